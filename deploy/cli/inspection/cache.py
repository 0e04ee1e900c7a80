"""`pando cache`: inspects the prefix cache's tree, figures and changes; pins, forgets and flushes entries."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.inspection.cache_changes import flush, forget, pin, unpin
from deploy.cli.inspection.cache_figures import show_stats
from deploy.cli.inspection.cache_tree import show_tree, watch
from deploy.cli.inspection.connection import add_connection_arguments, with_scheduler
from deploy.cli.inspection.identities import Filter, parse_subject
from deploy.cli.inspection.prompts import Prompt
from deploy.cli.inspection.replay import add_replay_arguments, run_replay

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from deploy.cli.inspection.connection import Connection

SHOWN_NODES = 200
SHOWN_OWNERS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `pando cache`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    add_replay_arguments(actions.add_parser("replay", help="replay a decision log and show the first difference"))
    tree = actions.add_parser("tree", help="print the cache's nodes")
    tree.add_argument("--max-nodes", type=int, default=SHOWN_NODES, help=f"0: all (default {SHOWN_NODES})")
    tree.add_argument("--token-ids", action="store_true", help="also print token ids; needs the admin token")
    changes = actions.add_parser("watch", help="print every change until Ctrl-C")
    for action in (tree, changes):
        seen = action.add_mutually_exclusive_group()
        seen.add_argument(
            "--view",
            metavar="TENANT/SUBJECT",
            help="only the view of this subject, e.g. acme/user/ann; needs the admin token",
        )
        seen.add_argument("--salt", default="", help="with --view: the salt of the view")
        seen.add_argument("--fingerprint", metavar="HEX", help="only the view with this fingerprint")
    stats = actions.add_parser("stats", help="pages, owners, hits and events in numbers")
    stats.add_argument(
        "--owners", type=int, default=SHOWN_OWNERS, help=f"owners to list, most pages first (default {SHOWN_OWNERS})"
    )
    gone = actions.add_parser("forget", help="drop all private entries of a user; needs the admin token")
    gone.add_argument("subject", metavar="TENANT/SUBJECT", help="e.g. acme/user/ann, acme/key/KEYID, default/local")
    gone.add_argument("--session", metavar="ID", help="only entries that belong to this conversation and no other")
    pinned = actions.add_parser("pin", help="declare a prompt public; needs the admin token")
    unpinned = actions.add_parser("unpin", help="undo a pin; needs the admin token")
    for action in (pinned, unpinned):
        prompt = action.add_mutually_exclusive_group(required=True)
        prompt.add_argument("--system", metavar="TEXT", help="a system prompt, rendered with the model's chat template")
        prompt.add_argument("--system-file", metavar="FILE", type=Path, help="the same from a file")
        prompt.add_argument("--text", metavar="TEXT", help="the beginning of plain prompts")
        prompt.add_argument("--text-file", metavar="FILE", type=Path, help="the same from a file")
        action.add_argument("--tokenizer", metavar="ADDRESS", help="gRPC address; default: this machine's deployment")
    flushed = actions.add_parser("flush", help="drop all entries that no running request needs")
    for action in (tree, changes, stats, gone, pinned, unpinned, flushed):
        add_connection_arguments(action)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action; return the exit status."""
    if arguments.action == "replay":
        return run_replay(arguments)
    return with_scheduler(arguments, _chosen(arguments))


def _chosen(arguments: argparse.Namespace) -> Callable[[Connection], None]:
    match arguments.action:
        case "tree":
            shown = Filter.of(arguments)
            return partial(show_tree, shown=shown, max_nodes=arguments.max_nodes, with_ids=arguments.token_ids)
        case "watch":
            return partial(watch, shown=Filter.of(arguments))
        case "stats":
            return partial(show_stats, max_owners=arguments.owners)
        case "forget":
            return partial(forget, subject=parse_subject(arguments.subject), session=arguments.session)
        case "pin":
            return partial(pin, prompt=Prompt.of(arguments))
        case "unpin":
            return partial(unpin, prompt=Prompt.of(arguments))
        case _:
            return flush
