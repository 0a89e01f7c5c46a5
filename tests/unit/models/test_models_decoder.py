"""Decoder: names, counts, masks, meta construction, activation checkpointing, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.models import Decoder, DecoderConfig, attention

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 64,
    "initializer_range": 0.1,
}


def build(**change: Any) -> Decoder:
    torch.manual_seed(11)
    return Decoder(**{**SMALL, **change})


def tokens(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 96, (batch, length), generator=torch.Generator().manual_seed(5))


def gradients(model: Decoder, *inputs: Any, **options: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(*inputs, **options).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_embeddings": True},
        {"qk_norm": True, "head_dim": 24, "num_kv_heads": 1},
        {"attention_bias": True, "intermediate_size": 100},
    ],
)
def test_num_parameters_is_exact(change: dict[str, Any]) -> None:
    model = build(**change)
    assert model.config.num_parameters() == sum(p.numel() for p in model.parameters())


def test_unknown_and_missing_fields_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Decoder(vocab_size=9, hidden_siz=64, num_layers=1, num_heads=1)
    assert "did you mean 'hidden_size'" in str(caught.value)
    assert "'hidden_size' is required" in str(caught.value)
    with pytest.raises(ConfigError, match="not both"):
        Decoder(DecoderConfig(**SMALL), dropout=0.1)


def test_future_tokens_do_not_matter() -> None:
    model, ids = build(), tokens()
    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 96
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.allclose(before[:, 15:], after[:, 15:])


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_packed_documents_equal_documents_alone(attention: str, window: int | None) -> None:
    model = build(attention=attention, sliding_window=window)
    lengths = [7, 12, 5]
    ids = tokens(1, sum(lengths))
    document_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, document_ids=document_ids, position_ids=position_ids).logits
    alone = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_packed_documents_train_as_documents_alone() -> None:
    model, ids = build(), tokens(1, 20)
    labels = ids.clone()
    labels[:, 8] = -100  # the first token of the second document has nothing to predict it
    packed = gradients(
        model,
        ids,
        labels,
        document_ids=(torch.arange(20) >= 8).long()[None],
        position_ids=torch.cat((torch.arange(8), torch.arange(12)))[None],
    )
    model.zero_grad()
    for part in ids.split([8, 12], 1):
        model(part, part, num_items_in_batch=18).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_flex_equals_sdpa_with_padding_and_window() -> None:
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    mask[0, :6] = 0
    for window in (None, 5):
        flex = build(attention="flex", sliding_window=window)(ids, attention_mask=mask).logits
        sdpa = build(sliding_window=window)(ids, attention_mask=mask).logits
        torch.testing.assert_close(flex, sdpa, rtol=1e-5, atol=1e-5)


def test_padding_does_not_reach_real_tokens() -> None:
    model, ids = build(), tokens(1, 20)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, position_ids=positions).logits[:, 5:]
        alone = model(ids[:, 5:]).logits
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_key_heads_written_out_train_as_grouped_ones(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out they are on a GPU, for kernels that do not group heads."""
    model, ids = build(), tokens()
    options = {"document_ids": torch.arange(24).expand(2, 24) // 9} if masked else {}
    grouped = gradients(model, ids, ids, **options)
    monkeypatch.setattr(attention, "_groups_heads", lambda *given, **named: False)
    for name, found in gradients(model, ids, ids, **options).items():
        torch.testing.assert_close(found, grouped[name], rtol=1e-4, atol=1e-6, msg=name)


def test_flex_refuses_to_train_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="attention='flex'"):
        build(attention="flex")(tokens(), tokens())


def test_meta_construction() -> None:
    with torch.device("meta"):
        model = build(tie_embeddings=True)
    assert all(t.is_meta for t in model.state_dict().values())
    model.to_empty(device="cpu")
    torch.manual_seed(11)
    model.init_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = build(tie_embeddings=True)
    assert torch.equal(model(tokens()).logits, expected(tokens()).logits)


def test_state_dict_has_no_rotary_tables_and_a_cast_keeps_them_exact() -> None:
    model = build()
    assert not any("rotary" in name for name in model.state_dict())
    exact = model.model.rotary_emb.cos.clone()
    model.to(torch.bfloat16).float()
    assert torch.equal(model.model.rotary_emb.cos, exact)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_gives_the_same_gradients(dropout: float) -> None:
    model, ids = build(dropout=dropout).train(), tokens()
    torch.manual_seed(0)
    plain = gradients(model, ids, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    torch.manual_seed(0)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hook = model.model.layers[0].self_attn.register_forward_hook(count)
    recomputed = gradients(model, ids, ids)
    hook.remove()
    assert calls == 2
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    with pytest.raises(ConfigError, match="did you mean 'use_reentrant'"):
        model.gradient_checkpointing_enable({"use_reentrnt": False})


class Adapter(torch.nn.Module):
    """Of somebody else, who draws random numbers."""

    def __init__(self, base: torch.nn.Linear, dropout: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.base, self.dropout = base, dropout
        self.more = torch.nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.more(self.dropout(x))


def drop_half(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("comes_later", [False, True])
@pytest.mark.parametrize("dropout", [torch.nn.Dropout(0.5), drop_half])
def test_adapters_that_draw_are_recomputed_with_the_same_numbers(
    dropout: Callable[[Tensor], Tensor], comes_later: bool
) -> None:
    def grads_of(recompute: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Decoder(vocab_size=96, hidden_size=32, num_layers=2, num_heads=4).train()
        if recompute and comes_later:
            model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            layer.mlp.up_proj = Adapter(layer.mlp.up_proj, dropout)
        if recompute and not comes_later:
            model.gradient_checkpointing_enable()
        torch.manual_seed(7)
        ids = torch.arange(32).view(2, 16)
        return list(torch.autograd.grad(model(ids, ids).loss, list(model.parameters())))

    assert all(map(torch.equal, grads_of(True), grads_of(False)))


def test_dropout_only_in_training() -> None:
    model, ids = build(dropout=0.5), tokens()
    with torch.no_grad():
        assert not torch.equal(model.train()(ids).logits, model(ids).logits)
        assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_too_long_a_sequence_and_a_token_out_of_range() -> None:
    model = build()
    with pytest.raises(ConfigError, match=r"65 tokens .* max_seq_len=64"):
        model(tokens(1, 65))
    model.check_token_range(tokens())
    with pytest.raises(ConfigError, match=r"token id 96 .*vocab_size=96"):
        model.check_token_range(torch.tensor([[1, 96]]))


def test_output_indexes_like_a_tuple() -> None:
    model, ids = build(), tokens()
    out = model(ids, ids, return_logits=True)
    assert out[0] is out.loss and out[1] is out["logits"] and len(out) == 2
    assert model(ids, ids).logits is None
    only = model(ids)
    assert only.loss is None and only[0] is only.logits
    leaves, spec = torch.utils._pytree.tree_flatten(out)
    assert (
        leaves[0] is out.loss and torch.utils._pytree.tree_unflatten(leaves, spec).loss is leaves[0]
    )


def test_autocast_trains_in_float32_weights() -> None:
    model, ids = build(qk_norm=True), tokens()
    exact = gradients(model, ids, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, ids).loss
    assert loss.dtype == torch.float32
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        cosine = torch.cosine_similarity(parameter.grad.flatten(), exact[name].flatten(), 0)
        assert cosine > 0.99, name


def test_compiled_model_has_the_same_gradients() -> None:
    model, ids = build(loss_chunk_tokens=16), tokens()
    expected = gradients(model, ids, ids)
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(ids, ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 40])
def test_flex_trains_as_sdpa_on_a_gpu(window: int | None) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "max_seq_len": 256, "sliding_window": window}
    ids = torch.randint(0, 96, (2, 256), device="cuda")
    document_ids = (torch.arange(256, device="cuda") // 70).expand(2, -1)
    with torch.device("cuda"):
        flex, sdpa = build(attention="flex", **sizes), build(**sizes)
    sdpa.load_state_dict(flex.state_dict())
    expected = gradients(sdpa, ids, ids, document_ids=document_ids)
    for name, grad in gradients(flex, ids, ids, document_ids=document_ids).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-2, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_compiled_model_trains_as_eager_under_autocast_on_a_gpu(attention: str) -> None:
    with torch.device("cuda"):
        model = build(hidden_size=256, max_seq_len=256, attention=attention, loss_chunk_tokens=128)
        ids = torch.randint(0, 96, (2, 256))
    grads = []
    for call in (model, torch.compile(model)):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = call(ids, ids, document_ids=ids.new_zeros(2, 256)).loss
        loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert (grads[1][name] - grad).norm() < 0.06 * grad.norm(), name
