"""Write what is derived from the settings' schema: `python -m deploy.checks.configuration [--check]`.

That is `docs/configuration.md`, and the part of the Helm chart's `values.schema.json` that checks `settings`.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from common.settings import Settings
from common.settings.reference import SettingsGroup, describe_settings

# JSON schemas are free-form.
Schema: TypeAlias = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "configuration.md"
CHART_SCHEMA = ROOT / "deploy" / "helm" / "pando" / "values.schema.json"
# The sections that values of the chart may set; it sets the others itself.
CHART_SECTIONS = ("model", "log", "metrics", "tracing", "gateway", "tokenizer", "scheduler", "worker", "detokenizer")
DEFINITIONS = "#/$defs/"
# Parts of a schema that do not check anything.
REMARKS = ("title", "description", "default", "format", "writeOnly")
COMMAND = "python -m deploy.checks.configuration"
HEAD = f"""# Configuration

<!-- Generated from `common/settings` by `{COMMAND}`; `make check` fails if it is outdated. -->

One schema configures all services. The sources are, in order of precedence: command-line flags, environment variables,
the TOML file that `--config` or `PANDO_CONFIG` names, the defaults below. An unknown name is an error in each of them;
the message suggests a similar setting.

```sh
pando up --scheduler.max_rows 128
PANDO_SCHEDULER__MAX_ROWS=128 pando up
pando up --config pando.toml         # [scheduler] ⏎ max_rows = 128
```

Sections may contain sections: `--scheduler.cache.mode isolated`, `PANDO_SCHEDULER__CACHE__MODE=isolated`, or `mode` in
the table `[scheduler.cache]`. A name that a version has changed is accepted until the next one, with a warning that
states the new name; giving a setting under both names is an error.

Lists and tables are JSON in flags and in the environment: `--gateway.allowed_hosts '["llm.example"]'`. Addresses may
also be separated by commas: `PANDO_TOKENIZER__SCHEDULERS=a:50052,b:50052`. The value `file:PATH` of a *secret string*
stands for the content of the file, in each source: `PANDO_SCHEDULER__ADMIN_TOKEN=file:/run/secrets/admin_token`. Only
the services that use the secret read the file, at their start.

Flags have the names of the settings: `--gateway.port 8000`. `pando up` accepts `--model`, `--host` and `--port` as
short forms of `model.reference`, `gateway.host` and `gateway.port`; it sets the addresses of the services that it
starts. A service that runs on its own (`python -m services.scheduler`) reads the same names, and uses its own section
and those that all share (`model`, `log`, `rpc`, `metrics`, `limits`). *Absent* means that the setting has no value;
the description states the effect.
"""


def main() -> int:
    """Write the page and the schema, or compare them with the settings; return the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is outdated")
    is_check = parser.parse_args().check
    outdated = 0
    for file, text in ((FILE, render(describe_settings())), (CHART_SCHEMA, render_chart_schema())):
        if not is_check:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"{file.name} does not match the settings: run `{COMMAND}`\n")
            outdated = 1
    return outdated


def render_chart_schema() -> str:
    """Return the schema of the chart's values, with `settings` as the services read them."""
    schema: Schema = json.loads(CHART_SCHEMA.read_text(encoding="utf-8"))
    whole = Settings.model_json_schema()
    own = {name: each for name, each in schema["$defs"].items() if not name.endswith("Settings")}
    sections = {name: _checked(whole["properties"][name]) for name in CHART_SECTIONS}
    pending = list(sections.values())
    classes: dict[str, Schema] = {}
    while pending:
        for name in _referenced(pending.pop()) - classes.keys():
            classes[name] = _checked(whole["$defs"][name])
            pending.append(classes[name])
    schema["properties"]["settings"] = {"type": "object", "additionalProperties": False, "properties": sections}
    schema["$defs"] = own | dict(sorted(classes.items()))
    return json.dumps(schema, indent=2) + "\n"


def _checked(schema: Schema) -> Schema:
    """Return the parts of a schema that check values. There is no null: a setting without a value is left out."""
    kept = {key: value for key, value in schema.items() if key not in REMARKS}
    if "anyOf" in kept:
        kinds = [_checked(kind) for kind in kept["anyOf"] if kind != {"type": "null"}]
        kept = {**kept, "anyOf": kinds} if len(kinds) > 1 else kinds[0]
    if "properties" in kept:
        kept["properties"] = {name: _checked(each) for name, each in kept["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = _checked(kept[key])
    return kept


def _referenced(schema: Any) -> set[str]:  # Any: every part of a schema
    """Return the names of the classes that a schema refers to."""
    if isinstance(schema, list):
        return set().union(*map(_referenced, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].removeprefix(DEFINITIONS)} if isinstance(schema.get("$ref"), str) else set()
    return own.union(*map(_referenced, schema.values()))


def render(groups: list[SettingsGroup]) -> str:
    """Return the page that describes `groups`."""
    parts = [HEAD]
    for section, members in groupby(groups, key=lambda group: group.section):
        parts.append(f"\n## {f'`{section}`' if section else 'Outside of sections'}\n")
        parts.extend(_table(group) for group in members)
    return "".join(parts)


def _table(group: SettingsGroup) -> str:
    lines = [
        f"| `{setting.name}` | {_cell(setting.kind)} | {_cell(setting.default)} | {_cell(setting.meaning)}"
        + (f" `{setting.variable}`" if setting.variable else "")
        + " |"
        for setting in group.settings
    ]
    meaning = ["", group.meaning] if group.section else []
    head = [*meaning, "", "| setting | type | default | meaning, environment variable |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
