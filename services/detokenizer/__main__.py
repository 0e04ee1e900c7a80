"""Run the detokenizer: `python -m services.detokenizer --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.metrics import MODEL_INFO
from common.rpc.security import read_security
from common.rpc.server import RpcServer
from common.runtime import collect_garbage_rarely, drained, run_service
from common.settings import Settings, load_settings
from common.tokenization import load_served_model
from protos.gen.pando.v1 import detokenizer_pb2_grpc
from services.detokenizer.decoding import DecoderFactory
from services.detokenizer.service import DetokenizerService
from services.detokenizer.session import Hub

if TYPE_CHECKING:
    import asyncio

NAME = "pando.v1.Detokenizer"
# Seconds that open choices have to finish after the signal to stop; the gateway resumes those that have not.
DRAIN_S = 15.0


def main() -> None:
    """Read the settings and serve until SIGTERM or SIGINT."""
    settings = load_settings("python -m services.detokenizer", "Token ids to text, incremental, with stop strings.")
    collect_garbage_rarely()
    run_service("detokenizer", settings, settings.detokenizer.metrics_port, lambda stop: serve(settings, stop))


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Run the detokenizer until `stopping` is set.

    Raises:
        ConfigurationError: the settings are invalid, the model cannot be read, or the address cannot be bound.
    """
    security = read_security(settings.rpc)
    server = RpcServer(NAME, settings.detokenizer.address, security)
    hub = Hub(DecoderFactory(load_served_model(settings.model)))
    MODEL_INFO.labels(settings.model.name).set(1)
    server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, DetokenizerService(hub))
    await server.start()
    try:
        await server.set_serving(True)
        await stopping.wait()
        await server.set_serving(False)
        await drained(lambda: not hub.open_choices, DRAIN_S)
    finally:
        await server.stop(grace_s=0.2)


if __name__ == "__main__":
    main()
