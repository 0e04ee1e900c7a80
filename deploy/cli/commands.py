"""The `pando` command, which dispatches to its subcommands."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from common.errors import ConfigurationError
from common.version import version

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommandModule(Protocol):
    """The interface of a subcommand's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's arguments to `parser`."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run with parsed arguments; return the exit status."""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. Its module is imported only when it runs, so that `pando --help` is fast."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("up", "deploy.supervisor.command", "start all services on this machine"),
    Command("chat", "deploy.cli.chat.command", "chat in the terminal"),
    Command("console", "deploy.cli.console", "open the web console of a deployment"),
    Command("batch", "deploy.cli.batch", "run files of requests as batches; list and cancel them"),
    Command("models", "deploy.models.command", "list, download, remove and inspect models"),
    Command("bench", "deploy.evaluation.bench.command", "measure any OpenAI-compatible server, or Pando's components"),
    Command(
        "attack", "deploy.evaluation.attack.command", "run the published attacks on shared caches against a server"
    ),
    Command("state", "deploy.cli.inspection.state", "show queues, rows and pages of the scheduler"),
    Command("profile", "deploy.cli.inspection.profile", "record traces of the workers' computations"),
    Command("keys", "deploy.cli.keys", "create, list and revoke API keys"),
    Command("audit", "deploy.cli.audit", "show and verify the audit log"),
    Command("adapters", "deploy.cli.inspection.adapters", "list, load, unload and pin adapters (LoRA)"),
    Command("weights", "deploy.cli.inspection.weights", "show the weights that serve; replace them"),
    Command("role", "deploy.cli.inspection.role", "show or change what a scheduler group does with prompts"),
    Command("sleep", "deploy.cli.inspection.sleep", "give back the memory of a model that is not needed now"),
    Command("wake", "deploy.cli.inspection.wake", "wake a model that was put to sleep"),
    Command("cache", "deploy.cli.inspection.cache", "inspect the prefix cache; pin, forget, flush"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `pando` command; return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="pando", description="Serve large language models to many users at once.")
    parser.add_argument("--version", action="version", version=f"pando {version()}")
    commands = "\n".join(f"  {command.name:<10}{command.help}" for command in COMMANDS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"commands (each has --help):\n{commands}"
    parser.add_argument("command", choices=[command.name for command in COMMANDS], metavar="command")
    # Only the first argument is parsed here: the flags of `up` are defined by the settings schema.
    chosen = parser.parse_args(arguments[:1]).command
    command = next(command for command in COMMANDS if command.name == chosen)
    try:
        return run_command(command, arguments[1:])
    except ConfigurationError as error:
        sys.stderr.write(f"pando {command.name}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def run_command(command: Command, argv: Sequence[str]) -> int:
    """Run one subcommand with the arguments after its name; return its exit status."""
    if command.name == "up":
        from deploy.supervisor import command as up

        return up.main(argv)
    module: CommandModule = importlib.import_module(command.module)
    parser = argparse.ArgumentParser(prog=f"pando {command.name}", description=command.help)
    module.add_arguments(parser)
    return module.run(parser.parse_args(list(argv)))
