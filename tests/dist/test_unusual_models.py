"""What ranks could disagree about: they train as one device does, or say why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway import (
    AccelTrainer,
    AccelTrainingArguments,
    ConfigError,
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from headway.dist import init_distributed
from headway.testing import run_ranks

pytestmark = pytest.mark.timeout(240)
KINDS: dict[str, Any] = {
    "single": (Trainer, TrainingArguments),
    "ddp": (DDPTrainer, DDPTrainingArguments),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments),
}


POST_LOCAL = {"enabled": True, "start_step": 1, "period": 3}


class Experts(nn.Module):
    """Each sample goes through one of two; one without a sample is not called, as in Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        out = x.clone()
        for number, expert in enumerate(self.experts):
            chosen = (route == number).nonzero().flatten()
            if len(chosen):
                out = out.index_add(0, chosen, torch.tanh(expert(x[chosen])))
        return out


class Mixture(nn.Module):
    def __init__(self, *, idle: bool = False, layerdrop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(layerdrop=layerdrop)
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(16, 32)
        if idle:
            self.idle = nn.Linear(16, 16)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, input_ids[:, 0] % 2)
        return {"logits": self.head(x)}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(32, 16), nn.BatchNorm1d(16)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return {"logits": self.head(self.dropout(x))}


def samples() -> list[dict[str, Any]]:
    """Even and odd first tokens in turn, so that ranks use different experts in many steps."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 16, (16, 8), generator=generator) * 2
    rows[1::2, 0] += 1
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]


def make(kind: str, folder: str, model: Any, callbacks: Any = (), **options: Any) -> Any:
    trainer_class, arguments_class = KINDS[kind]
    if kind != "single":
        init_distributed(use_cpu=True)
    settings = {
        "output_dir": folder,
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "seed": 1,
        "use_cpu": True,
        **options,
    }
    return trainer_class(
        args=arguments_class(**settings),
        model_init=model,
        train_dataset=samples(),
        eval_dataset=samples(),
        callbacks=list(callbacks),
        default_callbacks=False,
    )


def weights(trainer: Any) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.strategy.unwrap().named_parameters()
    }


def trained(kind: str, folder: str, size: int, **options: Any) -> dict[str, Tensor]:
    # By plain descent: for FSDP2 a parameter that nobody used has a gradient of zero, and not none.
    settings = {"optim": "sgd", "learning_rate": 0.5, **options}
    trainer = make(kind, folder, Mixture, per_device_train_batch_size=size, **settings)
    trainer.train()
    return weights(trainer)


def test_experts_that_only_one_rank_uses_train_under_fsdp2(tmp_path):
    alone = trained("single", str(tmp_path / "one"), 2)
    for found in run_ranks(trained, 2, "fsdp2", str(tmp_path / "two"), 1, timeout_s=120):
        for name, wanted in alone.items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_experts_used_in_other_micro_batches_train_where_gradients_are_summed_in_another_dtype(
    tmp_path,
):
    """Some gradients of a group are sums in float32 then, others are new and in bfloat16."""
    precision = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    options = {"gradient_accumulation_steps": 2, "fsdp2": precision}
    before = dict(Mixture().named_parameters())
    alone = trained("single", str(tmp_path / "one"), 4)
    found = run_ranks(trained, 2, "fsdp2", str(tmp_path / "two"), 1, timeout_s=120, **options)
    for weights_of_rank in found:
        for name, wanted in alone.items():
            moved = (wanted - before[name]).norm()
            assert (weights_of_rank[name] - wanted).norm() <= 0.05 * moved + 1e-4, name


class Disabled(TrainerCallback):
    """An observer that fails, on one rank alone."""

    failure_policy = "disable"

    def __init__(self, rank: int) -> None:
        self.rank, self.num_settled = rank, 0

    def on_window(self) -> None:
        if self.rank == 1:
            raise ValueError("bad luck")

    def on_step_settled(self) -> None:
        self.num_settled += 1


class Draws(TrainerCallback):
    """What the next random numbers of this rank are, in each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_begin(self) -> None:
        self.seen.append(int(torch.get_rng_state().sum()))


def on_ddp_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    context = init_distributed(use_cpu=True)
    unused = make("ddp", f"{folder}/unused", lambda: Mixture(idle=True), max_steps=1)
    try:
        unused.train()
        found["unused"] = "trained"
    except ConfigError as error:
        found["unused"] = str(error)
    found["step"] = unused.state.global_step
    draws = Draws()
    after_evaluation = make("ddp", f"{folder}/draws", Normed, [draws])
    after_evaluation.evaluate()
    after_evaluation.train()
    found["draws"] = draws.seen
    disabled = Disabled(context.rank)
    settings = {"ddp": {"find_unused_parameters": True}}
    make("ddp", f"{folder}/disabled", Mixture, [disabled], **settings).train()
    found["settled"] = disabled.num_settled
    local = make("ddp", f"{folder}/local", Normed, max_steps=5, post_local_sgd=POST_LOCAL)
    local.train()
    found["local"] = weights(local)
    return found


def test_ddp_ranks_do_not_grow_apart(tmp_path):
    first, second = run_ranks(on_ddp_ranks, 2, str(tmp_path), timeout_s=150)
    for found in (first, second):
        assert "idle" in found["unused"] and "find_unused_parameters" in found["unused"]
        assert found["step"] == 0, "a step that was reduced in part is not taken"
        assert len(found["draws"]) == 4
    assert not set(first["draws"]) & set(second["draws"]), "each rank has masks of its own"
    assert first["settled"] == 4, "the others go on where an observer fails on one rank"
    for name, weight in first["local"].items():
        assert torch.equal(weight, second["local"][name]), "one model when training is over"


class Staged(nn.Module):
    """A model of which a part is trained later than the rest."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)
        self.middle.requires_grad_(not frozen)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.tanh(self.middle(self.embedding(input_ids))))}


class Switch(TrainerCallback):
    """Thaws the middle, or freezes it, after two steps."""

    def __init__(self, *, trains: bool = True) -> None:
        self.trains = trains

    def on_step_begin(self, state: Any, model: Any) -> None:
        if state.global_step == 2:
            model.middle.requires_grad_(self.trains)


THAWED = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.1, "max_steps": 5}


def thawed(kind: str, folder: str, size: int, **options: Any) -> dict[str, Tensor]:
    settings = {**THAWED, "per_device_train_batch_size": size, **options}
    trainer = make(kind, folder, Staged, [Switch()], **settings)
    trainer.train()
    return weights(trainer)


def thawed_on_ranks(folder: str) -> list[dict[str, Tensor]]:
    found = [
        thawed("ddp", f"{folder}/ddp", 1),
        thawed("ddp", f"{folder}/accumulated", 1, gradient_accumulation_steps=2, max_steps=3),
    ]
    with pytest.raises(ConfigError, match=r"without a gradient \(middle\.weight, middle\.bias\)"):
        make(
            "ddp", f"{folder}/frozen", lambda: Staged(frozen=False), [Switch(trains=False)]
        ).train()
    return found


def test_what_is_thawed_in_a_ddp_run_is_trained_by_all_ranks_alike(tmp_path):
    alone = [
        thawed("single", str(tmp_path / "one"), 2),
        thawed("single", str(tmp_path / "four"), 4, max_steps=3),
    ]
    for found in run_ranks(thawed_on_ranks, 2, str(tmp_path), timeout_s=120):
        for wanted, held in zip(alone, found, strict=True):
            for name, weight in wanted.items():
                torch.testing.assert_close(held[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def thawed_under_accelerate(folder: str) -> dict[str, Tensor]:
    from accelerate import Accelerator

    settings = {**THAWED, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
    trainer = AccelTrainer(
        args=AccelTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            save_strategy="no",
            seed=1,
            **settings,
        ),
        accelerator=Accelerator(cpu=True),
        model_init=Staged,
        train_dataset=samples(),
        callbacks=[Switch()],
        default_callbacks=False,
    )
    trainer.train()
    return weights(trainer)


def test_what_is_thawed_under_accelerate_is_trained_by_all_ranks_alike(tmp_path):
    pytest.importorskip("accelerate")
    alone = thawed("single", str(tmp_path / "one"), 2)
    folder = str(tmp_path / "two")
    for found in run_ranks(thawed_under_accelerate, 2, folder, timeout_s=120, backend=None):
        for name, weight in alone.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_fsdp2_refuses_layers_that_are_left_out_at_random(tmp_path):
    with pytest.raises(Exception, match=r"layerdrop=0\.1.*set layerdrop=0"):
        run_ranks(dropped, 2, str(tmp_path), timeout_s=100)


def dropped(folder: str) -> None:
    make("fsdp2", folder, lambda: Mixture(layerdrop=0.1)).train()


class AtSave(TrainerCallback):
    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def on_save(self, model: Any) -> None:
        self.mean = model.norm.running_mean.clone()


def accelerated(folder: str) -> tuple[Tensor, list[float]]:
    from accelerate import Accelerator

    look = AtSave()
    trainer = AccelTrainer(
        args=AccelTrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=2,
            save_strategy="steps",
            save_steps=2,
            save_async=False,
            eval_strategy="steps",
            eval_steps=2,
            seed=1,
        ),
        accelerator=Accelerator(cpu=True),
        model_init=Normed,
        train_dataset=samples(),
        eval_dataset=samples(),
        callbacks=[look],
        default_callbacks=False,
    )
    trainer.train()
    assert look.mean is not None
    return look.mean, [r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r]


def test_accelerates_ranks_save_and_evaluate_with_the_same_buffers(tmp_path):
    pytest.importorskip("accelerate")
    first, second = run_ranks(accelerated, 2, str(tmp_path), timeout_s=120, backend=None)
    assert torch.equal(first[0], second[0])
