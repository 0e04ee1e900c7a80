"""Programs are not compiled again for sizes and alignments that only some batches have.

Triton compiles a variant of a program for integers that are 1 or multiples of 16, and for pointers that are multiples
of 16 bytes, unless the parameter's declaration excludes that. So each parameter of a program is of one of these kinds.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import services.worker.engine.kernels.gpu as folder

if TYPE_CHECKING:
    from collections.abc import Iterator

# Sizes of a batch.
VARYING = {"count", "first_token", "most_ranks", "shares", "steps", "stride_table", "tokens"}
# Different on each rank, whose programs are compiled once.
OF_A_RANK = {"rank"}
# Tensors with one entry per row, token or page of a batch, which may be slices of others.
OF_A_BATCH = {
    "blocks_of_batch", "chunks_of_batch", "into", "lengths", "page_table", "pages", "places", "positions", "rows",
    "slots", "token_ids", "write_slots",
}  # fmt: skip
# Integers that follow from the model, its configuration and the device.
CONSTANT = {
    "biases", "blocks", "chunks", "columns", "columns_out", "gated_offset", "groups", "padding_slot", "stride",
    "stride_bias", "stride_cells", "stride_expert", "stride_head", "stride_high", "stride_low", "stride_page",
    "stride_query", "stride_scales", "stride_token", "stride_token_in", "stride_widened", "vocabulary",
    "width", "words",
    # Parts of a matrix that is widened, the same in each pass that does so.
    "first", "last",
}  # fmt: skip
FLOAT = {"cap", "epsilon", "scale"}
# Tensors that are allocated as a whole, or that begin with the first row of another.
WHOLE = {
    "added", "allowed", "angles", "attended", "bases", "before_minimum", "best", "bias", "bias_ids", "bias_values",
    "both", "buffers", "cells", "convolved", "cosines", "counters", "counts", "decay_bias", "decay_scales", "epochs",
    "factors", "filters", "first_blocks", "given_scale", "grammar", "hidden", "high_bits", "input_scales", "inputs",
    "inverses", "key_norm", "key_scales", "keys", "last_block", "logits", "low_bits", "masses", "matrices", "norm",
    "normalizers", "normed", "offsets", "order", "outputs", "own_pad", "pads", "pairs", "partial", "partial_sums",
    "peaks", "pool", "processed", "projected", "qkv", "queries", "query_norm", "routing_weights", "scales", "scores",
    "shifts", "sines", "sinks", "sources", "staging", "starts", "table", "thresholds", "tiles",
    "value_scales", "values", "weight", "weight_scales", "weights", "widened",
}  # fmt: skip


def programs() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions that are launched, not those that they call."""
    for path in sorted(Path(folder.__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            if "triton.jit" in ast.unparse(node).partition("def ")[0] and "tl.program_id" in ast.unparse(node):
                yield f"{path.name}:{node.name}", node


def excluded(node: ast.FunctionDef, option: str) -> set[str]:
    """Return the parameters that a declaration's option names."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            for keyword in decorator.keywords:
                if keyword.arg == option:
                    return set(ast.literal_eval(keyword.value))
    return set()


def test_each_parameter_is_specialised_only_where_its_values_follow_from_the_model() -> None:
    seen = set()
    faults = []
    for name, node in programs():
        seen.add(name)
        runtime = {argument.arg for argument in node.args.args if argument.annotation is None}
        unknown = runtime - VARYING - OF_A_RANK - OF_A_BATCH - CONSTANT - FLOAT - WHOLE
        sizes = (runtime & (VARYING | OF_A_RANK)) - excluded(node, "do_not_specialize")
        tensors = (runtime & OF_A_BATCH) - excluded(node, "do_not_specialize_on_alignment")
        strangers = (excluded(node, "do_not_specialize") | excluded(node, "do_not_specialize_on_alignment")) - runtime
        faults += [f"{name}: {parameter} is of no kind" for parameter in sorted(unknown)]
        faults += [f"{name}: do_not_specialize lacks {parameter}" for parameter in sorted(sizes)]
        faults += [f"{name}: do_not_specialize_on_alignment lacks {parameter}" for parameter in sorted(tensors)]
        faults += [f"{name}: {parameter} is no parameter" for parameter in sorted(strangers)]
    assert not faults, "\n".join(faults)
    assert len(seen) >= 25
