"""Images that encoders outside the group encode, while their sequences wait for a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.scheduler.cache.encoder_outputs import OutputState, output_key

if TYPE_CHECKING:
    from common.types import EncoderOutputId, RowImage
    from services.scheduler.cache.encoder_outputs import EncoderOutput, EncoderOutputs, OutputKey
    from services.scheduler.cache.types import Scope
    from services.scheduler.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Encoding:
    """An image, with its pixels, and the output that all ranks will keep; the encoding uses that until its end."""

    image: RowImage
    output: EncoderOutput
    is_done: bool = False


@dataclass(slots=True)
class _Waiting:
    """The images of a waiting sequence, of which those before `next_image` have been looked at."""

    next_image: int = 0
    # Those that it waits for, and has waited for.
    encodings: list[Encoding] = field(default_factory=list)
    # Used until it has a row.
    outputs: list[EncoderOutput] = field(default_factory=list)


class Encodings:
    """Has images of sequences that could start encoded, so that no decoding row waits for the encoder.

    Encoders compute images in the order in which these were begun, and have at most `room` embeddings to compute at a
    time: sequences wait in the order of the queue beyond that. An encoding that fails, or for which there is no room
    among the outputs, is left to the workers.
    """

    def __init__(self, outputs: EncoderOutputs) -> None:
        """Keep embeddings as `outputs`."""
        # Embeddings that the encoders may have to compute at a time, but for a single larger image; 0: there are none.
        self.room = 0
        # Embeddings that they have to compute.
        self.open_embeddings = 0
        # Since the start.
        self.encoded_images = 0
        self.failed_images = 0
        self._outputs = outputs
        self._waiting: dict[int, _Waiting] = {}
        self._open: dict[OutputKey, Encoding] = {}
        self._begun: list[Encoding] = []

    @property
    def has_room(self) -> bool:
        """Whether encoders can be asked for more."""
        return self.open_embeddings < self.room

    @property
    def has_waiting(self) -> bool:
        """Whether a sequence may be waiting for an image."""
        return self.open_embeddings > 0

    def has_more(self, sequence: Sequence) -> bool:
        """Return whether there are encoders, and `begin` has not looked at all images of a waiting sequence."""
        waiting = self._waiting.get(sequence.handle)
        return self.room > 0 and (waiting.next_image if waiting else 0) < len(sequence.request.images)

    def begin(self, sequence: Sequence, computed: int, scope: Scope) -> int:
        """Begin to encode the images of a waiting sequence that are not in its first `computed` tokens, nor kept.

        Return the number of embeddings that are to be computed for it.
        """
        waiting = self._waiting.setdefault(sequence.handle, _Waiting())
        images, begun = sequence.request.images, 0
        while waiting.next_image < len(images):
            image, (_, end) = images[waiting.next_image], sequence.image_spans[waiting.next_image]
            if end > computed:
                length = self._begin(image, scope, waiting)
                if length is None:
                    break
                begun += length
            waiting.next_image += 1
        return begun

    def holds_back(self, sequence: Sequence) -> bool:
        """Return whether a sequence waits for an image, or for room at the encoders."""
        waiting = self._waiting.get(sequence.handle)
        if waiting is None:
            return False
        return self.has_more(sequence) or not all(encoding.is_done for encoding in waiting.encodings)

    def encoded_for(self, handle: int) -> frozenset[EncoderOutputId]:
        """Return the outputs that a waiting sequence has waited for."""
        waiting = self._waiting.get(handle)
        return frozenset(each.output.output_id for each in waiting.encodings) if waiting else frozenset()

    def leave(self, handle: int) -> None:
        """Let a sequence wait no more: it has a row, or has ended. What is being encoded goes on."""
        waiting = self._waiting.pop(handle, None)
        for output in waiting.outputs if waiting else ():
            self._outputs.release(output)

    def take_begun(self) -> list[Encoding]:
        """Return the encodings that the encoders have to be asked for, and clear them; `finish` ends each."""
        begun, self._begun = self._begun, []
        return begun

    def finish(self, encoding: Encoding, *, is_kept: bool) -> None:
        """Record that all ranks keep the output of an encoding, or that it failed, and some may keep it."""
        encoding.is_done = True
        self.open_embeddings -= encoding.image.length
        if self._open.get(encoding.output.key) is encoding:
            del self._open[encoding.output.key]
        if is_kept:
            self.encoded_images += 1
            self._outputs.confirm(encoding.output)
        else:
            self.failed_images += 1
        self._outputs.release(encoding.output)

    def forget_all(self) -> None:
        """Let sequences look at their images again, as the workers have lost all outputs."""
        self._waiting.clear()
        self._open.clear()

    def _begin(self, image: RowImage, scope: Scope, waiting: _Waiting) -> int | None:
        """Begin to encode an image; return the embeddings to compute, or None if there is no room for them yet."""
        output = self._outputs.find(scope, image)
        if output is not None:
            waiting.outputs.append(output)
            return 0
        known = self._open.get(output_key(scope, image))
        if known is not None and known.output.state is OutputState.PROMISED:
            waiting.encodings.append(known)
            waiting.outputs.append(self._outputs.share(known.output))
            return 0
        if self.open_embeddings and self.open_embeddings + image.length > self.room:
            return None
        output = self._outputs.promise(scope, image)
        if output is None:
            return 0
        encoding = Encoding(image, output)
        waiting.encodings.append(encoding)
        waiting.outputs.append(self._outputs.share(output))
        self._open[output.key] = encoding
        self._begun.append(encoding)
        self.open_embeddings += image.length
        return image.length
