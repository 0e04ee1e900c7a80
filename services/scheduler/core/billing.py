"""Charges subjects for computed prompt tokens and output, each exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.types import Subject
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.shares import VirtualCounters


class Billing:
    """Charges prompts at their start, for tokens not cached in their own view, and output as it is generated.

    A retraction charges nothing again, and a choice that ends before its prompt is computed is refunded the rest.
    Without counters every call is a no-op.
    """

    def __init__(self, rows: RowSlots, counters: VirtualCounters | None) -> None:
        """Charge `counters` for the sequences in `rows`."""
        self._rows = rows
        self.counters = counters

    def start(self, sequence: Sequence, cached_tokens: int) -> None:
        """Charge the uncached prompt of a sequence that gets its first row."""
        if self.counters is not None:
            uncached = len(sequence.token_ids) - cached_tokens
            sequence.charged_tokens = len(sequence.token_ids)
            self.counters.charge(sequence.request.view.subject, prompt_tokens=uncached)

    def settle(self) -> None:
        """Charge the output that all rows have generated since the last call."""
        if self.counters is None:
            return
        lengths = self._rows.length.tolist()
        generated: dict[Subject, int] = {}
        for sequence in self._rows.occupants():
            assert sequence.row is not None, "occupants have a row"
            tokens = self._take_output(sequence, lengths[sequence.row])
            if tokens:
                subject = sequence.request.view.subject
                generated[subject] = generated.get(subject, 0) + tokens
        for subject, tokens in generated.items():
            self.counters.charge(subject, output_tokens=tokens)

    def charge_idle_rows(self, sequence: Sequence, tokens: int) -> None:
        """Charge a waiting sequence for `tokens` that other subjects could have generated in the pages kept for it.

        So a prompt that needs most of the memory delays other tenants, and other subjects of its own tenant, only for
        its share of the time.
        """
        if self.counters is not None and tokens:
            self.counters.charge(sequence.request.view.subject, output_tokens=tokens)

    def leave(self, sequence: Sequence, *, for_good: bool) -> None:
        """Charge the remaining output of a sequence that is about to lose its row.

        Refund its uncomputed prompt if `for_good`.
        """
        if self.counters is None or sequence.row is None:
            return
        generated = self._take_output(sequence, int(self._rows.length[sequence.row]))
        if generated:
            self.counters.charge(sequence.request.view.subject, output_tokens=generated)
        # Charged at the first start, but not planned yet.
        missing = sequence.charged_tokens - int(self._rows.planned[sequence.row])
        if for_good and missing > 0 and not sequence.is_prefilled and not sequence.retractions:
            self.counters.charge(sequence.request.view.subject, prompt_tokens=-missing)

    def _take_output(self, sequence: Sequence, length: int) -> int:
        """Return the number of output tokens not charged yet, and mark them as charged."""
        generated = max(length - sequence.charged_tokens, 0)
        sequence.charged_tokens += generated
        return generated
