"""The console's libraries are the files that their table lists, with their licences."""

from __future__ import annotations

import hashlib
import re

from gateway.console.files import ROOT

VENDOR = ROOT / "vendor"
ROW = re.compile(r"^\| `([\w.-]+)` \| (\S+) (\d+\.\d+\.\d+), .*\| ([0-9a-f]{64}) \|$", re.MULTILINE)


def test_vendored_files_are_unchanged_and_listed() -> None:
    rows = ROW.findall((VENDOR / "README.md").read_text())
    listed = {name: digest for name, _, _, digest in rows}
    assert len(listed) == 10
    assert listed.keys() == {path.name for path in VENDOR.iterdir()} - {"README.md"}
    for name, digest in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name


def test_every_library_has_its_licence() -> None:
    names = {package for _, package, _, _ in ROW.findall((VENDOR / "README.md").read_text())}
    assert names == {"dompurify", "htm", "marked", "preact", "uplot"}
    for name in names:
        licence = (VENDOR / f"{name}.LICENSE.txt").read_text()
        assert "MIT" in licence or "Apache" in licence


def test_own_scripts_load_only_each_other_and_the_libraries() -> None:
    imports = re.compile(r"""^import .*?from "([^"]+)";|import\(""", re.MULTILINE | re.DOTALL)
    own = [path for path in ROOT.rglob("*.js") if not path.is_relative_to(VENDOR)]
    assert len(own) >= 10
    for path in own:
        for name in imports.findall(path.read_text()):
            assert name.startswith("."), (path, name)
            assert (path.parent / name).resolve().is_file(), (path, name)
