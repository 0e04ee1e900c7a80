"""The printable spelling of bytes in byte-level vocabularies."""

from __future__ import annotations


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's table: for each byte, the printable character that stands for it in byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
