from __future__ import annotations

import pytest

from gateway.state.aborts import MAX_MESSAGE_BYTES, VALID_S, RefusedError, Signatures

SECRET = "a secret that has more than 32 characters"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_signed_message_is_taken_once() -> None:
    sender, receiver, other = (Signatures(SECRET) for _ in range(3))
    message = sender.seal({"caller": "ann"})
    assert receiver.open(message)["caller"] == "ann"
    assert other.open(message)["caller"] == "ann"
    with pytest.raises(RefusedError, match="before"):
        receiver.open(message)
    assert receiver.open(sender.seal({"caller": "ann"}))["caller"] == "ann"


def test_any_changed_bit_is_refused() -> None:
    message = Signatures(SECRET).seal({"caller": "ann"})
    for index in range(len(message)):
        changed = bytes([*message[:index], message[index] ^ 1, *message[index + 1 :]])
        with pytest.raises(RefusedError, match="not signed"):
            Signatures(SECRET).open(changed)
    for part in (b"", message[:10], message[:32], message[:-1], message + b" "):
        with pytest.raises(RefusedError, match="not signed"):
            Signatures(SECRET).open(part)


def test_messages_without_the_secret_are_refused() -> None:
    for sender in (Signatures(None), Signatures(SECRET + "!")):
        with pytest.raises(RefusedError, match="not signed"):
            Signatures(SECRET).open(sender.seal({"caller": "ann"}))
    with pytest.raises(RefusedError):
        Signatures(None).open(Signatures(SECRET).seal({"caller": "ann"}))


@pytest.mark.parametrize("seconds", [VALID_S + 1, -VALID_S - 1])
def test_an_old_message_is_refused_also_when_it_was_never_received(seconds: float) -> None:
    clock = Clock()
    message = Signatures(SECRET, clock).seal({})
    clock.now += seconds
    with pytest.raises(RefusedError, match="too old"):
        Signatures(SECRET, clock).open(message)


def test_a_message_is_remembered_as_long_as_it_would_be_valid_and_no_longer() -> None:
    clock, ahead = Clock(), Clock()
    ahead.now += VALID_S - 1
    receiver = Signatures(SECRET, clock)
    message = Signatures(SECRET, ahead).seal({})
    receiver.open(message)
    clock.now += 2 * VALID_S - 2
    with pytest.raises(RefusedError, match="before"):
        receiver.open(message)
    clock.now += 3
    with pytest.raises(RefusedError, match="too old"):
        receiver.open(message)
    receiver.open(Signatures(SECRET, clock).seal({}))
    assert len(receiver._received) == 1


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"null", b'{"at": null, "nonce": "x"}', b'{"at": "nan", "nonce": ""}']
)
def test_malformed_messages_are_refused(body: bytes) -> None:
    with pytest.raises(RefusedError):
        Signatures(None).open(body)


def test_long_messages_are_refused() -> None:
    with pytest.raises(RefusedError, match="long"):
        Signatures(SECRET).open(Signatures(SECRET).seal({"x": "x" * MAX_MESSAGE_BYTES}))
