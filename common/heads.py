"""Classification heads of models, as their config.json describes them, and the tasks that follow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from common.errors import ConfigurationError
from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class HeadActivation(Enum):
    """From a head's outputs to its result: as they are, each output by itself, or all of them together."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class Head:
    """A classification head, which gives one output per label: for a whole prompt, or for each of its tokens."""

    pooling: Pooling
    labels: tuple[str, ...]
    activation: HeadActivation
    # Of the output for a pair of texts.
    score_activation: HeadActivation = HeadActivation.SIGMOID
    # The output is the logit of the second token minus that of the first; empty: the head has weights of its own.
    tokens: tuple[str, ...] = ()

    @property
    def scores_pairs(self) -> bool:
        """Whether the output for a pair of texts is a score: it is the only one."""
        return self.pooling is Pooling.CLASSIFY and len(self.labels) == 1


# Endings of `architectures`, and the number of labels where config.json has none.
_ARCHITECTURES: Final = {
    "ForSequenceClassification": (Pooling.CLASSIFY, 2),
    "ForTokenClassification": (Pooling.TOKEN_CLASSIFY, 2),
    "ForRewardModel": (Pooling.CLASSIFY, 1),
    "ForProcessRewardModel": (Pooling.TOKEN_CLASSIFY, 2),
}
_ACTIVATIONS: Final = {
    "regression": HeadActivation.NONE,
    "single_label_classification": HeadActivation.SOFTMAX,
    "multi_label_classification": HeadActivation.SIGMOID,
}
# Names of sentence-transformers.
_SCORE_ACTIVATIONS: Final = {"Identity": HeadActivation.NONE, "Sigmoid": HeadActivation.SIGMOID}


def read_head(config: Mapping[str, Any], tokens: Sequence[str] = ()) -> Head | None:
    """Return the head that a config.json describes; None: the model has none.

    Two `tokens` give a head to a model that has none, as those of its config.json (`classifier_from_token`) do.

    Raises:
        ConfigurationError: the head is not supported.
    """
    tokens = tuple(tokens or config.get("classifier_from_token") or ())
    if tokens and len(tokens) != 2:
        raise ConfigurationError(f"classifier_from_token: two tokens are expected, got {len(tokens)}: {list(tokens)}")
    found = next((entry for end, entry in _ARCHITECTURES.items() if architecture_of(config).endswith(end)), None)
    if tokens:
        return Head(Pooling.CLASSIFY, ("LABEL_0",), HeadActivation.SIGMOID, _score_activation(config), tokens)
    if found is None:
        return None
    pooling, default_labels = found
    labels = _labels(config, default_labels)
    return Head(pooling, labels, _activation(config, pooling, len(labels)), _score_activation(config))


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the class of `transformers` that a config.json names; empty if it names none."""
    return str(next(iter(config.get("architectures") or ()), ""))


def only_embeds(config: Mapping[str, Any], *, has_pooling: bool) -> bool:
    """Whether a model is made for embeddings: it has no head at all, or a pooling module of sentence-transformers."""
    if read_head(config) is not None:
        return False
    # Not GPT2LMHeadModel and the like.
    is_bare = architecture_of(config).endswith("Model") and not architecture_of(config).endswith("HeadModel")
    return is_bare or has_pooling


def has_pooling_module(path: Path) -> bool:
    """Whether the directory of a model has a pooling module of sentence-transformers."""
    try:
        modules = json.loads((path / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any(str(module.get("type")).endswith(".Pooling") for module in modules if isinstance(module, dict))


def _labels(config: Mapping[str, Any], default: int) -> tuple[str, ...]:
    names = config.get("id2label")
    if names:
        try:
            by_number = {int(number): str(name) for number, name in names.items()}
            return tuple(by_number[number] for number in range(len(by_number)))
        except (AttributeError, KeyError, ValueError) as error:
            raise ConfigurationError(f"id2label: labels 0, 1, … are expected, got {names}") from error
    count = config.get("num_labels") or default
    return tuple(f"LABEL_{number}" for number in range(int(count)))


def _activation(config: Mapping[str, Any], pooling: Pooling, labels: int) -> HeadActivation:
    """Return the activation that the pipelines of `transformers` apply."""
    problem = config.get("problem_type")
    if problem is not None and problem not in _ACTIVATIONS:
        raise ConfigurationError(f"problem_type {problem!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    if problem is not None:
        return _ACTIVATIONS[problem]
    return HeadActivation.SIGMOID if labels == 1 and pooling is Pooling.CLASSIFY else HeadActivation.SOFTMAX


def _score_activation(config: Mapping[str, Any]) -> HeadActivation:
    """Return the activation of a cross-encoder's score, by the rules of sentence-transformers."""
    stated = (config.get("sentence_transformers") or {}).get("activation_fn")
    stated = stated or config.get("sbert_ce_default_activation_function")
    if not stated:
        return HeadActivation.SIGMOID
    name = str(stated).rpartition(".")[2]
    if name not in _SCORE_ACTIVATIONS:
        known = ", ".join(_SCORE_ACTIVATIONS)
        raise ConfigurationError(f"activation {stated!r} of scores is not supported; supported: {known}")
    return _SCORE_ACTIVATIONS[name]


class Task(Enum):
    """A use of a model."""

    GENERATE = "generate"
    EMBED = "embed"
    # Pairs of texts: by a classification head, or by the similarity of their embeddings.
    SCORE = "score"
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"


def tasks_of(head: Head | None, *, generates: bool) -> tuple[Task, ...]:
    """Return all tasks of a model, the main one first."""
    if head is not None:
        own = Task.CLASSIFY if head.pooling is Pooling.CLASSIFY else Task.TOKEN_CLASSIFY
        return (own, Task.SCORE) if head.scores_pairs else (own,)
    return (Task.GENERATE, Task.EMBED, Task.SCORE) if generates else (Task.EMBED, Task.SCORE)
