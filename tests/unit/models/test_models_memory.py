"""The memory estimate counts what autograd really saves."""

from __future__ import annotations

import contextlib
from dataclasses import replace
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


JOB_A = DecoderConfig(
    vocab_size=32768, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12,
    max_seq_len=1024,
)  # fmt: skip
JOB_B = DecoderConfig(
    vocab_size=32768, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
    num_kv_heads=8, max_seq_len=4096,
)  # fmt: skip
BF16 = {"mixed_precision": "bf16"}
RECOMPUTED = {**BF16, "gradient_checkpointing": True}
HALF_WEIGHTS = {"dtype_bytes": 2, "optimizer_bytes_per_param": 4}


@pytest.mark.parametrize(
    ("config", "batch", "gib", "options"),
    [
        (JOB_A, 32, 10.40, {**BF16, "compiled": True}),
        (JOB_B, 4, 29.42, {**BF16, "compiled": True}),
        (JOB_B, 4, 18.26, {**RECOMPUTED, "compiled": True}),
        (JOB_B, 4, 21.98, {**HALF_WEIGHTS, "compiled": True}),
        (replace(JOB_B, loss_chunk_tokens=1024), 4, 29.42, {**BF16, "compiled": True}),
        (replace(JOB_B, loss_chunk_tokens=16384), 4, 29.67, {**BF16, "compiled": True}),
        (JOB_B, 4, 40.17, BF16),
        (JOB_B, 4, 18.40, RECOMPUTED),
    ],
)
def test_estimates_are_what_a_gpu_was_seen_to_take(
    config: DecoderConfig, batch: int, gib: float, options: dict[str, Any]
) -> None:
    """An H200, 2026-11-16: gpu-training and memory_options in benchmarks/results."""
    found = estimate_training_memory(
        config, batch_size=batch, seq_len=config.max_seq_len, **options
    )
    assert found.total_bytes / 2**30 == pytest.approx(gib, rel=0.025)


def test_masks_that_compiled_blocks_do_not_write_are_not_counted() -> None:
    given: dict[str, Any] = {"batch_size": 1, "seq_len": 16384, **BF16, "compiled": True}
    config = replace(JOB_B, max_seq_len=16384)
    plain = estimate_training_memory(config, **given).total_bytes
    assert estimate_training_memory(config, document_mask=True, **given).total_bytes == plain
    dense = replace(config, attention="sdpa")
    masked = estimate_training_memory(dense, document_mask=True, **given).total_bytes
    assert masked >= plain + 2 * 16384**2
    given["compiled"] = False
    plain = estimate_training_memory(config, **given).total_bytes
    masked = estimate_training_memory(config, document_mask=True, **given).total_bytes
    assert masked >= plain + 2 * 16384**2


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
