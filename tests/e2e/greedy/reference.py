"""What `transformers` answers in fp32, kept beside this file: `python -m tests.e2e.greedy.reference` writes it anew.

Two right programs add the same numbers in different orders, so their logits differ in the last digits: by less than
1e-4 between `transformers` and this engine, wherever it was looked at. Where a model's two best tokens are closer than
that, either is a right greedy choice, and comparing tokens would test the machine. `MINIMUM_MARGIN` is 200 times as
much, so that a prompt which keeps it has one right answer on any CPU, in any batch and with any split into chunks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.models import resolve_model
from common.types import FinishReason
from tests.common.tokenization.transformers_oracle import load_bundled
from tests.e2e.greedy.prompts import PROMPTS

if TYPE_CHECKING:
    from tests.e2e.greedy.prompts import Prompt

GOLDEN = Path(__file__).with_name("reference.json")
OUTPUT_TOKENS = 24
# Difference of the two highest logits.
MINIMUM_MARGIN = 0.02
END_OF_SEQUENCE = 2


@dataclass(frozen=True, slots=True)
class Reference:
    """The right answer to one prompt; `margin` is the smallest along it."""

    name: str
    margin: float
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str

    @property
    def finish(self) -> FinishReason:
        """Why the answer ends where it does."""
        return FinishReason.STOP if self.output_ids[-1] == END_OF_SEQUENCE else FinishReason.LENGTH


def read_golden() -> tuple[Reference, ...]:
    """Return the kept answers, in the order of the prompts."""
    return tuple(
        Reference(
            name=entry["name"],
            margin=entry["margin"],
            prompt_ids=tuple(entry["prompt_ids"]),
            output_ids=tuple(entry["output_ids"]),
            text=entry["text"],
        )
        for entry in json.loads(GOLDEN.read_text(encoding="utf-8"))
    )


class ReferenceModel:
    """The bundled model in `transformers`: fp32, on the CPU, one sequence at a time."""

    def __init__(self) -> None:
        """Load it; takes some ten seconds, most of them to unpack the weights."""
        import torch
        from transformers import AutoModelForCausalLM

        path = resolve_model("smollm2-135m-instruct").path
        self._torch = torch
        self._tokenizer = load_bundled()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids."""
        if prompt.is_chat:
            messages = [{"role": "user", "content": prompt.text}]
            ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            return ids
        ids = self._tokenizer(prompt.text)["input_ids"]
        assert prompt.cut_to is None or len(ids) >= prompt.cut_to, f"{prompt.name} has only {len(ids)} tokens"
        return ids[: prompt.cut_to]

    def answer(self, prompt: Prompt) -> Reference:
        """Return the output of `generate` for a prompt."""
        ids = self.encode(prompt)
        inputs = self._torch.tensor([ids])
        generated = self._model.generate(
            inputs,
            attention_mask=self._torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=OUTPUT_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = self._torch.cat(generated.logits).topk(2).values  # [tokens, 2] float32
        output_ids = generated.sequences[0, len(ids) :].tolist()
        return Reference(
            name=prompt.name,
            margin=round(float((best[:, 0] - best[:, 1]).min()), 4),
            prompt_ids=tuple(ids),
            output_ids=tuple(output_ids),
            text=self._tokenizer.decode(output_ids, skip_special_tokens=True),
        )

    def predict(self, reference: Reference) -> tuple[int, ...]:
        """Return the best token after the prompt and after each token of the answer but the last, in one pass."""
        ids = [*reference.prompt_ids, *reference.output_ids[:-1]]
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([ids]), logits_to_keep=len(reference.output_ids)).logits[0]
        return tuple(logits.argmax(-1).tolist())


def main() -> int:
    """Write the golden file, unless the model wavers at a prompt."""
    model = ReferenceModel()
    lines, wavering = [], []
    for prompt in PROMPTS:
        reference = model.answer(prompt)
        sys.stderr.write(f"{reference.name}: {len(reference.prompt_ids)} tokens, margin {reference.margin:.4f}\n")
        lines.append(json.dumps(asdict(reference), ensure_ascii=False))
        if reference.margin < MINIMUM_MARGIN:
            wavering.append(reference.name)
    if wavering:
        sys.stderr.write(f"nothing written: margin below {MINIMUM_MARGIN} at {', '.join(wavering)}\n")
        return 1
    GOLDEN.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
