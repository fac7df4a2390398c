"""The model whose start is measured, and what every process does with it, whoever loads its weights.

A Llama of random weights in bfloat16, made from a configuration alone: `python -m benchmarks.startup_model
DIRECTORY SIZE TOKENS` writes its files as `save_pretrained` does, and beside them what the model says before
it was ever saved (`expected.json`), which no loader has had a part in. A skeleton has no memory for its
weights; what the files do not hold (the frequencies of rotary embeddings, weights that are another's) is the
same for all who fill one.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.states import Leaf
from benchmarks.systems.limit import Limit

EXPECTED = "expected.json"
MODEL_DIRECTORY, RAW_DIRECTORY = "model", "raw"
"""Where in the directory the model lies, and the file of the raw limit."""
WRITING_WAY = "threads buffered 8 MiB x1"
FILES = 4
PROMPT = (17, 256, 1023, 5, 900, 77, 3000, 42)
SEED = 2024
SPREAD = 0.1
"""The deviation of the weights: with the usual 0.02 an untrained model says one token again and again."""


@dataclass(frozen=True, slots=True)
class Size:
    """The extents of a model whose embeddings are tied: of 16 layers with 8 heads of keys."""

    hidden: int
    feed_forward: int
    heads: int
    vocabulary: int


SIZES = {
    "tiny": Size(256, 256, 8, 4008),  # vLLM has no kernels for heads of less than 32
    "half-gb": Size(1024, 4096, 16, 32064),
    "1gb": Size(1536, 6144, 24, 64128),
}


def main() -> None:
    directory, size, tokens = sys.argv[1:]
    write(Path(directory), SIZES[size], int(tokens))


def write(directory: Path, size: Size, tokens: int) -> None:
    """Writes the model, what it says, and a raw file of as many bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    # In this dtype from the beginning: a cast would round the frequencies of the rotary embeddings, too.
    model = AutoModelForCausalLM.from_config(_configuration(size), dtype=torch.bfloat16).eval()
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    files = directory / MODEL_DIRECTORY
    model.save_pretrained(files, max_shard_size=-(-weight_bytes // FILES))
    said = say(model, tokens)
    model_bytes = sum(file.stat().st_size for file in files.glob("*.safetensors"))
    expected = {"tokens": said, "digest": digest(model), "bytes": model_bytes}
    limit = Limit()
    limit.prepare(WRITING_WAY)
    limit.save(directory / RAW_DIRECTORY, limit.build(raw_leaves(model_bytes)))
    measure.make_durable(directory)
    (directory / EXPECTED).write_text(json.dumps(expected))


def _configuration(size: Size) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=16,
        num_attention_heads=size.heads,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        initializer_range=SPREAD,
        bos_token_id=None,
        eos_token_id=None,  # so that every run says as many tokens
    )


def raw_leaves(model_bytes: int) -> list[Leaf]:
    """The state of the raw limit: as many bytes as the model's files have."""
    return [Leaf("raw", (model_bytes,), "uint8")]


# ---- what every process does -------------------------------------------------------------------


def skeleton(directory: Path) -> Any:
    """The model without weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    configuration = LlamaConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(configuration)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(configuration)  # its frequencies are in no file
    return model.eval()


def fill(model: Any, tensors: dict[str, Any]) -> None:
    """Makes loaded tensors the weights of a skeleton, without a copy.

    Raises:
        ValueError: They are not those that it needs.
    """
    _, unknown = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    named = chain(model.named_parameters(), model.named_buffers())
    lacking = [name for name, tensor in named if tensor.is_meta]
    if unknown or lacking:
        raise ValueError(f"the model has no {unknown[:3]}, and the files have no {lacking[:3]}")


class _Ear:
    """What transformers hands the prompt to, and then every token."""

    def __init__(self, on_token: Callable[[], None]) -> None:
        self.heard: list[int] = []
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if not self._is_prompt:
            self.heard += value.flatten().tolist()
            self._on_token()
        self._is_prompt = False

    def end(self) -> None:
        pass


def say(model: Any, tokens: int, on_token: Callable[[], None] = lambda: None) -> list[int]:
    """What the model says to the prompt, each time the likeliest token; `on_token` is called after each."""
    import torch

    ear, prompt = _Ear(on_token), torch.tensor([PROMPT])
    everything = torch.ones_like(prompt)
    model.generate(prompt, attention_mask=everything, max_new_tokens=tokens, do_sample=False, streamer=ear)
    return ear.heard


def digest(model: Any) -> str:
    """Of every weight and buffer: its name, dtype, shape and bytes."""
    import torch

    total = 0
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers())):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy(), total)
    return f"{total:08x}"


if __name__ == "__main__":
    main()
