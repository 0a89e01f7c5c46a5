"""`sdpa_backend: flash4` around its kernels, for which a formula stands in here."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway import TrainingArguments
from headway.errors import ConfigError
from headway.models import Decoder, DecoderConfig, attention
from headway.models.kernels import flash4
from headway.models.kernels.heads import split
from headway.models.rope import apply_rope
from headway.strategies import recompute
from headway.strategies.pipeline.layout import Layout
from headway.strategies.pipeline.part import ModelPart
from headway.strategies.pipeline.placement import find_ties
from headway.strategies.pipeline.splitter import split_automatically
from headway.strategies.torch_settings import check_attention
from headway.testing import tiny_decoder

GPU = torch.device("cuda:0")


def scores_of(q, k):
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / q.shape[3] ** 0.5
    return scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), float("-inf"))


def forward(q, k, v):
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    scores = scores_of(q, k)
    return torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), v), scores.logsumexp(-1)


def backward(grad, q, k, v, out, sums):
    """From the saved outputs alone, as the kernels do."""
    with torch.enable_grad():
        parts = [part.detach().requires_grad_() for part in (q, k, v)]
        chances = (scores_of(*parts[:2]) - sums[..., None]).exp()
        wide = parts[2].repeat_interleave(q.shape[2] // k.shape[2], 2)
        (dv,) = torch.autograd.grad(
            torch.einsum("bnst,btnd->bsnd", chances, wide), parts[2], grad, retain_graph=True
        )
        each = torch.einsum("bsnd,btnd->bnst", grad, wide.detach())
        along = (grad * out).sum(-1).transpose(1, 2)[..., None]
        into = chances.detach() * (each - along)
        hidden = scores_of(*parts[:2])
        dq, dk = torch.autograd.grad(hidden, parts[:2], into)
    return dq, dk, dv


@pytest.fixture
def calls(monkeypatch):
    """Lets the operation run on the CPU; the list has the name of every call."""
    names, library = [], torch.library.Library("headway", "IMPL")

    def counting(name, function):
        def call(*given):
            names.append(name)
            return tuple(part.contiguous() for part in function(*given))

        return call

    def joined_backward(grad, joined, out, sums, cos, sin, n, k):
        names.append("joined backward")
        dq, dk, dv = backward(grad, *split(joined, n, k), out, sums)
        return torch.cat([apply_rope(dq, cos, -sin), apply_rope(dk, cos, -sin), dv], 2).flatten(2)

    def project(x, weight, bias, cos, sin, n, k):
        q, key, v = split(F.linear(x, weight, bias), n, k)
        return torch.cat([apply_rope(q, cos, sin), apply_rope(key, cos, sin), v], 2).flatten(2)

    library.impl("flash4", counting("forward", forward), "CPU")
    library.impl("flash4_backward", counting("backward", backward), "CPU")
    library.impl("flash4_joined_backward", joined_backward, "CPU")
    library.impl("project_heads", project, "CPU")
    monkeypatch.setattr(attention, "takes_flash4", lambda device, dtype: True)
    yield names
    library._destroy()


def small_decoder(**options):
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, **options
    )
    return Decoder(config)


def grads_of(model, ids, **inputs):
    model.zero_grad()
    loss = model(ids, ids, **inputs).loss
    loss.backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return loss.detach(), {name: p.grad.clone() for name, p in trained}


def test_the_operation_has_the_gradients_of_attention(calls):
    torch.manual_seed(0)
    q = torch.randn(2, 9, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 9, 2, 8, requires_grad=True) for _ in range(2))
    wanted = F.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    found = flash4.attend_flash4(q, k, v)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(wanted, (q, k, v), grad)
    ):
        torch.testing.assert_close(one, other)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_decoder_trains_alike(calls, compiled):
    model, ids = small_decoder(), torch.randint(64, (2, 12))
    wanted_loss, wanted = grads_of(model, ids)
    assert not calls
    model.model.flash4 = True
    if compiled:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    loss, grads = grads_of(model, ids)
    assert sorted(calls) == ["backward"] * 2 + ["forward"] * 2
    torch.testing.assert_close(loss, wanted_loss)
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("frozen", [(), ("q_proj", "v_proj"), ("self_attn",)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_decoder_trains_alike_with_joined_projections(calls, monkeypatch, frozen, bias):
    """As on a GPU, where compiled blocks join them."""
    torch.compiler.reset()  # graphs of other cases count against the limit of the function
    model, ids = small_decoder(attention_bias=bias), torch.randint(64, (2, 12))
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in frozen))
        if name.endswith("bias"):
            nn.init.normal_(weight)
    wanted_loss, wanted = grads_of(model, ids)
    model.model.flash4 = True
    joins = attention.joins
    monkeypatch.setattr(
        attention, "joins", lambda x, *layers: len(layers) == 3 or joins(x, *layers)
    )
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    loss, grads = grads_of(model, ids)
    assert sorted(calls) == ["forward"] * 2 + ["joined backward"] * 2
    torch.testing.assert_close(loss, wanted_loss)
    torch.testing.assert_close(grads, wanted)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, ids).loss, wanted_loss)


def test_what_has_a_mask_goes_by_other_kernels_and_is_told_once(calls, caplog):
    model, ids = small_decoder(), torch.randint(64, (2, 12))
    model.model.flash4 = True
    documents = torch.arange(12).expand(2, -1) // 5
    for _ in range(2):
        grads_of(model, ids, document_ids=documents)
    assert not calls
    assert caplog.text.count("sdpa_backend='flash4': attention with a mask") == 1
    model.eval()
    with torch.no_grad():
        model.generate(ids[:, :4], max_new_tokens=3)
    assert not calls


def test_it_is_told_while_a_whole_model_is_compiled(calls, caplog):
    model, ids = small_decoder(), torch.randint(64, (2, 12))
    model.model.flash4 = True
    model.model.compile(backend="aot_eager", fullgraph=True)
    model(ids, ids, document_ids=torch.arange(12).expand(2, -1) // 5)
    assert "sdpa_backend='flash4': attention with a mask" in caplog.text and not calls


def test_selective_recomputation_keeps_attention(calls):
    model, ids = small_decoder(), torch.randint(64, (2, 12))
    model.model.flash4 = True
    wanted = grads_of(model, ids)
    calls.clear()
    recompute.enable(model, "selective")
    torch.testing.assert_close(grads_of(model, ids), wanted)
    assert sorted(calls) == ["backward"] * 2 + ["forward"] * 2


# Refusals


def check(tmp_path, monkeypatch, model=None, device=GPU, capability=(9, 0), **options):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda given: capability)
    options = {"mixed_precision": "bf16", **options}
    args = TrainingArguments(output_dir=str(tmp_path), sdpa_backend="flash4", **options)
    check_attention(args, model or tiny_decoder(), device, lambda: None)


@pytest.fixture(autouse=True)
def unknown_package(monkeypatch):
    """Nothing of the real package, or of one that stands in for it, outlives a test."""

    def names():
        return [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]

    before = {name: sys.modules.pop(name) for name in names()}
    monkeypatch.setattr(flash4, "_loaded", None)
    yield
    for name in names():
        del sys.modules[name]
    sys.modules.update(before)


def write_package(folder, text):
    package = folder / "flash_attn" / "cute"
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "interface.py").write_text(text)


class Other(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


@pytest.mark.parametrize(("given", "told"), [
    ({"model": Other()}, "for Headway's decoder, not for Other.*attn_implementation"),
    ({"device": torch.device("cpu")}, "cannot run on cpu: .*capability 9.x or 10.x"),
    ({"capability": (8, 0)}, "cannot run on cuda:0: "),
    ({"mixed_precision": None}, "needs half precision.*computes in float32.*mixed_precision: bf16"),
    ({"model": tiny_decoder(hidden_size=48, num_heads=4)}, "heads of width 12; allowed: multi"),
    ({"model": tiny_decoder(attention="flex")}, "attention='flex' ask for different kernels"),
    ({}, r"needs the package 'flash-attn-4'.*pip install 'headway\[flash4\]'"),
])  # fmt: skip
def test_it_is_refused_where_it_cannot_run(tmp_path, monkeypatch, given, told):
    # Of this name there is also a package of older kernels, without these.
    (tmp_path / "old" / "flash_attn").mkdir(parents=True)
    (tmp_path / "old" / "flash_attn" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "old")
    with pytest.raises(ConfigError, match=told):
        check(tmp_path, monkeypatch, **given)


FUNCTIONS = "_flash_attn_fwd = _flash_attn_bwd = None\n"


def test_the_package_keeps_its_kernels_beside_compiled_code(tmp_path, monkeypatch, caplog):
    write_package(tmp_path, FUNCTIONS + "import os\nSEEN = dict(os.environ)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(os.environ)
    check(tmp_path, monkeypatch, torch_compile_cache=str(tmp_path / "kept"))
    seen = flash4._loaded.SEEN
    assert seen["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert seen["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "kept" / "flash4")
    assert dict(os.environ) == before
    assert not caplog.records


def test_where_no_folder_can_be_used_the_package_keeps_nothing(tmp_path, monkeypatch, caplog):
    write_package(tmp_path, FUNCTIONS + "import os\nSEEN = dict(os.environ)\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "file").write_text("")
    check(tmp_path, monkeypatch, torch_compile_cache=str(tmp_path / "file" / "below"))
    assert "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" not in flash4._loaded.SEEN
    assert "nothing is kept of flash4" in caplog.text


@pytest.mark.parametrize(("text", "told"), [
    ("import cutlass_is_not_here\n", "cannot be used: No module named 'cutlass_is_not_here'"),
    ("raise OSError('no libcuda')\n", "cannot be used: no libcuda"),
    ("", "cannot be used: it has no _flash_attn_fwd or _flash_attn_bwd"),
])  # fmt: skip
def test_a_package_that_cannot_be_used(tmp_path, monkeypatch, text, told):
    write_package(tmp_path, text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=told):
        check(tmp_path, monkeypatch)


@pytest.mark.parametrize("tied", [False, True])
def test_parts_of_a_pipeline_are_known_as_a_decoder(tmp_path, monkeypatch, tied):
    write_package(tmp_path, FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    model = tiny_decoder(num_layers=4, tie_embeddings=tied)
    for per_rank in (1, 2):
        layout = Layout(2, per_rank)
        stages = split_automatically(model, layout.num_stages)
        ties = find_ties(model, stages, layout)
        for place in range(2):
            own = [stages[number] for number in layout.stages_of(place)]
            check(tmp_path, monkeypatch, model=ModelPart(model, own, ties, place))


def test_no_second_derivatives(calls):
    parts = [torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3)]
    seen = flash4.attend_flash4(*parts)
    (grad,) = torch.autograd.grad(seen.square().sum(), parts[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
