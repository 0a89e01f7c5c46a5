"""bf16 and fp16 autocast, as a loop written by hand would do it."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway import ConfigError, Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import NaNGuardCallback
from headway.engine.delivery import NonFiniteError
from headway.precision.scaler import LossScale
from headway.testing import tiny_dataset, tiny_decoder


class Net(nn.Module):
    """A classifier whose loss the data can blow up."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.seen = []

    def forward(self, x, target, factor):
        scores = self.layers(x)
        self.seen.append(scores.dtype)
        return {"loss": nn.functional.cross_entropy(scores, target) * factor.mean()}


def make_net():
    torch.manual_seed(3)
    return Net()


def samples(blown_up=(), num=48):
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, generator=draw),
            "target": torch.randint(4, (), generator=draw),
            "factor": torch.tensor(1e36 if number in blown_up else 1.0),
        }
        for number in range(num)
    ]


class Watch(TrainerCallback):
    """The batches of each step, and what the step left behind."""

    def __init__(self):
        self.windows, self.rates, self.scales, self.norms = [], [], [], []

    def on_window(self, window):
        self.windows.append(copy.deepcopy(window.micro_batches))

    def on_gradients(self, model):
        self.norms.append(float(next(model.parameters()).grad.norm()))

    def on_step_end(self, trainer):
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])
        scale = trainer.strategy.loss_scale
        self.scales.append(None if scale is None else scale.value)


def train(tmp_path, data, callbacks=(), **options):
    options = {
        "output_dir": str(tmp_path),
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "warmup_steps": 4,
        "save_strategy": "no",
        "logging_steps": 4,
        "seed": 5,
        "use_cpu": True,
        **options,
    }
    trainer = Trainer(
        args=TrainingArguments(**options),
        model_init=make_net,
        train_dataset=data,
        data_collator=torch.utils.data.default_collate,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def by_hand(windows, schedule, *, dtype):
    """The same steps in a plain loop with torch's own autocast and GradScaler."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    rates, scales, taken = [], [], []
    for micro_batches in windows:
        for batch in micro_batches:
            with torch.autocast("cpu", dtype):
                loss = model(**batch)["loss"] * (len(batch["x"]) / 4)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        taken.append(math.isfinite(norm))
        if taken[-1]:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        scales.append(scaler.get_scale() if scaler.is_enabled() else None)
    return model, rates, scales, taken


def same_weights(trainer, model):
    pairs = zip(trainer.model.state_dict().values(), model.state_dict().values())
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_steps_are_those_of_a_loop_by_hand(tmp_path, name, dtype):
    watch = Watch()
    trainer = train(tmp_path, samples(), [watch], mixed_precision=name)
    model, rates, scales, _ = by_hand(
        watch.windows, trainer.lr_scheduler.lr_lambdas[0], dtype=dtype
    )
    assert same_weights(trainer, model)
    assert watch.rates == rates and watch.scales == scales
    assert set(trainer.model.seen) == {dtype}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_overflows_in_fp16_are_those_of_torchs_grad_scaler(tmp_path):
    watch = Watch()
    data = samples(blown_up=(3, 17, 18, 40))
    trainer = train(tmp_path, data, [watch], mixed_precision="fp16", nonfinite_action="raise")
    schedule = trainer.lr_scheduler.lr_lambdas[0]
    model, rates, scales, taken = by_hand(watch.windows, schedule, dtype=torch.float16)
    assert 2 <= taken.count(False) <= 4, "the job must have overflows to say anything"
    assert same_weights(trainer, model)
    assert watch.scales == scales
    assert watch.rates == rates, "the schedule stands still when a step is withheld"
    assert [math.isfinite(norm) for norm in watch.norms] == taken
    assert max(norm for norm in watch.norms if math.isfinite(norm)) < 100, "unscaled for callbacks"


def test_an_overflow_is_in_the_log_and_leaves_no_infinite_norm_there(tmp_path):
    data = samples(blown_up=(3, 17, 18, 40))
    trainer = train(tmp_path, data, mixed_precision="fp16", nonfinite_action="raise")
    records = [record for record in trainer.state.log_history if "grad_norm" in record]
    assert sum(record.get("skipped_steps", 0) for record in records) >= 2
    assert all(math.isfinite(record["grad_norm"]) for record in records)


def test_a_record_of_overflows_alone_has_no_norm(tmp_path):
    data = samples(blown_up=(3, 17, 18, 40))
    trainer = train(
        tmp_path, data, mixed_precision="fp16", nonfinite_action="raise", logging_steps=1
    )
    records = [record for record in trainer.state.log_history if "learning_rate" in record]
    overflows = [record for record in records if "skipped_steps" in record]
    assert len(overflows) >= 2
    for record in records:
        norms = {"grad_norm", "max_grad_norm"} & record.keys()
        assert not norms if record in overflows else len(norms) == 2


class NoSlope(TrainerCallback):
    """Every gradient is infinite, whatever the scale; the loss is fine."""

    def on_train_begin(self, model):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.parametrize("guards", [[], [NaNGuardCallback(action="stop")]])
def test_gradients_that_no_scale_makes_finite_are_no_overflow(tmp_path, guards, caplog):
    trainer = train(tmp_path, samples(), [NoSlope(), *guards], mixed_precision="fp16", max_steps=40)
    assert 27 <= trainer.state.global_step < 40
    assert sum("every step overflows" in record.message for record in caplog.records) == 1


class Lose(TrainerCallback):
    def on_window(self, state, window):
        if state.global_step == 6:
            window.micro_batches[0]["factor"].fill_(math.nan)


def test_a_loss_that_is_not_a_number_is_no_overflow(tmp_path):
    with pytest.raises(NonFiniteError):
        train(tmp_path, samples(), [Lose()], mixed_precision="fp16", nonfinite_action="raise")


def test_the_smallest_scale_can_be_undone():
    scale = LossScale()
    for _ in range(1200):
        scale.update(taken=False)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), scale.value)
    scale.unscale([weight])
    assert torch.equal(weight.grad, torch.ones(2))


@given(steps=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_the_scale_goes_the_way_of_torchs(steps, interval):
    scale = LossScale(growth_interval=interval)
    theirs = torch.amp.GradScaler("cpu", growth_interval=interval)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for finite in steps:
        theirs.scale(torch.ones(()))
        parameter.grad = torch.full((1,), 1.0 if finite else math.inf)
        theirs.step(optimizer)
        theirs.update()
        scale.update(finite)
        assert scale.value == theirs.get_scale()
    if steps:
        assert scale.state_dict() == theirs.state_dict()


class ForgetScale(TrainerCallback):
    def on_train_begin(self, trainer):
        trainer.strategy.loss_scale.load_state_dict(LossScale().state_dict())


def test_a_resumed_fp16_run_goes_on_with_its_scale(tmp_path):
    data = samples(blown_up=(3, 17, 18, 40))
    run = partial(train, data=data, mixed_precision="fp16", lr_scheduler_type="constant")
    whole = run(tmp_path / "whole").strategy.loss_scale.state_dict()
    for name, callbacks in (("kept", []), ("lost", [ForgetScale()])):
        run(tmp_path / name, max_steps=6, save_strategy="steps", save_steps=6)
        resumed = run(tmp_path / name, callbacks=callbacks)
        scale = resumed.strategy.loss_scale.state_dict()
        assert (scale == whole) is (name == "kept")


def test_evaluation_and_sampling_run_under_autocast(tmp_path):
    seen = []
    model = tiny_decoder()
    model.lm_head.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    trainer = Trainer(
        args=TrainingArguments(output_dir=str(tmp_path), mixed_precision="bf16", use_cpu=True),
        model=model,
        eval_dataset=tiny_dataset(),
    )
    trainer.evaluate()
    trainer.strategy.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)
    assert seen and set(seen) == {torch.bfloat16}


def test_fp16_wants_weights_that_can_be_unscaled(tmp_path):
    with pytest.raises(ConfigError, match=r"needs weights in float32.*default_dtype"):
        train(tmp_path, samples(), mixed_precision="fp16", default_dtype="float16")
