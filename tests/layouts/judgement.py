"""Compares answers of a layout with those of a single rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.layouts.load import Answer

# Ranks add the parts of a product in another order than one alone. Two tokens may change places if they are as likely
# as each other to within this much: differences of logits, and of cumulative probabilities.
TIE_LOGIT, TIE_PROBABILITY = 1e-3, 1e-3
LOGPROB_TOLERANCE = 2e-2


class Judge:
    """Compares answers with those of a single rank."""

    def __init__(self, checkpoint: Path, *, is_exact: bool) -> None:
        self.ties = 0
        self._checkpoint = checkpoint
        self._is_exact = is_exact
        self._model: Any = None  # of transformers, loaded when two tokens have to be weighed

    def differences(
        self, bodies: Sequence[Mapping[str, Any]], own: Sequence[Answer], one: Sequence[Answer]
    ) -> list[str]:
        """Return why each answer that is not that of a single rank differs; count ties in `ties`."""
        return [
            f"request {index}: {why}; {bodies[index]}\n  {own[index]}\n  {one[index]}"
            for index in range(len(bodies))
            if (why := self._difference(bodies[index], own[index], one[index]))
        ]

    def _difference(self, body: Mapping[str, Any], own: Answer, one: Answer) -> str:
        pairs = list(zip(own.token_ids, one.token_ids, strict=False))
        first = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        if first is not None and not self._is_tie(body, own.token_ids[:first], pairs[first]):
            return f"another token {first}"
        if first is not None:
            self.ties += 1
        if len(own.logprobs) != len(one.logprobs) and first is None:
            return "other log probabilities"
        pairs_of = list(zip(own.logprobs, one.logprobs, strict=False))[:first]
        if any(abs(left - right) > LOGPROB_TOLERANCE for left, right in pairs_of):
            return "other log probabilities"
        if first is None and (own.token_ids, own.text, own.finish) != (one.token_ids, one.text, one.finish):
            return "another end"
        return ""

    def _is_tie(self, body: Mapping[str, Any], before: Sequence[int], tokens: tuple[int, int]) -> bool:
        """Whether rounding decides between two tokens after `before`."""
        if self._is_exact:
            return False
        logits = self._logits([*body["prompt"], *before])
        low, high = sorted(tokens)
        if not body["temperature"]:
            return float(logits.max() - logits[[low, high]].min()) < TIE_LOGIT
        # A token is drawn where the cumulative probability exceeds a uniform number.
        cumulative = torch.softmax(logits / body["temperature"], dim=-1).cumsum(-1)
        return float(cumulative[high - 1] - cumulative[low]) < TIE_PROBABILITY

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        from transformers import AutoModelForCausalLM

        if self._model is None:
            # Grouped products of experts are for smaller types only.
            model = AutoModelForCausalLM.from_pretrained(self._checkpoint, experts_implementation="eager")
            self._model = model.double().eval()
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([ids])).logits[0, -1]
        return logits
