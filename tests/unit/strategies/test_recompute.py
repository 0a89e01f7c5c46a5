"""Recomputation: the same numbers from fewer saved bytes, for every kind of model."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from headway.errors import ConfigError
from headway.models import decoder, recomputed
from headway.strategies import recompute
from headway.strategies.forwards import put_back
from headway.strategies.recompute import enable
from headway.testing import tiny_decoder, tiny_llama, tiny_trainer

POLICIES = ("selective", "every_2", "block")


class Alive(TorchDispatchMode):
    """Counts the bytes made inside that still exist: what the backward will need."""

    def __init__(self):
        super().__init__()
        self._made = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def num_bytes(self):
        return sum(size for storage, size in self._made.values() if not storage.expired())


class Stacked(nn.Module):
    """Blocks, and no switch to recompute them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
            self.drop = nn.Dropout(0.2)

        def forward(self, x):
            return x + self.drop(self.down(nn.functional.gelu(self.up(x))))

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(258, 16)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.head = nn.Linear(16, 258)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss}


MODELS = {
    "decoder": lambda: tiny_decoder(num_layers=4, dropout=0.2),
    "llama": lambda: tiny_llama(num_hidden_layers=4, attention_dropout=0.2),
    "any": Stacked,
}


def measure(model):
    """(loss, gradients, bytes kept for the backward) of one forward and backward."""
    ids = torch.arange(96).view(2, 48)
    torch.manual_seed(5)
    with Alive() as alive:
        loss = model(input_ids=ids, labels=ids)["loss"]
    num_bytes = alive.num_bytes()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], num_bytes


@pytest.mark.parametrize("kind", MODELS)
def test_policies_keep_less_and_give_the_same_bits(kind):
    torch.manual_seed(0)
    plain = MODELS[kind]()
    loss, gradients, kept = measure(copy.deepcopy(plain))
    sizes = {}
    for policy in POLICIES:
        model = copy.deepcopy(plain)
        enable(model, policy)
        again, made, sizes[policy] = measure(model)
        assert torch.equal(loss, again), policy
        assert all(map(torch.equal, gradients, made)), policy
        assert list(model.state_dict()) == list(plain.state_dict())
    assert sizes["block"] < min(sizes["selective"], sizes["every_2"])
    assert max(sizes["selective"], sizes["every_2"]) < 0.8 * kept


@pytest.mark.parametrize("asks_for_each", [False, True])
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_compiled_graphs_recompute_what_joined_projections_make(scope, asks_for_each, monkeypatch):
    """As on a GPU, where the decoder's MLP is two functions of its own; also as on older torch."""
    monkeypatch.setattr(decoder, "joins", lambda *_: True)
    needed = recomputed._KEEPS_FUNCTIONS
    if needed and not asks_for_each:
        pytest.skip("this torch keeps what functions make, unless each operation is asked for")
    monkeypatch.setattr(recomputed, "_KEEPS_FUNCTIONS", asks_for_each)

    def bytes_kept(policy):
        torch.compiler.reset()
        model = tiny_decoder(hidden_size=32, intermediate_size=256)
        if policy is not None:
            enable(model, policy)
        parts = model.model.layers if scope == "blocks" else [model.model]
        for part in parts:
            part.compile(backend="aot_eager_decomp_partition", dynamic=False)
        own, kept = {p.data_ptr() for p in model.parameters()}, {}

        def note(tensor):
            if tensor.data_ptr() not in own:
                kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        ids = torch.arange(96).view(2, 48)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = model.model(ids)
        assert hidden.requires_grad
        return sum(kept.values())

    of_gate_and_up = 2 * 96 * 2 * 256 * 4
    plain = bytes_kept(None)
    assert plain > of_gate_and_up
    # Inputs of blocks, and what is outside of them, are far less than that.
    if scope == "blocks":
        assert bytes_kept("every_2") < plain - 0.5 * of_gate_and_up
    else:
        assert bytes_kept("block") < 0.3 * of_gate_and_up


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draws", ["nothing", "dropout", "adapter", "hook"])
def test_random_states_are_saved_where_blocks_draw(policy, draws, monkeypatch):
    """Saving them takes longer than starting a block's operations."""
    states = []

    def noted(function, *args, preserve_rng_state=True, **options):
        states.append(preserve_rng_state)
        plain = recomputed.recomputed
        return plain(function, *args, preserve_rng_state=preserve_rng_state, **options)

    monkeypatch.setattr(decoder, "recomputed", noted)
    monkeypatch.setattr(recompute, "recomputed", noted)
    torch.manual_seed(0)
    plain = tiny_decoder(num_layers=2, dropout=0.2 * (draws == "dropout"))
    model = copy.deepcopy(plain)
    enable(model, policy)
    if draws == "adapter":  # also one that comes afterwards
        for one in (plain, model):
            layer = one.model.layers[0].mlp
            layer.up_proj = nn.Sequential(layer.up_proj, nn.Dropout(0.5))
    if draws == "hook":
        for one in (plain, model):
            layer = one.model.layers[0].mlp
            layer.register_forward_hook(lambda module, args, out: nn.functional.dropout(out, 0.5))
    loss, gradients, _ = measure(plain)
    again, made, _ = measure(model)
    assert torch.equal(loss, again)
    assert all(map(torch.equal, gradients, made))
    assert states[0] == (draws != "nothing")


def test_every_n_leaves_out_the_others():
    model = Stacked()
    enable(model, "every_3")
    assert ["forward" in block.__dict__ for block in model.blocks] == [True, False, False, True]


def test_nothing_is_recomputed_without_gradients_or_training():
    model = Stacked()
    enable(model, "selective")
    calls = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        model(ids, ids)
    model.eval()
    model(ids, ids)["loss"].backward()
    assert len(calls) == 2 * 4
    model.train()
    model(ids, ids)["loss"].backward()
    assert len(calls) == 2 * 4 + 8


def test_a_transformers_model_makes_no_cache_while_it_is_recomputed():
    model = tiny_llama()
    enable(model, "every_2")
    ids = torch.arange(8).view(1, 8)
    assert model(input_ids=ids, labels=ids).past_key_values is None
    assert model(input_ids=ids, use_cache=True).past_key_values is not None


def test_a_model_leaves_as_it_came():
    model = Stacked()
    enable(model, "block")
    copied = copy.deepcopy(model)
    assert copied.blocks[0].forward.__self__ is copied.blocks[0]
    put_back(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    llama = tiny_llama()
    enable(llama, "selective")
    put_back(llama)
    assert not llama._forward_pre_hooks


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="Linear has neither gradient_checkpointing_enable"):
        enable(nn.Linear(2, 2))
    enable(nn.Linear(2, 2), may_lack_blocks=True)  # a stage of a pipeline
    with pytest.raises(ConfigError, match="use_reentrant=True is only for models"):
        enable(Stacked(), options={"use_reentrant": True})


def test_options_reach_the_models_own_switch():
    model = tiny_decoder()
    enable(model, options={"determinism_check": "none"})
    assert model.model.checkpointing["determinism_check"] == "none"
    assert model.model.checkpointing["use_reentrant"] is False


def keep_products():
    aten = torch.ops.aten
    return create_selective_checkpoint_contexts([aten.mm.default, aten.addmm.default])


@pytest.mark.parametrize("kind", MODELS)
def test_a_context_function_can_be_named(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_contexts", types.ModuleType("own_contexts"))
    sys.modules["own_contexts"].keep = keep_products
    torch.manual_seed(0)
    plain = MODELS[kind]()
    given, named = copy.deepcopy(plain), copy.deepcopy(plain)
    enable(given, options={"context_fn": keep_products})
    enable(named, options={"context_fn": "own_contexts.keep"})
    sizes = [measure(model)[2] for model in (given, named)]
    enable(plain)
    assert sizes[0] == sizes[1] > measure(plain)[2], "it says what is kept"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context_fn": "a string"}, r"context_fn must be a function .* got 'a string'"),
        ({"context_fn": "torch.utils.chekpoint.x"}, r"context_fn: .* has no 'chekpoint'; did you"),
        ({"context_fn": "no_such_module.f"}, r"context_fn: no module named 'no_such_module'"),
        ({"context_fn": 3}, r"context_fn must be a function .* got 3"),
        ({"context_fn": "os.getcwd"}, r"context_fn='os.getcwd': calling it failed"),
        ({"context_fn": lambda: (1, 2)}, r"context_fn must be .* returns 1 and 2"),
        ({"context_fn": keep_products, "use_reentrant": True}, r"context_fn cannot be used with"),
        ({"determinism_check": "defalt"}, r"determinism_check 'defalt'; did you mean 'default'"),
        ({"preserve_rng_state": "no"}, r"preserve_rng_state must be True or False, got 'no'"),
    ],
)
def test_options_that_torch_would_fail_on_are_refused(options, says):
    with pytest.raises(ConfigError, match=rf"gradient_checkpointing_kwargs.*{says}"):
        enable(tiny_decoder(), options=options)


def losses_of(folder, **arguments):
    trainer = tiny_trainer(folder, max_steps=3, **arguments)
    trainer.train()
    return [r["loss"] for r in trainer.state.log_history if "loss" in r], trainer


@pytest.mark.parametrize("policy", POLICIES)
def test_training_with_a_policy_is_the_same_training(tmp_path, policy):
    plain, _ = losses_of(tmp_path / "plain")
    recomputed, _ = losses_of(
        tmp_path / policy, gradient_checkpointing=True, gradient_checkpointing_policy=policy
    )
    assert recomputed == plain


def test_the_users_own_function_wins(tmp_path, caplog):
    seen = []
    trainer = tiny_trainer(
        tmp_path, max_steps=1, gradient_checkpointing=True, gradient_checkpointing_policy="every_2"
    )
    trainer._enable_activation_checkpoint_fn = lambda rank, module: seen.append((rank, module))
    trainer.train()
    assert seen == [(0, trainer.model)]
    assert "enable_activation_checkpoint_fn decides" in caplog.text
    assert not any("forward" in module.__dict__ for module in trainer.model.modules())
