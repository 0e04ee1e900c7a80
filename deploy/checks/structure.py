"""Measures the structure of a checkout: `python -m deploy.checks.structure [ROOT] [--json FILE]`; `--check` for CI.

Figures: files and their lengths, import circles (at run time, and with type-only imports), files that only one other
file imports, settings, lines of wire converters, and the frequency of the words in `DIALECT`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "deploy", "gateway", "services")
PROSE = ("common", "deploy", "docs", "gateway", "protos/pando", "services", "README.md")
GENERATED = "protos/gen"
# Words to avoid, for which the field or plain English has others; docs/glossary.md defines the project's own terms.
DIALECT = re.compile(
    r"\b(rings?|twins?|vigilance|ladders?|lagged|nobody|whoever|anew|tells?|told|behind|liking|newcomers?)\b|"
    r'"""(?:Return )?(?:What|Who|Whose)\b',
    re.IGNORECASE,
)
CONVERTER = re.compile(r"(^|/)(wire|convert\w*)(/|\.py$)")
COUNT_SETTINGS = (
    "from common.settings import Settings\n"
    "def count(model):\n"
    "    fields = [getattr(field.annotation, 'model_fields', None) and field.annotation"
    " for field in model.model_fields.values()]\n"
    "    return sum(count(field) if field else 1 for field in fields)\n"
    "print(count(Settings))"
)


@dataclass(frozen=True, slots=True)
class Structure:
    """Figures of one checkout, lengths in lines. `circular_files` are in import circles, type-only ones included."""

    files: int
    lines: int
    median_lines: float
    largest_file: str
    largest_lines: int
    runtime_circles: int
    circles: int
    circular_files: int
    imported_once: int
    settings: int
    converter_lines: int
    dialect_per_thousand_lines: float


def measure(root: Path) -> Structure:
    """Return the figures of the checkout at `root`, without tests and generated code."""
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in python_files(root)}
    lengths = {name: len(text.splitlines()) for name, text in sources.items()}
    largest = max(lengths, key=lambda name: lengths[name])
    everything = imports_of(sources, with_types=True)
    circles = circles_of(everything)
    return Structure(
        files=len(sources),
        lines=sum(lengths.values()),
        median_lines=statistics.median(lengths.values()),
        largest_file=largest,
        largest_lines=lengths[largest],
        runtime_circles=len(circles_of(imports_of(sources, with_types=False))),
        circles=len(circles),
        circular_files=sum(map(len, circles)),
        imported_once=imported_once(everything),
        settings=count_settings(root),
        converter_lines=sum(lines for name, lines in lengths.items() if CONVERTER.search(name)),
        dialect_per_thousand_lines=round(dialect(root), 2),
    )


def python_files(root: Path) -> Iterator[Path]:
    """Yield the source files of `PACKAGES`."""
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def imports_of(sources: Mapping[str, str], *, with_types: bool) -> dict[str, set[str]]:
    """Return the files among `sources` that each file imports; `with_types` includes type-only imports."""
    by_module = {module_name(name): name for name in sources}
    return {
        name: {
            by_module[module]
            for module in imported_modules(ast.parse(text), by_module, with_types=with_types)
            if by_module[module] != name
        }
        for name, text in sources.items()
    }


def module_name(file: str) -> str:
    """Return the dotted name of a source file."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(tree: ast.AST, known: Iterable[str], *, with_types: bool) -> Iterator[str]:
    """Yield the modules among `known` that a file imports."""
    names = set(known)
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and not with_types and ast.unparse(node.test) == "TYPE_CHECKING":
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in names or node.module in names:
                    yield full if full in names else node.module
        stack.extend(ast.iter_child_nodes(node))


def circles_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one file (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for following in sorted(graph[node]):
            if following not in order:
                visit(following)
                lowest[node] = min(lowest[node], lowest[following])
            elif following in path:
                lowest[node] = min(lowest[node], order[following])
        if lowest[node] == order[node]:
            component = path[path.index(node) :]
            del path[path.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def imported_once(graph: Mapping[str, set[str]]) -> int:
    """Return the number of files that exactly one other file imports, if it is in the same folder."""
    importers: defaultdict[str, list[str]] = defaultdict(list)
    for name, imported in graph.items():
        for each in imported:
            importers[each].append(name)
    return sum(len(by) == 1 and Path(by[0]).parent == Path(name).parent for name, by in importers.items())


def count_settings(root: Path) -> int:
    """Return the number of settings in the checkout's schema."""
    command = [sys.executable, "-c", COUNT_SETTINGS]
    environment = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def dialect(root: Path) -> float:
    """Return occurrences of `DIALECT` in code, contracts and documents, per thousand lines."""
    words = lines = 0
    for place in PROSE:
        top = root / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in {".py", ".proto", ".md"} and path.resolve() != Path(__file__).resolve():
                text = path.read_text()
                words += len(DIALECT.findall(text))
                lines += len(text.splitlines())
    return 1000 * words / max(lines, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; with `--check`, fail on import circles, those of type-only imports included."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the checkout (this one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--circles", action="store_true", help="also list the files of each import circle")
    parser.add_argument("--check", action="store_true", help="fail if there is an import circle")
    options = parser.parse_args(argv)
    root = options.root.resolve()
    figures = measure(root)
    sys.stdout.writelines(f"{name.replace('_', ' '):28} {value}\n" for name, value in asdict(figures).items())
    if options.json:
        options.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in python_files(root)}
    if options.circles:
        sys.stdout.writelines(
            f"circle: {', '.join(circle)}\n" for circle in circles_of(imports_of(sources, with_types=True))
        )
    return 1 if options.check and figures.circles else 0


if __name__ == "__main__":
    sys.exit(main())
