"""Prints the requirements of extras, one per line: `requirements.py gateway tokenizer >requirements.txt`.

Images install them in a separate step, so that a change of the sources does not rebuild the layer with the
dependencies. This script only needs Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# pando[gateway,worker] in an extra stands for these extras.
OWN = re.compile(r"pando\[([\w,-]+)\]")


def main() -> int:
    """Print the requirements of the extras that the arguments name, and those of the project itself."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    try:
        lines = requirements_of(project["dependencies"], project["optional-dependencies"], sys.argv[1:])
    except KeyError as error:
        sys.stderr.write(f"there is no extra {error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def requirements_of(dependencies: list[str], extras: dict[str, list[str]], names: list[str]) -> list[str]:
    """Return `dependencies` and the requirements of the extras `names`, each once.

    Raises:
        KeyError: an extra does not exist.
    """
    found = dict.fromkeys(dependencies)
    for name in names:
        for line in extras[name]:
            own = OWN.fullmatch(line)
            found |= dict.fromkeys(requirements_of([], extras, own.group(1).split(",")) if own else [line])
    return list(found)


if __name__ == "__main__":
    sys.exit(main())
