"""The process that runs the detectors: one JSON object per line in, one out. It ends when its input ends.

Run as `python -m services.scheduler.content.child PARENT_PID`. The first line is its configuration; each further one
either submits a prompt (`ids`) or only lets it check its rules for changes. Neither text nor token ids are output.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

import numpy as np

from common.child_process import begin_child
from common.errors import ConfigurationError
from common.settings import ModelSettings
from common.tokenization import load_served_model
from services.scheduler.content.examiner import Examiner, make_detectors
from services.scheduler.content.interface import DetectorOptions, RulesError
from services.scheduler.content.text import Transcriber

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.child_process import JsonMessage

# Serving takes precedence over examining.
NICENESS = 10


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


if __name__ == "__main__":
    main()
