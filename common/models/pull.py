"""Downloads a model for the services of a deployment: `python -m common.models.pull org/name`.

A container runs this once before the services start, which then find the model in the cache that they share
(HF_HOME) and need no network (HF_HUB_OFFLINE=1).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.logs import configure_logging, get_logger
from common.models.resolving import resolve_model
from common.settings import LogSettings

if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> int:
    """Download what the arguments name; return the exit status."""
    arguments = parse(sys.argv[1:])
    configure_logging("pull", LogSettings(format="json"))
    try:
        files = resolve_model(arguments.model, weights=not arguments.no_weights)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    get_logger("models").info("model.ready", model=arguments.model, path=str(files.path))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m common.models.pull", description=__doc__)
    parser.add_argument("model", metavar="NAME", help="a model's reference; a bundled name or a path needs no download")
    parser.add_argument("--no-weights", action="store_true", help="only configuration and tokenizer")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
