"""The process that runs the detectors: one JSON object per line in, one out. It ends when its input ends.

Run as `python -m services.scheduler.content.child PARENT_PID`. The first line is its configuration; each further one
either submits a prompt (`ids`) or only lets it check its rules for changes. Neither text nor token ids are output.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TextIO

import numpy as np

from common.child_process import begin_child
from common.errors import ConfigurationError
from common.settings import ModelSettings
from common.tokenization import load_served_model
from services.scheduler.content.interface import DetectorOptions, RulesError
from services.scheduler.content.text import Transcriber

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from common.child_process import JsonMessage
    from common.types import TokenIds
    from services.scheduler.content.interface import Detector

# Serving takes precedence over examining.
NICENESS = 10
ENTRY_POINTS = "pando.content_detectors"
SHIPPED = {"patterns": "services.scheduler.content.patterns:PatternDetector"}


def main() -> None:
    """Serve standard input until it ends."""
    answers = begin_child()
    os.nice(NICENESS)
    serve(sys.stdin, answers, make_examiner)


def serve(questions: TextIO, answers: TextIO, make: Callable[[JsonMessage], Examiner]) -> None:
    """Configure an examiner from the first line, and answer each line."""
    examiner: Examiner | None = None
    for line in questions:
        message: JsonMessage = json.loads(line)
        try:
            if examiner is None:
                examiner = make(message)
            answer = examine(examiner, message)
        except (ConfigurationError, RulesError) as error:
            answer = {"failure": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def make_examiner(message: JsonMessage) -> Examiner:
    """Load the model and detectors named by the first line."""
    model = load_served_model(ModelSettings.model_validate(message["model"]))
    return Examiner(Transcriber(model), make_detectors(message["detectors"], DetectorOptions(message["rules"])))


def examine(examiner: Examiner, message: JsonMessage) -> JsonMessage:
    """Return the rules in effect, the error of newer ones, and the verdict if a prompt was submitted."""
    answer: JsonMessage = {}
    try:
        answer["rules"] = examiner.refresh()
    except RulesError as error:
        answer["complaint"] = str(error)
    if "ids" not in message:
        return answer
    try:
        verdict = examiner.examine(np.array(message["ids"], dtype=np.int32))
    except RulesError as error:
        return {**answer, "failure": str(error)}
    except Exception as error:  # noqa: BLE001  (detectors are third-party code; any exception means no verdict)
        # Its message may quote the text.
        return {**answer, "failure": f"a detector raised {type(error).__name__}"}
    return {**answer, "allowed": verdict.allowed_tokens, "rule": verdict.rule}


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """Number of leading tokens that may be public, and the rule that ended them, if one did."""

    allowed_tokens: int
    rule: str | None = None


class Examiner:
    """Gives verdicts. It raises if it cannot judge, and callers must then allow nothing."""

    def __init__(self, transcriber: Transcriber, detectors: Mapping[str, Detector]) -> None:
        """Use `detectors`, by name.

        Raises:
            RulesError: there are none, so nothing would ever be refused.
        """
        if not detectors:
            raise RulesError("no content detector is named")
        self._transcriber = transcriber
        self._detectors = detectors

    def refresh(self) -> str:
        """Let all detectors reload changed rules; return an identifier of the rules in effect.

        Raises:
            RulesError: a detector's rules are unusable.
        """
        return ",".join(f"{name}={detector.refresh()}" for name, detector in self._detectors.items())

    def examine(self, token_ids: TokenIds) -> CheckVerdict:
        """Return the verdict on a prompt, [tokens] int32.

        Raises:
            RulesError: the prompt has no text, which indicates a bug rather than a harmless prompt.
        """
        readable = self._transcriber.readable_tokens(token_ids)
        if not readable:
            if len(token_ids):
                return CheckVerdict(0, "unreadable")
            raise RulesError("there is nothing to examine")
        transcript = self._transcriber.transcribe(token_ids[:readable])
        text = transcript.text
        if not text:
            raise RulesError("the prompt has no text")
        verdict = CheckVerdict(readable, None if readable == len(token_ids) else "unreadable")
        for name, detector in self._detectors.items():
            for finding in detector.find(text):
                if not 0 <= finding.start < len(text):
                    raise RulesError(f"detector {name} found something at {finding.start} of {len(text)} characters")
                tokens = transcript.token_of(finding.start)
                if tokens < verdict.allowed_tokens:
                    verdict = CheckVerdict(tokens, finding.rule)
        return verdict


def make_detectors(names: Sequence[str], options: DetectorOptions) -> dict[str, Detector]:
    """Return the configured detectors: shipped ones, entry points, or `package.module:factory`.

    Raises:
        RulesError: a detector cannot be found or created.
    """
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    detectors: dict[str, Detector] = {}
    for name in names:
        path = SHIPPED.get(name) or installed.get(name) or name
        module, colon, attribute = path.partition(":")
        if not colon:
            known = ", ".join(sorted({*SHIPPED, *installed}))
            raise RulesError(f"no content detector {name!r}: there are {known}, or write package.module:factory")
        try:
            factory = getattr(importlib.import_module(module), attribute)
            detectors[name] = factory(options)
        except Exception as error:
            raise RulesError(f"content detector {name!r}: {type(error).__name__}: {error}") from error
    return detectors


if __name__ == "__main__":
    main()
