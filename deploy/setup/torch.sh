#!/usr/bin/env bash
# Installs torch, and FlashInfer for GPUs, into the environment of the pip at $1: `torch.sh path/to/pip 2.13.0 cpu|gpu`.
#
# The default build on PyPI installs several gigabytes of CUDA packages, which a machine without a GPU does not need.
# The CPU build is on PyTorch's own index: the script tries pip's configured index first, then that one.
set -euo pipefail
pip=$1 version=$2 flavour=$3
FLASHINFER_VERSION=0.6.11.post2
CUDA_BUILD=cu130
locks=$(dirname "${BASH_SOURCE[0]}")/../locks

if [[ $flavour == gpu ]]; then
    # The CUDA build includes Triton. FlashInfer compiles its kernels at their first use.
    for_gpu=("$pip" install -c "$locks/constraints.txt" -c "$locks/gpu.txt" "flashinfer-python==$FLASHINFER_VERSION")
    # With `==`, pip would prefer a CPU build of this version to the default one, and accept one that is installed.
    "${for_gpu[@]}" "torch===$version" ||
        "${for_gpu[@]}" "torch==$version+$CUDA_BUILD" --extra-index-url "https://download.pytorch.org/whl/$CUDA_BUILD"
    if ! command -v nvcc >/dev/null && ! [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; then
        echo "note: FlashInfer needs CUDA's nvcc, which is neither on the PATH nor in CUDA_HOME" >&2
    fi
    exit 0
fi
if [[ $(uname -s) != Linux ]]; then
    exec "$pip" install "torch==$version"
fi
if "$pip" install --quiet --retries 1 "torch==$version+cpu" 2>/dev/null; then
    exit 0
fi
if "$pip" install --retries 1 --timeout 15 "torch==$version+cpu" \
    --extra-index-url https://download.pytorch.org/whl/cpu; then
    exit 0
fi
echo "warning: no CPU build of torch $version is available; installing the default build (several GB of CUDA packages)" >&2
exec "$pip" install "torch==$version"
