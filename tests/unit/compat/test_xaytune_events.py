"""xaytune's ten events: how often each fires, in which order, with which counters."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from xaytune_runs import Record, make_config, make_loader, make_model, train

from headway.compat.xaytune import (
    EVENTS,
    CallbackManager,
    Trainer,
    TrainState,
    global_callbacks,
    on,
)
from headway.errors import ConfigError


@pytest.fixture
def clean_globals() -> Iterator[list[Any]]:
    registered: list[Any] = []
    yield registered
    for handler in registered:
        global_callbacks.remove(handler)


def test_each_event_fires_as_often_as_it_should_under_accumulation(tmp_path: Path) -> None:
    record = Record()
    # 22 samples in batches of 4 are 6 batches (the last of 2), in windows of 4 batches: 4 + 2.
    config = make_config(tmp_path, gradient_accumulation=4, checkpoint_every_n_steps=3)
    state = train(config, record.manager, eval_dataloader=make_loader())
    assert Counter(record.names) == {
        "train_start": 1,
        "train_end": 1,
        "epoch_start": 2,
        "epoch_end": 2,
        "step_start": 4,
        "step_end": 4,
        "eval_start": 2,
        "eval_end": 2,
        "checkpoint_saved": 1,
    }
    assert record.names == [
        *("train_start", "epoch_start", "step_start", "step_end", "step_start", "step_end"),
        *("epoch_end", "eval_start", "eval_end"),
        *("epoch_start", "step_start", "step_end", "checkpoint_saved", "step_start", "step_end"),
        *("epoch_end", "eval_start", "eval_end", "train_end"),
    ]
    assert record.of("step_start", "global_step") == [0, 1, 2, 3]
    assert record.of("step_end", "global_step") == [1, 2, 3, 4]
    assert record.of("step_start", "step") == [0, 4, 0, 4]
    assert record.of("step_end", "step") == [3, 5, 3, 5]
    assert record.of("epoch_start", "epoch") == record.of("epoch_end", "epoch") == [0, 1]
    assert record.of("step_end", "num_epochs") == [2] * 4
    assert (state.global_step, state.epoch, state.should_stop) == (4, 1, False)


def test_metrics_are_the_raw_loss_of_the_window_and_the_next_rate(tmp_path: Path) -> None:
    model = make_model()
    model.dropout.p = 0.0
    with torch.no_grad():
        samples = make_loader().dataset[:16]  # type: ignore[index]
        x, y = (torch.stack([sample[key] for sample in samples]) for key in ("x", "y"))
        expected = model(x, y).item()
    record = Record()
    config = make_config(
        tmp_path, gradient_accumulation=4, max_steps=2, scheduler="linear", learning_rate=0.5
    )
    state = train(config, record.manager, model=model)
    first = record.of("step_end", "metrics")[0]
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    assert first["learning_rate"] == pytest.approx(0.25)
    assert first["grad_norm"] > 0
    assert all(isinstance(value, float) for value in first.values())
    assert state.metrics["learning_rate"] == 0.0


def test_evaluation_metrics_reach_the_handlers(tmp_path: Path) -> None:
    record = Record()
    train(
        make_config(tmp_path, num_epochs=1),
        record.manager,
        eval_dataloader=make_loader(),
        eval_every_n_steps=4,
    )
    assert record.of("eval_end", "global_step") == [4, 6]
    assert record.names[record.names.index("eval_start") - 1] == "step_end"
    assert all(metrics["eval_loss"] > 0 for metrics in record.of("eval_end", "metrics"))


def test_stop_training_ends_the_run_after_the_step(tmp_path: Path) -> None:
    record = Record()

    @record.manager.on("step_end")
    def stop(state: TrainState) -> None:
        if state.global_step == 3:
            state.stop_training()

    state = train(make_config(tmp_path, save_last=True), record.manager)
    assert (state.global_step, state.should_stop) == (3, True)
    assert record.names[-4:] == ["step_end", "epoch_end", "checkpoint_saved", "train_end"]


@pytest.mark.parametrize("event", ["epoch_end", "eval_end", "checkpoint_saved"])
def test_a_stop_from_any_event_ends_the_run(event: str, tmp_path: Path) -> None:
    manager = CallbackManager()
    manager.on(event)(TrainState.stop_training)
    config = make_config(tmp_path, checkpoint_every_n_steps=6)
    assert train(config, manager, eval_dataloader=make_loader()).global_step == 6


def test_a_signal_finishes_the_step_saves_and_stops(tmp_path: Path) -> None:
    record = Record()

    @record.manager.on("step_start")
    def interrupt(state: TrainState) -> None:
        if state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)

    state = train(make_config(tmp_path, save_last=True), record.manager)
    assert (state.global_step, state.should_stop) == (3, True)
    assert record.names[-2:] == ["checkpoint_saved", "train_end"]


def test_a_loss_that_is_not_finite_never_reaches_the_weights(tmp_path: Path) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = train(
        make_config(tmp_path), model=model, loss_fn=lambda model, batch, outputs: outputs / 0
    )
    assert state.should_stop
    assert state.global_step < 12
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_error_fires_with_the_exception_and_train_end_does_not(tmp_path: Path) -> None:
    record, heard = Record(), []

    @record.manager.on("error")
    def fail_too(state: TrainState) -> None:
        raise RuntimeError("a handler of error must not hide the failure")

    @record.manager.on("error")
    def look(state: TrainState) -> None:
        heard.append(state.exception)

    def loss_fn(model: Any, batch: Any, outputs: Any) -> Any:
        raise ZeroDivisionError("the loss is broken")

    with pytest.raises(ZeroDivisionError, match="the loss is broken"):
        train(make_config(tmp_path), record.manager, loss_fn=loss_fn)
    assert record.names == ["train_start", "epoch_start", "step_start", "error"]
    assert [type(error) for error in heard] == [ZeroDivisionError]


def test_a_raising_handler_ends_the_run_and_error_hears_of_it(tmp_path: Path) -> None:
    record = Record()

    @record.manager.on("step_end")
    def fail(state: TrainState) -> None:
        raise LookupError("in a handler")

    with pytest.raises(LookupError, match="in a handler"):
        train(make_config(tmp_path), record.manager)
    assert record.names[-2:] == ["step_end", "error"]


def test_handlers_run_in_the_order_of_registration_and_can_be_removed() -> None:
    manager, calls = CallbackManager(), []
    handlers = [lambda state, n=n: calls.append(n) for n in range(3)]
    for handler in handlers:
        assert manager.on("step_end")(handler) is handler
    manager.fire("step_end", TrainState())
    assert manager.remove(handlers[1], "step_end")
    assert not manager.remove(handlers[1])
    manager.fire("step_end", TrainState())
    assert calls == [0, 1, 2, 0, 2]


def test_a_handler_may_ask_for_model_optimizer_scheduler_and_trainer(tmp_path: Path) -> None:
    manager, seen = CallbackManager(), {}

    @manager.on("step_end")
    def look(state: TrainState, model: Any, optimizer: Any = None, *, trainer: Any) -> None:
        seen.update(model=model, optimizer=optimizer, trainer=trainer)

    model, trainer = make_model(), Trainer(make_config(tmp_path, max_steps=1), manager)
    trainer.train(model=model, train_dataloader=make_loader())
    assert seen["model"] is model
    assert seen["trainer"] is trainer
    assert isinstance(seen["optimizer"], torch.optim.AdamW)


@pytest.mark.parametrize("method", ["on", "fire", "remove"])
def test_an_unknown_event_is_refused_with_the_nearest(method: str) -> None:
    manager = CallbackManager()
    with pytest.raises(ConfigError, match="did you mean 'step_end'"):
        if method == "on":
            manager.on("step_ended")
        elif method == "fire":
            manager.fire("step_ended", TrainState())
        else:
            manager.remove(print, "step_ended")


def test_a_handler_that_cannot_be_called_so_is_refused() -> None:
    manager = CallbackManager()
    with pytest.raises(ConfigError, match="unknown argument 'modl'; did you mean 'model'"):
        manager.on("step_end")(lambda state, modl: None)
    with pytest.raises(ConfigError, match="must take the state"):
        manager.on("step_end")(lambda: None)
    with pytest.raises(ConfigError, match="must be callable"):
        manager.on("step_end")("handler")  # type: ignore[type-var]


def test_module_level_handlers_reach_every_trainer(
    tmp_path: Path, clean_globals: list[Any]
) -> None:
    manager, calls = CallbackManager(), []
    trainers = [
        Trainer(make_config(tmp_path / "a", max_steps=1), manager),
        Trainer(make_config(tmp_path / "b", max_steps=2)),
    ]
    manager.on("step_end")(lambda state: calls.append("own"))

    @on("step_end")
    def everywhere(state: TrainState) -> None:
        calls.append("global")

    clean_globals.append(everywhere)
    for trainer in trainers:
        trainer.train(model=make_model(), train_dataloader=make_loader())
    assert calls == ["global", "own", "global", "global"]


def test_global_callbacks_as_the_manager_are_not_called_twice(
    tmp_path: Path, clean_globals: list[Any]
) -> None:
    calls: list[int] = []
    handler = on("step_end")(lambda state: calls.append(state.global_step))
    clean_globals.append(handler)
    train(make_config(tmp_path, max_steps=2), global_callbacks)
    assert calls == [1, 2]


def test_state_reads_the_device_only_when_metrics_are_read() -> None:
    class Loss:
        num_reads = 0

        def tolist(self) -> float:
            self.num_reads += 1
            return 1.5

    state, loss = TrainState(), Loss()
    state.record({"loss": loss})
    assert loss.num_reads == 0
    assert state.metrics["loss"] == state.metrics["loss"] == 1.5
    assert loss.num_reads == 1


def test_state_has_the_fields_of_the_original() -> None:
    assert TrainState().to_dict() == {
        "step": 0,
        "epoch": 0,
        "global_step": 0,
        "num_epochs": 0,
        "max_steps": -1,
        "metrics": {},
        "should_stop": False,
    }
    state = TrainState(global_step=3, metrics={"loss": torch.tensor(2.0)})
    assert state.to_dict()["metrics"] == {"loss": 2.0}
    assert state == TrainState(global_step=3, metrics={"loss": 2.0})
    assert state != TrainState(global_step=4, metrics={"loss": 2.0})


def test_step_events_alternate(tmp_path: Path) -> None:
    record = Record()
    train(make_config(tmp_path, gradient_accumulation=2), record.manager)
    steps = [name for name in record.names if name.startswith("step")]
    assert all(before != after for before, after in pairwise(steps))
    assert set(record.names) < set(EVENTS)
