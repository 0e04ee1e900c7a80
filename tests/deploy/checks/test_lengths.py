from __future__ import annotations

from pathlib import Path

from deploy.checks.lengths import too_long


def write(root: Path, name: str, lines: int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n" * lines)


def test_only_written_files_beyond_the_limit_are_reported_longest_first(tmp_path: Path) -> None:
    write(tmp_path, "common/short.py", 3)
    write(tmp_path, "common/long.py", 5)
    write(tmp_path, "services/longer.proto", 6)
    write(tmp_path, "protos/gen/generated_pb2.py", 99)
    write(tmp_path, "elsewhere/long.py", 99)
    assert too_long(tmp_path, limit=4) == [(Path("services/longer.proto"), 6), (Path("common/long.py"), 5)]
