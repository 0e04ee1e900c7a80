"""What documents, docstrings and comments of contracts name is there: files, commands, settings."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shlex
import sys
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

from common.settings import PREFIX, check_environment
from common.settings.reference import describe_settings
from deploy.cli import COMMANDS
from deploy.supervisor.command import read_arguments

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("common", "deploy", "docs", "gateway", "protos", "services", "tests")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))),
]
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if "gen" not in path.parts]
CONTRACTS = sorted((ROOT / "protos" / "pando").rglob("*.proto"))
# Full names of settings and of their sections.
SETTINGS = {
    name
    for group in describe_settings()
    for setting in group.settings
    for name in accumulate(setting.name.split("."), "{}.{}".format)
}
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name} - {"models"}
EXPERIMENTS = "deploy.evaluation.experiments"
# vLLM reads its arguments.
FOREIGN_ARGUMENTS = {f"{EXPERIMENTS}.peers.vllm_token_source"}
# Files of other projects, and keys of other formats.
FOREIGN = {"serving_chat.py", "renderers/", "docs/gguf.md", "tokenizer.ggml.pre"}
SUFFIXES = {"json", "proto", "py", "sock", "yaml"}
# What a name may begin with that is not said from its README's folder or the top.
BELOW_THE_TOP = ("tests", "services", "services/scheduler", "services/worker")
# Where the files of whoever wrote a document would be; examples have /etc, /path/to, /tmp and /var.
ELSEWHERE = re.compile(r"(?<![\w.:/-])/(?:home|mnt|opt/(?!pando)|root|srv|Users|work(?:space)?)/[\w./-]*")
PAGE = re.compile(r"[\w./-]+\.md\b")
OURS = re.compile(r"[\w.{},/-]+(?:\.(?:py|sh|proto|md|cpp|txt|Dockerfile)|/)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
every_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda path: path.stem)


def code_spans(text: str) -> list[str]:
    """Return what stands between single backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def command_lines(text: str) -> list[str]:
    """Return the lines of code blocks, fenced or indented, without comments; continued lines as one."""
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (?! )(.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    lines = "\n".join([*fenced, *indented]).splitlines()
    return [re.sub(r"\s#\s.*$", "", line).strip() for line in lines if not line.startswith("#")]


def commands(text: str, program: str) -> list[list[str]]:
    """Return the arguments of each call of `program` on a line of its own."""
    calls = (shlex.split(line) for line in command_lines(text) if re.match(rf"(\S+=\S+ )*(\S*/)?{program}\s", line))
    return [call[next(i for i, word in enumerate(call) if Path(word).name == program) + 1 :] for call in calls]


def calls_of_experiments(text: str) -> list[tuple[str, list[str]]]:
    """Return module and arguments of each call of an experiment, in blocks and in code spans."""
    places = [*command_lines(text), *code_spans(text)]
    calls = [re.search(rf"python -m ({re.escape(EXPERIMENTS)}[\w.]*)(.*)", place) for place in places]
    # A process id that the shell would insert.
    return [(call[1], shlex.split(re.sub(r"\$\([^)]*\)", "1", call[2]))) for call in calls if call]


def settings_in(text: str) -> list[str]:
    """Return the names of settings, with all their sections, in flags and in code spans."""
    flags = re.findall(r"--(\w+(?:\.\w+)+)", text)
    # Names with capitals are values of the chart.
    spans = [name for span in code_spans(text) for name in re.findall(r"^([a-z]\w*(?:\.[a-z0-9_]+)+)(?: \S+)?$", span)]
    return [
        *flags,
        *(name for name in spans if name.partition(".")[0] in SECTIONS and name.rpartition(".")[2] not in SUFFIXES),
    ]


@cache
def imports(module: str) -> frozenset[str]:
    """Return what a module of ours imports when it is loaded, with the names that it takes from there."""
    path = ROOT / module.replace(".", "/")
    file = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    nodes = ast.parse(file.read_text()).body if file else []
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {f"{node.module}.{name.name}" for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
    return frozenset(plain | named)


def loads_torch(module: str) -> bool:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        # Loading a.b.c loads a and a.b, too.
        new = set(accumulate(waiting.pop().split("."), "{}.{}".format)) - found
        found |= new
        waiting += [name for each in new for name in imports(each)]
    return "torch" in found


def exists(name: str, document: Path) -> bool:
    """Tell whether a file or folder is there.

    Names are said from a folder that holds the document, up to the top, or somewhere below its folder or service.
    """
    above = [folder for folder in document.parents if folder.is_relative_to(ROOT)]
    places = [*above, *(ROOT / place for place in BELOW_THE_TOP)]
    below = [document.parent, ROOT.joinpath(*document.relative_to(ROOT).parts[:2])]
    return any((place / name).exists() for place in places) or any(
        any(place.rglob(name.rstrip("/"))) for place in below if place.is_dir()
    )


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub derives them; repeated ones are numbered."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in shown]
    return {name if (i := names[:n].count(name)) == 0 else f"{name}-{i}" for n, name in enumerate(names)}


def is_within(target: Path) -> bool:
    return target.resolve().is_relative_to(ROOT)


def docstrings(path: Path) -> list[str]:
    """Return the strings of a module that stand alone: docstrings, also those of attributes."""
    nodes = ast.walk(ast.parse(path.read_text()))
    values = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return [value.value for value in values if isinstance(value.value, str)]


def comments(path: Path) -> str:
    """Return a contract's comments; what one says over several lines is one text."""
    return " ".join(re.findall(r"//\s?(.*)$", path.read_text(), flags=re.MULTILINE))


def missing(text: str, place: Path) -> list[str]:
    """Return the files of ours that `text`, which stands in the file `place`, names and that are not there."""
    named = {span for span in re.findall(r"`([^`\n]+)`", text) if OURS.fullmatch(span) and not span.startswith("/")}
    return sorted(name for name in named | set(PAGE.findall(text)) if name not in FOREIGN and not exists(name, place))


def is_module(path: Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_there_are_documents_with_commands() -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    assert len(DOCUMENTS) > 30
    assert {path.stem for path in DOCUMENTS} >= {"README", "architecture", "privacy", "operations", "CONTRIBUTING"}
    assert sum(len(commands(text, "pando")) for text in texts) > 30
    assert sum(len(OURS.findall(" ".join(code_spans(text)))) for text in texts) > 100


@every_document
def test_links_point_to_existing_files(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@every_document
def test_links_lead_to_headings_that_exist(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", document.read_text())
    places = [(document.parent / path if path else document, anchor) for path, anchor in links]
    assert [(place.name, anchor) for place, anchor in places if anchor not in anchors(place.read_text())] == []


def test_headings_that_are_not_there_would_be_found() -> None:
    text = "# The `run` directory, [again](x.md#y)\n```sh\n# not one\n```\n## On\n## On\n"
    assert anchors(text) == {"the-run-directory-again", "on", "on-1"}


@every_document
def test_nothing_outside_of_the_repository_is_named(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    upwards = [span for span in code_spans(text) if span.startswith("../")]
    assert [name for name in (*links, *upwards) if not is_within(document.parent / name)] == []
    assert ELSEWHERE.findall(text) == []


def test_paths_outside_of_the_repository_would_be_found() -> None:
    assert ELSEWHERE.findall("see /home/ann/notes.md and `/mnt/plan`") == ["/home/ann/notes.md", "/mnt/plan"]
    assert ELSEWHERE.findall("https://example.com/mnt/x, /etc/pando/tls, path/to/mnt/x, /opt/pando/bin") == []
    assert not is_within(ROOT / "docs" / ".." / ".." / "shared")


@every_document
def test_files_that_are_named_exist(document: Path) -> None:
    # What a link shows may be shorter than where it leads.
    text = re.sub(r"\[`[^`\n]+`\]\([^)]+\)", "", document.read_text())
    named = [span for span in code_spans(text) if OURS.fullmatch(span) and not span.startswith("/")]
    assert [name for name in named if name not in FOREIGN and not exists(name, document)] == []


def test_files_that_docstrings_name_exist() -> None:
    found = {path: docstrings(path) for path in MODULES}
    assert sum(len(texts) for texts in found.values()) > 2000
    assert sum(len(OURS.findall(" ".join(texts))) for texts in found.values()) > 20
    wrong = {
        path.relative_to(ROOT): names for path, texts in found.items() if (names := missing("\n".join(texts), path))
    }
    assert wrong == {}
    assert [
        path for path, texts in found.items() if ELSEWHERE.search("\n".join(texts)) and path != Path(__file__)
    ] == []


@every_contract
def test_files_that_comments_of_contracts_name_exist(contract: Path) -> None:
    text = comments(contract)
    assert len(text) > 100
    assert missing(text, contract) == []
    assert ELSEWHERE.findall(text) == []


def test_files_that_are_not_there_would_be_found() -> None:
    assert missing(
        "see `cache/radixx.py` and plan.md, not `cache/radix.py`", ROOT / "services" / "scheduler" / "x"
    ) == [
        "cache/radixx.py",
        "plan.md",
    ]


@every_document
def test_tests_that_are_named_exist(document: Path) -> None:
    calls = re.findall(r"-m pytest ((?:(?![`#]).)*)", document.read_text().replace("\\\n", " "))
    named = [word.partition("::")[0] for call in calls for word in call.split() if word.startswith("tests")]
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.stem != "CHANGELOG"], ids=relative)
def test_settings_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    assert [name for name in settings_in(text) if name not in SETTINGS | FOREIGN] == []
    check_environment(dict.fromkeys(re.findall(rf"\b{PREFIX}\w+__\w+", text), ""))


def test_wrong_settings_would_be_found() -> None:
    found = settings_in("`gateway.tls.key`, `gateway.tls.keys` and `pando up --scheduler.queue.rule fair`")
    assert found == ["scheduler.queue.rule", "gateway.tls.key", "gateway.tls.keys"]
    assert [name for name in found if name in SETTINGS] == ["gateway.tls.key"]


@every_document
def test_modules_that_are_run_exist(document: Path) -> None:
    modules = re.findall(rf"python -m ((?:{'|'.join(FOLDERS)})[\w.]*)", document.read_text())
    paths = [ROOT / module.replace(".", "/") for module in modules]
    assert [
        path for path in paths if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ] == []


@every_document
def test_targets_of_make_exist(document: Path) -> None:
    text = document.read_text()
    calls = [call[0] for call in commands(text, "make")] + re.findall(r"`make ([\w-]+)", text)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert [target for target in calls if target not in targets] == []


@every_document
def test_commands_that_are_mentioned_exist(document: Path) -> None:
    mentioned = set(re.findall(r"`pando ([a-z]\w*)", document.read_text()))
    assert mentioned <= {command.name for command in COMMANDS}


def test_documents_have_commands_to_check() -> None:
    assert sum(len(commands(document.read_text(), "pando")) for document in DOCUMENTS) >= 20


@every_document
def test_commands_are_understood(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pando.toml").touch()  # readers have one
    for name, *arguments in commands(document.read_text(), "pando"):
        assert understand(name, arguments) == 0, f"pando {name} {shlex.join(arguments)}"


def test_documents_have_calls_of_experiments_to_check() -> None:
    modules = {module for document in DOCUMENTS for module, _ in calls_of_experiments(document.read_text())}
    assert len(modules) > 15
    assert len([module for module in modules if not loads_torch(module)]) >= 8


@every_document
def test_arguments_of_experiments_are_understood(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks those that can be loaded without torch."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> None:
        parse(parser, arguments)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    for module, arguments in calls_of_experiments(document.read_text()):
        if module not in FOREIGN_ARGUMENTS and not loads_torch(module):
            main = importlib.import_module(module).main
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            with pytest.raises(SystemExit) as end:
                main(*[arguments][: len(inspect.signature(main).parameters)])
            assert end.value.code == 0, f"{module} {shlex.join(arguments)}"


def understand(name: str, arguments: list[str]) -> int:
    """Parse arguments as `pando` does, and go no further; return the exit status."""
    try:
        if name == "up":
            read_arguments(arguments)
        else:
            (command,) = (command for command in COMMANDS if command.name == name)
            parser = argparse.ArgumentParser(prog=f"pando {name}")
            importlib.import_module(command.module).add_arguments(parser)
            parser.parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0
