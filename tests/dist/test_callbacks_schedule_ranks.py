"""Schedules on two ranks: the same run as on one device, under every strategy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import (
    ConfigError,
    DDPTrainer,
    FSDP2Trainer,
    PipelineTrainer,
    Trainer,
    TrainerCallback,
)
from headway.callbacks import (
    BatchSizeSchedulerCallback,
    FreezeCallback,
    QATSwitchCallback,
    SequenceLengthSchedulerCallback,
)
from headway.checkpoint.sharding import local_tensor
from headway.dist import cleanup_distributed, init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

STEPS, RATE = 6, 1e-2
SIZES, SCHEDULE = [4, 8, 2], [0, 2, 4]
OF_STEP = [4, 4, 8, 8, 2, 2]
pytestmark = pytest.mark.timeout(170)

MLP = r"\.mlp\."
STRATEGIES = {"ddp": DDPTrainer, "fsdp2": FSDP2Trainer, "pipeline": PipelineTrainer}


class Curve(TrainerCallback):
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.rates: list[float] = []
        self.tokens: list[int] = []
        self.held: list[dict[str, torch.Tensor]] = []
        self.quantised: list[set[bool]] = []

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "train/CE loss" in metrics:
            self.losses[step] = metrics["train/CE loss"]
            self.rates.append(metrics["optim/LR (group 0)"])

    def on_step_end(self, state: Any, model: Any) -> None:
        self.tokens.append(state.num_input_tokens_seen)
        layers = [m for m in model.modules() if type(m).__name__ == "FakeQuantizedLinear"]
        self.quantised.append({layer.weight_fake_quantizer.enabled for layer in layers})
        self.held.append({n: local_tensor(p.detach()).clone() for n, p in model.named_parameters()})


def make(
    folder: Path, kind: type[Trainer], callbacks: list[Any], **args: Any
) -> tuple[Trainer, Curve]:
    curve = Curve()
    several = kind is not Trainer
    shares = 2 if kind in (DDPTrainer, FSDP2Trainer) else 1
    settings = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "seed": 3,
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // shares,
        "per_device_eval_batch_size": 4 // shares,
        "logging_steps": 1000,
        "save_strategy": "no",
        **({"n_microbatches": 2} if kind is PipelineTrainer else {}),
        **args,
    }
    trainer = kind(
        args=kind.arguments_class(**settings),
        model_init=lambda: tiny_decoder(),
        train_dataset=tiny_dataset(64, sequence_length=16),
        callbacks=[*callbacks, curve],
        default_callbacks=False,
    )
    assert several == (trainer.env.world_size > 1)
    return trainer, curve


def both() -> list[Any]:
    return [
        BatchSizeSchedulerCallback(SIZES, SCHEDULE),
        SequenceLengthSchedulerCallback(4, 4, max_sequence_length=16),
    ]


def train_on_rank(folder: str) -> dict[str, Any]:
    """Runs of all strategies with all schedules, and what each came to on this rank."""
    init_distributed(use_cpu=True)
    root, found = Path(folder), {}
    for name, kind in STRATEGIES.items():
        trainer, curve = make(root / name, kind, both())
        trainer.train()
        weights = [p.detach() for p in trainer.model.parameters()]
        found[name] = curve.losses, curve.rates, curve.tokens
        frozen, of_frozen = make(
            root / f"{name}-frozen", kind, [FreezeCallback([MLP, "embed"], 1, 3)]
        )
        frozen.train()
        found[f"{name} frozen"] = of_frozen.losses, moves(of_frozen)
        if name == "ddp":
            found["resumed"] = resume(root / "resumed", weights)
            continue
        quantised, of_quantised = make(
            root / f"{name}-qat",
            kind,
            [QATSwitchCallback(2)],
            max_steps=3,
            qat_recipe="int8-dynamic-act-int4-weight",
        )
        quantised.train()
        found[f"{name} qat"] = of_quantised.losses, of_quantised.quantised
    found["refused"] = refuse(root / "refused")
    cleanup_distributed()
    return found


def moves(curve: Curve) -> list[set[str]]:
    """The parameters of this rank that steps 2 to the last changed."""
    return [
        {name for name in before if not torch.equal(before[name], after[name])}
        for before, after in zip(curve.held, curve.held[1:])
    ]


def resume(folder: Path, weights: list[torch.Tensor]) -> tuple[dict[int, float], bool]:
    """In two parts, of which the second reads its data in another way."""
    first, before = make(folder, DDPTrainer, both(), stop_at=3, save_strategy="steps", save_steps=3)
    first.train()
    second, after = make(folder, DDPTrainer, both(), dispatch_batches=False)
    second.train(resume_from_checkpoint=True)
    same = all(map(torch.equal, weights, [p.detach() for p in second.model.parameters()]))
    return {**before.losses, **after.losses}, same


def refuse(folder: Path) -> str:
    trainer, curve = make(folder, DDPTrainer, [BatchSizeSchedulerCallback([4, 7], [0, 2])])
    try:
        trainer.train()
    except ConfigError as error:
        return f"{error} after {len(curve.tokens)} steps"
    return "not refused"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> list[dict[str, Any]]:
    pytest.importorskip("torchao")
    return run_ranks(train_on_rank, 2, str(tmp_path_factory.mktemp("ranks")), timeout_s=150)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_schedules_are_those_of_one_device(
    strategy: str, ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone, curve = make(tmp_path, Trainer, both())
    alone.train()
    expected = [RATE * (1 - n / STEPS) * math.sqrt(size / 4) for n, size in enumerate(OF_STEP)]
    assert curve.rates == pytest.approx(expected)
    for here in ranks:
        losses, rates, tokens = here[strategy]
        assert losses == pytest.approx(curve.losses, rel=1e-6)
        assert rates == pytest.approx(expected)
        assert tokens == curve.tokens == [sum(OF_STEP[: n + 1]) * 16 for n in range(STEPS)]


def test_a_resume_on_ranks_has_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for here in ranks:
        losses, same = here["resumed"]
        assert losses == here["ddp"][0]
        assert same


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_stand_still(
    strategy: str, ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone, curve = make(tmp_path, Trainer, [FreezeCallback([MLP, "embed"], 1, 3)])
    alone.train()
    frozen = {name for name in curve.held[0] if ".mlp." in name or "embed" in name}
    moved = [set(), set(), set(), set(), set()]
    for here in ranks:
        losses, of_rank = here[f"{strategy} frozen"]
        assert losses == pytest.approx(curve.losses, rel=2e-6)
        moved = [old | new for old, new in zip(moved, of_rank)]
    everything = set(curve.held[0])
    assert moved[:2] == [everything - frozen] * 2
    assert moved[2:] == [everything] * 3


@pytest.mark.parametrize("strategy", ["fsdp2", "pipeline"])
def test_fake_quantisation_begins_on_all_ranks(
    strategy: str, ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    plain, curve = make(tmp_path / "plain", Trainer, [], max_steps=3)
    plain.train()
    switched, expected = make(
        tmp_path / "qat",
        Trainer,
        [QATSwitchCallback(2)],
        max_steps=3,
        qat_recipe="int8-dynamic-act-int4-weight",
    )
    switched.train()
    for here in ranks:
        losses, quantised = here[f"{strategy} qat"]
        assert [losses[1], losses[2]] == pytest.approx([curve.losses[1], curve.losses[2]], rel=1e-6)
        # A last digit may decide to which of few values a weight is rounded.
        assert losses[3] == pytest.approx(expected.losses[3], rel=1e-3)
        assert losses[3] != curve.losses[3]
        assert quantised == [{False}, {False}, {True}]


def test_a_batch_that_ranks_cannot_share_is_refused(ranks: list[dict[str, Any]]) -> None:
    for here in ranks:
        assert "batch_sizes: 7 samples" in here["refused"] and "6 or 8" in here["refused"]
        assert here["refused"].endswith("after 0 steps")
