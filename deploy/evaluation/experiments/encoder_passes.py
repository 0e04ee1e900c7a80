"""Times of an encoder of pictures, launched program by program as it runs, and captured in a CUDA graph.

    python -m deploy.evaluation.experiments.encoder_passes deploy/evaluation/shapes/qwen2.5-vl-7b

The encoder of a model like Qwen2.5-VL is loaded alone, with random weights; pictures of one size are encoded, some at a
time. `encoded` is what a worker does: tables of places and pixels are prepared on the host and sent, then the layers
run. `layers, launched` leaves out the former, and `layers, captured` replays the same layers from one graph, which a
worker would need for each size of pictures. On a CPU nothing is captured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from common.steps import EngineSpec
from common.types import PackedPixels
from deploy.evaluation.bench.partial_results import PartialResults, report
from deploy.evaluation.experiments.decode_steps import idle_share, spans_of
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.loader import load_encoder
from services.worker.engine.vision.encoder import EncoderImage, batches
from services.worker.engine.vision.patches import BATCH_PATCHES
from services.worker.engine.vision.qwen2_5 import Qwen25Encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each number of pictures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with config.json")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 8], help="encoded together (%(default)s)")
    parser.add_argument("--rows", type=int, default=54, help="of patches of a picture (%(default)s)")
    parser.add_argument("--columns", type=int, default=74, help="(%(default)s); these are 1036 x 756 pixels")
    parser.add_argument("--repeats", type=int, default=10, help="of each figure (%(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    arguments = parser.parse_args(argv)
    encoder, _ = load_encoder(
        EngineSpec(arguments.model, load_format="dummy", vision=True, only_encodes=True),
        lambda _fraction, _stage: None,
        RunnerOptions(device=arguments.device),
    )
    if not isinstance(encoder, Qwen25Encoder):
        parser.error("the layers of other families than Qwen2.5-VL are not separated from what precedes them")
    has_gpu = arguments.device != "cpu"
    label = torch.cuda.get_device_name() if has_gpu else None
    results = PartialResults("encoder-passes", f"{Path(arguments.model).name} (dummy)", arguments.json, label=label)
    with torch.inference_mode():
        for count in arguments.images:
            measure(encoder, pictures(encoder, count, arguments), arguments.repeats, results, has_gpu=has_gpu)
    return 0


def pictures(encoder: Qwen25Encoder, count: int, arguments: argparse.Namespace) -> list[EncoderImage]:
    """Return random pictures, in 8 bits as tokenizers send them."""
    config = encoder.config
    patches, pixels = arguments.rows * arguments.columns, config.patch_size**2
    random = np.random.default_rng(0)
    table = np.tile(np.linspace(-2, 2, 256, dtype=np.float32), (config.channels, 1))
    shape = (patches, config.channels * config.frames * pixels)
    return [
        EncoderImage(
            PackedPixels(
                random.integers(0, 256, (patches, config.channels, pixels), np.uint8), table, config.frames, shape
            ),
            (1, arguments.rows, arguments.columns),
        )
        for _ in range(count)
    ]


def measure(
    encoder: Qwen25Encoder, images: Sequence[EncoderImage], repeats: int, results: PartialResults, *, has_gpu: bool
) -> None:
    """Add the milliseconds of one picture, of several that are encoded together."""
    # As the encoder divides them.
    parts = [images[part.start : part.stop] for part in batches([each.shape[0] for each in images], BATCH_PATCHES)]
    prepared = [encoder.prepare(part) for part in parts]

    def run() -> list[torch.Tensor]:
        return [encoder.run(each) for each in prepared]

    def timed(step: Callable[[], object]) -> list[float]:
        step()
        found = []
        for _ in range(repeats):
            _wait(has_gpu=has_gpu)
            started = time.perf_counter()
            step()
            _wait(has_gpu=has_gpu)
            found.append((time.perf_counter() - started) * 1e3 / len(images))
        return found

    title = f"{len(images)} at once"
    results.add(f"encoded, {title}", "ms per picture", timed(lambda: encoder.encode(images)))
    results.add(f"layers, launched, {title}", "ms per picture", timed(run))
    if not has_gpu:
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        _wait(has_gpu=True)
    results.add(f"idle share of layers, launched, {title}", "%", [100 * idle_share(spans_of(profiled))])
    launched = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    results.add(f"layers, captured, {title}", "ms per picture", timed(graph.replay))
    if not all(torch.allclose(*pair, atol=1e-2, rtol=1e-2) for pair in zip(launched, captured, strict=True)):
        report("captured layers compute other embeddings")


def _wait(*, has_gpu: bool) -> None:
    if has_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
