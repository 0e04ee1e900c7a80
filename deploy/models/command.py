"""`pando models`: lists, downloads, removes and inspects models."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from common.errors import ConfigurationError
from common.models import BUNDLED_MODELS, ModelFiles, pin, resolve_model
from common.models.bundled import find_bundled
from common.models.references import is_object_address, parse_hub_reference
from common.models.resolving import find_local, hub_reference, object_reference
from deploy.models.evidence import gather
from deploy.models.facts import facts_of
from deploy.models.progress import download_report, size

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from deploy.models.facts import ModelFacts

ABSENT = "unknown"
SHOWN_LABELS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `pando models`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    listing = actions.add_parser("list", help="print the bundled models and those in the cache")
    pull = actions.add_parser("pull", help="download a model into the cache")
    removal = actions.add_parser("remove", help="delete a model from the cache")
    inspection = actions.add_parser(
        "inspect", help="print a model's size, memory and context, and whether it is served; downloads no weights"
    )
    for action in (pull, removal, inspection):
        action.add_argument(
            "model",
            metavar="NAME",
            help="organisation/repository[@revision][:quantization], s3://bucket/prefix"
            + ("" if action is removal else ", a bundled model or a path"),
        )
    for action in (listing, inspection):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action; return the exit status."""
    match arguments.action:
        case "list":
            return _list(as_json=arguments.json)
        case "pull":
            return _pull(arguments.model)
        case "remove":
            return _remove(arguments.model)
        case _:
            return _inspect(arguments.model, as_json=arguments.json)


def _list(*, as_json: bool) -> int:
    from common.models.object_store import cached_prefixes
    from deploy.models.cache import cached_models

    rows: list[dict[str, Any]] = []
    for name in BUNDLED_MODELS:
        files = _installed(name)
        rows.append({"name": name, "source": "bundled", "bytes": _bytes_of(files.path) if files else None})
    for model in cached_models():
        described = {"revisions": list(model.revisions), "gguf_files": list(model.gguf_files)}
        rows.append({"name": model.repository, "source": "cache", "bytes": model.size, **described})
    rows += [{"name": address, "source": "cache", "bytes": count} for address, count in cached_prefixes().items()]
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    table = Table("name", "source", "size", "revisions", "GGUF files", box=None, pad_edge=False)
    for row in rows:
        shown = "not installed" if row["bytes"] is None else size(row["bytes"])
        table.add_row(
            row["name"], row["source"], shown, ", ".join(row.get("revisions", ())), ", ".join(row.get("gguf_files", ()))
        )
    Console(soft_wrap=True).print(table)
    return 0


def _pull(model: str) -> int:
    pinned = pin(model, download_report())
    sys.stdout.write(f"{resolve_model(pinned).path}\n")
    return 0


def _remove(model: str) -> int:
    if model in BUNDLED_MODELS:
        raise ConfigurationError(f"{model} is a Python package: remove it with pip")
    if is_object_address(model):
        from common.models import object_store

        sys.stdout.write(f"removed {model}, {size(object_store.remove(object_reference(model)))}\n")
        return 0
    named = parse_hub_reference(model)
    if (named is None or "/" not in named.repository) and find_local(model) is not None:
        raise ConfigurationError(f"{model} is a path, and not in the hub's cache")
    from deploy.models.cache import remove

    freed = remove(hub_reference(model))
    sys.stdout.write(f"removed {model}, {size(freed)}\n")
    return 0


def _inspect(model: str, *, as_json: bool) -> int:
    facts = facts_of(gather(model))
    if as_json:
        sys.stdout.write(json.dumps({"name": model, **asdict(facts), "service": facts.service.name.lower()}) + "\n")
        return 0
    for name, value in shown_facts(facts).items():
        sys.stdout.write(f"{name:<18}{value}\n")
    return 0


def shown_facts(facts: ModelFacts) -> dict[str, str]:
    """Return the lines that `pando models inspect` prints."""
    memory = ABSENT if facts.memory is None else ", ".join(f"{size(n)} at {kind}" for kind, n in facts.memory.items())
    kv = ABSENT
    if facts.kv_bytes_per_token:
        kv = f"{facts.kv_bytes_per_token:,} bytes per token (half with kv_dtype fp8)"
        if facts.kv_bytes_at_max_context:
            kv += f", {size(facts.kv_bytes_at_max_context)} for one sequence of full length"
    if facts.state_bytes:
        kv += f"; {size(facts.state_bytes)} for the recurrent states of one sequence"
    return {
        "family": facts.family + (f", weights quantised by {facts.quantization}" if facts.quantization else ""),
        "served": facts.service.value + (f": {facts.reason}" if facts.reason else ""),
        "tasks": ", ".join(facts.tasks) + (f" ({_shown_labels(facts)})" if facts.labels else "")
        if facts.tasks
        else "none",
        "parameters": ABSENT if facts.parameters is None else f"{facts.parameters / 1e9:.2f} billion",
        "files": size(facts.download_bytes),
        "weights in memory": memory,
        "keys and values": kv,
        "context": ABSENT if facts.max_context is None else f"{facts.max_context:,} tokens",
        "tokenizer": "yes" if facts.has_tokenizer else "no tokenizer.json",
        "chat template": "yes" if facts.has_chat_template else "no",
    }


def _shown_labels(facts: ModelFacts) -> str:
    few = ", ".join(facts.labels[:SHOWN_LABELS])
    return few if len(facts.labels) <= SHOWN_LABELS else f"{few}, … {len(facts.labels)} labels"


def _installed(name: str) -> ModelFiles | None:
    try:
        return find_bundled(name)
    except ConfigurationError:
        return None


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
