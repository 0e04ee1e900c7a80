"""gRPC inside the ring."""

import os

# Before gRPC starts: its handlers for forks abort children now and then, also of those that only start a program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# With gRPC's event engine, what arrives passes through two more threads on its way to our event loop. Without, the
# thread that asyncio needs anyway reads the sockets: half the context switches, and a third less time for each hop.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
