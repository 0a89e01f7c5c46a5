"""One process on an Accelerator, and what decides between it and the arguments."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from headway.args import AccelTrainingArguments
from headway.data.loader import Window
from headway.errors import ConfigError
from headway.strategies.accelerate import AccelerateStrategy
from headway.strategies.accelerator import check_accelerator, reconcile
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice
from headway.strategies.source import ModelSource
from headway.testing import tiny_decoder

MakeAccelerator = Callable[..., Accelerator]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeAccelerator]:
    """Accelerators on the CPU; what Accelerate keeps for the whole process is taken back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)

    def make(**settings: Any) -> Accelerator:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return Accelerator(cpu=True, **settings)

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def tiny() -> torch.nn.Module:
    torch.manual_seed(3)
    return tiny_decoder(hidden_size=16, intermediate_size=32, num_layers=1)


def windows(num: int, accumulation: int) -> list[Window]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(num):
        ids = torch.randint(0, 258, (accumulation, 2, 9), generator=generator)
        batches = [{"input_ids": batch, "labels": batch.clone()} for batch in ids]
        for number, batch in enumerate(batches):
            batch["labels"][:, : 1 + number] = -100  # micro-batches of unequal weight
        targets = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        made.append(Window(batches, targets, ids.numel(), 2 * accumulation))
    return made


def run(strategy: Any, accumulation: int = 3, max_norm: float = 0.5) -> list[tuple[float, float]]:
    model = strategy.setup(ModelSource(make=tiny))
    objective = Objective(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for window in windows(4, accumulation):
        loss = strategy.forward_backward(
            window, objective, window.num_target_tokens, lambda event: None
        )
        norm = strategy.clip(max_norm)
        strategy.apply(optimizer, loss, norm)
        curve.append((loss.item(), norm.item()))
    strategy.teardown()
    return curve


def check_close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance
    )


def messages_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


# -- training alone ------------------------------------------------------------------------------


def test_one_process_equals_the_single_device(make: MakeAccelerator) -> None:
    accelerator = make(gradient_accumulation_steps=3)
    strategy = AccelerateStrategy(accelerator, AccelTrainingArguments())
    assert strategy.agree(5) == 5 and strategy.data_shard().world_size == 1
    check_close(run(strategy), run(SingleDevice(torch.device("cpu"))))


def test_autocast_is_the_accelerators(make: MakeAccelerator) -> None:
    found = run(AccelerateStrategy(make(mixed_precision="bf16"), AccelTrainingArguments()))
    exact = run(SingleDevice(torch.device("cpu")))
    assert found != exact
    check_close(found, exact, tolerance=0.05)


def test_the_model_leaves_as_it_came(make: MakeAccelerator) -> None:
    accelerator = make(mixed_precision="bf16")
    model = tiny()
    before = set(model.__dict__)
    strategy = AccelerateStrategy(accelerator, AccelTrainingArguments())
    seen: list[bool] = []
    model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    for _ in range(2):
        assert strategy.setup(ModelSource(model=model)) is model is strategy.unwrap()
        ids = torch.ones(1, 4, dtype=torch.long)
        assert strategy.generate(ids, max_new_tokens=1).shape == (1, 5)
        strategy.teardown()
        assert set(model.__dict__) == before and accelerator._models == []
    model(ids)
    assert seen[-1] is False and all(seen[:-1])


def test_a_step_that_is_not_finite_is_withheld(make: MakeAccelerator) -> None:
    strategy = AccelerateStrategy(make(), AccelTrainingArguments())
    model = strategy.setup(ModelSource(make=tiny))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.clone() for p in model.parameters()]
    for loss, norm in ((float("nan"), 1.0), (1.0, float("inf"))):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        strategy.apply(optimizer, torch.tensor(loss), torch.tensor(norm))
    assert all(torch.equal(old, p) for old, p in zip(before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


class HostScaler(torch.amp.GradScaler):
    """torch's own scaler, which works on the CPU as on a GPU."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0**12, growth_interval=2)


def test_fp16_clips_by_the_unscaled_norm_and_steps_with_the_scaler(make: MakeAccelerator) -> None:
    exact = run(SingleDevice(torch.device("cpu")))
    accelerator = make()
    accelerator.scaler = HostScaler()
    strategy = AccelerateStrategy(accelerator, AccelTrainingArguments())
    check_close(run(strategy), exact)
    assert accelerator.scaler.get_scale() == 2.0**14
    [component] = strategy.state_components()
    assert component.key == "scaler" and component.stateful is accelerator.scaler


def test_fp16_overflow_is_withheld_and_lowers_the_scale(
    make: MakeAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = make()
    accelerator.scaler = HostScaler()
    args = AccelTrainingArguments()
    strategy = AccelerateStrategy(accelerator, args)
    assert args.nonfinite_action == "skip" and "nonfinite_action='stop'" in messages_of(caplog)
    model = strategy.setup(ModelSource(make=tiny))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator.scaler.scale(torch.zeros(1))
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("inf"))
    called = []
    strategy.before_apply = lambda: called.append(True)
    norm = strategy.clip(1.0)
    assert not norm.isfinite()
    strategy.apply(optimizer, torch.tensor(1.0), norm)
    assert called and accelerator.scaler.get_scale() == 2.0**11
    assert all(torch.equal(old, p) for old, p in zip(before, model.parameters()))


# -- who decides ---------------------------------------------------------------------------------


def test_the_accelerators_accumulation_wins(
    make: MakeAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    args = AccelTrainingArguments(gradient_accumulation_steps=4, per_device_train_batch_size=2)
    reconcile(accelerator, args)
    assert args.gradient_accumulation_steps == 2
    assert "gradient_accumulation_steps=4 gives way to the Accelerator's 2" in messages_of(caplog)
    caplog.clear()
    reconcile(accelerator, args)
    assert not caplog.records
    args.global_batch_size = 4
    reconcile(accelerator, args)
    args.global_batch_size = 5
    with pytest.raises(ConfigError, match=r"global_batch_size=5 .* = 4"):
        reconcile(accelerator, args)
    args.global_batch_size, args.global_batch_tokens = None, 1024
    with pytest.raises(ConfigError, match="global_batch_tokens"):
        reconcile(accelerator, args)


def test_mixed_precision_is_ignored_with_a_warning(
    make: MakeAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    args = AccelTrainingArguments()
    args.mixed_precision = "bf16"
    reconcile(make(), args)
    assert args.mixed_precision is None
    assert "mixed_precision='bf16' is ignored" in messages_of(caplog)


def test_mixed_precision_that_agrees_is_no_warning(
    make: MakeAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    args = AccelTrainingArguments()
    args.mixed_precision = "bf16"
    reconcile(make(mixed_precision="bf16"), args)
    assert not messages_of(caplog)


def test_fp16_without_effect_is_said(
    make: MakeAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    reconcile(make(mixed_precision="fp16"), AccelTrainingArguments())
    assert "has no effect on the device cpu" in messages_of(caplog)


# -- what is refused -----------------------------------------------------------------------------


def test_something_else_than_an_accelerator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs an accelerate\.Accelerator, got dict"):
        check_accelerator({})


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "accelerate":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"headway\[accelerate\]"):
        check_accelerator(object())


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP2Trainer"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "dropped it"),
        ({"WORLD_SIZE": "2"}, "started 2 processes"),
    ],
)
def test_what_accelerate_would_silently_do_otherwise_is_refused(
    make: MakeAccelerator, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_accelerator(make(), environ)


@pytest.mark.parametrize("kind", ["FSDP", "MEGATRON_LM", "XLA"])
def test_other_ways_of_accelerate_are_refused(
    make: MakeAccelerator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = make()
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(ConfigError, match="not supported"):
        check_accelerator(accelerator, {})


def test_a_launch_that_lost_its_processes_is_told(
    make: MakeAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    launched = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}
    check_accelerator(make(), launched)
    assert not caplog.records
    check_accelerator(make(), {**launched, "MASTER_PORT": "29500"})
    assert "asked for several processes and started one" in messages_of(caplog)
    assert caplog.records[0].levelno == logging.WARNING
