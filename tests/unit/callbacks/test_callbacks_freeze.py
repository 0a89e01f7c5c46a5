"""Parameters that are frozen for a part of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from schedule_loops import (
    RATE,
    assert_close,
    assert_same_bits,
    make_trainer,
    read_samples,
    resume_at,
    train_by_hand,
    weights_of,
)

from headway import ConfigError, TrainerCallback
from headway.callbacks import FreezeCallback

STEPS = 6
MLP = r"layers\.\d+\.mlp\."


class History(TrainerCallback):
    """The weights after every step, and what had a gradient."""

    priority = -1000

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.graded: list[set[str]] = []
        self.required: list[set[str]] = []

    def on_train_begin(self, trainer: Any) -> None:
        self.weights.append(weights_of(trainer))

    def on_gradients(self, model: Any) -> None:
        self.graded.append({n for n, p in model.named_parameters() if p.grad is not None})
        self.required.append({n for n, p in model.named_parameters() if p.requires_grad})

    def on_step_end(self, trainer: Any) -> None:
        self.weights.append(weights_of(trainer))

    def moved(self, step: int) -> set[str]:
        before, after = self.weights[step - 1 : step + 1]
        return {name for name in before if not torch.equal(before[name], after[name])}


def run(folder: Path, callbacks: list[Any], **args: Any) -> tuple[Any, Any, History]:
    history = History()
    trainer, curve = make_trainer(folder, [*callbacks, history], **{"max_steps": STEPS, **args})
    trainer.train()
    return trainer, curve, history


def test_a_run_is_that_of_a_loop_by_hand(tmp_path: Path) -> None:
    trainer, curve, history = run(tmp_path, [FreezeCallback(MLP, since=2, until=4)])
    names = set(weights_of(trainer))
    mlp = {name for name in names if ".mlp." in name}
    frozen = [mlp if n in (2, 3) else set() for n in range(STEPS)]
    rates = [RATE * (1 - n / STEPS) for n in range(STEPS)]
    batches = [read_samples(2 * n, 2) for n in range(STEPS)]
    losses, weights = train_by_hand(batches, rates, frozen)
    assert curve.losses == pytest.approx(losses, rel=1e-6)
    assert_close(weights_of(trainer), weights)
    assert [history.moved(step) for step in range(1, STEPS + 1)] == [names - out for out in frozen]
    assert history.graded == [names - out for out in frozen]


def test_neither_weight_decay_nor_the_norm_reaches_frozen_parameters(tmp_path: Path) -> None:
    norms = {}
    for patterns in ([MLP], ["no_such|lm_head"]):
        _, curve, history = run(
            tmp_path / patterns[0][:2], [FreezeCallback(patterns)], weight_decay=0.5, max_steps=1
        )
        norms[patterns[0]] = curve.of("optim/total grad norm")[0]
        (graded,) = history.graded
        assert history.moved(1) == graded
    plain, curve, _ = run(tmp_path / "plain", [], max_steps=1)
    whole = curve.of("optim/total grad norm")[0]
    assert 0 < norms[MLP] < whole


def test_computation_of_frozen_gradients_is_saved(tmp_path: Path) -> None:
    """What lies below the first trained layer has no backward pass at all."""
    calls: list[str] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, model: Any) -> None:
            for name in ("model.layers.0", "model.layers.1"):
                model.get_submodule(name).register_forward_hook(
                    lambda m, i, out, name=name: calls.append(f"{name} {out.requires_grad}")
                )

    run(tmp_path, [FreezeCallback(r"embed_tokens|layers\.0\."), Watch()], max_steps=1)
    assert calls == ["model.layers.0 False", "model.layers.1 True"]


@pytest.mark.parametrize("step", [3, 4])
def test_a_resume_has_the_same_bits(step: int, tmp_path: Path) -> None:
    def make(folder: Path, **args: Any) -> Any:
        return make_trainer(folder, [FreezeCallback(MLP, 0, 4)], **{"max_steps": STEPS, **args})

    whole, curve = make(tmp_path / "whole")
    whole.train()
    resumed, (before, after) = resume_at(tmp_path / "two", step, make, STEPS)
    assert before.losses + after.losses == curve.losses
    assert_same_bits(weights_of(resumed), weights_of(whole))


def test_gradual_unfreezing_with_several_callbacks(tmp_path: Path) -> None:
    layers = [FreezeCallback(r"layers\.", until=2), FreezeCallback(r"layers\.0\.", until="4 steps")]
    trainer, _, history = run(tmp_path, layers)
    first = {name for name in history.weights[0] if "layers.0." in name}
    both = {name for name in history.weights[0] if "layers." in name}
    names = set(history.weights[0])
    expected = [names - both] * 2 + [names - first] * 2 + [names] * 2
    assert [history.moved(step) for step in range(1, STEPS + 1)] == expected
    assert history.required == expected
    assert all(p.requires_grad for p in trainer.model.parameters())


def test_the_model_is_trainable_after_the_run(tmp_path: Path) -> None:
    trainer, *_ = run(tmp_path, [FreezeCallback(MLP)], max_steps=1)
    assert all(p.requires_grad for p in trainer.model.parameters())
    assert not any("_frozen_by" in vars(p) for p in trainer.model.parameters())


def test_updates_in_the_backward_pass_pass_over_them(tmp_path: Path) -> None:
    _, _, history = run(
        tmp_path,
        [FreezeCallback(MLP, until=1)],
        max_steps=2,
        fuse_optim_with_backward=True,
        max_grad_norm=None,
    )
    assert not any(".mlp." in name for name in history.moved(1))
    assert any(".mlp." in name for name in history.moved(2))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"patterns": r"lm_haed"}, "lm_haed.*nearest.*lm_head.weight"),
        ({"patterns": "."}, "nothing would be left"),
        ({"patterns": [r"layers", "norm", "embed", "head"]}, "nothing would be left"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_told(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    trainer, curve = make_trainer(tmp_path, [FreezeCallback(**options)], max_steps=1)
    with pytest.raises(ConfigError, match=told):
        trainer.train()
    assert curve.tokens == []


def test_what_was_never_trainable_cannot_be_unfrozen(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, [FreezeCallback("lm_head", until=2)], max_steps=3)
    make = trainer.model_init

    def init() -> Any:
        model = make()
        model.lm_head.requires_grad_(False)
        return model

    trainer.model_init = init
    with pytest.raises(ConfigError, match=r"until.*lm_head\.weight"):
        trainer.train()
