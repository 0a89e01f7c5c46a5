"""What an exception in a callback does, by its policy."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from headway import ConfigError, TrainerCallback
from headway.config.load import load_run
from headway.dist import group
from headway.dist.watch import Failure
from headway.engine.events import EventBus
from headway.engine.state import TrainerControl, TrainerState
from headway.testing import tiny_trainer


class Observer(TrainerCallback):
    failure_policy = "disable"

    def __init__(self, event="on_step_end", error=None):
        self.event = event
        self.error = error or RuntimeError("the disk is full")
        self.heard = []

    def hear(self, event):
        self.heard.append(event)
        if event == self.event:
            raise self.error

    def on_init_end(self):
        self.hear("on_init_end")

    def on_train_begin(self):
        self.hear("on_train_begin")

    def on_step_end(self):
        self.hear("on_step_end")

    def on_log(self):
        self.hear("on_log")

    def on_error(self):
        self.hear("on_error")

    def on_close(self):
        self.hear("on_close")


class Healthy(Observer):
    def hear(self, event):
        self.heard.append(event)


@pytest.mark.parametrize(("shared", "level"), [(False, logging.ERROR), (True, logging.WARNING)])
def test_what_fails_on_another_rank_alone_is_told_by_it(shared, level, caplog):
    """Ranks other than the first show errors only."""
    error = RuntimeError("the disk is full")
    error.told_by_all_ranks = shared
    state = TrainerState(is_world_process_zero=False)
    bus = EventBus(SimpleNamespace(process_index=3), state, TrainerControl())
    bus.add(Observer(error=error))
    bus.fire("on_step_end")
    [record] = [r for r in caplog.records if "is disabled" in r.getMessage()]
    assert record.levelno == level
    assert record.getMessage().startswith("rank 3: callback") == (not shared)


@pytest.mark.parametrize("failed_rank", [1, 0, None])
def test_an_observer_is_not_at_fault_where_a_rank_has_failed(failed_rank, monkeypatch, caplog):
    found = None if failed_rank is None else Failure(failed_rank, "ValueError: bad luck")
    watch = SimpleNamespace(rank=0, wait_for_failure=lambda limit_s: found)
    monkeypatch.setattr(group, "current_watch", lambda: watch)
    bus = EventBus(SimpleNamespace(process_index=0), TrainerState(), TrainerControl())
    bus.add(Observer(error=RuntimeError("gloo: Connection closed by peer")))
    if failed_rank == 1:
        with pytest.raises(RuntimeError, match="closed by peer"):
            bus.fire("on_step_end")
    else:
        bus.fire("on_step_end")
    assert bool(bus.disabled) == ("is disabled" in caplog.text) == (failed_rank != 1)


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_a_full_disk_is_told_in_one_line_unless_one_looks_closely(level, caplog):
    bus = EventBus(SimpleNamespace(), TrainerState(), TrainerControl())
    bus.add(Observer(error=OSError(28, "No space left on device")))
    with caplog.at_level(level, "headway.engine.events"):
        bus.fire("on_step_end")
    [record] = [r for r in caplog.records if "is disabled" in r.getMessage()]
    assert (record.exc_info is None) == (level > logging.DEBUG)
    assert level == logging.DEBUG or "No space left on device" in record.getMessage()


def test_a_failing_observer_is_disabled_and_the_run_goes_on(tmp_path, caplog):
    failing, other = Observer(), Healthy()
    trainer = tiny_trainer(tmp_path, [failing, other], max_steps=3)
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 3
    assert failing.heard == ["on_init_end", "on_train_begin", "on_step_end", "on_close"]
    assert other.heard.count("on_step_end") == 3 and other.heard[-1] == "on_close"
    [record] = [r for r in caplog.records if "is disabled" in r.getMessage()]
    assert "'Observer' failed in on_step_end" in record.getMessage()
    assert record.exc_info[1] is failing.error  # the traceback is printed
    assert trainer.bus.disabled == {"Observer": "on_step_end: RuntimeError: the disk is full"}
    failing.event = None
    trainer.args.max_steps = 4
    trainer.train()  # another run: it may try again
    assert failing.heard[-2:] == ["on_log", "on_close"] and not trainer.bus.disabled


@pytest.mark.parametrize("event", ["on_init_end", "on_train_begin"])
def test_a_configuration_mistake_of_an_observer_ends_the_run(tmp_path, event):
    observer = Observer(event, ConfigError("log_dir: cannot be written"))
    with pytest.raises(ConfigError, match="log_dir"):
        tiny_trainer(tmp_path, [observer], max_steps=1).train()
    assert observer.heard[-2:] == ["on_error", "on_close"]


def test_a_configuration_error_during_training_only_disables_an_observer(tmp_path):
    observer = Observer("on_step_end", ConfigError("late"))
    assert tiny_trainer(tmp_path, [observer], max_steps=2).train().global_step == 2


@pytest.mark.parametrize("event", ["on_close", "on_error"])
def test_an_observer_that_fails_at_the_end_costs_nothing(tmp_path, event):
    failing, other = Observer(event), Healthy()
    trainer = tiny_trainer(tmp_path, [failing, other], max_steps=1)
    if event == "on_close":
        assert trainer.train().global_step == 1
    else:
        trainer.add_callback(Observer("on_log", KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert "on_error" in other.heard
    assert failing.heard[-1] == other.heard[-1] == "on_close"


class Odd(Exception):
    """An error whose words are its own affair."""

    def __str__(self):
        return f"odd {self.args[0]}"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("disk"), "callback 'Acting', on_step_end: disk"),
        (RuntimeError(), "callback 'Acting', on_step_end"),
        (OSError("disk"), "callback 'Acting', on_step_end: disk"),
        (OSError(28, "full", "log"), "[Errno 28] callback 'Acting', on_step_end: full: 'log'"),
        (ConfigError(["a", "b"]), "callback 'Acting', on_step_end: a\n"
                                  "callback 'Acting', on_step_end: b"),
        (Odd("one"), "odd callback 'Acting', on_step_end: one"),
        (Odd("one", "two"), "odd one"),
        (KeyboardInterrupt(), ""),
    ],
)  # fmt: skip
def test_other_callbacks_end_the_run_and_are_named(tmp_path, error, told):
    class Acting(Observer):
        failure_policy = "raise"

    with pytest.raises(type(error)) as caught:
        tiny_trainer(tmp_path, [Acting("on_step_end", error)], max_steps=3).train()
    assert str(caught.value) == told
    noted = getattr(caught.value, "__notes__", [])
    assert noted == ([] if "Acting" in told else ["raised by callback 'Acting' in on_step_end"])


@pytest.mark.parametrize("part", ["state_dict", "load_state_dict"])
def test_a_callback_whose_state_fails_is_named(tmp_path, part):
    class Keeper(TrainerCallback):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    def fail(*_):
        raise ValueError("lost")

    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    if part == "load_state_dict":
        tiny_trainer(tmp_path, [Keeper()], **options).train()
    keeper = Keeper()
    setattr(keeper, part, fail)
    with pytest.raises(Exception, match=f"callback 'Keeper', {part}: lost"):
        tiny_trainer(tmp_path, [keeper], **options).train()


def test_an_interrupt_inside_an_observer_is_not_taken_for_its_failure(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tiny_trainer(tmp_path, [Observer(error=KeyboardInterrupt())], max_steps=1).train()


def test_an_unknown_policy_is_refused(tmp_path):
    observer = Observer()
    observer.failure_policy = "disabel"
    with pytest.raises(ConfigError, match="failure_policy 'disabel'; did you mean 'disable'"):
        tiny_trainer(tmp_path, [observer])


def test_state_that_cannot_be_saved_or_loaded_costs_the_observer_only(tmp_path, caplog):
    class Stateful(Healthy):
        def state_dict(self):
            return {"version": 1}

        def load_state_dict(self, state):
            raise KeyError("offset")

    class Broken(Healthy):
        def state_dict(self):
            raise OSError("gone")

    options = {"save_strategy": "steps", "save_steps": 1}
    trainer = tiny_trainer(tmp_path, [Stateful(), Broken()], max_steps=2, **options)
    assert trainer.train().global_step == 2
    assert trainer.bus.disabled == {"Broken": "state_dict: OSError: gone"}
    again = tiny_trainer(tmp_path, [Stateful(), Broken()], max_steps=3, **options)
    assert again.train().global_step == 3
    assert set(again.bus.disabled) == {"Stateful", "Broken"}


def test_one_name_given_twice_is_refused(tmp_path):
    first, second = Observer(), Observer()
    first.callback_name = second.callback_name = "watch"
    with pytest.raises(ConfigError, match="two callbacks have the name 'watch'"):
        tiny_trainer(tmp_path, [first, second])

    class Named(TrainerCallback):
        name = "watch"

    class Told(TrainerCallback):
        @property
        def name(self):
            return "watch"

    for pair in ([first, Named()], [Named(), Told()], [Told(), Told()]):
        kinds = " and ".join(type(one).__name__ for one in pair)
        with pytest.raises(ConfigError, match=f"two callbacks have the name 'watch': {kinds};"):
            tiny_trainer(tmp_path, pair)
    assert list(tiny_trainer(tmp_path, [Named(), Observer(), Observer()]).callbacks) == [
        "watch",
        "Observer",
        "Observer_2",
    ]
    run = tmp_path / "run.yaml"
    run.write_text("callbacks:\n  log: JsonLogger\n  log: InfoCallback\n")
    with pytest.raises(ConfigError, match="'log' is given twice"):
        load_run(run)
