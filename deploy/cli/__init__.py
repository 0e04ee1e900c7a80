"""The command line: `pando` and its subcommands."""

from deploy.cli.commands import COMMANDS, main

__all__ = ["COMMANDS", "main"]
