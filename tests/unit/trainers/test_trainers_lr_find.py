"""`Trainer.lr_find`: the run's own optimizer, precision, data; and a run that does not notice."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from headway import Trainer, TrainingArguments
from headway.dist.env import DistributedEnv
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_dataset
from headway.trainers import lr_find
from headway.trainers.parallel import AccelTrainer

NUM_STEPS = 6


class Net(nn.Module):
    """Has dropout, running means and a mean loss."""

    def __init__(self, vocab_size: int = 258) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.drop(hidden))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Counting(IterableDataset[Any]):
    """A stream without a state of its own."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Stateful(Counting):
    """A stream that goes on from where it stands, like some remote ones."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.samples):
            self.position += 1
            yield self.samples[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Augmented:
    """Each sample has randomness of its own, and the data is told its epoch."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        tokens = self.samples[number]["input_ids"]
        shift = (self.epoch + int(np.random.randint(3))) % 8
        tokens = tokens[shift:] + tokens[:shift]
        return {"input_ids": tokens, "labels": tokens}


def make_data(kind: str, num_samples: int = 20) -> Any:
    samples = tiny_dataset(num_samples, sequence_length=8)
    match kind:
        case "map":
            return samples
        case "augmented":
            return Augmented(samples)
        case "stream":
            return Counting(samples)
        case "stateful":
            return Stateful(samples)
    tensors = [{k: torch.tensor(v) for k, v in sample.items()} for sample in samples]
    generator = torch.Generator().manual_seed(3) if kind == "own order" else None
    return DataLoader(tensors, batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]


def make_trainer(
    folder: Path, kind: str = "map", callbacks: list[Any] | None = None, **arguments: Any
) -> Trainer:
    given = arguments.pop("model", None)
    options = {
        name: arguments.pop(name)
        for name in ("optimizer_factory", "optimizer_groups", "optimizer_cls_and_kwargs")
        if name in arguments
    }
    settings = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 7,
        "use_cpu": True,
        "max_steps": NUM_STEPS,
        "epoch_train_steps": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "lr_scheduler_type": "linear",
        **arguments,
    }
    return Trainer(
        args=TrainingArguments(**settings),
        model=given,
        model_init=None if given is not None else Net,
        train_dataset=make_data(kind),
        callbacks=callbacks,
        default_callbacks=False,
        **options,
    )


class Finder(TrainerCallback):
    """Searches in the middle of a run, and notes which events it heard meanwhile."""

    def __init__(self, at_step: int, **options: Any) -> None:
        self.at_step, self.options = at_step, {"num_iterations": 8, "num_seeds": 2, **options}
        self.events: list[str] = []
        self.found: Any = None
        self.error: BaseException | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any, **more: Any) -> None:
        self.events.append("on_step_end")
        if state.global_step == self.at_step:
            before = (copy.deepcopy(vars(state)), len(self.events))
            try:
                self.found = trainer.lr_find(**self.options)
            except (RuntimeError, KeyboardInterrupt) as error:
                self.error = error
            assert (vars(state), len(self.events)) == before

    def on_substep_end(self, **more: Any) -> None:
        self.events.append("on_substep_end")

    def on_optimizer_step(self, **more: Any) -> None:
        self.events.append("on_optimizer_step")


def result_of(trainer: Trainer) -> dict[str, Any]:
    """What a run leaves behind, to the last bit."""
    trainer.train()
    assert trainer.model is not None and trainer.optimizer is not None
    assert trainer.lr_scheduler is not None and trainer.strategy is not None
    records = [r for r in trainer.state.log_history if "loss" in r]
    scale = trainer.strategy.loss_scale
    return {
        "model": {k: v.clone() for k, v in trainer.model.state_dict().items()},
        "moments": {
            f"{n}.{k}": v for n, s in enumerate(trainer.optimizer.state.values())
            for k, v in s.items()
        },
        "groups": [{**g, "params": None} for g in trainer.optimizer.param_groups],
        "schedule": {
            k: v for k, v in trainer.lr_scheduler.state_dict().items() if not callable(v)
        },
        "losses": [record["loss"] for record in records],
        "rates": [record["learning_rate"] for record in records],
        "scale": None if scale is None else scale.state_dict(),
        "random": torch.get_rng_state(),
        "numpy": str(np.random.get_state(legacy=False)),
    }  # fmt: skip


def assert_same(one: Any, other: Any, key: str = "") -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), key
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), key
        for name, value in one.items():
            assert_same(value, other[name], f"{key}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), key
        for number, value in enumerate(one):
            assert_same(value, other[number], f"{key}.{number}")
    else:
        assert one == other, key


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "fp16": {"mixed_precision": "fp16"},
    "augmented": {"kind": "augmented"},
    "stream": {"kind": "stream"},
    "stateful": {"kind": "stateful"},
    "loader": {"kind": "loader"},
    "own order": {"kind": "own order"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_after_it_is_the_run_without_it(variant: str, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    plain = result_of(make_trainer(tmp_path / "a", **options))
    trainer = make_trainer(tmp_path / "b", **options)
    random = torch.get_rng_state()
    found = trainer.lr_find(num_iterations=24)  # more than an epoch
    assert len(found.lrs) == 24 and not (tmp_path / "b").exists()
    assert torch.equal(torch.get_rng_state(), random)
    assert trainer.model is None and trainer.optimizer is None and trainer.lr_scheduler is None
    assert_same(plain, result_of(trainer))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_does_not_notice_it_in_its_middle(variant: str, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    plain = result_of(make_trainer(tmp_path / "a", **options))
    finder = Finder(3, num_iterations=24)
    assert_same(plain, result_of(make_trainer(tmp_path / "b", callbacks=[finder], **options)))
    assert finder.found is not None and len(finder.found.lrs) == 24


def test_a_ready_model_is_prepared_once_and_stays_the_same(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net()
    plain = result_of(make_trainer(tmp_path / "a", model=copy.deepcopy(model)))
    trainer = make_trainer(tmp_path / "b", model=model)
    trainer.lr_find(num_iterations=5)
    trainer.lr_find(num_iterations=5)
    assert trainer.model is model
    assert_same(plain, result_of(trainer))


def test_after_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    assert trainer.model is not None
    trainer.model.eval()
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.lr_find(num_iterations=5)
    assert_same(before, dict(trainer.model.state_dict()))
    assert not trainer.model.training and not trainer.model.norm.training


def test_an_evaluation_after_it_is_that_without_it(tmp_path: Path) -> None:
    held_out = tiny_dataset(4, sequence_length=8, seed=1)
    plain = make_trainer(tmp_path / "a").evaluate(held_out)["eval_loss"]
    trainer = make_trainer(tmp_path / "b")
    trainer.lr_find(num_iterations=5)
    assert trainer.evaluate(held_out)["eval_loss"] == plain


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_its_middle_leaves_the_run_as_it_was(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = result_of(make_trainer(tmp_path / "a", mixed_precision="fp16"))
    finder, calls, forward = Finder(3), [0], Net.forward

    def fail(self: Net, **inputs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3 + 5:
            raise error("in the middle")
        return forward(self, **inputs)

    fail.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(Net, "forward", fail)
    trainer = make_trainer(tmp_path / "b", callbacks=[finder], mixed_precision="fp16")
    assert_same(plain, result_of(trainer))
    assert isinstance(finder.error, error) and finder.found is None


def test_callbacks_hear_nothing_of_it(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listening(TrainerCallback):
        """Every event that there is."""

    def make(event: str) -> Callable[..., None]:
        return lambda self, args, state, control, **more: heard.append(event)

    from headway.engine.events import EVENTS

    for event in EVENTS:
        setattr(Listening, event, make(event))
    make_trainer(tmp_path, callbacks=[Listening()]).lr_find(num_iterations=4)
    assert heard == []


# What it tries is what will be trained


def test_it_takes_the_configured_steps(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for g in self.param_groups for p in g["params"]]
            norm = float(nn.utils.get_total_norm([g for g in gradients if g is not None]))
            seen.append({"lrs": [g["lr"] for g in self.param_groups], "norm": norm})
            return super().step(closure)

    batches: list[int] = []
    trainer = make_trainer(
        tmp_path,
        optimizer_factory=lambda groups: Watched(groups, lr=0.5),
        optimizer_groups={"slow": {"regex": "embed", "config": {"lr": 0.05}}},
        gradient_accumulation_steps=3,
        max_grad_norm=1e-3,
        mixed_precision="bf16",
    )
    dtypes = set()

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        batches.append(output.shape[0])
        dtypes.add(output.dtype)

    init = trainer.model_init

    def make() -> nn.Module:
        assert init is not None
        model = init()
        model.head.register_forward_hook(watch)
        return model

    trainer.model_init = make
    found = trainer.lr_find(start_lr=1e-4, end_lr=1e-1, num_iterations=3)
    assert [s["lrs"][1] / s["lrs"][0] for s in seen] == pytest.approx([10] * 3)  # their ratio stays
    assert [s["lrs"][0] for s in seen] == pytest.approx(found.lrs)
    assert all(s["norm"] <= 1.001e-3 for s in seen)
    assert batches == [2] * 9 and dtypes == {torch.bfloat16}
    # The loss of a window, not of its last micro-batch.
    assert all(loss == pytest.approx(math.log(258), rel=0.2) for loss in found.losses)


def test_the_step_can_be_in_the_backward(tmp_path: Path) -> None:
    options = {"fuse_optim_with_backward": True, "max_grad_norm": 0.0}
    plain = result_of(make_trainer(tmp_path / "a", **options))
    trainer = make_trainer(tmp_path / "b", **options)
    found = trainer.lr_find(num_iterations=30)
    assert found.losses[-1] != found.losses[0]
    assert_same(plain, result_of(trainer))


def test_seeds_differ_in_order_and_calls_agree(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    first = trainer.lr_find(num_iterations=8, num_seeds=3)
    assert len({tuple(run.losses) for run in first.runs}) == 3
    assert trainer.lr_find(num_iterations=8, num_seeds=3).to_dict() == first.to_dict()
    assert trainer.lr_find(num_iterations=8).losses == first.runs[0].losses


def test_ranks_with_other_groups_keep_the_ratio_to_one_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of a pipeline may hold AdamW's parameters only, and another one Muon's as well."""
    trainer = make_trainer(tmp_path)
    trainer.env = DistributedEnv(world_size=3)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    others: list[Any] = [[True, 1.0], [False, 0.7]]
    monkeypatch.setattr(lr_find, "exchange", lambda own: [own, *others])
    assert trainer._agree_on_rate(optimizer) == 1.0
    del others[0]
    assert trainer._agree_on_rate(optimizer) == 0.1


def test_mistakes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match="end_lr: 1e-09 given"):
        trainer.lr_find(end_lr=1e-9)
    with pytest.raises(ConfigError, match="num_seeds: 0 given"):
        trainer.lr_find(num_seeds=0)
    trainer.train_dataset = iter(tiny_dataset(4))
    with pytest.raises(ConfigError, match=r"train_dataset: .*only once"):
        trainer.lr_find()
    trainer.train_dataset = None
    with pytest.raises(ConfigError, match="needs train_dataset"):
        trainer.lr_find()
    assert trainer.strategy is None


def test_state_that_cannot_be_put_back_is_not_touched(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    trainer = AccelTrainer(
        accelerator=accelerate.Accelerator(cpu=True),
        args={"output_dir": str(tmp_path), "use_cpu": True},
        model_init=Net,
        train_dataset=tiny_dataset(4),
    )
    with pytest.raises(ConfigError, match="search with trainer 'ddp'"):
        trainer.lr_find()
    assert trainer.strategy is None
