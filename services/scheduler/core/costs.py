"""What it costs to load pages from the host, and what to compute them again: measured, never guessed."""

from __future__ import annotations

from dataclasses import dataclass

# Share of what was known that remains when the next measurement comes in: the last ten or so decide.
MEMORY = 0.9
# Weight of the calibration at start-up, in seconds of measured work.
CALIBRATION_S = 0.2
# Smaller chunks say more about the cost of a pass than about prefill.
MIN_PREFILL_TOKENS = 32
# Until the first load is seen: it begins with the next plan and is seen done with a later result.
FIRST_LATENCY_S = 0.005
LATENCY_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """The model's parameters at one moment, for people; rates are 0 while nothing is known.

    `break_even_tokens` is the shortest run of tokens whose load pays, None if none ever does.
    """

    prefill_tokens_per_s: float
    load_bytes_per_s: float
    bytes_per_token: int
    load_latency_s: float
    break_even_tokens: int | None


class LoadCosts:
    """Compares two straight lines: tokens / prefill rate against latency + bytes / bandwidth.

    Attention makes long prompts dearer than that; as long ones also weigh most in the running rate, it follows what
    is served. Times come in as arguments, and only measured ones: equal measurements give equal decisions.
    """

    def __init__(self, bytes_per_token: int, prefill_tokens_per_s: float = 0.0, load_bytes_per_s: float = 0.0) -> None:
        """Start with a calibration, where there is one; `bytes_per_token` are those of one rank."""
        self._bytes_per_token = bytes_per_token
        self._prefill = _Rate(prefill_tokens_per_s)
        self._load = _Rate(load_bytes_per_s)
        self._latency_s = FIRST_LATENCY_S

    def pays(self, tokens: int, queued_tokens: int = 0) -> bool:
        """Whether loading `tokens` tokens, behind others that are being loaded, is faster than computing them.

        While nothing has been measured it is tried.
        """
        if not self._prefill.value or not self._load.value:
            return True
        return self._load_s(tokens + queued_tokens) < tokens / self._prefill.value

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Take in a pass that prefilled `tokens` tokens."""
        if tokens >= MIN_PREFILL_TOKENS:
            self._prefill.add(tokens, seconds)

    def saw_load(self, tokens: int, seconds: float, waited_s: float) -> None:
        """Take in a load: the time of the copy itself, and from its plan to its acknowledgement."""
        self._load.add(tokens * self._bytes_per_token, seconds)
        self._latency_s += LATENCY_WEIGHT * (max(waited_s - seconds, 0.0) - self._latency_s)

    def estimate(self) -> CostEstimate:
        """Return what is known now."""
        return CostEstimate(
            self._prefill.value, self._load.value, self._bytes_per_token, self._latency_s, self._break_even()
        )

    def _load_s(self, tokens: int) -> float:
        return self._latency_s + tokens * self._bytes_per_token / self._load.value

    def _break_even(self) -> int | None:
        if not self._prefill.value or not self._load.value:
            return None
        gain = 1 / self._prefill.value - self._bytes_per_token / self._load.value
        return int(self._latency_s / gain) + 1 if gain > 0 else None


class _Rate:
    """Amount per second over a fading window."""

    def __init__(self, calibrated: float) -> None:
        self._seconds = CALIBRATION_S if calibrated > 0 else 0.0
        self._amount = calibrated * self._seconds

    @property
    def value(self) -> float:
        return self._amount / self._seconds if self._seconds > 0 else 0.0

    def add(self, amount: float, seconds: float) -> None:
        if seconds > 0:
            self._amount = MEMORY * self._amount + amount
            self._seconds = MEMORY * self._seconds + seconds
