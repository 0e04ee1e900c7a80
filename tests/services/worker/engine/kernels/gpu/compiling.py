"""Compiles programs of attention, the sampler, quantised products and sums over ranks for an H200.

The compiler itself needs no GPU. In a process of its own, without Triton's interpreter: which of both a program gets is
settled when it is defined.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.worker.engine.kernels.gpu import (
    adapter_products,
    adapter_programs,
    decode_attention,
    elementwise,
    experts,
    fp8_rows,
    grouped_product,
    int4_product,
    latent_programs,
    ordered_attention,
    ordered_product,
    product_launch,
    quantised_linear,
    rank_sums,
    sampling,
    small_linear,
)
from services.worker.engine.kernels.gpu import delta_programs as programs
from services.worker.engine.kernels.gpu import device_batch as row_state
from services.worker.engine.kernels.gpu import logits_processors as adjusting
from services.worker.engine.kernels.gpu import logprobs as reporting
from services.worker.engine.kernels.gpu.fp8_rows import LIMITS
from services.worker.engine.quantization.formats import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

# Values of what is constant while a program is compiled.
Constants = dict[str, float]
AMPERE, ADA, HOPPER, BLACKWELL = (GPUTarget("cuda", capability, 32) for capability in (80, 89, 90, 100))
# Shared memory of one program at most, by compute capability (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
FLOATS = ("*bf16", "*fp16", "*fp32")


# Matrix instructions of warps, and of four warps together.
WARPS, WARPGROUPS = "mma.sync.aligned.m16n8k16", "wgmma.mma_async.sync.aligned.m64"
# One that takes its left factor from registers, and the wait for all of them.
_FROM_REGISTERS = re.compile(WARPGROUPS.replace(".", r"\.") + r"\S* \{[^}]*\}, *\{")
_INT8 = re.compile(r"mma\S*\.s32\.s8\.s8")
_WAIT_FOR_ALL = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+0;")


def build(program: Any, types: str, warps: int, target: GPUTarget = HOPPER, **constants: float) -> int:
    """Return the size of what comes out; `types` are those of the arguments that are no constants."""
    return len(compiled(program, types, warps, target, **constants).asm["cubin"])


def build_by(instruction: str, program: Any, types: str, warps: int, **constants: float) -> int:
    """Do the same, and check that this is the matrix instruction of all products."""
    done = compiled(program, types, warps, **constants)
    found = {name for name in (WARPS, WARPGROUPS) if name in done.asm["ptx"]}
    assert found == {instruction}, f"{program.__name__} {constants} multiplies by {found}"
    return len(done.asm["cubin"])


def build_exact(program: Any, types: str, warps: int, **constants: float) -> int:
    """Do the same for INT8, whose products matrix units must sum up to 32 bits."""
    done = compiled(program, types, warps, **constants)
    assert _INT8.search(done.asm["ptx"]), f"{program.__name__} {constants} does not multiply by INT8's units"
    return len(done.asm["cubin"])


def compiled(
    program: Any, types: str, warps: int, target: GPUTarget = HOPPER, stages: float | None = None, **constants: float
) -> Any:
    """Return a compiled variant of a program, whose loops load `stages` ahead, or as far as Triton would."""
    rest = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(rest) for name in program.arg_names}
    values = {(program.arg_names.index(name),): value for name, value in constants.items()}
    # As they are launched; only what lies at such places is copied while products run.
    places = [number for number, name in enumerate(program.arg_names) if signature[name].startswith("*")]
    sizes = [number for number, name in enumerate(program.arg_names) if name in ("width", "columns")]
    aligned = {(number,): [["tt.divisibility", 16]] for number in (*places, *sizes) if (number,) not in values}
    source = ASTSource(fn=program, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps} if stages is None else {"num_warps": warps, "num_stages": stages}
    done = triton.compile(source, target=target, options=options)
    for loop in loops_of(done.asm["ptx"]):
        waits = _WAIT_FOR_ALL.search(loop) or not _FROM_REGISTERS.search(loop)
        assert waits, f"{program.__name__} {constants} fills registers that matrix units may still read"
    return done


def loops_of(ptx: str) -> Iterator[str]:
    """Yield the text of every loop."""
    lines, labels = ptx.splitlines(), {}
    for number, line in enumerate(lines):
        if label := re.match(r"\s*(\$L__BB\w+):", line):
            labels[label[1]] = number
        branch = re.search(r"bra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if branch and branch[1] in labels:
            yield "\n".join(lines[labels[branch[1]] : number + 1])


def main() -> None:
    """Compile all, each for the types that it is launched with; write the size of each."""
    ints, sizes = "i32 i32 i32", []
    for dtype in FLOATS:
        sizes.append(build(adjusting._process, f"{dtype} {'*i32 ' * 6} *fp32 {ints}", 4, BLOCK=2048))
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
    sums = "*bf16 *bf16 *bf16 *i32 *i64 *i64 *i32 fp32 i32"
    for patience, overlaps in itertools.product((0, 1), (0, 1)):
        shape = {"WIDTH": 5120, "BLOCK": 8192, "WORLD": 4, "PATIENCE": patience, "OVERLAPS": overlaps}
        sizes.append(build(rank_sums._sum_add_norm, sums, 8, **shape))
    for adds in (0, 1):
        norm: Constants = {"WIDTH": 5120, "BLOCK": 8192, "ADDS": adds, "QUANTISES": 0, "IS_GIVEN": 0, **LIMITS}
        given = "*bf16 *bf16 *bf16 *bf16 fp32 *bf16 *bf16 *bf16"
        sizes.append(build(elementwise._rms_norm, given, 8, OVERLAPS=1, **norm))
        sizes.append(build(elementwise._rms_norm, given, 8, AMPERE, OVERLAPS=0, **norm))
    sizes += fp8_sizes() + int8_expert_sizes() + quantised_sizes() + attention_sizes() + latent_sizes()
    sizes += adapter_sizes() + ordered_sizes() + recurrent_sizes()
    sys.stdout.write("\n".join(map(str, sizes)))


def attention_sizes() -> list[int]:
    """Compile attention of decoding rows in gpt-oss's shape: with sinks, with and without a window, chunks and parts.

    In bfloat16 and FP8; and the storing of keys and values in FP8.
    """
    others = "*bf16 *i32 *i32 *i32 *fp32 *fp32 *i32 *i64 *fp32 *bf16 *bf16 fp32 *fp32"
    sizes = []
    choices = ((127, 0, True, 8), (127, 0, False, 1), (8191, 1, True, 8), (-1, 0, True, 1), (-1, 0, False, 8))
    for (window, is_chunked, stores, parts), stored in itertools.product(choices, ("bf16", "fp8e4nv")):
        shape: Constants = {"KV_HEADS": 8, "GROUP": 8, "QUERIES": 16, "HEAD_DIM": 64, "WIDTH": 64, "PAGE_SIZE": 16}
        tiles: Constants = {"BLOCK": 64, "PARTS": parts, "LEAST_PART": 64, "MERGED": 8}
        how = {
            "STORES": stores,
            "NORMED": False,
            "WINDOW_LEFT": window,
            "CHUNKED": is_chunked,
            "CAPPED": False,
            "HAS_SINKS": True,
            "SCALED": stored != "bf16",
            "OVERLAPS": True,
        }
        tensors = f"*bf16 *{stored} *{stored} *fp32 *fp32 {others}"
        types = f"{tensors} fp32 fp32 i32 i32 i32 i32 i32"
        sizes.append(build(decode_attention._decode, types, 2, **shape, **tiles, **how))
    store = "*bf16 *fp8e4nv *fp8e4nv *fp32 *fp32 *fp32 *i64 *i64 *bf16 *bf16 fp32 i32 i32 i32"
    for heads, warps in ((4, 1), (16, 4)):
        shape = {"QUERY_HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAGE_SIZE": 16, "HALF": 64, "HEADS": heads}
        how = {"NORMED": True, "SCALED": True, "OVERLAPS": True}
        sizes.append(build(elementwise._rotate_and_store, store, warps, **shape, **how))
    return sizes


def fp8_sizes() -> list[int]:
    """Compile what multiplies FP8: products of few tokens, of experts, and what quantises ahead of them."""
    both, scales, sizes = "*fp8e4nv *fp8e4nv", "*fp32 *fp32", []
    for block, warps in ((16, 1), (4096, 4), (32768, 16)):
        how: Constants = {"BLOCK": block, "IS_GIVEN": False, **LIMITS}
        sizes.append(build(fp8_rows._quantise_rows, "*bf16 *fp32 *fp8e4nv *fp32 i32", warps, OVERLAPS=True, **how))
    for is_given in (False, True):
        rows, constants = "*fp32 *fp8e4nv *fp32", {"QUANTISES": True, "IS_GIVEN": is_given, **LIMITS}
        how = {"WIDTH": 4096, "BLOCK": 4096, "ADDS": True, "OVERLAPS": True, **constants}
        sizes.append(build(elementwise._rms_norm, f"*bf16 *bf16 *bf16 *bf16 fp32 {rows}", 8, **how))
        block = 1024 if is_given else elementwise.WIDEST_GATED_ROW
        how = {"BLOCK": block, "ACTIVATION": 0, "OVERLAPS": True, **constants}
        sizes.append(build(elementwise._gate, f"*bf16 *bf16 i32 {rows}", 4 if is_given else 16, **how))
    for program, block, warps in ((small_linear._product_at_once, 4096, 4), (small_linear._product, 1024, 2)):
        how = {"ROWS": 1, "BLOCK": block, "HAS_BIAS": True, "SCALED": True, "ADDS": False, "GATED": True}
        given = f"{both} *bf16 {scales} *bf16 i32 i32"
        sizes.append(build(program, given, warps, ACTIVATION=0, OVERLAPS=True, **how))
    for tuning, is_first in itertools.product((experts._FEW_PAIRS, experts._MANY_PAIRS), (True, False)):
        how = {"ROWS": tuning.rows, "COLUMNS": tuning.columns, "DEPTH": tuning.depth, "IS_FIRST": is_first}
        given = f"{both} {scales} *bf16 *bf16 *bf16 {'*i64 ' * 4} {'i32 ' * 7}"
        for grouped in (False, True):
            how["DEPTH"] = FP8_BLOCK if grouped else tuning.depth
            sizes.append(
                build(
                    experts._grouped_product, given, tuning.warps,
                    PER_TOKEN=8, EXPERTS=128, SEARCH=128, HAS_BIAS=True, ACTIVATION=0, SCALED=True,
                    GROUPED=grouped, **how,
                )
            )  # fmt: skip
    return sizes


def int8_expert_sizes() -> list[int]:
    """Compile both products of experts with INT8, for tiles of all sizes."""
    sizes = []
    for tuning, is_first in itertools.product(
        (experts._FEW_PAIRS, experts._MANY_PAIRS, experts.ORDERED_PAIRS), (True, False)
    ):
        cut: Constants = {"ROWS": tuning.rows, "COLUMNS": tuning.columns, "DEPTH": tuning.depth, "IS_FIRST": is_first}
        sharing: Constants = {"PER_TOKEN": 8, "EXPERTS": 128, "SEARCH": 128, "HAS_BIAS": True, "ACTIVATION": 0}
        given = f"*i8 *i8 *fp32 *fp32 *bf16 *bf16 *bf16 {'*i64 ' * 4} {'i32 ' * 7}"
        sizes.append(
            build_exact(experts._grouped_product, given, tuning.warps, SCALED=True, GROUPED=False, **cut, **sharing)
        )
    return sizes


def quantised_sizes() -> list[int]:
    """Compile the products with FP8 in blocks, INT8 and packed integers, for tiles of all sizes."""
    sizes = []
    rounding: Constants = {"BLOCK": 8192, "HALF_RANGE": 127.5, "SMALLEST": 1e-12, "OVERLAPS": True}
    sizes.append(build(quantised_linear._quantise_rows_to_int8, "*bf16 *i8 *fp32 i32", 8, **rounding))
    packed_tunings = (experts._FEW_PACKED, experts._SOME_PACKED, experts._MANY_PACKED)
    for tuning, is_first in itertools.product(packed_tunings, (True, False)):
        tiles: Constants = {"ROWS": tuning.rows, "COLUMNS": tuning.columns, "IS_FIRST": is_first, "ACTIVATION": 2}
        packs: Constants = {"BITS": 4, "PACK": 64, "GROUP": 32, "HAS_SHIFTS": False, "IS_E2M1": True}
        routing: Constants = {"PER_TOKEN": 4, "EXPERTS": 32, "SEARCH": 32, "HAS_BIAS": True}
        given = f"*bf16 *u8 *u8 *u8 *u8 *bf16 *bf16 *bf16 {'*i64 ' * 4} {'i32 ' * 6}"
        sizes.append(build(experts._packed_product, given, tuning.warps, **tiles, **packs, **routing))
    for tokens, outputs in ((1, 4096), (17, 4096), (33, 4096), (65, 4096), (65, 32768)):
        tile = product_launch.tile_for(tokens, outputs)
        parts = 4 if tokens == 1 else 1
        how: Constants = {
            "PARTS": parts, "ROWS": tile.rows, "COLUMNS": tile.columns, "HAS_BIAS": True, "ADDS": True,
            "OVERLAPS": True,
        }  # fmt: skip
        blocks = "*fp8e4nv *fp8e4nv *fp32 *fp32 *bf16 *bf16 *fp32 i32 i32 i32 i32"
        sizes.append(build(quantised_linear._fp8_block_product, blocks, tile.warps, DEPTH=FP8_BLOCK, **how))
        narrow = "*i8 *i8 *fp32 *fp32 *bf16 *bf16 *fp32 i32 i32 i32"
        sizes.append(build_exact(quantised_linear._int8_product, narrow, tile.warps, DEPTH=128, **how))
        packed = "*bf16 *u8 *u8 *fp32 *fp32 *bf16 *bf16 *fp32 i32 i32 i32"
        for bits, group in ((4, 16), (5, 32), (6, 16), (8, 32)):
            what = {"BITS": bits, "GROUP": group, "PACK": grouped_product.pack_of(4096, group), "HAS_SHIFTS": True}
            sizes.append(build(grouped_product._grouped_product, packed, tile.warps, IS_E2M1=False, **how, **what))
    packing = (
        (1, 128, 1),
        (9, 32, 2),
        (17, 64, 0),
        (33, 128, 1),
        (65, 32, 2),
        (65, 16, 0),
        (129, 128, 1),
        (129, 16, 2),
    )
    for tokens, group, offset in packing:
        for dtype, target in itertools.product(("*bf16", "*fp16"), (HOPPER, BLACKWELL)):
            division = int4_product.int4_tile(tokens, 4096, 4096, is_hopper=target is HOPPER)
            tile = division.tile
            cut = {"PARTS": 4, "ROWS": tile.rows, "COLUMNS": tile.columns, "GROUP": group, "OFFSET": offset}
            cut |= {"SLICES": division.slices, "DEPTH": division.depth, "IS_RAGGED": tokens == 1}
            given = f"{dtype} *u8 *i32 *i32 {dtype} {dtype} *fp32 i32 i32 i32"
            how = {"HAS_BIAS": True, "ADDS": True, "OVERLAPS": True, "IS_HOPPER": target is HOPPER}
            sizes.append(build(int4_product.int4_product, given, tile.warps, target, **how, **cut))
        for dtype in ("*bf16", "*fp16"):
            given = f"*u8 *i32 *i32 {dtype} i32 i32 i32 i32"
            sizes.append(build(int4_product.widen, given, 4, BLOCKS=4, GROUP=group, OFFSET=offset))
    fp4: Constants = {"BITS": 4, "GROUP": 32, "PACK": grouped_product.pack_of(2880, 32), "HAS_SHIFTS": False}
    given = "*bf16 *u8 *u8 *u8 *u8 *bf16 *bf16 *fp32 i32 i32 i32"
    how = {"PARTS": 1, "ROWS": 16, "COLUMNS": 32, "HAS_BIAS": True, "ADDS": True, "OVERLAPS": True}
    sizes.append(build(grouped_product._grouped_product, given, 4, IS_E2M1=True, **fp4, **how))
    joined: Constants = {"COLUMNS": 1024, "PARTS": 4, "HAS_BIAS": True, "ADDS": True, "OVERLAPS": True}
    sizes.append(build(product_launch._join, "*fp32 *bf16 *bf16 i32 i32", 4, **joined))
    for bits, group in ((4, 128), (5, 32), (6, 16), (8, 32)):
        what = {"BITS": bits, "GROUP": group, "PACK": grouped_product.pack_of(4096, group), "HAS_SHIFTS": False}
        widened = f"*u8 *u8 *fp32 *fp32 *bf16 {'i32 ' * 8}"
        sizes.append(build(grouped_product.widen, widened, 4, COLUMNS=32, IS_E2M1=False, OVERLAPS=False, **what))
    return sizes


def latent_sizes() -> list[int]:
    """Compile latent attention of DeepSeek's sizes, and what stores its rows."""
    tuning, sizes = latent_programs.LatentTuning(), []
    latent: Constants = {"HEADS": 128, "LATENT": 512, "WIDTH": 512, "OVERLAPS": True}
    storing: Constants = {**latent, "ROTARY": 64, "HALF": 32, "PAGE_SIZE": 16, "TILE": 8}
    given = "*bf16 *bf16 *fp32 *i64 *i64 i64 i64"
    sizes.append(build(latent_programs._rotate_and_store, given, 2, **storing))
    for parts in (1, 16):
        how: Constants = {**latent, "BLOCK": tuning.block, "PARTS": parts, "LEAST_PART": tuning.least_part}
        attending: Constants = {**how, "ROTARY": 64, "ROTARY_WIDTH": 64, "PAGE_SIZE": 16, "TILE": tuning.heads}
        given = "*bf16 *bf16 *bf16 *i32 *i32 *i32 *fp32 *fp32 fp32 i32 i32 i32 i32"
        sizes.append(build(latent_programs._attend, given, tuning.warps, **attending))
    sizes.append(build(latent_programs._merge, "*bf16 *i32 *fp32 *fp32", 4, **how))
    return sizes


def adapter_sizes() -> list[int]:
    """Compile products of adapters in the shape of an 8B model: of few tokens, and of many."""
    few, many = (
        (
            (adapter_products._FEW, adapter_products._FEW_GATED),
            (adapter_products._FEW_OF_ONE, adapter_products._FEW_OF_SEVERAL),
        ),
        (
            (adapter_products._MANY, adapter_products._MANY_GATED),
            (adapter_products._MANY_OF_ONE, adapter_products._MANY_OF_SEVERAL),
        ),
    )
    sorting: Constants = {"ROWS": 16, "MOST": 256, "OWN": 32, "LINES": 32}
    sizes = [
        build(adapter_programs.sort_tokens, "*i32 *i64 *i32 i32 i32", 4, ADAPTERS=adapters, **sorting)
        for adapters in (8, 64)
    ]
    for rows, shares, ((plain, gated), shrinking) in ((16, 2, few), (16, 8, few), (64, 1, many)):
        tiles: Constants = {"COLUMNS": 17, "ROWS": rows}
        how: Constants = {"OVERLAPS": rows == 16, "NARROW": rows == 16}
        for form, is_even in itertools.product(shrinking, (False, True)):
            shrink = "*bf16 *i64 *i32 *i64 *fp32 i32 i32 i32 i32 i32"
            cut: Constants = {"DEPTH": form.depth, "RANKS": form.ranks, "EVEN": is_even}
            sizes.append(build(adapter_programs.shrink, shrink, form.warps, **tiles, **how, **cut))
        sizes.append(build(adapter_programs.look_up, "*i64 *i64 *i32 *i64 *fp32 *bf16 i32", 4, **tiles, RANKS=16))
        shrunk: Constants = {**tiles, **how, "RANKS": 16, "SHARES": shares}
        for parts in (1, 2, 3):
            cut = {"BLOCK": plain.block, "STAGES": plain.stages, "PARTS": parts}
            expand = "*bf16 *i64 *i32 *i64 *fp32 i32 i32 i32 i32 i32"
            sizes.append(build(adapter_programs.expand, expand, plain.warps, **shrunk, **cut))
        for activation in (0, 1):
            cut = {"BLOCK": gated.block, "STAGES": gated.stages, "PARTS": 2}
            gate = "*bf16 *bf16 *i64 *i32 *i64 *fp32 i32 i32 i32 i32"
            sizes.append(
                build(adapter_programs.expand_and_gate, gate, gated.warps, **shrunk, **cut, ACTIVATION=activation)
            )
    return sizes


def recurrent_sizes() -> list[int]:
    """Compile gated delta nets as of Qwen3.5 9B; what a program keeps in shared memory fits."""
    heads: Constants = {"HEADS": 32, "PER_KEY": 2, "KEY_DIM": 128, "VALUE_DIM": 128}
    shape: Constants = {**heads, "KEY_BLOCK": 128}
    of_token: Constants = {**shape, "LEAST": 1e-6, "VALUE_BLOCK": 64}
    solving: Constants = {**shape, "LEAST": 1e-6, "TOKENS": 64, "SUBBLOCK": 16}
    taking: Constants = {**shape, "VALUE_BLOCK": 32, "TOKENS": 64}
    row: Constants = {"KERNEL": 4, "BLOCK": 1024}
    block: Constants = {"KERNEL": 4, "TOKENS": 64, "BLOCK": 128}
    kept: Constants = {"KERNEL": 4, "LINES": 4, "BLOCK": 128}
    ends: Constants = {"HEADS": 32, "VALUE_DIM": 128, "VALUE_BLOCK": 128, "HEAD_BLOCK": 8}
    # With the warps of each, and how many blocks its loops load at once.
    made: list[tuple[GPUTarget, int, int | None, Any, str, Constants]] = []
    for dtype in ("*bf16", "*fp16"):
        given = f"{dtype} {dtype} {dtype} *i32 {dtype} i32 i32"
        taken = f"{dtype} {dtype} *fp32 *i32 *fp32 *fp32 *fp32 i32"
        made += [
            (HOPPER, 4, None, programs.filter_tokens, given, row),
            (HOPPER, 4, None, programs.take_tokens, taken, of_token),
            (HOPPER, 8, None, programs.filter_blocks, given, block),
            (HOPPER, 4, None, programs.keep_inputs, f"{dtype} {dtype} *i32 i32 i32", kept),
            (HOPPER, 4, None, programs.finish_tokens, f"*fp32 {dtype} *fp32 {dtype} i32 i32 i32 fp32", ends),
        ]
        solved, taken = f"{dtype} {dtype} *fp32 *fp32 *i32 *fp32 *fp32 *fp32 i32", f"{dtype} *fp32 *i32 {'*fp32 ' * 4}"
        for target in (HOPPER, AMPERE, ADA):
            made += [
                (target, 4, None, programs.solve_blocks, solved, solving),
                (target, 4, 1, programs.take_blocks, taken, taking),
            ]
    sizes = []
    for target, warps, at_once, program, types, constants in made:
        done = compiled(program, types, warps, target, stages=at_once, **constants)
        assert done.metadata.shared <= SHARED_BYTES[target.arch], f"{program.__name__} takes {done.metadata.shared}"
        sizes.append(len(done.asm["cubin"]))
    return sizes


def ordered_sizes() -> list[int]:
    """Compile what deterministic mode uses; with every tile, one kind of product is by one matrix instruction."""
    sizes = []
    for tile, adds in itertools.product(ordered_product.TILES, (False, True)):
        blocks = f"tensordesc<bf16[{tile.rows},{tile.depth}]> tensordesc<bf16[{tile.columns},{tile.depth}]>"
        cut: Constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": 8}
        how: Constants = {"HAS_BIAS": True, "ADDS": adds, "OVERLAPS": True}
        given = f"{blocks} *bf16 *{'fp32' if adds else 'bf16'} i32 i32 i32"
        sizes.append(build_by(WARPGROUPS, ordered_product._product, given, tile.warps, **cut, **how))
    tuning = ordered_attention.OrderedTuning()
    for decodes, is_cut, head_dim in itertools.product((True, False), (True, False), (64, 128, 256)):
        lines = tuning.decode if decodes else tuning.chunk
        shape: Constants = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": head_dim, "WIDTH": head_dim, "PAGE_SIZE": 16}
        cut = {"HEIGHT": lines.height, "TOKENS": 1 if decodes else lines.height // 4, "BLOCK": 64, "SEGMENT": 256}
        how = {
            "SEARCH": 1 if decodes else 16, "DECODES": decodes, "IS_CUT": is_cut, "WINDOW_LEFT": 1023,
            "CHUNKED": False, "CAPPED": True, "HAS_SINKS": True, "OVERLAPS": True,
        }  # fmt: skip
        given = f"{'*bf16 ' * 4} {'*i32 ' * 4} *fp32 *fp32 *i32 *fp32 fp32 fp32 {'i32 ' * 7}"
        sizes.append(build_by(WARPS, ordered_attention._attend, given, lines.warps, **shape, **cut, **how))
    first = experts.ORDERED_PAIRS
    for is_first in (True, False):
        cut = {"ROWS": first.rows, "COLUMNS": first.columns, "DEPTH": first.depth, "IS_FIRST": is_first}
        routing: Constants = {"PER_TOKEN": 8, "EXPERTS": 128, "SEARCH": 128, "HAS_BIAS": False, "ACTIVATION": 0}
        given = f"*bf16 *bf16 *fp32 *fp32 *bf16 *bf16 *bf16 {'*i64 ' * 4} {'i32 ' * 7}"
        sizes.append(
            build_by(
                WARPGROUPS, experts._grouped_product, given, first.warps, SCALED=False, GROUPED=False, **cut, **routing
            )
        )
    sizes.append(build(reporting._normalise, "*fp32 *fp32 *fp32 i32", 1, CHUNKS=64))
    return sizes


if __name__ == "__main__":
    main()
