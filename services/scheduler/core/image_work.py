"""Images of running rows: which are encoded in which step, and which outputs of the encoder are kept or used again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from common.images import runs_of
from services.scheduler.core.encodings import Encodings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.types import RowImage, RowSlot
    from services.scheduler.cache.encoder_outputs import EncoderOutput, EncoderOutputs
    from services.scheduler.cache.types import Scope
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.step_limits import VisionLimits


@dataclass(slots=True)
class _PendingImage:
    """An image of a row until all of its tokens are computed; positions are those in the row."""

    first: int
    end: int
    # That the encoder still has to compute; 0: the chunk that begins the image is planned, or an output is used.
    embeddings: int
    # Used until then.
    output: EncoderOutput | None
    # Tokens [start, stop) that chunks must not cut.
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def least(self) -> int:
        """Tokens of the shortest chunk that begins the image."""
        return self.blocks[0][1] - self.blocks[0][0] if self.blocks else 1


class ImageWork:
    """Plans the encoder's work: workers encode an image in the step whose chunk begins it.

    Each embedding counts as a token of the step in which it is encoded. A chunk ends before an image that does not fit
    in what is left of the step's tokens, or of its `step_embeddings` if rows decode in it, which would wait for the
    encoder. The first image of a step is encoded regardless of its size, as the encoder cannot cut one; then the chunk
    computes a single token of it if no more are left.

    Where tokens of an image attend to each other (`VisionLimits.block`), chunks begin and end beside these runs.
    """

    def __init__(self, outputs: EncoderOutputs, limits: VisionLimits) -> None:
        """Keep embeddings as `outputs`, and encode as many of them in a step with decoding rows as `limits` allow."""
        self.outputs = outputs
        self.encodings = Encodings(outputs)
        self._most = limits.step_embeddings
        self._block = limits.block
        self._rows: dict[RowSlot, list[_PendingImage]] = {}
        # Of the plan that is being made.
        self.planned = 0
        self._delays_rows = False
        # Since the start.
        self.encoded_images = 0
        self.encoded_embeddings = 0
        self.reused_images = 0

    @property
    def block_ahead(self) -> int:
        """Tokens of an image that a step needs room for at least, while a row has images that are not computed."""
        return self._block if self._rows else 0

    def begin(self, sequence: Sequence, computed: int, scope: Scope | None) -> tuple[RowImage, ...]:
        """Start to follow an admitted row whose first `computed` tokens are cached; return its images for the workers.

        Those within these tokens, and those whose output is kept, need no pixels. Outputs belong to `scope`; None: none
        are used or kept.
        """
        assert sequence.row is not None, "the row is open"
        opened, pending = [], []
        new = self.encodings.encoded_for(sequence.handle)
        own: dict[bytes, EncoderOutput] = {}
        for image, (first, end) in zip(sequence.request.images, sequence.image_spans, strict=True):
            if end <= computed:
                opened.append(replace(image, pixels=None))
                continue
            output, has_output = self._output_of(image, scope, own)
            self.reused_images += output is not None and has_output and output.output_id not in new
            needs_pixels = not has_output or image.digest in own
            sent = image if needs_pixels else replace(image, pixels=None)
            opened.append(sent if output is None else replace(sent, output=output.output_id))
            blocks = self._blocks_of(sequence, first, end)
            pending.append(_PendingImage(first, end, 0 if has_output else image.length, output, blocks))
        if pending:
            self._rows[sequence.row] = pending
        self.encodings.leave(sequence.handle)
        return tuple(opened)

    def forget_all(self) -> None:
        """Forget all outputs, as the workers have none of them. No row may use any."""
        self.outputs.forget_all()
        self.encodings.forget_all()

    def begin_plan(self, *, delays_rows: bool) -> None:
        """Start to count what is encoded in a plan; `delays_rows`: rows decode in its first step."""
        self.planned = 0
        self._delays_rows = delays_rows

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
            room = budget - before - image.least
            if self._delays_rows:
                room = min(room, self._most - planned)
            if planned and image.embeddings > room:
                return before
            planned += image.embeddings
            budget -= image.embeddings
            length = min(length, max(budget, before + image.least))
        return self.whole(row, start, length)

    def whole(self, row: RowSlot, start: int, length: int) -> int:
        """Return the length of the longest chunk from `start`, of at most `length` tokens, that cuts no block."""
        end = start + length
        return next((first for first, after in self._blocks(row) if first < end < after), end) - start

    def least(self, row: RowSlot, start: int) -> int:
        """Return the length of the shortest chunk from `start`, which is in no block."""
        return next((after - first for first, after in self._blocks(row) if first == start), 1)

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

    def _blocks(self, row: RowSlot) -> Iterator[tuple[int, int]]:
        return (block for image in self._rows.get(row, ()) for block in image.blocks)

    def _blocks_of(self, sequence: Sequence, first: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the runs of embeddings of an image that has its first one at `first` and its last one before `end`."""
        if not self._block:
            return ()
        return runs_of(first + np.flatnonzero(sequence.token_ids[first:end] < 0))

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
