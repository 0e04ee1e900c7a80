"""Measured costs: of loading pages from the host or from storage and of recomputing them; durations of operations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Decay of earlier measurements at each new one: about the last ten decide.
MEMORY = 0.9
# The same for reads from storage, which are rare while they do not pay: about the last two decide.
STORAGE_MEMORY = 0.5
# Measurements of reads from other groups that decide, and the reads beside each other that are one of them at most.
PEER_MEASUREMENTS = 5
PEER_READS_AT_ONCE = 8
# Missing tokens for which a prompt is left to another group: until what that takes is measured, and the least and the
# most that follow from any measurement.
FIRST_PEER_TOKENS = 512
LEAST_PEER_TOKENS = 128
MOST_PEER_TOKENS = 4096
# Weight of the calibration at start-up, in seconds of measured work.
CALIBRATION_S = 0.2
# Smaller chunks reflect the fixed cost of a pass rather than prefill.
MIN_PREFILL_TOKENS = 32
# Used until the first load is measured: a load begins with the next plan and its end is seen with a later result.
FIRST_LATENCY_S = 0.005
LATENCY_WEIGHT = 0.2

P = ParamSpec("P")
R = TypeVar("R")

# Reading a thread's processor time is a system call, which takes about as long as a peek.
SAMPLED_ONE_IN = 16


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Snapshot of the cost model's parameters, for display; rates are 0 until measured.

    `break_even_tokens` is the shortest run of tokens that is faster to load than to compute; None if there is none.
    `storage_break_even_tokens` is the same for tokens that are read from storage to the host first.
    """

    prefill_tokens_per_s: float
    load_bytes_per_s: float
    bytes_per_token: int
    load_latency_s: float
    break_even_tokens: int | None
    storage_bytes_per_s: float
    storage_break_even_tokens: int | None


class LoadCosts:
    """Compares two linear costs: tokens / prefill rate against latency + bytes / bandwidth.

    Attention makes long prompts more expensive than that; as they also weigh most in the running rate, it follows the
    served mix. Measured times are passed in as arguments, so equal measurements give equal decisions.
    """

    def __init__(self, bytes_per_token: int, prefill_tokens_per_s: float = 0.0, load_bytes_per_s: float = 0.0) -> None:
        """Start from a calibration, if there is one; `bytes_per_token` is per rank."""
        self._bytes_per_token = bytes_per_token
        self._prefill = _Rate(prefill_tokens_per_s)
        self._load = _Rate(load_bytes_per_s)
        self._latency_s = FIRST_LATENCY_S
        self._storage = _Rate(0.0, STORAGE_MEMORY)
        # Of pages that another group computes, from its workers to the host.
        self._peer = _LinkRate()
        # By how many seconds prompts that another group computed were later here than there.
        self._peer_delays: deque[float] = deque(maxlen=PEER_MEASUREMENTS)
        # Of a read, without the time of the transfer itself.
        self._storage_latency_s = FIRST_LATENCY_S

    def pays(self, tokens: int, copied_tokens: int | None = None) -> bool:
        """Return whether it is faster to load `tokens` tokens than to compute them.

        That takes copying the memory of `copied_tokens` tokens: by default of as many, but more if loads are in
        progress, or if snapshots of recurrent states are to be loaded, too. True while nothing has been measured.
        """
        if not self._prefill.value or not self._load.value:
            return True
        return self._load_s(tokens if copied_tokens is None else copied_tokens) < tokens / self._prefill.value

    def storage_pays(self, tokens: int, reads: int, more_tokens: int = 0) -> bool:
        """Return whether reading `tokens` tokens from storage, in `reads` reads in turn, is faster than computing them.

        They are loaded from the host then, and the memory of `more_tokens` tokens with them. True while the rate of
        storage or of prefill has not been measured.
        """
        if not self._prefill.value or not self._storage.value:
            return True
        return self._storage_s(tokens + more_tokens, reads) < tokens / self._prefill.value

    def least_stored(self, reads: int, more_tokens: int) -> int:
        """Return the least tokens for which `storage_pays`, as it does for some number; 0 while that is unknown."""
        if not self._prefill.value or not self._storage.value:
            return 0
        fixed_s = self._storage_s(more_tokens, reads)
        return self._least(fixed_s, self._storage_s(more_tokens + 1, reads) - fixed_s) or 0

    def peer_pays(self, tokens: int = 1, copied_tokens: int = 1) -> bool:
        """Return whether pages come from another group's workers, and from the host, faster than they are computed.

        For `tokens` tokens, the memory of `copied_tokens` is read: more if states of recurrent layers come with them.
        True while the rates have not been measured.
        """
        if not self._prefill.value or not self._peer.value:
            return True
        load_s = 1 / self._load.value if self._load.value else 0.0
        copied_s = copied_tokens * self._bytes_per_token * (1 / self._peer.value + load_s)
        return copied_s < tokens / self._prefill.value

    def least_peer_tokens(self) -> int:
        """Return for how many missing tokens a prompt is left to another group, within bounds.

        To compute so many here, which delays all rows, takes as long as leaving them to the other group delays one
        prompt: by the shortest of the latest delays, as queues make them longer, never shorter.
        """
        if not self._prefill.value or not self._peer_delays:
            return FIRST_PEER_TOKENS
        tokens = self._prefill.value * min(self._peer_delays)
        return int(min(max(tokens, LEAST_PEER_TOKENS), MOST_PEER_TOKENS))

    def prefill_s(self, tokens: int) -> float:
        """Return the time to compute `tokens` tokens; 0 while that has not been measured."""
        return tokens / self._prefill.value if self._prefill.value else 0.0

    def saw_peer_read(self, tokens: int, seconds: float, *, beside_others: bool = False) -> None:
        """Record a transfer of `tokens` tokens' pages from another group, while others go on or not.

        `seconds`: the time that has passed since the transfer before it ended, if they were beside each other.
        """
        self._peer.add(tokens * self._bytes_per_token, seconds, has_ended=not beside_others)

    def saw_peer_start(self, seconds: float) -> None:
        """Record a prompt that another group computed: it could start here so long after it arrived here.

        Without the time in which the other group computed it.
        """
        self._peer_delays.append(max(seconds, 0.0))

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Record a pass that prefilled `tokens` tokens."""
        if tokens >= MIN_PREFILL_TOKENS:
            self._prefill.add(tokens, seconds)

    def saw_load(self, tokens: int, seconds: float, waited_s: float) -> None:
        """Record a load: the time of the copy itself, and the time from its plan to its acknowledgement."""
        self._load.add(tokens * self._bytes_per_token, seconds)
        self._latency_s += LATENCY_WEIGHT * (max(waited_s - seconds, 0.0) - self._latency_s)

    def saw_storage_read(self, tokens: int, pages: int, seconds: float, waited_s: float) -> None:
        """Record a read of `pages` pages, of which `tokens` tokens arrived.

        The transfer itself took `seconds`; from the read's plan to its acknowledgement it took `waited_s`. Reads of
        one page, or of pages that are not stored, show the round trip rather than the rate.
        """
        if pages > 1 and tokens:
            self._storage.add(tokens * self._bytes_per_token, seconds)
        self._storage_latency_s += LATENCY_WEIGHT * (max(waited_s - seconds, 0.0) - self._storage_latency_s)

    def estimate(self) -> CostEstimate:
        """Return the current parameters."""
        return CostEstimate(
            self._prefill.value,
            self._load.value,
            self._bytes_per_token,
            self._latency_s,
            self._break_even(),
            self._storage.value,
            self._storage_break_even(),
        )

    def _load_s(self, tokens: int) -> float:
        return self._latency_s + tokens * self._bytes_per_token / self._load.value

    def _storage_s(self, tokens: int, reads: int) -> float:
        """Return the time to read tokens from storage and to load them to the device."""
        load_s = self._load_s(tokens) if self._load.value else self._latency_s
        return reads * self._storage_latency_s + tokens * self._bytes_per_token / self._storage.value + load_s

    def _break_even(self) -> int | None:
        if not self._prefill.value or not self._load.value:
            return None
        return self._least(self._latency_s, self._bytes_per_token / self._load.value)

    def _storage_break_even(self) -> int | None:
        if not self._prefill.value or not self._storage.value:
            return None
        fixed_s = self._storage_s(0, 1)
        return self._least(fixed_s, self._storage_s(1, 1) - fixed_s)

    def _least(self, fixed_s: float, token_s: float) -> int | None:
        """Return the least number of tokens for which these costs are lower than those of computing."""
        gain = 1 / self._prefill.value - token_s
        return int(fixed_s / gain) + 1 if gain > 0 else None


class _Rate:
    """Amount per second over an exponentially decaying window."""

    def __init__(self, calibrated: float, memory: float = MEMORY) -> None:
        self._memory = memory
        self._seconds = CALIBRATION_S if calibrated > 0 else 0.0
        self._amount = calibrated * self._seconds

    @property
    def value(self) -> float:
        return self._amount / self._seconds if self._seconds > 0 else 0.0

    def add(self, amount: float, seconds: float) -> None:
        if seconds > 0:
            self._amount = self._memory * self._amount + amount
            self._seconds = self._memory * self._seconds + seconds


class _LinkRate:
    """The highest of the latest measured amounts per second of a link.

    Queues, passes of the GPUs on either side and other traffic make reads slower, never faster, so the highest one is
    closest to what the link can do (as in BBR: Cardwell et al., ACM Queue 2016). One read without delays thus ends what
    an overload has left, and it takes several slow ones to begin it. Reads beside each other are one measurement: by
    themselves, the first would count the others' time, and the last none of its own.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=PEER_MEASUREMENTS)
        self._amount = self._seconds = 0.0
        self._reads = 0

    @property
    def value(self) -> float:
        return max(self._rates, default=0.0)

    def add(self, amount: float, seconds: float, *, has_ended: bool) -> None:
        """Add a read; `has_ended`: no other one is under way."""
        if amount > 0:
            self._amount += amount
            self._seconds += max(seconds, 0.0)
        self._reads += 1
        if not has_ended and self._reads < PEER_READS_AT_ONCE:
            return
        if self._seconds > 0:
            self._rates.append(self._amount / self._seconds)
        self._amount = self._seconds = 0.0
        self._reads = 0


@dataclass(slots=True, eq=False)
class OperationCost:
    """Number of calls of one operation, and the duration of the measured ones in seconds."""

    calls: int = 0
    measured_calls: int = 0
    measured_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Estimated duration of all calls."""
        return self.measured_s * self.calls / self.measured_calls if self.measured_calls else 0.0


class OperationTimes:
    """Counts and measures calls of named operations."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Measure with `clock`, in seconds."""
        self._clock = clock
        self._costs: dict[str, OperationCost] = {}

    def __iter__(self) -> Iterator[tuple[str, OperationCost]]:
        """Iterate over the operations and their costs."""
        return iter(self._costs.items())

    def timed(self, name: str, function: Callable[P, R], one_in: int = SAMPLED_ONE_IN) -> Callable[P, R]:
        """Wrap `function` to count its calls as `name` and to measure one in `one_in`, beginning with the first."""
        cost = self._costs.setdefault(name, OperationCost())
        clock = self._clock

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            is_measured = cost.calls % one_in == 0
            cost.calls += 1
            if not is_measured:
                return function(*args, **kwargs)
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                cost.measured_s += clock() - started
                cost.measured_calls += 1

        return call
