"""The printable spelling of bytes in byte-level vocabularies."""

from __future__ import annotations


def byte_alphabet() -> dict[int, str]:
    """Return the printable character that byte-level vocabularies write for each byte (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
