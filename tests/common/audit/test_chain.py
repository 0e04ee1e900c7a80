"""The chain of records on disk: continued, rotated, repaired, and what `verify_chain` finds in a changed one."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
from typing import TYPE_CHECKING

import pytest

from common.audit.chain import AuditChain, files_of
from common.audit.records import NO_HASH, AuditRecord, Torn, decode_record, encode_record, read_records
from common.audit.verification import ChainHead, verify_chain
from common.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

NOW = "2026-01-01T00:00:00+00:00"


def write(root: Path, count: int, max_file_bytes: int = 1 << 20) -> Path:
    """Append `count` records, and return the chain's directory."""
    chain = AuditChain(root, "gateway", max_file_bytes)
    for number in range(count):
        chain.append([{"action": "test", "what": {"number": number}}], NOW)
    chain.close()
    return chain.directory


def records(directory: Path) -> list[AuditRecord]:
    parts = [part for path in files_of(directory) for part in read_records(path.read_bytes())]
    return [part for part in parts if isinstance(part, AuditRecord)]


def broken(directory: Path, *heads: ChainHead) -> str | None:
    return verify_chain(files_of(directory), heads).broken


def only_file(directory: Path) -> Path:
    [path] = files_of(directory)
    return path


def test_a_record_reads_back_and_holds_the_hash_of_the_one_before() -> None:
    line, digest = encode_record(7, {"action": "x"}, NO_HASH)
    record = decode_record(line.removesuffix(b"\n"))
    assert record is not None
    assert (record.sequence, record.previous, record.hash) == (7, NO_HASH, digest)
    assert record.fields["action"] == "x"


def test_a_chain_continues_after_its_process_has_ended(tmp_path: Path) -> None:
    write(tmp_path, 3)
    directory = write(tmp_path, 2)
    found = records(directory)
    assert [record.sequence for record in found] == [1, 2, 3, 4, 5]
    assert [record.previous for record in found] == [NO_HASH, *(record.hash for record in found[:-1])]
    assert broken(directory) is None


def test_files_and_directories_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    directory = write(tmp_path / "audit", 1)
    assert stat.S_IMODE(only_file(directory).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o700


def test_a_new_file_begins_by_size_and_continues_the_chain(tmp_path: Path) -> None:
    directory = write(tmp_path, 40, max_file_bytes=4096)
    files = files_of(directory)
    assert len(files) > 1
    assert files[0].stem == "000000000001"
    assert verify_chain(files).records == 40
    # Files that were moved to an archive are not missed, but one in between is.
    later = verify_chain(files[1:])
    assert later.broken is None
    assert later.first == int(files[1].stem)
    second = write(tmp_path, 40, max_file_bytes=4096)
    files = files_of(second)
    assert "is missing" in (verify_chain([files[0], *files[2:]]).broken or "")


def test_several_processes_have_chains_of_their_own(tmp_path: Path) -> None:
    one, two = AuditChain(tmp_path, "gateway", 1 << 20), AuditChain(tmp_path, "gateway", 1 << 20)
    assert [one.directory.name, two.directory.name] == ["gateway", "gateway-2"]
    one.close()
    three = AuditChain(tmp_path, "gateway", 1 << 20)
    assert three.directory.name == "gateway"


@pytest.mark.parametrize("torn", [b'{"sequence":3,"act', b'{"sequence":3}\n', b"\0\0\0", b"a\nb\nc"])
def test_a_line_that_was_not_completed_is_named_by_the_next_record(tmp_path: Path, torn: bytes) -> None:
    directory = write(tmp_path, 2)
    with only_file(directory).open("ab") as file:
        file.write(torn)
    assert "record 3" in (broken(directory) or "")
    write(tmp_path, 1)
    found = records(directory)
    assert [record.fields["action"] for record in found] == ["test", "test", "audit.repaired", "test"]
    assert found[2].fields["what"] == Torn(torn.removesuffix(b"\n")).described()
    report = verify_chain(files_of(directory))
    assert (report.broken, report.repairs, report.records) == (None, 1, 4)


def test_torn_bytes_at_the_beginning_of_a_new_file_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path, 2)
    (directory / "000000000003.jsonl").write_bytes(b"half a li")
    write(tmp_path, 1)
    assert verify_chain(files_of(directory)).records == 4
    assert broken(directory) is None


def test_torn_bytes_without_a_record_about_them_are_a_change(tmp_path: Path) -> None:
    directory = write(tmp_path, 3)
    path = only_file(directory)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"something else\n" + lines[1] + lines[2])
    assert "record 2 has been changed" in (broken(directory) or "")


def _append_until_killed(root: Path, started: int) -> None:
    chain = AuditChain(root, "gateway", 1 << 14)
    os.write(started, b"x")
    while True:
        chain.append([{"action": "test", "what": {"text": "x" * 200}}], NOW)


def test_records_survive_kill_9(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        reading, writing = os.pipe()
        process = context.Process(target=_append_until_killed, args=(tmp_path, writing))
        process.start()
        os.read(reading, 1)
        process.join(0.05)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        os.close(reading)
        os.close(writing)
    directory = write(tmp_path, 1)
    report = verify_chain(files_of(directory))
    assert report.broken is None
    assert report.records == report.last
    assert report.records > 5


def test_a_flipped_byte_names_its_record_wherever_it_is(tmp_path: Path) -> None:
    directory = write(tmp_path, 5)
    path = only_file(directory)
    content = path.read_bytes()
    starts = [0, *[place + 1 for place, byte in enumerate(content) if byte == 10][:-1]]
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        number = sum(start <= place for start in starts)
        found = broken(directory)
        assert found is not None, place
        assert f"record {number} " in found or (number == 1 and "the first record here" in found), (place, found)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_removed_record_is_named(tmp_path: Path, number: int) -> None:
    directory = write(tmp_path, 5)
    path = only_file(directory)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: number - 1] + lines[number:]))
    assert f"record {number} is missing" in (broken(directory) or "")


def test_swapped_records_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path, 5)
    path = only_file(directory)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[3], lines[2], lines[4]]))
    assert "record 3 is missing; record 4 follows" in (broken(directory) or "")


def test_a_rewritten_record_that_fits_itself_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path, 4)
    path = only_file(directory)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1], _ = encode_record(2, {"action": "another"}, records(directory)[0].hash)
    path.write_bytes(b"".join(lines))
    assert "record 3 follows another record 2" in (broken(directory) or "")


def test_a_truncated_chain_is_noticed_by_a_recorded_head(tmp_path: Path) -> None:
    directory = write(tmp_path, 5)
    path = only_file(directory)
    head = ChainHead(5, records(directory)[4].hash[:12])
    assert broken(directory, head) is None
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert broken(directory) is None
    assert "record 4 is missing: the chain once reached 5" in (broken(directory, head) or "")
    # Records made up in place of those removed have other hashes.
    write(tmp_path, 4)
    assert "record 5 is another one" in (broken(directory, head) or "")


def test_a_write_that_fails_in_the_middle_of_a_line_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = AuditChain(tmp_path, "gateway", 1 << 20)
    chain.append([{"action": "test"}], NOW)
    real = os.write

    def full(descriptor: int, content: bytes) -> int:
        if len(content) <= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                chain.append([{"action": "lost"}], NOW)
    chain.append([{"action": "test"}], NOW)
    chain.close()
    assert [record.fields["action"] for record in records(chain.directory)] == ["test", "audit.repaired", "test"]
    assert broken(chain.directory) is None


def test_a_record_whose_sync_failed_is_kept_in_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = AuditChain(tmp_path, "gateway", 1 << 20)
    chain.append([{"action": "first"}], NOW)

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            chain.append([{"action": "second"}], NOW)
    chain.append([{"action": "third"}], NOW)
    chain.close()
    assert [record.fields["action"] for record in records(chain.directory)] == ["first", "second", "third"]
    assert broken(chain.directory) is None


def test_a_directory_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"audit\.directory"):
        AuditChain(tmp_path / "file", "gateway", 1 << 20)


def test_no_records_at_all_are_not_whole(tmp_path: Path) -> None:
    assert verify_chain([]).broken == "there are no records"
    (tmp_path / "000000000001.jsonl").write_bytes(b"")
    assert broken(tmp_path) == "there are no records"
