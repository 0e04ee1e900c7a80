"""What `transformers` says in fp32 of prompts: `python -m tests.e2e.greedy.score_reference` writes it anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("score_reference.json")
# By the names that `prompts.py` gives them.
NAMES = ("english-physics", "chinese-capitals", "code-python", "emoji-flags", "length-63", "length-300")
TOP = 3
DIGITS = 5


def read_scores() -> dict[str, dict[str, Any]]:
    """Return for each name `logprobs`, from the second token on, and `top`: ids and their log probabilities."""
    scores: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return scores


def main() -> None:
    """Score the prompts and write the file."""
    import torch
    import transformers

    from common.models import resolve_model
    from tests.e2e.greedy.reference import read_golden

    file = resolve_model("smollm2-135m-instruct").path
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    prompts = {reference.name: reference.prompt_ids for reference in read_golden()}
    scores = {}
    for name in NAMES:
        ids = torch.tensor([prompts[name]])
        with torch.inference_mode():
            told = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        best = told.topk(TOP)
        own = told.gather(1, ids[0, 1:, None])[:, 0]
        scores[name] = {
            "logprobs": [round(value, DIGITS) for value in own.tolist()],
            "top": [
                [[token, round(value, DIGITS)] for token, value in zip(*pair, strict=True)]
                for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ],
        }
    GOLDEN.write_text(json.dumps(scores) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
