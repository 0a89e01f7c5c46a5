"""The memory estimate counts what autograd really saves."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from headway.errors import ConfigError
from headway.models import Decoder, DecoderConfig, estimate_training_memory
from headway.models.memory import saved_activation_bytes


def measure_saved_bytes(model: Decoder, ids: torch.Tensor, **inputs: Any) -> int:
    """Bytes of distinct storages that autograd holds, the model's own tensors left out."""
    own = [*model.parameters(), *model.buffers()]
    seen = {tensor.untyped_storage().data_ptr(): 0 for tensor in own}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage.nbytes())
        held.append(tensor)  # keeps the address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids, **inputs)
    return sum(seen.values())


@pytest.mark.parametrize("mixed", [None, "bf16"])
@pytest.mark.parametrize(
    "change",
    [{}, {"qk_norm": True}, {"num_kv_heads": 1, "tie_embeddings": True}, {"sliding_window": 32}],
)
def test_saved_activations(change: dict[str, Any], mixed: str | None) -> None:
    config = DecoderConfig(
        **{
            "vocab_size": 300,
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "intermediate_size": 160,
            **change,
        }
    )
    model, ids = Decoder(config), torch.randint(0, 300, (4, 128))
    cast = torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext()
    with cast:
        measured = measure_saved_bytes(model, ids)
    # Made in the loss's forward and kept outside autograd's own list.
    measured += ids.numel() * 64 * (2 if mixed else 4)
    estimate = saved_activation_bytes(
        config, batch_size=4, seq_len=128, mixed_precision=mixed, fused_kernels=False
    )
    assert estimate == pytest.approx(measured, rel=0.05)


def test_checkpointed_activations() -> None:
    config = DecoderConfig(vocab_size=300, hidden_size=64, num_layers=6, num_heads=4)
    model, ids = Decoder(config), torch.randint(0, 300, (2, 128))
    model.gradient_checkpointing_enable()
    measured = measure_saved_bytes(model, ids) + ids.numel() * 64 * 4
    estimate = saved_activation_bytes(
        config, batch_size=2, seq_len=128, gradient_checkpointing=True, fused_kernels=False
    )
    assert estimate == pytest.approx(measured, rel=0.05)


def test_estimate_moves_the_right_way() -> None:
    config = DecoderConfig(vocab_size=32000, hidden_size=512, num_layers=8, num_heads=8)

    def total(**change: Any) -> int:
        options: dict[str, Any] = {"batch_size": 8, "seq_len": 1024, **change}
        return estimate_training_memory(config, **options).total_bytes

    parts = estimate_training_memory(config, batch_size=8, seq_len=1024)
    assert parts.weights_bytes == 4 * config.num_parameters()
    assert parts.optimizer_bytes == 8 * config.num_parameters()
    held = parts.weights_bytes + parts.optimizer_bytes + parts.activations_bytes
    assert parts.total_bytes > held
    assert total(gradient_checkpointing=True) < total(mixed_precision="bf16") < total()
    assert total(batch_size=16) > 1.5 * total(batch_size=8) - parts.total_bytes
    assert total(accumulation_steps=2) > total()
    assert total(document_mask=True) > total()
    assert total(dtype_bytes=2) < total()
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        total(mixed_precision="bf61")
