"""FSDP2 on real ranks: the same losses, norms and initial weights as one process."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.args import FSDP2TrainingArguments
from headway.data.counting import count_targets
from headway.data.loader import WindowLoader
from headway.data.windows import Window
from headway.dist import init_distributed, seed_all
from headway.dist.agreement import exchange
from headway.errors import ConfigError
from headway.models import load_causal_lm, save_pretrained
from headway.models.initial import blank_causal_lm
from headway.strategies.fsdp2 import FullyShardedStrategy
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice
from headway.strategies.source import ModelSource
from headway.testing import run_ranks, tiny_dataset, tiny_decoder, tiny_llama

CPU = torch.device("cpu")
NUM_STEPS, GLOBAL_BATCH, SEED = 5, 8, 3


@dataclass(frozen=True)
class Case:
    """One way of sharding one model."""

    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] = tiny_decoder
    accumulation: int = 1
    ready: bool = False
    recompute: bool = False
    fused: bool = False


def _sharing_layers() -> nn.Module:
    """Two layers have one matrix, two others one module, a fifth one the last norm's weight."""
    model = tiny_decoder(num_layers=6)
    layers: Any = model.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    layers[3].mlp = layers[1].mlp
    layers[4].input_layernorm.weight = model.model.norm.weight
    return model


def _ignore(event: str) -> None:
    pass


def _windows(rank: int, num_ranks: int, accumulation: int) -> list[tuple[Window, int]]:
    """This rank's rows of every global batch, which are of different lengths; and the count."""
    rows = tiny_dataset(NUM_STEPS * GLOBAL_BATCH, sequence_length=12)
    windows = []
    for step in range(NUM_STEPS):
        batch = torch.tensor(
            [row["input_ids"] for row in rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]]
        )
        labels = batch.clone()
        labels[::3, 5:] = -100
        own = slice(rank * GLOBAL_BATCH // num_ranks, (rank + 1) * GLOBAL_BATCH // num_ranks)
        micro = [
            {"input_ids": ids, "labels": targets}
            for ids, targets in zip(
                batch[own].chunk(accumulation), labels[own].chunk(accumulation), strict=True
            )
        ]
        count = sum(int(count_targets(one)) for one in micro)
        total = int(count_targets({"input_ids": batch, "labels": labels}))
        windows.append((Window(micro, count, own.stop - own.start, batch[own].numel()), total))
    return windows


def _train(strategy: Any, case: Case, rank: int, num_ranks: int) -> list[tuple[float, float]]:
    torch.manual_seed(SEED)
    source = ModelSource(case.make()) if case.ready else ModelSource(make=case.make)
    if case.recompute:
        source.prepare = lambda module: module.gradient_checkpointing_enable()
    model = strategy.setup(source)
    objective = Objective(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=case.fused)
    results = []
    for window, num_targets in _windows(rank, num_ranks, case.accumulation):
        share = strategy.forward_backward(window, objective, num_targets, _ignore)
        norm = strategy.clip(0.5)
        strategy.apply(optimizer, share, norm)
        results.append((strategy.reduce(share, "sum").item(), norm.item()))
    batch = {"input_ids": torch.arange(20).view(2, 10), "labels": torch.arange(20).view(2, 10)}
    with torch.no_grad():
        step = strategy.eval_forward(batch, objective, with_logits=True)
    results.append((step.loss_sum.item(), float(step.logits.float().norm())))
    assert all(isinstance(p, DTensor) for p in model.parameters()) == (num_ranks > 1)
    return results


def _single(case: Case) -> list[tuple[float, float]]:
    return _train(SingleDevice(CPU), Case(make=case.make, ready=case.ready), 0, 1)


def _strategy(**options: Any) -> FullyShardedStrategy:
    args = FSDP2TrainingArguments.from_dict({"fsdp2": options})
    return FullyShardedStrategy(init_distributed(use_cpu=True), CPU, args)


def _train_all(cases: dict[str, Case]) -> dict[str, list[tuple[float, float]]]:
    context = init_distributed(use_cpu=True)
    return {
        name: _train(_strategy(**case.options), case, context.rank, context.world_size)
        for name, case in cases.items()
    }


TWO_RANKS = {
    "plain": Case(),
    "kept after the forward": Case({"reshard_after_forward": False}),
    "as one": Case({"shard_transformer_layers": False}),
    "accumulated": Case(accumulation=2),
    "recomputed": Case(recompute=True),
    "tied": Case(make=partial(tiny_decoder, tie_embeddings=True)),
    "offloaded": Case({"cpu_offload": True}),
    "llama": Case(make=tiny_llama),
    "tied llama": Case(make=partial(tiny_llama, tie_word_embeddings=True)),
    "layers that share": Case(make=_sharing_layers),
    "layers that share, recomputed": Case(make=_sharing_layers, recompute=True),
    "ready": Case(ready=True),
    "path": Case({"transformer_layers_path": "model.layers"}, fused=True),
}
FOUR_RANKS = {
    "plain": Case(),
    "over two": Case({"reshard_after_forward": 2}),
    "hybrid": Case({"shard_size": 2}),
    "hybrid, accumulated": Case({"shard_size": 2}, accumulation=2),
    "uneven": Case(make=partial(tiny_decoder, vocab_size=261, intermediate_size=65)),
}


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_losses_and_norms_are_those_of_one_process(num_ranks: int, cases: dict[str, Case]) -> None:
    told = run_ranks(_train_all, num_ranks, cases, timeout_s=120)
    for name, case in cases.items():
        expected = torch.tensor(_single(case))
        got = torch.tensor(told[0][name])
        difference = ((got - expected).abs() / expected).max().item()
        # Sums in another order: which bits are lost depends on the machine too.
        assert difference < 5e-6, f"{name}: {got} in place of {expected}"
        for one in told[1:]:
            assert one[name] == told[0][name], f"{name}: not the same bits on all ranks"


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers whole, under every name."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def _folder_source(folder: Path) -> ModelSource:
    return ModelSource(
        make=partial(load_causal_lm, folder),
        make_meta=partial(blank_causal_lm, folder),
        weights=folder,
    )


def _draws_by_itself() -> nn.Module:
    """Draws in ways that the meta device does not swallow, and then cannot go on there."""
    scale = torch.rand((), device="cpu").item() + random.random()
    model = _Drawn()
    nn.init.constant_(model.layers[0].weight, scale)
    assert model.layers[0].weight.sum().item() > 0
    return model


class _Drawn(nn.Module):
    """Not Headway's: has a plain and a derived buffer, and blocks of several sizes."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.register_buffer("scale", torch.rand(7))
        self.register_buffer("derived", torch.arange(7.0), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale + self.derived
        return x.square().mean()


INITIAL = {
    "decoder": partial(tiny_decoder, num_layers=3),
    "tied": partial(tiny_decoder, tie_embeddings=True, vocab_size=261),
    "llama": partial(tiny_llama, tie_word_embeddings=True),
    "other": _Drawn,
    "by itself": _draws_by_itself,
}


def _initial_weights(folders: list[Path]) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    results: dict[str, Any] = {}
    for name, make in INITIAL.items():
        seed_all(SEED)
        results[name] = _full(_strategy().setup(ModelSource(make=make)))
        results[f"{name}: generator"] = torch.rand(2)
    for folder in folders:
        model = _strategy().setup(_folder_source(folder))
        results[folder.name] = _full(model)
    # Ranks that built different weights: those of rank 0 are taken, not a mixture.
    results["ready"] = _full(_strategy().setup(ModelSource(_Drawn(seed=rank))))
    results["tie"] = isinstance(model.lm_head.weight, DTensor) and (
        model.lm_head.weight is model.model.embed_tokens.weight
    )
    return results


def test_initial_weights_are_those_of_one_process(tmp_path: Path) -> None:
    from transformers import GemmaConfig, GemmaForCausalLM

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_pretrained(tiny_decoder(tie_embeddings=True).to(torch.bfloat16), ours)
    config = GemmaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, vocab_size=101, head_dim=16,
    )  # fmt: skip
    GemmaForCausalLM(config).save_pretrained(theirs)
    told = run_ranks(_initial_weights, 2, [ours, theirs], timeout_s=120)
    expected: dict[str, Any] = {}
    for name, make in INITIAL.items():
        seed_all(SEED)
        expected[name] = _full(make())
        expected[f"{name}: generator"] = torch.rand(2)
    expected |= {folder.name: _full(load_causal_lm(folder)) for folder in (ours, theirs)}
    expected["ready"] = _full(_Drawn(seed=0))
    for got in told:
        assert got.pop("tie"), "tied names are one tensor"
        assert got.keys() == expected.keys()
        for name, want in expected.items():
            if isinstance(want, torch.Tensor):
                assert torch.equal(got[name], want), f"{name}: another number of draws"
                continue
            assert got[name].keys() == want.keys()
            for key in want:
                assert got[name][key].dtype == want[key].dtype, f"{name}: {key}"
                assert torch.equal(got[name][key], want[key]), f"{name}: {key}"


def _count_whole_tensors() -> tuple[int, int]:
    """(most whole values that were alive at once, bytes this rank keeps)."""
    drawn: list[weakref.ref[torch.Tensor]] = []
    most = 0
    draw = nn.init.normal_

    def watched(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        nonlocal most
        if not tensor.is_meta:
            drawn.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in drawn))
        return draw(tensor, **options)

    nn.init.normal_ = watched  # type: ignore[assignment]
    make = partial(tiny_decoder, num_layers=6)
    model = _strategy().setup(ModelSource(make=make))
    nn.init.normal_ = draw
    assert len(drawn) > 40
    return most, sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())


def test_no_rank_holds_the_whole_model_at_the_start() -> None:
    whole = sum(p.numel() * 4 for p in tiny_decoder(num_layers=6).parameters())
    for most, kept in run_ranks(_count_whole_tensors, 2):
        assert most == 1
        assert kept < 0.51 * whole


def _refusals() -> list[str]:
    said = []
    for options in (
        {"transformer_layers_path": "model.layer"},
        {"transformer_layers_path": "model.norm"},
        {"reshard_after_forward": 3},
        {"shard_size": 3},
        {"shard_size": 2, "reshard_after_forward": 4},
        {"shard_size": 8},
    ):
        with pytest.raises(ConfigError) as caught:
            _strategy(**options).setup(ModelSource(make=tiny_decoder))
        said.append(str(caught.value))
    for part in ("param", "reduce", "buffer"):
        strategy = FSDP2TrainingArguments()
        setattr(strategy.fsdp2, f"{part}_dtype", "bfloat")
        with pytest.raises(ConfigError) as caught:
            FullyShardedStrategy(init_distributed(use_cpu=True), CPU, strategy)
        said.append(str(caught.value))
    scalar = _Drawn()
    scalar.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError) as caught:
        _strategy().setup(ModelSource(scalar))
    said.append(str(caught.value))
    other = nn.Linear(3, 3 + init_distributed().rank)
    with pytest.raises(ConfigError) as caught:
        _strategy().setup(ModelSource(other))
    said.append(str(caught.value))
    return said


def test_bad_options_are_refused_on_every_rank() -> None:
    first, *others = run_ranks(_refusals, 4)
    expected = [
        "fsdp2.transformer_layers_path='model.layer' leads to nothing in Decoder; did you mean "
        "'model.layers'?",
        "fsdp2.transformer_layers_path='model.norm' is a RMSNorm, not a list of blocks",
        "fsdp2.reshard_after_forward=3 does not divide the 4 ranks that share a copy; allowed: "
        "True, False, 2, 4",
        "fsdp2.shard_size=3 does not divide the 4 ranks; allowed: 2, 4",
        "fsdp2.reshard_after_forward=4 does not divide the 2 ranks",
        "fsdp2.shard_size=8 does not divide the 4 ranks",
        "unknown fsdp2.param_dtype 'bfloat'; did you mean",
        "unknown fsdp2.reduce_dtype 'bfloat'",
        "unknown fsdp2.buffer_dtype 'bfloat'",
        "cannot shard the parameter gain, which has no dimension",
        "model.weight: differs between ranks",
    ]
    for text, said in zip(expected, first, strict=True):
        assert text in said
    assert all(said == first for said in others)


def _mixed_precision() -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    strategy = _strategy(param_dtype="bf16", reduce_dtype="fp32", buffer_dtype="bfloat16")
    torch.manual_seed(SEED)
    model = strategy.setup(ModelSource(make=partial(tiny_decoder, num_layers=2)))
    facts: dict[str, Any] = {"kept": {str(p.dtype) for p in model.parameters()}}
    seen = []
    model.model.layers[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    objective = Objective(model)
    window, num_targets = _windows(rank, 2, 1)[0]
    share = strategy.forward_backward(window, objective, num_targets, _ignore)
    facts["loss"] = strategy.reduce(share, "sum").item()
    facts["loss dtype"] = str(share.dtype)
    facts["inside"] = str(seen[0])
    facts["gradients"] = {str(p.grad.dtype) for p in model.parameters()}
    facts["rotary"] = str(model.model.rotary_emb.cos.dtype)
    prompt = torch.arange(6).view(2, 3)
    facts["tokens"] = strategy.generate(prompt, max_new_tokens=3).tolist()
    other = _strategy(buffer_dtype="bf16").setup(ModelSource(make=_Drawn))
    facts["buffers"] = {name: str(b.dtype) for name, b in other.named_buffers()}
    return facts


def test_dtypes_of_parameters_gradients_and_buffers() -> None:
    first, second = run_ranks(_mixed_precision, 2)
    assert first == second
    torch.manual_seed(SEED)
    window, num_targets = _windows(0, 1, 1)[0]
    plain = tiny_decoder(num_layers=2)(**window.micro_batches[0]).loss.item()
    assert first["loss"] != plain
    assert first["loss"] == pytest.approx(plain, rel=1e-2)
    assert first["kept"] == first["gradients"] == {"torch.float32"}
    assert first["inside"] == "torch.bfloat16"
    assert first["loss dtype"] == first["rotary"] == "torch.float32"
    floating = {"scale": "torch.bfloat16", "derived": "torch.bfloat16"}
    assert first["buffers"] == {**floating, "count": "torch.int64"}


def _sample(make: Callable[[], nn.Module]) -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    torch.manual_seed(SEED)
    strategy = _strategy()
    model = strategy.setup(ModelSource(make=make))
    names = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    torch.manual_seed(100 + rank)  # ranks have generators of their own
    prompt = torch.arange(8).view(2, 4)
    options = {"max_new_tokens": 6, "temperature": 1.5}
    facts: dict[str, Any] = {
        "sampled": strategy.generate(prompt, **options).tolist(),
        "again": strategy.generate(prompt, **options).tolist(),
        "best": strategy.generate(prompt, max_new_tokens=6, do_sample=False).tolist(),
    }
    generator = torch.Generator().manual_seed(rank)
    facts["given"] = strategy.generate(prompt, generator=generator, **options).tolist()
    names += [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert not names, "parameters are sharded again"
    return facts


@pytest.mark.parametrize("make", [tiny_decoder, tiny_llama])
def test_all_ranks_sample_the_same_text(make: Callable[[], nn.Module]) -> None:
    first, second = run_ranks(_sample, 2, make)
    assert first == second
    assert first["sampled"] != first["again"]
    torch.manual_seed(SEED)
    from headway.models import generate

    prompt = torch.arange(8).view(2, 4)
    best = generate(make(), prompt, max_new_tokens=6, do_sample=False)
    assert first["best"] == best.tolist()


def _broken_loss(outputs: Any, labels: Any, num_items_in_batch: int) -> torch.Tensor:
    return outputs.logits.float().mean() + float("nan")


def _withhold() -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    strategy = _strategy()
    model = strategy.setup(ModelSource(make=tiny_decoder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objective = Objective(model)
    before = _full(model)
    window, num_targets = _windows(rank, 2, 1)[0]
    # One rank's share is not finite, though all gradients are; every rank must see it.
    broken = Objective(model, _broken_loss) if rank == 1 else objective
    share = strategy.forward_backward(window, broken, num_targets, _ignore)
    norm = strategy.clip(1.0)
    strategy.apply(optimizer, share, norm)
    facts: dict[str, Any] = {"finite": bool(norm.isfinite())}
    facts["untouched"] = all(torch.equal(t, before[n]) for n, t in _full(model).items())
    # A stand-in takes part in every collective and weighs nothing.
    [batch] = window.micro_batches
    filled = Window([batch, batch], window.num_target_tokens, 0, 0, num_fillers=1)
    alone = Window([batch], window.num_target_tokens, 0, 0)
    norms = []
    for one in (alone, filled):
        share = strategy.forward_backward(one, objective, num_targets, _ignore)
        norms.append((share.item(), strategy.clip(None).item()))
        optimizer.zero_grad()
    facts["fillers"] = norms[0] == norms[1]
    return facts


def test_a_share_that_is_not_finite_and_a_stand_in_change_nothing() -> None:
    for facts in run_ranks(_withhold, 2):
        assert facts == {"finite": False, "untouched": True, "fillers": True}


class _Normed(nn.Module):
    """Keeps a running mean of its data, and a table that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 300)
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(hidden)}


def _mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
    return outputs["logits"].square().sum() / num_items_in_batch


def _meet() -> dict[str, Any]:
    rank = init_distributed(use_cpu=True).rank
    strategy = _strategy()
    model = strategy.setup(ModelSource(make=_Normed))
    model.table.fill_(rank)
    objective = Objective(model, _mean_loss)

    def means() -> list[list[float]]:
        return [exchange(model.norm.running_mean.tolist()), exchange(model.table.tolist())]

    seen = []
    data = tiny_dataset(4, sequence_length=12)
    loader = WindowLoader(data, batch_size=2, collate_fn=_stack, rank=rank, world_size=2)
    for meet in (strategy.before_save, lambda: next(strategy.feed(loader, training=False))):
        window, num_targets = _windows(rank, 2, 1)[0]
        strategy.forward_backward(window, objective, num_targets, _ignore)
        before = means()
        meet()
        seen.append((before, means()))
    return {"seen": seen, "batches": int(model.norm.num_batches_tracked)}


def _stack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([sample["input_ids"] for sample in samples])}


def test_buffers_are_those_of_the_first_rank_in_a_save_and_in_an_evaluation() -> None:
    for facts in run_ranks(_meet, 2):
        assert facts["batches"] == 2
        for (means, _), (joined, tables) in facts["seen"]:
            assert means[0] != means[1], "each rank has its own data"
            assert joined == [means[0], means[0]]
            assert tables == [[0.0, 0.0], [1.0, 1.0]], "in no checkpoint, and left alone"
