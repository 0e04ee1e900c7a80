"""`pando up`: runs all services on this machine."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.runtime import Interrupts
from common.settings import SettingsParser, parse_settings
from common.settings.reference import describe_settings
from common.types import GroupRole
from deploy.models.progress import download_report
from deploy.supervisor.console import ConsoleReporter, JsonReporter
from deploy.supervisor.layout import PlannedGroup, Replicas, lay_out
from deploy.supervisor.models import pin_models
from deploy.supervisor.process import Probes
from deploy.supervisor.room import check_room, find_host
from deploy.supervisor.supervisor import ServiceFailedError, Supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.settings import Settings
    from deploy.supervisor.layout import Layout

# Short flags, and the settings that they stand for.
SHORTCUTS = {
    "--model": "--model.reference",
    "--chat-template": "--model.chat_template",
    "--port": "--gateway.port",
    "--host": "--gateway.host",
}
SHARE_DEVICE = "--share-device"
EXPERT_PARALLEL = "--expert-parallel"
# Flags without a value, and the settings that they turn on.
_SWITCHES = {SHARE_DEVICE: "scheduler.device_turns.enabled", EXPERT_PARALLEL: "scheduler.expert_parallel"}
# The settings that `--help` shows; `--help-all` shows all.
COMMON_SETTINGS = (
    "model.reference",
    "model.dtype",
    "model.quantization",
    "model.max_context",
    "model.chat_template",
    "models",
    "gateway.host",
    "gateway.port",
    "gateway.keys_file",
    "limits.file",
    "gateway.tls.certificate",
    "gateway.tls.key",
    "scheduler.max_rows",
    "scheduler.max_step_tokens",
    "scheduler.memory_fraction",
    "scheduler.queue.policy",
    "scheduler.cache.mode",
    "scheduler.host_tier.gigabytes",
    "worker.device",
    "worker.threads",
    "log.level",
)
DESCRIPTION = (
    "Start gateway, tokenizer, scheduler, worker and detokenizer on this machine and keep them running. "
    + ", ".join(f"{short} stands for {full}" for short, full in SHORTCUTS.items())
    + ". Every setting may also be given in the environment (PANDO_SCHEDULER__MAX_ROWS=32) or in a file (--config)."
)
_ROLE = re.compile(r"(?P<role>\w+)(=(?P<count>[0-9]+)(x(?P<ranks>[1-9][0-9]*))?)?")
EXIT_FAILED = 1
EXIT_CONFIGURATION = 2


def main(argv: Sequence[str]) -> int:
    """Run `pando up` with the arguments after its name; return the process's exit status."""
    try:
        settings, arguments = read_arguments(argv)
        replicas = Replicas(arguments.tokenizers, arguments.detokenizers, arguments.roles, arguments.encoders)
        check_room(settings, arguments.tp, replicas, find_host())
        # A missing model is reported here, rather than in the log of the first service that reads it.
        settings = pin_models(settings, arguments.tp, download_report(as_json=settings.log.format == "json"))
        layout, directory = lay_out(settings, arguments.tp, arguments.run_directory, replicas)
    except ConfigurationError as error:
        sys.stderr.write(f"pando up: {error}\n")
        return EXIT_CONFIGURATION
    reporter = JsonReporter() if settings.log.format == "json" else ConsoleReporter([s.name for s in layout.services])
    return asyncio.run(_run(layout, directory, reporter))


def read_arguments(argv: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    """Return the settings and the supervisor's own arguments.

    Raises:
        ConfigurationError: a setting is unknown or invalid.
    """
    parser = UpParser(prog="pando up", description=DESCRIPTION, allow_abbrev=False, add_help=False)
    _add_own_arguments(parser)
    parser.add_argument("-h", "--help", action=_CommonHelp, help="show the most common settings")
    parser.add_argument("--help-all", action="help", help="show all settings")
    settings, arguments = parse_settings(parser, [_long_form(argument) for argument in argv])
    changes: dict[str, object] = {}
    if arguments.pp is not None:
        if arguments.pp < 1:
            raise ConfigurationError(f"--pp: a pipeline has at least 1 stage, not {arguments.pp}")
        changes["pipeline_parallel"] = arguments.pp
    if arguments.dp is not None:
        if arguments.dp < 1:
            raise ConfigurationError(f"--dp: experts are distributed over at least 1 group, not {arguments.dp}")
        changes["data_parallel"] = settings.scheduler.data_parallel.model_copy(update={"size": arguments.dp})
        if len(arguments.roles) == 1:
            arguments.roles *= arguments.dp
    return settings.model_copy(update={"scheduler": settings.scheduler.model_copy(update=changes)}), arguments


class UpParser(SettingsParser):
    """The parser of `pando up`, whose `--help` shows only the most common flags."""

    all_flags_option = "--help-all"


class _CommonHelp(argparse.Action):
    """Prints the most common arguments, and ends the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(common_help())
        parser.exit()


def common_help() -> str:
    """Return the help text with only the settings in `COMMON_SETTINGS`."""
    parser = argparse.ArgumentParser(
        prog="pando up",
        usage="pando up [--SECTION.SETTING VALUE …]",
        description=DESCRIPTION,
        epilog="--help-all shows all settings.",
        add_help=False,
    )
    _add_own_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    settings = {setting.name: setting for group in describe_settings() for setting in group.settings}
    for name in COMMON_SETTINGS:
        setting = settings[name]
        meaning = f"{setting.meaning} [{setting.kind}; {setting.default}]".replace("`", "").replace("%", "%%")
        parser.add_argument(f"--{name}", metavar="", help=meaning)
    return parser.format_help()


def _add_own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel worker processes (default 1)")
    parser.add_argument(
        "--pp",
        type=int,
        metavar="N",
        help="pipeline stages, each with --tp worker processes that hold some of the layers; sets "
        "scheduler.pipeline_parallel (default 1)",
    )
    parser.add_argument(
        "--dp",
        type=int,
        metavar="N",
        help="scheduler groups of a mixture that share its experts, each with one worker and with the attention and KV "
        "of its own requests; sets scheduler.data_parallel (default 1)",
    )
    for kind in ("tokenizers", "detokenizers"):
        text = f"{kind} of each model, which share its requests (default 1)"
        parser.add_argument(f"--{kind}", type=int, default=1, metavar="N", help=text)
    parser.add_argument(
        "--encoders",
        type=int,
        default=0,
        metavar="N",
        help="workers of each scheduler group that only encode images, so that its rows do not wait for it; sets "
        "scheduler.encoders (default 0)",
    )
    parser.add_argument(
        "--roles",
        type=read_roles,
        default=(PlannedGroup(),),
        metavar="ROLE=N,…",
        help="scheduler groups of each model, each with its own workers, by what they do: both=2, or "
        "prefill=1,decode=1, where the first one computes long prompts for the other; prefill=1x2,decode=2x1 gives the "
        "groups 2 tensor-parallel workers and 1 instead of --tp (default both=1)",
    )
    # Switches are replaced by settings before the arguments are parsed; here for the help text.
    parser.add_argument(
        EXPERT_PARALLEL,
        action="store_true",
        default=argparse.SUPPRESS,
        help="each of the --tp workers of a mixture holds some experts as a whole, instead of a part of every expert "
        "(scheduler.expert_parallel)",
    )
    parser.add_argument(
        SHARE_DEVICE,
        action="store_true",
        default=argparse.SUPPRESS,
        help="all models use one device in turns: one is awake, requests wake the others (scheduler.device_turns)",
    )
    parser.add_argument(
        "--run-directory", type=Path, metavar="DIR", help="directory for sockets and state, which are in DIR/<port>"
    )


def read_roles(text: str) -> tuple[PlannedGroup, ...]:
    """Return the scheduler groups of a text: `prefill=1,decode=2`, or with the ranks of each `prefill=1x2,decode=2x1`.

    Raises:
        argparse.ArgumentTypeError: the text is invalid.
    """
    groups: list[PlannedGroup] = []
    for part in text.split(","):
        found = _ROLE.fullmatch(part.strip())
        if found is None or found["role"] not in (role.value for role in GroupRole):
            names = ", ".join(role.value for role in GroupRole)
            raise argparse.ArgumentTypeError(f"{part!r} is not ROLE=NUMBER or ROLE=NUMBERxRANKS with a role of {names}")
        group = PlannedGroup(GroupRole(found["role"]), int(found["ranks"]) if found["ranks"] else None)
        groups += [group] * int(found["count"] or 1)
    return tuple(groups)


def _long_form(argument: str) -> str:
    if argument in _SWITCHES:
        return f"--{_SWITCHES[argument]}=true"
    name, equals, value = argument.partition("=")
    return SHORTCUTS.get(name, name) + equals + value


async def _run(layout: Layout, directory: Path, reporter: ConsoleReporter | JsonReporter) -> int:
    stopping = asyncio.Event()
    supervisor = Supervisor(layout, directory, reporter, Probes())
    loop = asyncio.get_running_loop()

    interrupts = Interrupts(loop.time)

    def stop(number: signal.Signals) -> None:
        if interrupts.mean_now(number):
            supervisor.abort()
        elif not stopping.is_set():
            reporter.end()
            reporter.note("stopping; interrupt twice to kill all services at once")
            stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    reporter.begin()
    try:
        await supervisor.run(stopping)
    except ServiceFailedError as error:
        reporter.failed(error)
        return EXIT_FAILED
    finally:
        reporter.end()
    reporter.note("stopped")
    return 0
