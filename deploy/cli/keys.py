"""`pando keys`: creates, lists and revokes API keys."""

from __future__ import annotations

import secrets
import sys
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from common.errors import ConfigurationError, InvalidRequestError
from common.names import check_name
from common.types import CacheMode
from gateway.identity.keys import ApiKey, hash_of, load_keys, new_secret, save_keys

if TYPE_CHECKING:
    import argparse

ID_BYTES = 4


# Columns of a table that is not shown on a terminal.
WIDTH = 240


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `pando keys`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    create = actions.add_parser("create", help="create a key and print it; it is not shown again")
    create.add_argument("--tenant", required=True, help="the organisation that the key belongs to")
    create.add_argument("--user", help="the person that the key identifies; absent: an application")
    create.add_argument(
        "--vouches-for-users", action="store_true", help="users named in its requests count as separate people"
    )
    create.add_argument("--admin", action="store_true", help="the key may also use administrative endpoints")
    modes = [mode.value for mode in CacheMode]
    create.add_argument("--cache", choices=modes, default="default", help="the most that its requests may cache")
    create.add_argument("--max-priority", type=int, metavar="N", help="the highest priority that its requests may set")
    shown = actions.add_parser("list", help="print all keys, without their secrets")
    revoke = actions.add_parser("revoke", help="make a key invalid, within a second")
    revoke.add_argument("id", help="the key's id, as printed by `list`; the key begins with it")
    for action in (create, shown, revoke):
        action.add_argument("--file", type=Path, required=True, help="the keys file (gateway.keys_file)")


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action; return the exit status."""
    match arguments.action:
        case "create":
            return _create(arguments)
        case "list":
            return _list(arguments.file)
        case _:
            return _revoke(arguments.file, arguments.id)


def _create(arguments: argparse.Namespace) -> int:
    keys = _existing(arguments.file)
    key_id = secrets.token_hex(ID_BYTES)
    secret = new_secret(key_id)
    try:
        key = ApiKey(
            id=key_id,
            sha256=hash_of(secret),
            tenant=check_name("tenant", arguments.tenant),
            user=check_name("user", arguments.user) if arguments.user else None,
            vouches_for_users=arguments.vouches_for_users,
            admin=arguments.admin,
            cache=CacheMode(arguments.cache),
            created=datetime.now(UTC).date().isoformat(),
            max_priority=arguments.max_priority,
        )
    except InvalidRequestError as error:
        raise ConfigurationError(error.message) from error
    save_keys(arguments.file, [*keys, key])
    sys.stderr.write(f"key {key_id}; save it now, as only its hash is stored:\n")
    sys.stdout.write(f"{secret}\n")
    return 0


def _list(file: Path) -> int:
    names = [field.name for field in fields(ApiKey) if field.name != "sha256"]
    table = Table(*names)
    for key in load_keys(file, may_be_empty=True):
        table.add_row(*(_shown(getattr(key, name)) for name in names))
    # In a pipe, nothing is cut.
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    return 0


def _revoke(file: Path, key_id: str) -> int:
    keys = load_keys(file, may_be_empty=True)
    left = [key for key in keys if key.id != key_id]
    if len(left) == len(keys):
        raise ConfigurationError(f"{file} has no key {key_id}")
    save_keys(file, left)
    sys.stderr.write(f"key {key_id} is revoked\n")
    return 0


def _existing(file: Path) -> list[ApiKey]:
    return load_keys(file, may_be_empty=True) if file.exists() else []


def _shown(value: object) -> str:
    match value:
        case None | False:
            return ""
        case True:
            return "yes"
        case CacheMode():
            return value.value
        case _:
            return str(value)
