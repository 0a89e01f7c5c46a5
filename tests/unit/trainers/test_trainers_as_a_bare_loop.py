"""What surrounds a step changes nothing in it: weights are those of a bare loop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway import ConfigError, Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import EMACallback, FreezeCallback
from headway.data import count_targets
from headway.testing import tiny_dataset, tiny_decoder


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(self.norm(self.body(x))).square().mean() * 10}


def rows(number: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator)} for _ in range(number)]


def make(folder: Path, model: nn.Module, callbacks: Any = (), data: Any = None, **options: Any):
    optimizer = options.pop("optimizer", None)
    settings = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 0,
        "use_cpu": True,
        **options,
    }
    return Trainer(
        args=TrainingArguments(**settings),
        model=model,
        train_dataset=rows() if data is None else data,
        eval_dataset=rows() if data is None else data,
        callbacks=list(callbacks),
        default_callbacks=False,
        **({} if optimizer is None else {"optimizer_factory": optimizer}),
    )


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_gradients_that_were_there_before_are_not_trained_on(tmp_path):
    plain, spoilt = Two(), Two()
    make(tmp_path / "a", plain).train()
    (1000 * spoilt(torch.ones(4, 4))["loss"]).backward()
    spoilt.norm.load_state_dict(Two().norm.state_dict())  # the forward has changed its means
    make(tmp_path / "b", spoilt).train()
    assert all(map(torch.equal, weights(plain), weights(spoilt)))


def test_parameters_that_no_optimizer_has_do_not_collect_gradients(tmp_path):
    norms = []

    class Look(TrainerCallback):
        def on_gradients(self, model):
            norms.append(model.body.weight.grad.norm().item())

    model = Two()

    def of_head(_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.head.parameters(), lr=1e-9)

    make(tmp_path, model, [Look()], max_steps=6, data=rows(4), optimizer=of_head).train()
    assert norms == pytest.approx([norms[0]] * 6, rel=1e-3), "of one batch each"


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_parameters_that_are_thawed_later_are_clipped(tmp_path, evaluates_first):
    model = Two()
    model.body.requires_grad_(False)
    before = model.body.weight.detach().clone()

    class Thaw(TrainerCallback):
        def on_train_begin(self, model):
            model.requires_grad_(True)

    trainer = make(
        tmp_path,
        model,
        [Thaw()],
        learning_rate=1.0,
        max_grad_norm=1e-3,
        optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=1.0),
    )
    if evaluates_first:
        trainer.evaluate()
        model.requires_grad_(True)
    trainer.train()
    moved = (model.body.weight - before).norm().item()
    assert 0 < moved < 3.1e-3, "three steps of at most a thousandth"


@pytest.mark.parametrize("share", [0.5, 1.0, 1.0 + 1e-7, 1.0 + 1e-6, 2.0])
def test_gradients_are_clipped_as_torch_does_it(tmp_path, share):
    """To the bit, around the norm from which on nothing is clipped as well."""
    found = []

    class Look(TrainerCallback):
        def on_gradients(self, model):
            self.before = [p.grad.clone() for p in model.parameters()]

        def on_pre_optimizer_step(self, model):
            found.append((self.before, [p.grad.clone() for p in model.parameters()]))

    make(tmp_path / "a", Two(), [Look()], max_steps=1).train()
    norm = nn.utils.get_total_norm(found[0][0]).item()
    make(tmp_path / "b", Two(), [Look()], max_steps=1, max_grad_norm=norm * share).train()
    before, after = found[1]
    by_torch = [nn.Parameter(torch.zeros_like(gradient)) for gradient in before]
    for parameter, gradient in zip(by_torch, before):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(by_torch, norm * share)
    assert all(torch.equal(one, other.grad) for one, other in zip(after, by_torch))
    if share in (0.5, 2.0):
        assert all(map(torch.equal, before, after)) == (share == 2.0)


def test_a_second_run_of_a_trainer_begins_anew(tmp_path):
    trainer = make(
        tmp_path, Two(), max_steps=4, lr_scheduler_type="linear", learning_rate=1.0, optim="adamw"
    )
    trainer.train()
    first, run_id = list(trainer.state.log_history), trainer.run_id
    trainer.train()
    rates = [r["learning_rate"] for r in trainer.state.log_history if "learning_rate" in r]
    assert rates == [r["learning_rate"] for r in first if "learning_rate" in r]
    assert trainer.state.global_step == 4 and trainer.run_id != run_id
    assert [r["step"] for r in trainer.state.log_history if "loss" in r] == [1, 2, 3, 4]


def test_an_evaluation_leaves_every_module_in_its_mode(tmp_path):
    modes = []

    class Still(TrainerCallback):
        def on_train_begin(self, model):
            model.norm.eval()

        def on_step_begin(self, model):
            modes.append((model.training, model.norm.training, model.head.training))

    make(tmp_path, Two(), [Still()], eval_strategy="steps", eval_steps=1).train()
    assert modes == [(True, False, True)] * 3


class Noisy(Two):
    """Draws random numbers whatever its mode."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x + torch.randn_like(x))


def test_an_evaluation_takes_no_random_numbers_from_training(tmp_path):
    plain, evaluated = Noisy(), Noisy()
    make(tmp_path / "a", plain).train()
    make(tmp_path / "b", evaluated, eval_strategy="steps", eval_steps=1).train()
    assert all(map(torch.equal, weights(plain), weights(evaluated)))


def test_a_window_that_was_edited_is_counted_anew(tmp_path):
    class Mask(TrainerCallback):
        """Of each row only the last two tokens are to be learnt."""

        def on_window(self, window):
            for batch in window.micro_batches:
                batch["labels"] = batch["labels"].clone()
                batch["labels"][:, :-2] = -100

    torch.manual_seed(0)
    model, data = tiny_decoder(), tiny_dataset(4, sequence_length=16)
    ids = torch.stack([torch.as_tensor(sample["input_ids"]) for sample in data])
    labels = ids.clone()
    labels[:, :-2] = -100
    with torch.no_grad():
        wanted = model(ids, labels).loss.item()
    assert count_targets({"labels": labels}) == 8
    trainer = make(
        tmp_path, model, [Mask()], data, max_steps=1, per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_momentum_and_parameters_that_are_thawed_go_together(tmp_path):
    model = Two()
    frozen = FreezeCallback("body.*", until="2 steps")
    make(tmp_path, model, [frozen], max_steps=4, optim_args={"momentum": 0.9}).train()
    assert not torch.equal(model.body.weight, Two().body.weight)


def test_an_average_and_the_best_model_are_not_both_left_in_the_model(tmp_path):
    trainer = make(
        tmp_path,
        Two(),
        [EMACallback(swap_at_end=True)],
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    with pytest.raises(ConfigError, match=r"swap_at_end=true.*load_best_model_at_end"):
        trainer.train()


def test_a_dtype_for_new_weights_says_that_it_does_not_cast_a_ready_model(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make(tmp_path, Two(), default_dtype="bfloat16", max_steps=1).train()
    assert "default_dtype='bfloat16': without effect on a ready model" in caplog.text


@pytest.mark.parametrize("train_for", [None, "2.5 epochs"])
@pytest.mark.parametrize("stop_at", [4, 6])
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_epochs_stay_epochs_where_a_resume_has_another_batch(tmp_path, batch, stop_at, train_for):
    length = {"num_train_epochs": 3} if train_for is None else {"train_for": train_for}
    settings = {"max_steps": -1, "save_strategy": "steps", "save_steps": 2, **length}
    data = rows(16)
    make(tmp_path, Two(), data=data, stop_at=f"{stop_at} steps", **settings).train()
    again = make(tmp_path, Two(), data=data, per_device_train_batch_size=batch, **settings)
    again.train()
    assert again.state.epoch == pytest.approx(3.0 if train_for is None else 2.5)
    left = (3.0 if train_for is None else 2.5) - stop_at / 4
    assert again.state.global_step == stop_at + left * 16 / batch
    assert again.state.num_train_epochs == 3  # as HF counts: whole ones
