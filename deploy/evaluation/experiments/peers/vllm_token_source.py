"""vLLM's OpenAI server without an engine, whose place a source takes that has tokens for every request at once.

Run it with vLLM's own Python, from this repository, with the arguments of `vllm serve`:
`python -m deploy.evaluation.experiments.peers.vllm_token_source tiny/ --load-format dummy --port 8002`.
What is left is what the server itself does: HTTP, tokenizer, the bookkeeping of requests, and ids to text. Beside it,
`pando up --model.load_format fake` does the same for Pando, its scheduler included.
"""

from __future__ import annotations

import asyncio
import sys
import types
from typing import Any

# Words, as in Pando's fake.
FIRST_WORD = 1024


class TokenSource:
    """Answers as an engine's client does: each round brings one token of every open request."""

    engine_ranks_managed = (0,)
    resources = types.SimpleNamespace(engine_dead=False)

    def __init__(self, vocabulary_size: int) -> None:
        """Begin with no request."""
        self._vocabulary_size = vocabulary_size
        # Tokens left, by request.
        self._open: dict[str, int] = {}
        self._news = asyncio.Event()
        self._round = 0

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Say what can be asked for."""
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:  # Any: vLLM is not installed beside this project
        """Take a request."""
        self._open[request.request_id] = request.sampling_params.max_tokens
        self._news.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    async def get_output_async(self) -> Any:
        """Return the next round."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason  # type: ignore[import-not-found]  # not in this environment

        while not self._open:
            self._news.clear()
            await self._news.wait()
        # An engine is a process of its own: others get their turn while it computes.
        await asyncio.sleep(0)
        self._round += 1
        outputs = []
        for place, (request_id, left) in enumerate(list(self._open.items())):
            token = FIRST_WORD + (self._round * 7919 + place * 104_729) % (self._vocabulary_size - FIRST_WORD)
            self._open[request_id] = left - 1
            reason = FinishReason.LENGTH if left <= 1 else None
            if reason is not None:
                del self._open[request_id]
            outputs.append(EngineCoreOutput(request_id, [token], finish_reason=reason))
        return EngineCoreOutputs(outputs=outputs)

    async def reset_mm_cache_async(self) -> None:
        """Do nothing."""

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def main() -> None:
    """Serve as `vllm serve` does, but for the engine."""
    from vllm.entrypoints.cli.main import main as serve  # type: ignore[import-not-found]  # not in this environment
    from vllm.v1.engine.core_client import EngineCoreClient  # type: ignore[import-not-found]  # not in this environment

    def make(vllm_config: Any, **_: Any) -> TokenSource:
        return TokenSource(vllm_config.model_config.get_vocab_size())

    EngineCoreClient.make_async_mp_client = staticmethod(make)
    sys.argv = ["vllm", "serve", *sys.argv[1:], "--disable-log-stats"]
    serve()


if __name__ == "__main__":
    main()
