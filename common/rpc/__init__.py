"""gRPC inside the ring."""

import os

# Before gRPC starts: its handlers for forks abort children now and then, also of those that only start a program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
