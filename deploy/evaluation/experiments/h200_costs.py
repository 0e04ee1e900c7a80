"""Times of one NVIDIA H200 that serves the shape of Llama-3.1-8B in bfloat16, for simulations of fleets.

Each constant names the file of `results/` that has its measurement. Those that were fitted describe what the times of
passes do not explain: gaps and first tokens of two GPUs over HTTP (`group_roles.json`), with which
`disaggregation` compares its simulation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times of passes and of pages on their way from one GPU to another of the same host."""

    # A decode step of one row, which reads the weights once: 4.30 ms (`h200.json`, decode-steps).
    floor_s: float = 4.3e-3
    # Passes of 512, 1,000 and 2,048 prompt tokens took 12.8, 24.6 and 48.2 ms (`h200.json`, prompt-passes, host-tier).
    launch_s: float = 1.5e-3
    tokens_per_s: float = 43_000
    kv_token_bytes: int = 131_072
    # Steps of 64 and 256 rows took 6.1 and 12.4 ms (`h200.json`, decode-steps).
    kv_bytes_per_s: float = 4.2e12
    # A pass of 8,192 prompt tokens took 214 ms (`h200.json`, host-tier): the rest, by pairs of a token and one before.
    pair_s: float = 6.4e-10
    # Pages of prompts in serving, pauses included: 74 to 77 GB/s with 8,192 tokens (`group_roles.json`). A copy alone
    # reaches 183 (`peer_pages.json`).
    transfer_bytes_per_s: float = 75.8e9
    # Prompts waited for 14 to 26 ms after their last chunk (`group_roles.json`): this, and the pages of that chunk.
    transfer_wait_s: float = 15e-3
    # Added to the first token of an idle server by the services (`control_plane.json`).
    service_s: float = 6e-3
    # Fitted: of so many passes with prompts and rows, one takes twice as long. The p99 between tokens of two groups
    # that do both is that of one pass at low rates and that of two at higher ones. 0: none, as on one GPU with larger
    # steps.
    mixed_passes_per_slow_one: int = 16
    # Fitted: a pass that starts prompts of another group takes longer. The p99 between tokens of the decode group is 12
    # to 24 ms more than the median.
    start_s: float = 15e-3

    def pass_s(self, prompt_tokens: int, pairs: float, rows: int, kv_tokens: int) -> float:
        """Return the time of a pass of chunks and of decoding rows that read so many tokens of KV."""
        products = max(self.floor_s, self.launch_s + (prompt_tokens + rows) / self.tokens_per_s)
        return products + pairs * self.pair_s + kv_tokens * self.kv_token_bytes / self.kv_bytes_per_s

    def transfer_s(self, tokens: int, chunk_tokens: int) -> float:
        """Return the seconds from the end of a prompt's computation until its KV is in another group.

        The pages of a chunk move while the next one is computed, so that those of the last one are left, or more if
        pages move more slowly than they are computed.
        """
        token_s = self.kv_token_bytes / self.transfer_bytes_per_s
        last = min(tokens, chunk_tokens)
        return self.transfer_wait_s + max(last * token_s, tokens * token_s - (tokens - last) / self.tokens_per_s)
