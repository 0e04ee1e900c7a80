"""Speculative decoding: which rows get drafts, and how long ones."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.steps import Draft
from common.types import RowSlot
from services.scheduler.core.drafts import Guess, Origin

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import StepResult
    from common.types import StepId
    from services.scheduler.core.costs import LoadCosts
    from services.scheduler.core.rows import RowSlots

# Assumed share of right tokens by origin before drafts have been verified, its weight in tokens, and the weight of
# the share among all rows in the estimate for one.
PRIOR_SHARES = np.array([0.3, 0.5, 0.75, 0.75, 0.75])
PRIOR_TOKENS = 16.0
SHARED_TOKENS = 2.0
# Decay of a row's counts with each draft that is verified, and with each pass in which a guess was too unlikely to be
# drafted, so that the row is given another chance; and of the counts of all rows, for the same reasons.
VERIFIED_DECAY = 0.9
SKIPPED_DECAY = 0.97
SHARED_VERIFIED_DECAY = 0.99
SHARED_SKIPPED_DECAY = 0.999
# Decay of measured passes, and the weight of the assumed time of a further token, as a variance of passes' tokens.
PASS_DECAY = 0.97
ASSUMED_VARIANCE = 4.0
# Decay of what passes with drafts have cost, with each pass in which they were too expensive.
UNUSED_DECAY = 0.998
# A pass counts as at most this many times the estimate: one for which a kernel was compiled says nothing of the next.
MOST_SURPRISE = 4.0
# By how much drafts have to raise the expected tokens per second.
LEAST_GAIN = 1.02
# Rows for which drafts are looked for in one plan, besides those whose last draft was sent: so that the search does not
# delay the plans of large batches, of which few rows gain anything.
SEARCHED_ROWS = 32
# Assumed time that a pass with drafts takes besides that of its tokens, until one has been measured, in seconds: the
# worker is idle until the result has reached the scheduler and the next plan has come back.
OVERHEAD_S = 0.001


class GuessesTokens(Protocol):
    """Sources of drafts, as `DraftSources` is."""

    def guess(self, row: RowSlot, most: int) -> Guess | None:
        """Return up to `most` tokens that may come next in a running row, or None."""


class LinearFit:
    """Fits seconds as a line over tokens, with recent measurements weighing more and an assumed slope as a prior."""

    def __init__(self) -> None:
        """Know no measurement."""
        # Sums over measurements: weight, tokens, seconds, tokens squared, tokens times seconds.
        self._sums: NDArray[np.float64] = np.zeros(5)

    @property
    def weight(self) -> float:
        """Number of measurements, less those that have been forgotten."""
        return float(self._sums[0])

    def saw(self, tokens: float, seconds: float) -> None:
        """Record a measurement."""
        self._sums *= PASS_DECAY
        self._sums += (1.0, tokens, seconds, tokens * tokens, tokens * seconds)

    def fade(self, factor: float) -> None:
        """Let the prior weigh more."""
        self._sums *= factor

    def line(self, slope: float, intercept: float | None = None) -> tuple[float, float]:
        """Return the seconds of no tokens and of each token, given an assumed slope, and intercept as a measurement."""
        weight, of_tokens, of_seconds, of_squares, of_products = self._sums.tolist()
        if intercept is not None:
            weight, of_seconds = weight + 1.0, of_seconds + intercept
        mean_tokens, mean_s = of_tokens / weight, of_seconds / weight
        variance = of_squares / weight - mean_tokens**2
        covariance = of_products / weight - mean_tokens * mean_s
        each_s = max((covariance + ASSUMED_VARIANCE * slope) / (variance + ASSUMED_VARIANCE), 0.0)
        return mean_s - mean_tokens * each_s, each_s


class PassCosts:
    """Estimates the time of decode passes from measured ones: without drafts by rows, and what drafts add to that."""

    def __init__(self, load_costs: LoadCosts) -> None:
        """Assume that a token of a draft costs as much as one of a prompt until passes of different sizes are known."""
        self._load_costs = load_costs
        self._plain = LinearFit()
        # Of passes with drafts: tokens of drafts, and seconds beyond a pass without.
        self._added = LinearFit()

    @property
    def is_known(self) -> bool:
        """Whether a pass without drafts has been measured."""
        return bool(self._plain.weight)

    def saw(self, rows: int, seconds: float) -> None:
        """Record a pass with neither prompts nor drafts."""
        self._plain.saw(rows, seconds)

    def saw_drafted(self, rows: int, drafted: int, seconds: float) -> None:
        """Record the time from a plan with drafts, and without prompts, to the next plan."""
        if not self.is_known:
            return
        plain_s, (overhead_s, each_s) = self.plain_s(rows), self.added()
        seconds = min(seconds, MOST_SURPRISE * (plain_s + overhead_s + drafted * each_s))
        self._added.saw(drafted, seconds - plain_s)

    def fade(self) -> None:
        """Record that drafts were too expensive: they are tried again when what they cost is long ago."""
        self._added.fade(UNUSED_DECAY)

    def plain_s(self, rows: int) -> float:
        """Return the seconds of a pass of `rows` rows without drafts."""
        base_s, each_s = self._plain.line(self._assumed_s())
        return max(base_s + rows * each_s, each_s)

    def added(self) -> tuple[float, float]:
        """Return the seconds that drafts add to a pass, whatever their number of tokens, and those of each token."""
        overhead_s, each_s = self._added.line(self._assumed_s(), OVERHEAD_S)
        return max(overhead_s, 0.0), each_s

    def _assumed_s(self) -> float:
        rate = self._load_costs.estimate().prefill_tokens_per_s
        return 1 / rate if rate else 0.0


class AcceptanceRates:
    """Estimates by row and origin how likely a token of a draft is accepted after those before it were.

    A row's estimate starts from what was accepted lately among all rows, of the same origin.
    """

    def __init__(self, rows: RowSlots) -> None:
        """Start with the priors for every row."""
        self._rows = rows
        self._shared_tried: NDArray[np.float64] = np.zeros(len(Origin))
        self._shared_right = np.zeros_like(self._shared_tried)
        self._tried: NDArray[np.float64] = np.zeros((rows.max_rows, len(Origin)))
        self._right = np.zeros_like(self._tried)
        # The choice that the counts of each slot belong to.
        self._handles = np.zeros(rows.max_rows, np.int64)

    def of(self, row: RowSlot, origin: Origin) -> float:
        """Return the estimate for a running row."""
        if self._handles[row] != self._rows.handle[row]:
            self._handles[row] = self._rows.handle[row]
            self._tried[row] = self._right[row] = 0.0
        shared = self._shared_right[origin] + PRIOR_SHARES[origin] * PRIOR_TOKENS
        shared /= self._shared_tried[origin] + PRIOR_TOKENS
        right, tried = self._right[row, origin], self._tried[row, origin]
        return float((right + shared * SHARED_TOKENS) / (tried + SHARED_TOKENS))

    def saw(self, row: RowSlot, origin: Origin, drafted: int, accepted: int) -> None:
        """Record a draft's verification, which ended at the first wrong token."""
        self._decay(row, origin, VERIFIED_DECAY, SHARED_VERIFIED_DECAY)
        tried = min(accepted + 1, drafted)
        self._tried[row, origin] += tried
        self._right[row, origin] += accepted
        self._shared_tried[origin] += tried
        self._shared_right[origin] += accepted

    def skipped(self, row: RowSlot, origin: Origin) -> None:
        """Record that a guess was too unlikely to be drafted."""
        self._decay(row, origin, SKIPPED_DECAY, SHARED_SKIPPED_DECAY)

    def _decay(self, row: RowSlot, origin: Origin, factor: float, shared_factor: float) -> None:
        self._tried[row, origin] *= factor
        self._right[row, origin] *= factor
        self._shared_tried[origin] *= shared_factor
        self._shared_right[origin] *= shared_factor


@dataclass(frozen=True, slots=True)
class _Sent:
    """The drafts of a plan in flight, by row, with the handles of the rows' choices."""

    step_id: StepId
    sent_at: float
    guesses: dict[RowSlot, tuple[int, Guess]]

    @property
    def drafted(self) -> int:
        """Tokens of all drafts."""
        return sum(guess.token_ids.size for _, guess in self.guesses.values())


@dataclass(frozen=True, slots=True)
class _Verified:
    """A pass with drafts whose result has arrived; its time ends with the next plan."""

    sent_at: float
    rows: int
    drafted: int
    compute_s: float


class Speculation:
    """Drafts the next tokens of decoding rows where that is expected to give more tokens per second.

    How many tokens a draft yields is known only from its result. So plans with drafts are made when no plan is in
    flight, and no further one until their results are in.

    A draft gets another token while the probability that it is accepted, per second that it costs, exceeds the tokens
    per second of the pass so far. A large batch, whose passes are limited by computation, so gets no drafts.
    """

    def __init__(self, most: int, rows: RowSlots, sources: GuessesTokens, load_costs: LoadCosts) -> None:
        """Draft up to `most` tokens for a row, from `sources`; 0: none."""
        # Drafts that were verified, their tokens, and the accepted ones of these.
        self.drafts = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._most = most
        self._rows = rows
        self._costs = PassCosts(load_costs)
        self._sources = sources
        self._rates = AcceptanceRates(rows)
        self._sent: _Sent | None = None
        self._verified: _Verified | None = None
        # Passes that have been measured, and their number when guesses were last found not to pay.
        self._passes = 0
        self._skipped_at = 0
        # Where the search among the other rows goes on.
        self._next_row = 0
        # Rows that had a draft in the last plan with drafts.
        self._drafting: NDArray[np.bool_] = np.zeros(rows.max_rows, np.bool_)

    def holds_plans(self, live: NDArray[np.int64], room: int) -> bool:
        """Whether the next plan has to wait for the results of plans in flight: for those of drafts, or to draft.

        `live` are the decoding rows, `room` is the number of tokens that all their drafts may have.
        """
        if not self._most:
            return False
        if self._sent is not None:
            return True
        chosen = self._choose(live, room)
        if any(guess.token_ids.size for guess in chosen.values()):
            return True
        self._skip(chosen)
        return False

    def propose(self, live: NDArray[np.int64], room: int, now: float) -> dict[RowSlot, Guess]:
        """Return drafts, of up to `room` tokens in all, for rows of the next plan; no plan is in flight."""
        verified, self._verified = self._verified, None
        if verified is not None and live.size:
            seconds = max(now - verified.sent_at, verified.compute_s)
            self._costs.saw_drafted(verified.rows, verified.drafted, seconds)
        chosen = self._choose(live, room)
        self._next_row += SEARCHED_ROWS
        self._drafting[live] = False
        drafts = {row: guess for row, guess in chosen.items() if guess.token_ids.size}
        for row in drafts:
            self._drafting[row] = True
        self._skip({row: guess for row, guess in chosen.items() if row not in drafts})
        return drafts

    def sent(self, step_id: StepId, guesses: dict[RowSlot, Guess], now: float) -> tuple[Draft, ...]:
        """Return the drafts for the plan `step_id`, which is sent next."""
        if not guesses:
            return ()
        handles = {row: (int(self._rows.handle[row]), guess) for row, guess in guesses.items()}
        self._sent = _Sent(step_id, now, handles)
        return tuple(Draft(row, guess.token_ids) for row, guess in guesses.items())

    def saw_pass(self, step_id: StepId, rows: int, seconds: float) -> bool:
        """Record the time of a pass without prompts, for `rows` rows; return whether it had drafts."""
        self._passes += 1
        sent = self._sent
        if sent is None or sent.step_id != step_id:
            self._costs.saw(rows, seconds)
            return False
        self._verified = _Verified(sent.sent_at, rows, sent.drafted, seconds)
        return True

    def saw_result(self, result: StepResult) -> None:
        """Record how much of the drafts of a plan was right."""
        sent = self._sent
        if sent is None or sent.step_id != result.step_id:
            return
        self._sent = None
        accepted = Counter(result.accepted_rows.tolist())
        for row, (handle, guess) in sent.guesses.items():
            self.drafts += 1
            self.drafted_tokens += guess.token_ids.size
            self.accepted_tokens += accepted[row]
            sequence = self._rows.sequences[row]
            if sequence is None or self._rows.handle[row] != handle:
                continue
            self._rates.saw(row, guess.origin, guess.token_ids.size, accepted[row])
            if guess.origin is Origin.PREDICTION:
                sequence.accepted_prediction_tokens += accepted[row]
                sequence.rejected_prediction_tokens += guess.token_ids.size - accepted[row]

    def forget_sent(self) -> None:
        """Forget the plans in flight, as the workers that had them are gone."""
        self._sent = self._verified = None

    def _skip(self, guesses: dict[RowSlot, Guess]) -> None:
        """Record guesses that do not pay, once for each pass."""
        if guesses and self._try_fade():
            for row, guess in guesses.items():
                self._rates.skipped(row, guess.origin)

    def _try_fade(self) -> bool:
        """Record that drafts were too expensive, once for each pass; return whether this was the first time."""
        if self._skipped_at == self._passes:
            return False
        self._skipped_at = self._passes
        self._costs.fade()
        return True

    def _choose(self, live: NDArray[np.int64], room: int) -> dict[RowSlot, Guess]:
        """Return the guesses that are worth their time, with those that are not as empty ones, or nothing at all."""
        count = len(live)
        if not (self._most and count and self._costs.is_known):
            return {}
        pass_s, (overhead_s, each_s) = self._costs.plain_s(count), self._costs.added()
        if count * each_s > pass_s + overhead_s:
            # Not even a certain token would pay.
            self._try_fade()
            return {}
        guesses: dict[RowSlot, Guess] = {}
        for row in map(RowSlot, self._searched(live).tolist()):
            # One more token is sampled after a draft.
            most = min(self._most, int(self._rows.limit[row] - self._rows.length[row]))
            guess = self._sources.guess(row, most) if most > 0 else None
            if guess is not None:
                guesses[row] = guess
        lengths = self._lengths(guesses, count, room, pass_s, overhead_s, each_s)
        return {row: Guess(guess.token_ids[: lengths[row]], guess.origin) for row, guess in guesses.items()}

    def _searched(self, live: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows for which drafts are looked for now; in a large batch the others take turns."""
        if live.size <= SEARCHED_ROWS:
            return live
        drafting, others = live[self._drafting[live]], live[~self._drafting[live]]
        start = self._next_row % max(others.size, 1)
        return np.concatenate([drafting, np.roll(others, -start)[:SEARCHED_ROWS]])

    def _lengths(
        self, guesses: dict[RowSlot, Guess], count: int, room: int, pass_s: float, overhead_s: float, each_s: float
    ) -> Counter[RowSlot]:
        """Return how many tokens of each guess to draft, for the most expected tokens per second."""
        lengths: Counter[RowSlot] = Counter()
        shares = {row: self._rates.of(row, guess.origin) for row, guess in guesses.items()}
        expected, seconds = float(count), pass_s + overhead_s
        # The next token of each guess, by the probability that it is accepted.
        heap = [(-share, row) for row, share in shares.items()]
        heapq.heapify(heap)
        while heap and room > 0:
            negative, row = heapq.heappop(heap)
            if -negative * seconds < each_s * expected:
                break
            expected, seconds, room = expected - negative, seconds + each_s, room - 1
            lengths[row] += 1
            if lengths[row] < guesses[row].token_ids.size:
                heapq.heappush(heap, (negative * shares[row], row))
        pays = expected * pass_s > LEAST_GAIN * count * seconds
        return lengths if pays else Counter()
