"""Conversion between protobuf messages that several services exchange and the dataclasses of `common`.

Messages that only one service reads are converted by that service's own `wire.py`.
"""
