"""Options of gRPC channels and servers between services."""

from __future__ import annotations

from common.rpc.handshake import own_build

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 20_000
CONNECT_TIMEOUT_MS = 1_500

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.primary_user_agent", own_build().user_agent),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Each channel has a connection of its own, so that a new channel replaces a connection that has failed silently.
    ("grpc.use_local_subchannel_pool", 1),
    # By default, only two pings are sent without data, so that keepalive would stop on a silent stream.
    ("grpc.http2.max_pings_without_data", 0),
    # The bandwidth-delay probe enlarges windows, so that megabytes are buffered for a stalled reader.
    ("grpc.http2.bdp_probe", 0),
    # Reconnect to a restarted service at once; the default pause is up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name, the timeout of a connection attempt: a second more is enough for TLS on a busy machine, and an
    # attempt during which messages are lost is given up soon after that has ended.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 250),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # By default, keepalive pings less than 5 minutes apart end the connection, which would break silent streams.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),
]
