from __future__ import annotations

import contextlib
import json
import sqlite3
import stat
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from common.errors import ConfigurationError
from services.scheduler.cache.types import PUBLIC_SCOPE
from services.scheduler.storage_desk import Keyring

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAIN = [b"c" * 32]
ANN, BOB = ("t", "ann"), ("t", "bob")
CONNECT = sqlite3.connect


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keyring.db"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a statement wait for another process's lock for as short a time as matters to no test."""
    monkeypatch.setattr("services.scheduler.storage_desk._LOCK_TIMEOUT_S", 0.01)


def seeds_in(path: Path) -> list[bytes]:
    with sqlite3.connect(path) as database:
        return [bytes(seed) for (seed,) in database.execute("SELECT seed FROM seeds")]


def test_seeds_are_made_once_and_kept_from_others(path: Path) -> None:
    keys = Keyring(path).keys(ANN, CHAIN)
    assert Keyring(path).keys(ANN, CHAIN) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in path.parent.iterdir())


def writes_to(path: Path) -> int:
    """Return the number of transactions that have written to the file, which SQLite counts in its header."""
    return int.from_bytes(path.read_bytes()[24:28])


def test_seeds_of_many_new_subjects_are_written_together(path: Path) -> None:
    keyring = Keyring(path)
    subjects = [("t", f"user {number}") for number in range(20)]
    old = keyring.keys(subjects[0], CHAIN)
    before = writes_to(path)
    with keyring.together():
        keys = [keyring.keys(subject, CHAIN) for subject in subjects]
        assert writes_to(path) == before
    assert writes_to(path) == before + 1
    assert keys[0] == old
    assert [Keyring(path).keys(subject, CHAIN) for subject in subjects] == keys
    # Without new ones nothing is written, and others may write.
    with capture_logs() as entries, keyring.together():
        assert [keyring.keys(subject, CHAIN) for subject in subjects] == keys
        other = Keyring(path).keys(BOB, CHAIN)
    assert not entries
    assert writes_to(path) == before + 2
    assert keyring.keys(BOB, CHAIN) == other
    keyring.keys(ANN, CHAIN)
    assert writes_to(path) == before + 3


@contextlib.contextmanager
def lock_on(path: Path, begin: str) -> Iterator[None]:
    """Be another process: BEGIN stops commits, BEGIN IMMEDIATE also other writes, and BEGIN EXCLUSIVE reads, too."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute(begin)
    other.execute("SELECT seed FROM seeds").fetchall()
    yield
    other.execute("ROLLBACK")
    other.close()


class Waits(sqlite3.Connection):
    """Counts statements that have waited for a lock in vain."""

    count = 0

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*arguments)
        except sqlite3.OperationalError:
            Waits.count += 1
            raise


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_many_new_subjects_wait_once_for_a_lock(path: Path, monkeypatch: pytest.MonkeyPatch, begin: str) -> None:
    known = Keyring(path).keys(BOB, CHAIN)
    monkeypatch.setattr("services.scheduler.storage_desk.sqlite3.connect", partial(CONNECT, factory=Waits))
    keyring = Keyring(path)
    subjects = [("t", f"user {number}") for number in range(40)]
    keys = []
    # A later plan waits, too.
    for plan in (subjects[:20], subjects[20:]):
        monkeypatch.setattr(Waits, "count", 0)
        with lock_on(path, begin), keyring.together():
            keys += [keyring.keys(subject, CHAIN) for subject in plan]
            assert (keyring.keys(BOB, CHAIN) == known) is (begin != "BEGIN EXCLUSIVE")
        assert Waits.count == 1
    keyring.refresh()
    for each in (keyring, Keyring(path)):
        assert each.keys(BOB, CHAIN) == known
        assert [each.keys(subject, CHAIN) for subject in subjects] == keys


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
@pytest.mark.parametrize("is_together", [False, True])
def test_seeds_that_cannot_be_written_are_kept_and_written_later(path: Path, begin: str, *, is_together: bool) -> None:
    keyring = Keyring(path)
    salted = (*ANN, "salt")
    with lock_on(path, begin), keyring.together() if is_together else contextlib.nullcontext():
        keys = keyring.keys(ANN, CHAIN)
        with_salt = keyring.keys(salted, CHAIN)
    assert len(seeds_in(path)) == 1, "the file's own"
    Keyring(path).keys(BOB, CHAIN)
    # Another scheduler has written, and so nothing is cached any more.
    with lock_on(path, "BEGIN IMMEDIATE"):
        keyring.refresh()
        assert [keyring.keys(scope, CHAIN) for scope in (ANN, salted)] == [keys, with_salt]
    keyring.refresh()
    for each in (keyring, Keyring(path)):
        assert [each.keys(scope, CHAIN) for scope in (ANN, salted)] == [keys, with_salt]
    # They are not written again.
    with lock_on(path, "BEGIN IMMEDIATE"), capture_logs() as entries:
        keyring.refresh()
    assert not entries


def test_seeds_that_could_not_be_written_are_written_with_the_next_ones(path: Path) -> None:
    keyring = Keyring(path)
    with lock_on(path, "BEGIN IMMEDIATE"):
        keys = keyring.keys(ANN, CHAIN)
    before = writes_to(path)
    later = keyring.keys(BOB, CHAIN)
    assert writes_to(path) == before + 1
    assert [Keyring(path).keys(scope, CHAIN) for scope in (ANN, BOB)] == [keys, later]


@pytest.mark.parametrize("is_refreshed", [False, True])
def test_of_two_schedulers_seeds_for_a_subject_the_one_in_the_file_is_kept(path: Path, *, is_refreshed: bool) -> None:
    keyring = Keyring(path)
    with lock_on(path, "BEGIN IMMEDIATE"):
        before = keyring.keys(ANN, CHAIN)
    written = Keyring(path).keys(ANN, CHAIN)
    assert keyring.keys(ANN, CHAIN) == before != written
    if is_refreshed:
        keyring.refresh()
    else:
        keyring.keys(BOB, CHAIN)
    assert keyring.keys(ANN, CHAIN) == Keyring(path).keys(ANN, CHAIN) == written


def test_a_seed_that_another_scheduler_writes_first_is_used_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, written = Keyring(path), []

    class Late(sqlite3.Connection):
        """Begins to write only after the other scheduler has written."""

        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            if arguments == ("BEGIN IMMEDIATE",):
                written.append(other.keys(ANN, CHAIN))
            return super().execute(*arguments)

    monkeypatch.setattr("services.scheduler.storage_desk.sqlite3.connect", partial(CONNECT, factory=Late))
    assert [Keyring(path).keys(ANN, CHAIN)] == written


def test_a_seed_that_could_not_be_read_is_read_although_nothing_can_be_written(path: Path) -> None:
    known = Keyring(path).keys(ANN, CHAIN)
    keyring = Keyring(path)
    with lock_on(path, "BEGIN EXCLUSIVE"):
        assert keyring.keys(ANN, CHAIN) != known
    with lock_on(path, "BEGIN IMMEDIATE"):
        keyring.refresh()
        assert keyring.keys(ANN, CHAIN) == known


def test_a_seed_that_could_not_be_written_can_be_revoked(path: Path) -> None:
    keyring = Keyring(path, b"x" * 32)
    with lock_on(path, "BEGIN IMMEDIATE"):
        before = keyring.keys(ANN, CHAIN)
        keyring.revoke(ANN)
        after = keyring.keys(ANN, CHAIN)
        assert after != before
    keyring.refresh()
    assert keyring.keys(ANN, CHAIN) == Keyring(path, b"x" * 32).keys(ANN, CHAIN) == after
    with lock_on(path, "BEGIN IMMEDIATE"):
        lost = keyring.keys(BOB, CHAIN)
    path.unlink()
    keyring.refresh()
    assert keyring.keys(BOB, CHAIN) != lost


def test_seeds_that_cannot_be_written_are_kept_up_to_a_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.storage_desk._CACHED_SCOPES", 3)
    keyring = Keyring(path)
    subjects = [("t", f"user {number}") for number in range(5)]
    with lock_on(path, "BEGIN IMMEDIATE"), keyring.together():
        keys = [keyring.keys(subject, CHAIN) for subject in subjects]
        assert [keyring.keys(subject, CHAIN) for subject in subjects[2:]] == keys[2:]
    keyring.refresh()
    assert [keyring.keys(subject, CHAIN) == key for subject, key in zip(subjects, keys, strict=True)] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_two_keyring_files_have_no_keys_in_common(tmp_path: Path) -> None:
    secret = b"x" * 32
    for given in (None, secret):
        one, other = (Keyring(tmp_path / f"{name}{given is None}", given).keys(ANN, CHAIN) for name in "ab")
        assert one.names != other.names
        assert one.cipher_key != other.cipher_key


def test_a_given_secret_is_needed_with_the_file_and_not_written_to_it(path: Path) -> None:
    secret = b"x" * 32
    keys = Keyring(path, secret).keys(ANN, CHAIN)
    assert Keyring(path, secret).keys(ANN, CHAIN) == keys
    assert Keyring(path, b"y" * 32).keys(ANN, CHAIN) != keys
    assert Keyring(path).keys(ANN, CHAIN) != keys
    assert secret not in path.read_bytes()


@pytest.mark.parametrize(
    ("revoked", "kept"), [(ANN, BOB), (ANN, PUBLIC_SCOPE), (ANN, ("t",)), (PUBLIC_SCOPE, ANN), (("t",), ANN)]
)
def test_keys_of_a_revoked_scope_change_for_good_and_other_keys_stay(
    path: Path, revoked: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    keyring = Keyring(path)
    before = [keyring.keys(scope, CHAIN) for scope in (revoked, kept)]
    keyring.revoke(revoked)
    for pipeline in (keyring, Keyring(path)):
        assert pipeline.keys(revoked, CHAIN).names != before[0].names
        assert pipeline.keys(revoked, CHAIN).cipher_key != before[0].cipher_key
        assert pipeline.keys(kept, CHAIN) == before[1]
        assert pipeline.keys(revoked, CHAIN) == keyring.keys(revoked, CHAIN)


def test_a_revoked_seed_is_removed_from_the_file_and_its_directory(path: Path) -> None:
    keyring = Keyring(path)
    for number in range(50):
        keyring.keys(("t", f"user {number}"), CHAIN)
    before = set(seeds_in(path))
    for number in range(50):
        keyring.revoke(("t", f"user {number}"))
    gone = before - set(seeds_in(path))
    assert len(gone) == 50
    content = b"".join(each.read_bytes() for each in path.parent.iterdir())
    assert not [seed for seed in gone if seed in content]


def test_salts_share_their_subjects_seed_and_end_with_it(path: Path) -> None:
    """Clients choose salts: with a seed each, they could fill the file."""
    keyring = Keyring(path)
    views = [(*ANN, ""), (*ANN, "salt"), (*ANN, "other salt")]
    before = [keyring.keys(view, CHAIN) for view in views]
    assert len({keys.cipher_key for keys in before}) == len({keys.names for keys in before}) == 3
    assert len(seeds_in(path)) == 2, "the file's own and the subject's"
    keyring.revoke(views[1])
    assert not {keys.cipher_key for keys in before} & {keyring.keys(view, CHAIN).cipher_key for view in views}


def test_other_keyrings_adopt_a_revocation_at_their_next_refresh(path: Path) -> None:
    one, other = Keyring(path), Keyring(path)
    before = one.keys(ANN, CHAIN)
    assert other.keys(ANN, CHAIN) == before
    one.revoke(ANN)
    other.refresh()
    assert other.keys(ANN, CHAIN) == one.keys(ANN, CHAIN) != before


def test_revocations_of_two_processes_add_up(path: Path) -> None:
    one, other = Keyring(path), Keyring(path)
    one.revoke(ANN)
    other.revoke(BOB)
    fresh = Keyring(path)
    assert fresh.keys(ANN, CHAIN) == one.keys(ANN, CHAIN)
    assert fresh.keys(BOB, CHAIN) == other.keys(BOB, CHAIN)


def test_no_names_are_stored_in_the_keyring(path: Path) -> None:
    Keyring(path).revoke(("tenant-name", "user-name"))
    assert b"name" not in path.read_bytes()


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_revocation_counts_although_it_cannot_be_written_and_is_written_later(path: Path, begin: str) -> None:
    keyring = Keyring(path)
    before = keyring.keys(ANN, CHAIN)
    with lock_on(path, begin):
        keyring.revoke(ANN)
        after = keyring.keys(ANN, CHAIN)
        keyring.refresh()
        assert after == keyring.keys(ANN, CHAIN) != before
    assert Keyring(path).keys(ANN, CHAIN) == before
    # It keeps no lock meanwhile.
    Keyring(path).revoke(BOB)
    keyring.refresh()
    assert Keyring(path).keys(ANN, CHAIN) == keyring.keys(ANN, CHAIN) == after


def test_a_destroyed_file_makes_everything_unreachable(path: Path) -> None:
    keyring = Keyring(path)
    before = [keyring.keys(scope, CHAIN) for scope in (ANN, PUBLIC_SCOPE)]
    path.unlink()
    keyring.refresh()
    after = [keyring.keys(scope, CHAIN) for scope in (ANN, PUBLIC_SCOPE)]
    assert not {keys.cipher_key for keys in before} & {keys.cipher_key for keys in after}
    assert Keyring(path).keys(ANN, CHAIN) == after[0]


def test_a_file_that_others_can_read_is_refused(path: Path) -> None:
    Keyring(path)
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        Keyring(path)


@pytest.mark.parametrize("content", ["[]", json.dumps({"secret": "00" * 32, "generations": {}}), "x" * 9000])
def test_a_file_that_is_not_a_keyring_is_refused_and_not_changed(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"keyring\.db"):
        Keyring(path)
    assert path.read_text() == content


def test_seeds_are_read_from_a_disk_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keyring(path).keys(ANN, CHAIN)

    def connect(name: Path, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = CONNECT(f"file:{name}?mode=ro", uri=True, **options)
        return connection

    monkeypatch.setattr("services.scheduler.storage_desk.sqlite3.connect", connect)
    keyring = Keyring(path)
    with keyring.together():
        new = keyring.keys(BOB, CHAIN)
        assert keyring.keys(ANN, CHAIN) == keys
    keyring.refresh()
    assert [keyring.keys(scope, CHAIN) for scope in (ANN, BOB)] == [keys, new]


def test_another_database_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE other (value)")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="not a keyring"):
        Keyring(path)
