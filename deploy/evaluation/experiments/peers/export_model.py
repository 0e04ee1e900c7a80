"""Write the bundled model in forms that peers read.

Run as `python -m deploy.evaluation.experiments.peers.export_model DIRECTORY`.

The weights are the very same: llama-server reads `model-bf16.gguf`, vLLM and SGLang the directory itself. `--tiny`
writes instead a model of one narrow layer without weights, for `dummy` ones: what runs it is busy with all the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.models import resolve_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GGUF_NAME = "model-bf16.gguf"


def main() -> int:
    """Write both forms; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled name or GGUF file")
    parser.add_argument("--tiny", action="store_true", help="write only config and tokenizer of a model of one layer")
    parser.add_argument("directory", type=Path, help="where to write")
    arguments = parser.parse_args()
    source = resolve_model(arguments.model).path
    arguments.directory.mkdir(parents=True, exist_ok=True)
    if arguments.tiny:
        write_tiny_directory(source, arguments.directory)
        return 0
    write_bfloat16_gguf(source, arguments.directory / GGUF_NAME)
    write_directory(source, arguments.directory)
    return 0


def write_bfloat16_gguf(source: Path, target: Path) -> None:
    """Copy a GGUF file with its matrices as bfloat16 and its vectors as float32."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])
        kind = GGMLQuantizationType.BF16 if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_directory(source: Path, target: Path) -> None:
    """Write config, tokenizer and bfloat16 safetensors as `transformers` names them."""
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), **_place(source), dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved, its weights in an empty one do not.
    plain = AutoModelForCausalLM.from_config(_config(source), dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(target)
    _write_tokenizer(source, target)


def write_tiny_directory(source: Path, target: Path) -> None:
    """Write the tokenizer and the config of a model of one layer and one head of 64."""
    config = _config(source)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    config.update({**sizes, "hidden_size": 64, "intermediate_size": 128})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(target)
    _write_tokenizer(source, target)


def _place(source: Path) -> dict[str, Any]:
    return {"gguf_file": source.name, "local_files_only": True}


def _config(source: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(str(source.parent), **_place(source))


def _write_tokenizer(source: Path, target: Path) -> None:
    AutoTokenizer.from_pretrained(str(source.parent), **_place(source)).save_pretrained(target)


if __name__ == "__main__":
    raise SystemExit(main())
