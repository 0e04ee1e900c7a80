"""How long steps last, learnt from those that have run."""

from __future__ import annotations

# Weight of the newest sample in the running mean of the decode step's duration, and share that prompts' times keep when
# another one comes.
_NEWEST = 0.1
_KEPT = 0.9


class StepTimes:
    """Running means; a pass that computes prompts takes as long as those take, and a decode step if rows decode."""

    def __init__(self) -> None:
        """Know nothing."""
        self.decode_step_s: float | None = None
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0

    def saw_decoding(self, seconds: float) -> None:
        """Take note of a pass in which rows only decoded."""
        if self.decode_step_s is None:
            self.decode_step_s = seconds
        self.decode_step_s += _NEWEST * (seconds - self.decode_step_s)

    def saw_prompts(self, tokens: int, seconds: float, *, decodes: bool) -> float:
        """Take note of a pass with `tokens` of prompts; return the seconds that these account for."""
        prefill_s = seconds - (self.decode_step_s or 0.0 if decodes else 0.0)
        # Long passes count for more: short ones last for what every pass takes.
        self._prefill_s = _KEPT * self._prefill_s + max(prefill_s, 0.0)
        self._prefill_tokens = _KEPT * self._prefill_tokens + tokens
        return prefill_s

    def expected(self, prompt_tokens: int, *, decodes: bool) -> float:
        """Return about how many seconds a pass with so many tokens of prompts will last; 0 where nothing is known."""
        if not prompt_tokens or not self._prefill_tokens:
            return 0.0
        return prompt_tokens * self._prefill_s / self._prefill_tokens + (self.decode_step_s or 0.0 if decodes else 0.0)
