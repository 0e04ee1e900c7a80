"""Options of channels and servers inside the ring."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 20_000

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # The default leaves a silent stream with a ping a minute after the first two.
    ("grpc.http2.max_pings_without_data", 0),
    # Without it a stalled reader has megabytes buffered for it before the writer notices.
    ("grpc.http2.bdp_probe", 0),
    # A service that restarts must be found again within a second, not after the default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt may last, whatever its name: less than what a busy machine takes to answer fails for nothing.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # By default, keepalive pings sooner than 5 minutes apart end the connection: silent streams would break.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),
]
