"""gRPC between the services of the pipeline."""

import os

# Must be set before gRPC starts: its fork handlers sometimes abort children, even those that only exec a program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# With gRPC's event engine, each message passes through two more threads before it reaches our event loop. Without it,
# the thread that asyncio needs anyway reads the sockets: half the context switches and a third less time per hop.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
