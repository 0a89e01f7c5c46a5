"""The reference decoder, its loss, text generation, and Hugging Face folders.

Names load on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.models.cache import KVCache
    from headway.models.config import DecoderConfig
    from headway.models.decoder import Decoder, DecoderOutput
    from headway.models.generation import generate
    from headway.models.hf import (
        hf_config_of,
        load_causal_lm,
        load_pretrained,
        load_state,
        save_pretrained,
        state_for_export,
    )
    from headway.models.hf_config import from_hf_config, to_hf_config
    from headway.models.loss import (
        chunked_cross_entropy,
        count_targets,
        cross_entropy_sum,
        shift_labels,
    )
    from headway.models.memory import MemoryEstimate, estimate_training_memory

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "KVCache",
    "MemoryEstimate",
    "chunked_cross_entropy",
    "count_targets",
    "cross_entropy_sum",
    "estimate_training_memory",
    "from_hf_config",
    "generate",
    "hf_config_of",
    "load_causal_lm",
    "load_pretrained",
    "load_state",
    "save_pretrained",
    "shift_labels",
    "state_for_export",
    "to_hf_config",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "cache": ("KVCache",),
        "config": ("DecoderConfig",),
        "decoder": ("Decoder", "DecoderOutput"),
        "generation": ("generate",),
        "hf": (
            "hf_config_of",
            "load_causal_lm",
            "load_pretrained",
            "load_state",
            "save_pretrained",
            "state_for_export",
        ),
        "hf_config": ("from_hf_config", "to_hf_config"),
        "loss": ("chunked_cross_entropy", "count_targets", "cross_entropy_sum", "shift_labels"),
        "memory": ("MemoryEstimate", "estimate_training_memory"),
    },
)
