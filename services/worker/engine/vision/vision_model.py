"""A vision encoder without its decoder, as an engine loads it in a process that encodes images for others."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from common.errors import InvalidRequestError
from services.worker.engine.execution.interface import InvalidPlanError, never_overtaken
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sleeping import release_memory, used_memory
from services.worker.engine.vision.encoder import EncoderImage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from common.steps import EngineCapacity, SleepLevel, SleepPart, StepPlan
    from common.types import RowImage
    from services.worker.engine.execution.interface import Emit, IsOvertaken, ProgressReport
    from services.worker.engine.vision.encoder import VisionEncoder

    LoadEncoder = Callable[[ProgressReport], tuple[VisionEncoder, EngineCapacity]]


class VisionModel:
    """Encodes images; see `LoadedModel` and `ImageEncoder`."""

    ends_with_group = False
    host_pages = device_pages = peer_copies = adapters = images = None

    def __init__(self, load: LoadEncoder, report: ProgressReport) -> None:
        """Load; `load` is called again when the model wakes."""
        self._load = load
        # None: it sleeps.
        self._encoder: VisionEncoder | None
        self._encoder, self.capacity = load(report)
        report(1.0, "ready")

    @property
    def encoder(self) -> VisionModel:
        """This object."""
        return self

    @torch.inference_mode()
    def encode(self, images: Sequence[RowImage]) -> list[memoryview]:
        """Return the embeddings of each image; see `ImageEncoder.encode`."""
        assert self._encoder is not None, "a model that sleeps encodes nothing"
        sources = [self._source(self._encoder, image) for image in images]
        encoded = self._encoder.encode(sources)
        return [each.contiguous().view(torch.uint8).cpu().numpy().data.cast("B") for each in encoded]

    def make_runner(self) -> NoPlans:
        return NoPlans()

    def computing(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def read_expert_load(self) -> None:
        """Return None: there are no experts."""

    @property
    def pass_calls(self) -> None:
        """None, for the same reason."""

    def join_pass(self, number: int) -> bool:
        """Return False: no pass is called."""
        del number
        return False

    def keep_warm(self) -> None:
        """Do nothing: requests with images are seldom so close to each other that it would matter."""

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """Drop the weights at each level, as they are a small part of a model's; return the bytes that became free."""
        device = torch.device(self.capacity.device)
        before = used_memory(device)
        self._encoder = None
        release_memory(device)
        return max(before - used_memory(device), 0)

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        """Read the weights again, whichever parts are named."""
        if self._encoder is None:
            self._encoder, self.capacity = self._load(report)
        return True

    def close(self) -> None:
        """Free the weights."""
        self._encoder = None

    def _source(self, encoder: VisionEncoder, image: RowImage) -> EncoderImage:
        if image.pixels is None:
            raise InvalidRequestError("an image without pixels", param="image")
        source = EncoderImage(image.pixels, image.grid)
        try:
            count = encoder.count(source.shape, source.grid)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="image") from error
        if count != image.length:
            raise InvalidRequestError(f"an image of {count} embeddings, not of {image.length}", param="image")
        return source


class NoPlans:
    """Refuses all plans; see `PlanRunner`."""

    def __init__(self) -> None:
        """Have a row that no plan opens."""
        self.rows = RowStates(1, 1, 1)

    def run(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        """Refuse a plan."""
        raise InvalidPlanError("this worker only encodes images")

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """Do nothing: no pass runs."""

    def reset(self) -> None:
        """Do nothing: no row is open."""
