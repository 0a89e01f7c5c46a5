"""Models and data small enough for a test, with something in them to learn.

Owns: a decoder, a transformers Llama, token samples and text files, all made from a seed.
Does not own: real models and data loading (models/, data/).
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import missing_extra

if TYPE_CHECKING:
    import torch

    from headway.models import Decoder

# Few enough that a model learns the order of all of them within a few dozen steps.
_NUM_SYMBOLS = 32

_SUBJECTS = ("the boat", "a gull", "the keeper", "our crew", "the tide", "a small light")
_VERBS = ("finds", "follows", "passes", "waits for", "turns from", "remembers")
_OBJECTS = ("the harbour", "a long wave", "the north wind", "an old chart", "the morning", "land")


def tiny_decoder(**overrides: Any) -> Decoder:
    """Headway's own decoder in miniature; `overrides` are fields of `DecoderConfig`."""
    from headway.models import Decoder, DecoderConfig

    fields: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 64,
        "max_seq_len": 128,
    }
    return Decoder(DecoderConfig(**{**fields, **overrides}))


def tiny_llama(**overrides: Any) -> torch.nn.Module:
    """A `transformers.LlamaForCausalLM` made from a configuration; nothing is downloaded."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise missing_extra("transformers", "transformers", "tiny_llama") from error
    fields: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**{**fields, **overrides}))
    return model


def tiny_dataset(
    num_samples: int = 64,
    sequence_length: int = 32,
    vocab_size: int = 258,
    seed: int = 0,
    ragged: bool = False,
) -> list[dict[str, list[int]]]:
    """Samples with `input_ids` and equal `labels`, in which each token decides the next one.

    All samples of one seed walk the same hidden cycle of tokens from different starts, so a
    model that learns the cycle brings the loss near zero. With `ragged` the lengths vary from
    2 to `sequence_length`.
    """
    generator = random.Random(seed)
    cycle = generator.sample(range(vocab_size), min(_NUM_SYMBOLS, vocab_size))
    samples = []
    for _ in range(num_samples):
        length = generator.randint(min(2, sequence_length), sequence_length)
        start = generator.randrange(len(cycle))
        length = length if ragged else sequence_length
        tokens = [cycle[(start + offset) % len(cycle)] for offset in range(length)]
        samples.append({"input_ids": tokens, "labels": list(tokens)})
    return samples


def tiny_text_files(
    directory: str | os.PathLike[str], num_files: int = 3, num_lines: int = 40, seed: int = 0
) -> list[Path]:
    """Write `num_files` text files of simple sentences below `directory`; return their paths."""
    generator = random.Random(seed)
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(num_files):
        lines = [
            " ".join(map(generator.choice, (_SUBJECTS, _VERBS, _OBJECTS))) + "."
            for _ in range(num_lines)
        ]
        path = root / f"text-{number}.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(path)
    return paths
