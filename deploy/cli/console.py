"""`pando console`: opens the web console of the deployment that runs on this machine."""

from __future__ import annotations

import sys
import webbrowser
from typing import TYPE_CHECKING

from deploy.supervisor.state import find_state

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando console`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a gateway; default: this machine's deployment")
    where.add_argument("--port", type=int, help="HTTP port of the deployment, if several run here")
    parser.add_argument("--print", action="store_true", help="print the address instead of opening a browser")


def run(arguments: argparse.Namespace) -> int:
    """Open the console, or print its address where there is no browser; return the exit status."""
    base = arguments.url or find_state(port=arguments.port).url
    address = f"{base.rstrip('/').removesuffix('/v1')}/console"
    if arguments.print or not webbrowser.open(address):
        sys.stdout.write(f"{address}\n")
    return 0
