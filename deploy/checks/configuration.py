"""Write `docs/configuration.md` from the settings' schema: `python -m deploy.checks.configuration [--check]`."""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

from common.settings.reference import SettingsGroup, describe_settings

FILE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
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
    """Write the page, or compare it with the schema; return the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is outdated")
    page = render(describe_settings())
    if not parser.parse_args().check:
        FILE.write_text(page, encoding="utf-8")
    elif not FILE.is_file() or FILE.read_text(encoding="utf-8") != page:
        sys.stderr.write(f"{FILE.name} does not match the settings: run `{COMMAND}`\n")
        return 1
    return 0


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
