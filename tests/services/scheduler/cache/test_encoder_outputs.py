"""Which outputs of the vision encoder workers keep, for whom, and which give way."""

from __future__ import annotations

from hashlib import sha256

import pytest

from common.types import RowImage, Subject
from services.scheduler.cache.encoder_outputs import LEAST_EMBEDDINGS, EncoderOutput, EncoderOutputs

ALICE, BOB, SALTED = ("acme", "alice", ""), ("acme", "bob", ""), ("acme", "alice", "salt")
ROOM = 4 * LEAST_EMBEDDINGS


def image(name: str, length: int = LEAST_EMBEDDINGS, grid: tuple[int, ...] = (1, 1)) -> RowImage:
    return RowImage(sha256(name.encode()).digest(), 0, length, grid)


def keep(outputs: EncoderOutputs, scope: tuple[str, ...], *names: str, length: int = LEAST_EMBEDDINGS) -> None:
    """Let rows of a view encode images one after the other."""
    for name in names:
        output = outputs.promise(scope, image(name, length))
        if output is not None:
            outputs.confirm(output)
            outputs.release(output)
        assert outputs.faults() == []


def kept(outputs: EncoderOutputs, scope: tuple[str, ...], *names: str) -> list[str]:
    """Return those of a view's images that are found."""
    found = []
    for name in names:
        output = outputs.find(scope, image(name))
        if output is not None:
            found.append(name)
            outputs.release(output)
    return found


def promised(outputs: EncoderOutputs, scope: tuple[str, ...], name: str) -> EncoderOutput:
    output = outputs.promise(scope, image(name))
    assert output is not None
    return output


@pytest.mark.parametrize("other", [BOB, SALTED, ("rival", "alice", ""), ()])
def test_an_output_is_found_in_the_view_that_encoded_it_and_in_no_other(other: tuple[str, ...]) -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "cat")
    assert kept(outputs, ALICE, "cat", "dog") == ["cat"]
    assert outputs.find(other, image("cat")) is None
    # The same pixels in another shape are another image.
    assert outputs.find(ALICE, image("cat", grid=(2, 1))) is None
    assert outputs.find(ALICE, image("cat", length=LEAST_EMBEDDINGS + 1)) is None


def test_an_output_is_not_found_before_it_is_encoded_and_is_promised_once() -> None:
    outputs = EncoderOutputs(ROOM)
    output = promised(outputs, ALICE, "cat")
    assert outputs.find(ALICE, image("cat")) is None
    assert outputs.promise(ALICE, image("cat")) is None
    outputs.confirm(output)
    assert outputs.find(ALICE, image("cat")) is output


def test_a_promise_that_is_not_kept_is_withdrawn_from_the_workers_too() -> None:
    outputs = EncoderOutputs(ROOM)
    output = promised(outputs, ALICE, "cat")
    outputs.release(output)
    assert outputs.take_dropped() == (output.output_id,)
    assert not outputs.has_dropped
    assert not outputs.embeddings
    promised(outputs, ALICE, "cat")


def test_the_least_recently_used_output_gives_way_and_used_ones_do_not() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "a", "b", "c", "d")
    assert kept(outputs, ALICE, "a") == ["a"]
    used = outputs.find(ALICE, image("b"))
    assert used is not None
    keep(outputs, ALICE, "e")
    assert kept(outputs, ALICE, "a", "b", "c", "d", "e") == ["a", "b", "d", "e"]
    assert len(outputs.take_dropped()) == outputs.evicted == 1


def test_an_output_is_in_use_until_the_last_row_has_released_it() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "a", "b", "c", "d")
    first = outputs.find(ALICE, image("a"))
    assert first is not None
    second = outputs.share(first)
    outputs.release(first)
    assert kept(outputs, ALICE, "b") == ["b"]
    # Until here, the room of all but "a" may be given to others.
    assert outputs.promise(BOB, image("e", length=ROOM)) is None
    outputs.release(second)
    assert outputs.faults() == []
    keep(outputs, ALICE, "e", "f", "g")
    assert kept(outputs, ALICE, "a", "b", "c", "d", "e", "f", "g") == ["a", "e", "f", "g"]


def test_of_equal_owners_the_one_with_the_least_recently_used_output_gives_way() -> None:
    outputs = EncoderOutputs(ROOM)
    carol, dave, erin = (("acme", name, "") for name in ("carol", "dave", "erin"))
    keep(outputs, ALICE, "a")
    keep(outputs, BOB, "b", "c")
    keep(outputs, ALICE, "d")
    keep(outputs, carol, "e")
    assert kept(outputs, ALICE, "a") == []
    keep(outputs, dave, "f")
    assert kept(outputs, BOB, "b") == []
    # Each has one by now, and Bob's is older than Alice's.
    keep(outputs, erin, "g")
    assert kept(outputs, ALICE, "d") == ["d"]
    assert kept(outputs, BOB, "c") == []


def test_one_large_output_displaces_several_of_one_subject() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "a", "b", "c", "d")
    keep(outputs, BOB, "e", length=2 * LEAST_EMBEDDINGS)
    assert kept(outputs, ALICE, "a", "b", "c", "d") == ["c", "d"]
    assert outputs.evicted == 2
    assert outputs.faults() == []


def test_one_large_output_displaces_the_oldest_of_several_subjects() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "a", "b")
    keep(outputs, BOB, "c", "d")
    keep(outputs, ("acme", "carol", ""), "e", length=2 * LEAST_EMBEDDINGS)
    assert kept(outputs, ALICE, "a", "b") == ["b"]
    assert kept(outputs, BOB, "c", "d") == ["d"]
    assert outputs.evicted == 2
    assert outputs.faults() == []


def test_what_cannot_fit_displaces_nothing() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "a", "b")
    assert outputs.promise(ALICE, image("large", ROOM + 1)) is None
    used = [outputs.find(ALICE, image(name)) for name in "ab"]
    assert all(used)
    assert outputs.promise(ALICE, image("large", ROOM)) is None
    assert kept(outputs, ALICE, "a", "b") == ["a", "b"]
    assert EncoderOutputs(0).promise(ALICE, image("cat")) is None


def test_small_images_count_for_the_least_number_of_embeddings() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, *"abcdef", length=1)
    assert len(outputs) == 4
    assert outputs.embeddings == ROOM


def test_a_flood_displaces_others_only_down_to_an_equal_share() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "a", "b", "c")
    keep(outputs, BOB, *(f"flood-{number}" for number in range(20)))
    assert kept(outputs, ALICE, "a", "b", "c") == ["b", "c"]


def test_names_invented_in_one_tenant_displace_only_its_share() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "a", "b", "c")
    for number in range(20):
        keep(outputs, ("rival", f"name-{number}", ""), "x")
    assert kept(outputs, ALICE, "a", "b", "c") == ["b", "c"]
    # In their own tenant, each of them has as much right as the others.
    assert outputs.embeddings == ROOM


def test_an_owner_does_not_displace_smaller_ones_while_its_own_outputs_are_used() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, ALICE, "a")
    keep(outputs, BOB, "x", "y", "z")
    held = [outputs.find(BOB, image(name)) for name in "xyz"]
    assert all(held)
    assert outputs.promise(BOB, image("w")) is None
    assert kept(outputs, ALICE, "a") == ["a"]


def test_forgetting_drops_all_views_of_a_subject_and_nobody_else_s() -> None:
    outputs = EncoderOutputs(ROOM)
    for scope in (ALICE, SALTED, BOB):
        keep(outputs, scope, "cat")
    outputs.forget(Subject("acme", "alice"))
    assert len(outputs.take_dropped()) == 2
    assert outputs.find(ALICE, image("cat")) is outputs.find(SALTED, image("cat")) is None
    assert kept(outputs, BOB, "cat") == ["cat"]
    outputs.flush()
    assert len(outputs.take_dropped()) == 1
    assert outputs.faults() == []


def test_what_is_forgotten_while_it_is_encoded_is_dropped_afterwards() -> None:
    outputs = EncoderOutputs(ROOM)
    output = promised(outputs, ALICE, "cat")
    outputs.forget(Subject("acme", "alice"))
    assert not outputs.has_dropped, "the workers may not have it yet"
    outputs.confirm(output)
    assert outputs.find(ALICE, image("cat")) is None
    outputs.release(output)
    assert outputs.take_dropped() == (output.output_id,)


def test_in_a_cache_that_all_share_forgetting_one_drops_everything() -> None:
    outputs = EncoderOutputs(ROOM)
    keep(outputs, (), "cat")
    assert kept(outputs, (), "cat") == ["cat"]
    outputs.forget(Subject("acme", "alice"))
    assert outputs.find((), image("cat")) is None
