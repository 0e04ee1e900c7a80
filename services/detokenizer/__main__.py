"""Run the detokenizer: `python -m services.detokenizer --help`."""

from __future__ import annotations

import asyncio
import sys

from common.errors import ConfigurationError
from common.logs import get_logger
from common.rpc.server import RpcServer
from common.runtime import run_service
from common.settings import Settings, load_settings
from common.tokenization import load_served_model
from protos.gen.pando.v1 import detokenizer_pb2_grpc
from services.detokenizer.factory import DecoderFactory
from services.detokenizer.hub import Hub
from services.detokenizer.service import DetokenizerService

NAME = "pando.v1.Detokenizer"
DRAIN_INTERVAL_S = 0.05


def main() -> None:
    """Read the settings and serve until a signal comes."""
    settings = load_settings("python -m services.detokenizer", "Token ids to text, incremental, with stop strings.")
    run_service("detokenizer", settings.log, lambda stop: serve(settings, stop), settings.detokenizer.metrics_port)


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Run the detokenizer until `stopping` is set; exit with status 1 if the configuration cannot work."""
    server = RpcServer(NAME, settings.detokenizer.address)
    try:
        hub = Hub(DecoderFactory(load_served_model(settings.model)))
        server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, DetokenizerService(hub))
        await server.start()
    except ConfigurationError as error:
        get_logger("detokenizer").error("service.misconfigured", reason=str(error))
        sys.exit(1)
    try:
        await server.set_serving(True)
        await stopping.wait()
        await server.set_serving(False)
        await drained(hub, settings.detokenizer.drain_s)
    finally:
        await server.stop(grace_s=0.2)


async def drained(hub: Hub, timeout_s: float) -> None:
    """Wait until the open choices have finished, for at most `timeout_s`."""
    for _ in range(int(timeout_s / DRAIN_INTERVAL_S)):
        if not hub.open_choices:
            break
        await asyncio.sleep(DRAIN_INTERVAL_S)


if __name__ == "__main__":
    main()
