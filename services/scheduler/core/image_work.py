"""Images of running rows: which are encoded in which step, and which outputs of the encoder are kept or used again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.types import RowImage, RowSlot
    from services.scheduler.cache.encoder_outputs import EncoderOutput, EncoderOutputs
    from services.scheduler.cache.types import Scope
    from services.scheduler.core.sequence import Sequence


@dataclass(slots=True)
class _PendingImage:
    """An image of a row until all of its tokens are computed; positions are those in the row."""

    first: int
    end: int
    # That the encoder still has to compute; 0: the chunk that begins the image is planned, or an output is used.
    embeddings: int
    # Used until then.
    output: EncoderOutput | None


class ImageWork:
    """Plans the encoder's work: workers encode an image in the step whose chunk begins it.

    Each embedding counts as a token of the step in which it is encoded. A chunk ends before an image that does not fit
    in what is left of the step's tokens, or of its `step_embeddings`. The first image of a step is encoded regardless
    of its size, as the encoder cannot cut one; then the chunk computes a single token of it if no more are left.
    """

    def __init__(self, outputs: EncoderOutputs, step_embeddings: int) -> None:
        """Keep embeddings as `outputs`, and encode up to `step_embeddings` of them in a step."""
        self.outputs = outputs
        self._most = step_embeddings
        self._rows: dict[RowSlot, list[_PendingImage]] = {}
        # Of the plan that is being made.
        self.planned = 0
        # Since the start.
        self.encoded_images = 0
        self.encoded_embeddings = 0

    def begin(self, sequence: Sequence, computed: int, scope: Scope | None) -> tuple[RowImage, ...]:
        """Start to follow an admitted row whose first `computed` tokens are cached; return its images for the workers.

        Those within these tokens, and those whose output is kept, need no pixels. Outputs belong to `scope`; None: none
        are used or kept.
        """
        assert sequence.row is not None, "the row is open"
        opened, pending = [], []
        own: dict[bytes, EncoderOutput] = {}
        for image, (first, end) in zip(sequence.request.images, sequence.image_spans, strict=True):
            if end <= computed:
                opened.append(replace(image, pixels=None))
                continue
            output, has_output = self._output_of(image, scope, own)
            needs_pixels = not has_output or image.digest in own
            sent = image if needs_pixels else replace(image, pixels=None)
            opened.append(sent if output is None else replace(sent, output=output.output_id))
            pending.append(_PendingImage(first, end, 0 if has_output else image.length, output))
        if pending:
            self._rows[sequence.row] = pending
        return tuple(opened)

    def begin_plan(self) -> None:
        """Start to count what is encoded in a plan."""
        self.planned = 0

    def cut(self, row: RowSlot, start: int, length: int, budget: int) -> int:
        """Return the length of a chunk from `start` that begins only images which this step can encode.

        `budget` are the tokens that are left of the step; those of the chunk are at most as many.
        """
        planned = self.planned
        for image in self._rows.get(row, ()):
            before = image.first - start
            if before >= length:
                break
            if not image.embeddings:
                continue
            if planned and image.embeddings > min(self._most - planned, budget - before - 1):
                return before
            planned += image.embeddings
            budget -= image.embeddings
            length = min(length, max(budget, before + 1))
        return length

    def plan_chunk(self, row: RowSlot, end: int) -> int:
        """Record that a planned chunk of a row ends at `end`; return the embeddings that are encoded for it."""
        embeddings = 0
        for image in self._rows.get(row, ()):
            if image.first >= end:
                break
            if image.embeddings:
                self.encoded_images += 1
                embeddings += image.embeddings
                image.embeddings = 0
        self.planned += embeddings
        self.encoded_embeddings += embeddings
        return embeddings

    def confirm(self, row: RowSlot, computed: int) -> None:
        """Record that the first `computed` tokens of a row are computed."""
        pending = self._rows.get(row)
        if pending is None:
            return
        for image in pending:
            if image.output is not None and image.first < computed:
                self.outputs.confirm(image.output)
                if image.end <= computed:
                    self.outputs.release(image.output)
                    image.output = None
        left = [image for image in pending if image.end > computed]
        if left:
            self._rows[row] = left
        else:
            del self._rows[row]

    def end(self, row: RowSlot) -> None:
        """Follow a row no longer; `confirm` was called with all of its tokens that are computed."""
        for image in self._rows.pop(row, ()):
            if image.output is not None:
                self.outputs.release(image.output)

    def _output_of(
        self, image: RowImage, scope: Scope | None, own: dict[bytes, EncoderOutput]
    ) -> tuple[EncoderOutput | None, bool]:
        """Return where an image's embeddings are or will be kept, if anywhere, and whether they need no encoding.

        `own` are outputs that this row has promised: it may have the same image more than once.
        """
        if scope is None:
            return None, False
        output = self.outputs.find(scope, image)
        if output is not None:
            return output, True
        output = own.get(image.digest)
        if output is not None and (output.key.grid, output.key.length) == (image.grid, image.length):
            return self.outputs.share(output), True
        output = self.outputs.promise(scope, image)
        if output is not None:
            own[image.digest] = output
        return output, False
