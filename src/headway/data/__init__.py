"""Data: token files, deterministic order, packing, mixing, collation, the stateful loader.

Names are loaded when they are first used, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.data.collate import PadCollator, default_collator
    from headway.data.counting import count_samples, count_targets, count_tokens
    from headway.data.datasets import PromptDataset, SyntheticDataset, TextDataset, TokenDataset
    from headway.data.loader import Window, WindowLoader
    from headway.data.mixing import MixedDataset
    from headway.data.order import SampleOrder, sample_rng
    from headway.data.packing import PackIndex, build_packs, load_packs
    from headway.data.text import inspect_tokens, prepare_tokens
    from headway.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
    from headway.data.tokens import TokenFile, TokenFileWriter

__all__ = [
    "ByteTokenizer",
    "MixedDataset",
    "PackIndex",
    "PadCollator",
    "PromptDataset",
    "SampleOrder",
    "SyntheticDataset",
    "TextDataset",
    "TokenDataset",
    "TokenFile",
    "TokenFileWriter",
    "Tokenizer",
    "Window",
    "WindowLoader",
    "build_packs",
    "count_samples",
    "count_targets",
    "count_tokens",
    "default_collator",
    "inspect_tokens",
    "load_packs",
    "load_tokenizer",
    "prepare_tokens",
    "sample_rng",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "collate": ("PadCollator", "default_collator"),
        "counting": ("count_samples", "count_targets", "count_tokens"),
        "datasets": ("PromptDataset", "SyntheticDataset", "TextDataset", "TokenDataset"),
        "loader": ("Window", "WindowLoader"),
        "mixing": ("MixedDataset",),
        "order": ("SampleOrder", "sample_rng"),
        "packing": ("PackIndex", "build_packs", "load_packs"),
        "text": ("inspect_tokens", "prepare_tokens"),
        "tokenizer": ("ByteTokenizer", "Tokenizer", "load_tokenizer"),
        "tokens": ("TokenFile", "TokenFileWriter"),
    },
)
