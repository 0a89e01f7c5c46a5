"""Fake quantisation from a point of the run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from schedule_loops import (
    RATE,
    SEED,
    assert_same_bits,
    make_trainer,
    read_samples,
    resume_at,
    weights_of,
)

from headway import ConfigError
from headway.callbacks import QATSwitchCallback
from headway.precision.qat import prepare
from headway.testing import tiny_decoder

pytest.importorskip("torchao")

STEPS, START = 6, 3
RECIPE = {"qat_recipe": "int8-dynamic-act-int4-weight"}


def make(folder: Path, **args: Any) -> Any:
    return make_trainer(
        folder, [QATSwitchCallback(START)], **{"max_steps": STEPS, **RECIPE, **args}
    )


def train_by_hand() -> list[float]:
    torch.manual_seed(SEED)
    model = tiny_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    losses = []
    for step in range(STEPS):
        if step == START:
            prepare(model, RECIPE["qat_recipe"], exclude=[r"lm_head"])
        ids = read_samples(2 * step, 2)
        loss = model(ids, labels=ids, num_items_in_batch=2 * 15).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_run_is_plain_before_and_quantised_after(tmp_path: Path) -> None:
    trainer, curve = make(tmp_path / "switched")
    trainer.train()
    assert curve.losses == pytest.approx(train_by_hand(), rel=1e-6)
    plain, alone = make_trainer(tmp_path / "plain", [], max_steps=STEPS)
    plain.train()
    quantised, always = make_trainer(tmp_path / "always", [], max_steps=STEPS, **RECIPE)
    quantised.train()
    assert curve.losses[:START] == alone.losses[:START]
    assert curve.losses[START] != alone.losses[START]
    assert curve.losses[0] != always.losses[0]


@pytest.mark.parametrize("step", [START - 1, START])
def test_a_resume_on_either_side_has_the_same_bits(step: int, tmp_path: Path) -> None:
    whole, curve = make(tmp_path / "whole")
    whole.train()
    resumed, (before, after) = resume_at(tmp_path / "two", step, make, STEPS)
    assert before.losses + after.losses == curve.losses
    assert_same_bits(weights_of(resumed), weights_of(whole))


def test_evaluations_go_by_what_is_trained(tmp_path: Path) -> None:
    seen: list[tuple[int, bool | None, float]] = []

    class Watch(QATSwitchCallback):
        def on_evaluate(self, state: Any, metrics: dict[str, float]) -> None:
            seen.append((state.global_step, self.is_on, metrics["eval_loss"]))

    for number, callbacks in enumerate(([Watch(4)], [])):
        trainer, _ = make_trainer(
            tmp_path / str(number),
            callbacks,
            max_steps=5,
            eval_strategy="steps",
            eval_steps=2,
            **(RECIPE if callbacks else {}),
        )
        trainer.eval_dataset = trainer.train_dataset
        trainer.train()
        if not callbacks:
            plain = {
                r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r
            }
    assert [(step, on) for step, on, _ in seen] == [(2, False), (4, False), (5, True)]
    assert seen[0][2] == plain[2] and seen[1][2] == plain[4] and seen[2][2] != plain[5]


def test_without_a_recipe_it_is_refused(tmp_path: Path) -> None:
    trainer, curve = make(tmp_path, qat_recipe=None)
    with pytest.raises(ConfigError, match="qat_recipe"):
        trainer.train()
    assert curve.tokens == []


def test_after_the_run_the_layers_are_as_the_recipe_says(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, max_steps=1)
    trainer.train()
    on = [
        layer.weight_fake_quantizer.enabled
        for layer in trainer.model.modules()
        if type(layer).__name__ == "FakeQuantizedLinear"
    ]
    assert on and all(on)


@pytest.mark.slow
def test_a_compiled_model_goes_over_with_it(tmp_path: Path) -> None:
    plain, curve = make(tmp_path / "plain", max_steps=4)
    plain.train()
    compiled, seen = make(
        tmp_path / "compiled", max_steps=4, torch_compile=True, torch_compile_backend="eager"
    )
    compiled.train()
    assert seen.losses == pytest.approx(curve.losses, rel=1e-6)
