"""Generate the Python stubs of `pando.v1` into `protos/gen`.

Run by `make protos`. With `--check`, nothing is written and the exit status is 1 if the committed stubs are outdated.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
GENERATED = PROTOS / "gen"


def main() -> int:
    """Write the stubs, or compare them with `--check`; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only report drift")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "gen"
        generate(fresh)
        if arguments.check:
            drifted = differences(fresh, GENERATED)
            for name in drifted:
                sys.stderr.write(f"protos/gen/{name} has drifted: run `make protos`\n")
            return 1 if drifted else 0
        shutil.rmtree(GENERATED, ignore_errors=True)
        shutil.copytree(fresh, GENERATED)
    return 0


def generate(target: Path) -> None:
    """Write the stubs of all contracts into `target`, importable as `protos.gen.pando.v1`."""
    target.mkdir(parents=True)
    sources = sorted(str(path) for path in (PROTOS / "pando").rglob("*.proto"))
    options = [f"--{plugin}={target}" for plugin in ("python_out", "mypy_out", "grpc_python_out", "mypy_grpc_out")]
    if protoc.main(["protoc", f"-I{PROTOS}", *options, *sources]):
        raise SystemExit("protoc failed")
    for path in target.rglob("*.py*"):
        # protoc derives import paths from proto packages; ours start with `protos.gen`.
        path.write_text(re.sub(r"(?m)^from pando\.v1 import|'pando\.v1\.\w+_pb2'", _rooted, path.read_text()))
    for folder in (target, target / "pando", target / "pando" / "v1"):
        (folder / "__init__.py").touch()


def _rooted(match: re.Match[str]) -> str:
    return match.group(0).replace("pando.v1", "protos.gen.pando.v1")


def differences(fresh: Path, committed: Path) -> list[str]:
    """Return the relative names of files that differ between two generated trees or exist in only one."""
    names = {
        str(path.relative_to(root))
        for root in (fresh, committed)
        for path in root.rglob("*.py*")
        if "__pycache__" not in path.parts
    }
    return sorted(name for name in names if _content(fresh / name) != _content(committed / name))


def _content(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
