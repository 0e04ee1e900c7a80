"""Times of passes of short prompts on a GPU, alone and beside rows that decode, and the part in which it idles.

    python -m deploy.evaluation.experiments.prompt_passes deploy/evaluation/shapes/qwen3-0.6b \
        --prompts 32 128 512 --rows 0 32

A device that idles waits for the host to launch what comes next.

Of a model that sees images, such as `deploy/evaluation/shapes/qwen2.5-vl-7b`, prompts of one image are measured, too,
whose embeddings are known: what their passes take beyond those of texts is not the encoder's.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from common.steps import EngineSpec, PrefillChunk, RowOpen, StepPlan
from common.types import EncoderOutputId, RequestId, RowImage, RowSlot, SamplingParams
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.experiments.decode_steps import Driver, idle_share, spans_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PASSES = 24
# Of each row that decodes.
PROMPT = 500


class PromptDriver(Driver):
    """Beside rows that decode, opens one with a prompt in each pass, in place of the one before."""

    # The row of the last prompt.
    prompted: tuple[RowSlot, ...] = ()

    def keep(self, image: RowImage) -> None:
        """Let the engine know embeddings of an image, all zeros."""
        assert image.output is not None, "they are known by their number"
        assert self._engine.images is not None, "the model sees images"
        self._engine.images.keep(image.output, memoryview(bytearray(image.length * self.embedding_bytes)))

    def passes(self, count: int, slot: int, tokens: int, images: tuple[RowImage, ...] = ()) -> float:
        """Run passes with a prompt of `tokens`, those of `images` among them, at row `slot`; return one's seconds."""
        ids = np.random.default_rng(0).integers(0, 10_000, tokens).astype(np.int32)
        for image in images:
            ids[image.offset : image.offset + image.length] = -1
        size, row = self.page_size, RowSlot(slot)
        pages = np.arange(self.pages - -(-(tokens + 1) // size), self.pages, dtype=np.int32)
        started = time.perf_counter()
        for _ in range(count):
            step = self.step()
            opened = RowOpen(
                row=row, request_id=RequestId(f"prompt-{step}"), token_ids=ids, prompt_tokens=tokens, computed_tokens=0,
                pages=pages, sampling=SamplingParams(temperature=0.6, seed=1), max_total_tokens=tokens + 1,
                images=images,
            )  # fmt: skip
            plan = StepPlan(step, closes=self.prompted, opens=(opened,), prefills=(PrefillChunk(row, 0, tokens),))
            self.run(plan)
            self.prompted = (row,)
        self.settle()
        return (time.perf_counter() - started) / count


def known_image(tokens: int) -> RowImage:
    """Return an image of all but the first and the last of so many tokens, in one row of squares of 2 x 2 patches."""
    length = tokens - 2
    return RowImage(bytes(32), 1, length, (1, 2, 2 * length), output=EncoderOutputId(tokens))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every size beside every number of rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with config.json")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 128, 512], help="tokens of a pass's prompt")
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 32], help="rows that decode in the same pass")
    parser.add_argument("--deterministic", action="store_true", help="with the programs of deterministic mode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    arguments = parser.parse_args(argv)
    most = max(arguments.rows)
    driver = PromptDriver(
        EngineSpec(
            arguments.model, load_format="dummy", max_rows=most + 1, max_context=4096,
            max_step_tokens=max(8192, *arguments.prompts) + most, deterministic=arguments.deterministic,
            vision=not arguments.deterministic,
        )
    )  # fmt: skip
    command = shlex.join(["python", "-m", "deploy.evaluation.experiments.prompt_passes", *(argv or sys.argv[1:])])
    name = f"{Path(arguments.model).name} (dummy)"
    sheet = ResultSheet("prompt-passes", name, 1, replace(Provenance.collect(()), command=command))
    for rows in sorted(arguments.rows):
        if rows:
            driver.fill(rows, PROMPT, tokens=8 * PASSES * len(arguments.prompts) * len(arguments.rows))
        for tokens in arguments.prompts:
            measure(driver, sheet, f"{tokens} tokens beside {rows} rows", most, tokens)
            if driver.embedding_bytes:
                image = known_image(tokens)
                driver.keep(image)
                measure(driver, sheet, f"{tokens} tokens of a known image beside {rows} rows", most, tokens, image)
    if arguments.json is not None:
        write_results(arguments.json, sheet.results)
    torch.cuda.synchronize()
    return 0


def measure(driver: PromptDriver, sheet: ResultSheet, label: str, slot: int, tokens: int, *images: RowImage) -> None:
    """Measure passes at row `slot`, print and add their figures."""
    driver.passes(PASSES, slot, tokens, images)
    seconds = min(driver.passes(PASSES, slot, tokens, images) for _ in range(2))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        driver.passes(PASSES, slot, tokens, images)
    idle = idle_share(spans_of(profiled))
    sys.stdout.write(f"{label}: {seconds * 1e6:.0f} us per pass, idle {idle:.1%}\n")
    sys.stdout.flush()
    sheet.add(f"pass of {label}", seconds * 1e6, "us")
    sheet.add(f"idle share, {label}", 100 * idle, "%")


if __name__ == "__main__":
    sys.exit(main())
