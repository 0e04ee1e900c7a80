"""Compiles the sampler's programs for an H200, wherever it runs: the compiler needs no GPU.

In a process of its own, without Triton's interpreter: which of both a program gets is settled when it is defined.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.worker.engine.kernels.gpu import adjusting, reporting, row_state, sampling

HOPPER = GPUTarget("cuda", 90, 32)
FLOATS = ("*bf16", "*fp16", "*fp32")


def build(program: Any, types: str, warps: int, **constants: int) -> int:
    """Return the size of what comes out; `types` are those of the arguments that are no constants."""
    rest = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(rest) for name in program.arg_names}
    values = {(program.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=program, signature=signature, constexprs=values)
    return len(triton.compile(source, target=HOPPER, options={"num_warps": warps}).asm["cubin"])


def main() -> None:
    """Compile all, each for the types that it is launched with; write the size of each."""
    ints, sizes = "i32 i32 i32", []
    for dtype in FLOATS:
        sizes.append(build(adjusting._adjust, f"{dtype} {'*i32 ' * 6} *fp32 {ints}", 4, BLOCK=2048))
        sizes.append(build(reporting._weigh, f"{dtype} *fp32 *fp32 i32 i32", 4, CHUNK=4096))
        find = f"{dtype} *i32 *i32 *fp32 *fp32 *fp32 {ints}"
        sizes.append(build(sampling._find_thresholds, find, 16, CHUNKS=64, BLOCK=4096))
        survey = f"{dtype} *i32 *i32 *fp32 *fp32 *i32 *fp32 {ints}"
        sizes.append(build(sampling._survey, survey, 4, FILTERED=True, CHUNK=4096))
        choose = f"{dtype} *i32 *i32 *fp32 *fp32 *i32 *fp32 *i32 {ints}"
        sizes.append(build(sampling._choose, choose, 8, FILTERED=True, CHUNKS=64, CHUNK=4096))
    sizes.append(build(adjusting._add_bias, f"*i32 *i32 *i32 *fp32 *fp32 {ints}", 4, BLOCK=1024))
    sizes.append(build(adjusting._count, f"*i32 *i32 *i32 *i32 {ints}", 4, BLOCK=256))
    sizes.append(build(row_state._append, f"*i32 *i32 *i32 {ints}", 4, BLOCK=256))
    sys.stdout.write("\n".join(map(str, sizes)))


if __name__ == "__main__":
    main()
