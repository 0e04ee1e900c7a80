#!/usr/bin/env bash
# Installs torch into the environment whose pip is named by $1, and for GPUs FlashInfer: `torch.sh path/to/pip 2.13.0 cpu|gpu`.
#
# The default build on PyPI brings several gigabytes of CUDA packages, which a machine without a GPU never uses. The CPU
# build lives on PyTorch's own index, so it is looked for first where pip is configured to look, then there.
set -euo pipefail
pip=$1 version=$2 flavour=$3
FLASHINFER_VERSION=0.6.11.post2
CUDA_BUILD=cu130
locks=$(dirname "${BASH_SOURCE[0]}")/../locks

if [[ $flavour == gpu ]]; then
    # The build for CUDA brings Triton along. FlashInfer compiles its kernels when they are first used.
    for_gpu=("$pip" install -c "$locks/constraints.txt" -c "$locks/gpu.txt" "flashinfer-python==$FLASHINFER_VERSION")
    # With `==`, pip would prefer a CPU build of this version to the default one, and be content with an installed one.
    "${for_gpu[@]}" "torch===$version" ||
        "${for_gpu[@]}" "torch==$version+$CUDA_BUILD" --extra-index-url "https://download.pytorch.org/whl/$CUDA_BUILD"
    if ! command -v nvcc >/dev/null && ! [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; then
        echo "note: FlashInfer needs CUDA's nvcc, which is neither on the path nor in CUDA_HOME" >&2
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
echo "warning: no CPU build of torch $version to be had; installing the default build (several GB of CUDA packages)" >&2
exec "$pip" install "torch==$version"
