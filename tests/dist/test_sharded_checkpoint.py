"""Checkpoints of sharded models: what any layout saves, any other loads to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from headway.args import FSDP2TrainingArguments
from headway.checkpoint import (
    CheckpointContents,
    CheckpointError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    one_pass,
    verify,
)
from headway.checkpoint.distributed import DistributedRanks
from headway.checkpoint.ranks import SoloRanks
from headway.checkpoint.sharding import is_spread
from headway.data.tokenizer import ByteTokenizer
from headway.dist import init_distributed
from headway.errors import ConfigError
from headway.models import load_pretrained
from headway.strategies.fsdp2 import FullyShardedStrategy
from headway.strategies.source import ModelSource
from headway.testing import run_ranks, tiny_decoder, tiny_llama

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a tie, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(261, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 261, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.rand(1))
        self.register_buffer("seen", torch.rand(5))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x) * self.gain
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "two": (2, {}),
    "two, offloaded": (2, {"cpu_offload": True}),
    "four": (4, {}),
    "two by two": (4, {"shard_size": 2}),
}
SOLO = [name for name, (num_ranks, _) in LAYOUTS.items() if num_ranks == 1]


def _names(num_ranks: int) -> list[str]:
    return [name for name, (number, _) in LAYOUTS.items() if number == num_ranks]


class Job:
    """A model and its optimizer in one layout."""

    def __init__(self, layout: str, seed: int, num_steps: int) -> None:
        num_ranks, options = LAYOUTS[layout]
        self.rank = 0
        torch.manual_seed(seed)
        if num_ranks == 1:
            self.model: nn.Module = Odd()
        else:
            context = init_distributed(use_cpu=True)
            self.rank = context.rank
            args = FSDP2TrainingArguments.from_dict({"fsdp2": options})
            self.strategy = FullyShardedStrategy(context, CPU, args)
            self.model = self.strategy.setup(ModelSource(make=Odd))
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters[:3], "lr": 1e-3 * seed}, {"params": parameters[3:]}],
            amsgrad=True,
        )
        for step in range(num_steps):
            ids = (torch.arange(12).view(2, 6) * (step + seed + self.rank)) % 261
            self.model(ids).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def contents(self, step: int) -> CheckpointContents:
        return CheckpointContents(
            model=self.model, optimizer=self.optimizer, trainer_state={"step": step}
        )

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint must bring back, whole."""
        found: dict[str, Any] = dict(self.model.state_dict())
        names = {id(p): name for name, p in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                found[f"lr of {names[id(param)]}"] = torch.tensor(group["lr"])
                for key, value in self.optimizer.state.get(param, {}).items():
                    if key != "step":
                        assert type(value) is type(param.data), f"{key} of {names[id(param)]}"
                    found[f"{key} of {names[id(param)]}"] = value
        return {
            name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
            for name, t in found.items()
        }


def _save(layouts: list[str], folder: Path) -> dict[str, Any]:
    ranks = SoloRanks() if layouts == SOLO else DistributedRanks()
    states = {}
    for layout in layouts:
        job = Job(layout, seed=1 + list(LAYOUTS).index(layout), num_steps=2)
        states[layout] = job.state()
        manager = CheckpointManager(folder / layout, ranks=ranks, max_shard_bytes=3000)
        manager.save(job.contents(2), 2)
    return states


def _load(layouts: list[str], folder: Path) -> dict[tuple[str, str], Any]:
    ranks = SoloRanks() if layouts == SOLO else DistributedRanks()
    states = {}
    for layout in layouts:
        for number, saved in enumerate(LAYOUTS):
            # With and without a state that is in use already.
            job = Job(layout, seed=90, num_steps=number % 2)
            manager = CheckpointManager(folder / saved, ranks=ranks)
            found = manager.load(job.contents(0), manager.find_latest())
            assert found.trainer_state["step"] == 2
            states[saved, layout] = job.state()
    return states


def test_every_layout_loads_what_every_other_saved(tmp_path: Path) -> None:
    saved, loaded = {}, {}
    for num_ranks in (1, 2, 4):
        layouts = _names(num_ranks)
        if layouts == SOLO:
            saved |= _save(layouts, tmp_path)
            continue
        first, *others = run_ranks(_save, num_ranks, layouts, tmp_path, timeout_s=120)
        saved |= first
    for layout in LAYOUTS:
        verify(tmp_path / layout / "checkpoint-2")
    for num_ranks in (1, 2, 4):
        layouts = _names(num_ranks)
        if layouts == SOLO:
            loaded |= _load(layouts, tmp_path)
            continue
        first, *others = run_ranks(_load, num_ranks, layouts, tmp_path, timeout_s=120)
        loaded |= first
    assert len(loaded) == len(LAYOUTS) ** 2
    for (source, layout), state in loaded.items():
        wanted = saved[source]
        assert state.keys() == wanted.keys(), f"{source} under {layout}"
        assert len(wanted) > 40
        for name, tensor in wanted.items():
            assert tensor.dtype == state[name].dtype
            assert torch.equal(tensor, state[name]), f"{source} under {layout}: {name}"


def _share_of_bytes(folder: Path) -> dict[str, float]:
    """What one rank copies for a save, reads for a load, relative to the whole state."""
    ranks = DistributedRanks()
    context = init_distributed(use_cpu=True)
    strategy = FullyShardedStrategy(context, CPU, FSDP2TrainingArguments())
    model = strategy.setup(ModelSource(make=tiny_decoder))
    optimizer = torch.optim.AdamW(model.parameters())
    contents = CheckpointContents(model=model, optimizer=optimizer, trainer_state={})
    manager = CheckpointManager(folder, ranks=ranks)
    manager.reserve(contents)  # before there are moments
    reserved = manager.stager.host_bytes
    model(torch.arange(10).view(1, 10), labels=torch.arange(10).view(1, 10)).loss.backward()
    optimizer.step()
    whole = 3 * sum(p.numel() * 4 for p in model.parameters())
    num_read = 0
    plain_fill = one_pass.fill

    def watched_fill(destinations: Any, *rest: Any) -> None:
        nonlocal num_read
        num_read += sum(d.tensor.numel() * d.tensor.element_size() for d in destinations)
        plain_fill(destinations, *rest)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a whole tensor was gathered")

    one_pass.fill = watched_fill
    DTensor.full_tensor = DTensor.redistribute = refuse  # type: ignore[method-assign]
    path = manager.save(contents, 1)
    copied = manager.stager.host_bytes
    manager.load(contents, path)
    return {"reserved": reserved / whole, "copied": copied / whole, "read": num_read / whole}


def test_no_rank_copies_or_reads_the_whole(tmp_path: Path) -> None:
    for shares in run_ranks(_share_of_bytes, 4, tmp_path):
        assert all(0.24 < share < 0.32 for share in shares.values()), shares


class _Table:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors: dict[str, Any] = tensors

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def _other_uses(folder: Path) -> dict[str, Any]:
    ranks = DistributedRanks()
    context = init_distributed(use_cpu=True)
    facts: dict[str, Any] = {}

    def shard(make: Any, seed: int = 3) -> nn.Module:
        torch.manual_seed(seed)
        strategy = FullyShardedStrategy(context, CPU, FSDP2TrainingArguments())
        return strategy.setup(ModelSource(make=make))

    # Weights alone, and in another dtype than the model's.
    model = shard(Odd)
    manager = CheckpointManager(folder / "weights", ranks=ranks)
    path = manager.save(CheckpointContents(model=model, trainer_state={}), 1)
    other = shard(Odd, seed=4)
    manager.load_model(other, path)
    half = shard(Odd, seed=5).to(torch.bfloat16)
    manager.load_model(half, path)
    for name, tensor in model.state_dict().items():
        got, low = other.state_dict()[name], half.state_dict()[name]
        if isinstance(tensor, DTensor):
            tensor, got, low = tensor.to_local(), got.to_local(), low.to_local()
        facts[f"weights: {name}"] = torch.equal(tensor, got)
        facts[f"converted: {name}"] = torch.equal(tensor.to(low.dtype), low)
    # A model of another shape is refused before anything is changed.
    wide = shard(tiny_decoder)
    before = wide.lm_head.weight.to_local().clone()
    try:
        manager.load_model(wide, path)
    except CheckpointError as error:
        facts["misfit"] = "does not fit the model" in str(error)
    facts["untouched"] = torch.equal(before, wide.lm_head.weight.to_local())
    # A component that names spread tensors.
    table = _Table({"exp": model.embed.weight.detach()})
    part = StateComponent("table", table, SharingPattern.SHARDED)
    manager = CheckpointManager(folder / "table", ranks=ranks)
    contents = CheckpointContents(model=model, components=[part], trainer_state={})
    path = manager.save(contents, 1)
    manager.load(contents, path)
    facts["component"] = torch.equal(table.tensors["exp"], model.embed.weight.to_local())
    return facts


def test_weights_alone_other_dtypes_and_components(tmp_path: Path) -> None:
    for facts in run_ranks(_other_uses, 2, tmp_path):
        assert len(facts) > 20
        assert [name for name, held in facts.items() if not held] == []


def _save_models(folder: Path) -> None:
    from headway import FSDP2Trainer

    init_distributed(use_cpu=True)
    for name, make in (("ours", tiny_decoder), ("theirs", tiny_llama)):
        args = FSDP2TrainingArguments(
            output_dir=str(folder / f"{name}-run"), seed=3, use_cpu=True, save_strategy="no"
        )
        FSDP2Trainer(args=args, model_init=make).save_model(str(folder / name))
    # Taken by now, which is the same mistake on every rank.
    with pytest.raises(ConfigError, match=f"save_model: {folder / name} already holds model-0000"):
        FSDP2Trainer(args=args, model_init=make).save_model(str(folder / name))


@pytest.mark.timeout(180)
def test_a_model_folder_is_written_by_all_ranks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    run_ranks(_save_models, 2, tmp_path, timeout_s=120)
    for name, make in (("ours", tiny_decoder), ("theirs", tiny_llama)):
        torch.manual_seed(3)
        expected = make().state_dict()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(loaded) is LlamaForCausalLM
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        for key, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[key]), f"{name}: {key}"
        own = load_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(own[key], tensor) for key, tensor in expected.items())


class Adapted(nn.Module):
    """Stands for a PeftModel: all is frozen but what it adds, and that alone is what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = tiny_llama().requires_grad_(False)
        self.lora_A = nn.Linear(8, self.base_model.config.vocab_size, bias=False)
        self.peft_config = {"default": {"r": 8}}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.base_model(input_ids=input_ids).logits
        return {"logits": logits + self.lora_A.weight.sum(dim=1)}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        state = kwargs.get("state_dict") or self.state_dict()
        assert {*state} == {*self.state_dict()}, "tied weights too are there under every name"
        chosen = {name: tensor for name, tensor in state.items() if "lora_" in name}
        save_file(chosen, f"{save_directory}/adapter_model.safetensors")


def _save_adapters(folder: Path) -> torch.Tensor:
    from headway import DDPTrainer, DDPTrainingArguments, FSDP2Trainer

    init_distributed(use_cpu=True)
    kinds: Any = [(DDPTrainer, DDPTrainingArguments), (FSDP2Trainer, FSDP2TrainingArguments)]
    for trainer_class, arguments_class in kinds:
        name = arguments_class.strategy_name
        args = arguments_class(output_dir=str(folder / f"{name}-run"), seed=3, use_cpu=True)
        tokenizer = ByteTokenizer()
        trainer = trainer_class(args=args, model_init=Adapted, processing_class=tokenizer)
        trainer.save_model(str(folder / name))
    weight = trainer.strategy.unwrap().lora_A.weight
    assert is_spread(weight), "no rank has it whole"
    return weight.full_tensor().detach()


@pytest.mark.timeout(180)
def test_of_a_peft_model_the_adapters_alone_are_written_on_several_ranks_too(
    tmp_path: Path,
) -> None:
    weight, *_ = run_ranks(_save_adapters, 2, tmp_path, timeout_s=120)
    for name in ("ddp", "fsdp2"):
        found = {path.name for path in (tmp_path / name).iterdir()}
        assert found == {"adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        held = load_file(tmp_path / name / "adapter_model.safetensors")
        assert {*held} == {"lora_A.weight"} and torch.equal(held["lora_A.weight"], weight)


class Prompted(Adapted):
    """Stands for one that saves what a module of its own gives, as prompt tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_encoder = nn.Embedding(4, 8)
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        chosen = {"prompt": self.prompt_encoder(torch.arange(4)).detach()}
        save_file(chosen, f"{save_directory}/adapter_model.safetensors")


class Watched(Adapted):
    """Notes how much it was given of what it does not save."""

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        state = kwargs["state_dict"]
        with_values = sorted(name for name, tensor in state.items() if not tensor.is_meta)
        Path(save_directory, "given.txt").write_text(" ".join(with_values))
        super().save_pretrained(save_directory, **kwargs)


def _save_with_peft(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    from headway import FSDP2Trainer

    def chosen(model: Any, state_dict: Any, adapter_name: str) -> dict[str, torch.Tensor]:
        assert adapter_name in model.peft_config
        return {f"its-{n}": tensor for n, tensor in state_dict.items() if "lora_" in n}

    init_distributed(use_cpu=True)
    sys.modules["peft"] = SimpleNamespace(get_peft_model_state_dict=chosen)  # type: ignore
    kinds: Any = {"watched": Watched, "prompted": Prompted}
    for name, kind in kinds.items():
        args = FSDP2TrainingArguments(output_dir=str(folder / f"{name}-run"), seed=3, use_cpu=True)
        trainer = FSDP2Trainer(args=args, model_init=kind)
        trainer.save_model(str(folder / name))
        model: Any = trainer.strategy.unwrap()
        if name == "watched":
            adapter = model.lora_A.weight.full_tensor().detach()
    prompt = model.prompt_encoder.weight
    assert is_spread(prompt), "as it was before"
    return adapter, prompt.full_tensor().detach()


@pytest.mark.timeout(180)
def test_of_a_peft_model_on_several_ranks_the_base_is_neither_written_nor_read(
    tmp_path: Path,
) -> None:
    (adapter, prompt), _ = run_ranks(_save_with_peft, 2, tmp_path, timeout_s=120)
    assert (tmp_path / "watched" / "given.txt").read_text() == "lora_A.weight"
    held = load_file(tmp_path / "watched" / "adapter_model.safetensors")
    assert {*held} == {"lora_A.weight"} and torch.equal(held["lora_A.weight"], adapter)
    held = load_file(tmp_path / "prompted" / "adapter_model.safetensors")
    assert torch.equal(held["prompt"], prompt)


class Templated(ByteTokenizer):
    """One that has a file in a folder, as tokenizers with several chat templates do."""

    def save_pretrained(self, directory: Any) -> Any:
        folder = Path(directory, "additional_chat_templates")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tool_use.jinja").write_text("{{ messages }}")
        return super().save_pretrained(directory)


def _save_over(folder: Path) -> torch.Tensor:
    from headway import DDPTrainer, DDPTrainingArguments

    init_distributed(use_cpu=True)
    args = DDPTrainingArguments(output_dir=str(folder / "run"), seed=3, use_cpu=True)
    trainer = DDPTrainer(args=args, model_init=tiny_llama, processing_class=Templated())
    trainer.save_model(str(folder / "model"), overwrite_output_dir=True)
    return trainer.strategy.unwrap().lm_head.weight.detach()


@pytest.mark.timeout(180)
def test_a_model_that_ranks_write_over_another_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)  # one file, which transformers looks for first
    assert (folder / "model.safetensors").is_file()
    weight, *_ = run_ranks(_save_over, 2, tmp_path, timeout_s=120)
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(found.lm_head.weight, weight)
    assert not (folder / "model.safetensors").exists()
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert not (folder / "state").exists() and not (folder / "trainer_state.json").exists()
