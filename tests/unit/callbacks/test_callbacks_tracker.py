"""What all trackers do alike, shown with a service that lives in a list."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence

import pytest

from headway.callbacks.remote.tracker import Ending, RunFacts, Tracker, flatten, numbers, rename
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer


class Memory(Tracker):
    """A tracker whose service is this object."""

    package = "json"
    extra = "memory"

    def __init__(self, tags: Sequence[str] = (), fail_to_open: int = 0, **options) -> None:
        super().__init__(**options)
        self.remote_tags = list(tags)
        self.fail_to_open = fail_to_open
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.opened: list[RunFacts] = []
        self.rewinds: list[int] = []
        self.endings: list[Ending] = []
        self.threads: set[str] = set()

    def open_run(self, facts) -> None:
        self.threads.add(threading.current_thread().name)
        if self.fail_to_open:
            self.fail_to_open -= 1
            raise ConnectionError("no route")
        self.opened.append(facts)

    def send(self, step, figures) -> None:
        self.threads.add(threading.current_thread().name)
        self.rows.append((step, figures))

    def mark_rewind(self, step) -> None:
        self.rewinds.append(step)

    def finish_run(self, ending) -> None:
        self.endings.append(ending)

    def fetch_tags(self):
        return self.remote_tags

    def state_dict(self):
        return {"version": 1, "run_id": "mine"}

    def steps(self, name: str) -> list[int]:
        return [step for step, figures in self.rows if name in figures]


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, act) -> None:
        self.step, self.act = step, act

    def on_step_end(self, state, control) -> None:
        if state.global_step == self.step:
            self.act(control)


def _fail(control) -> None:
    raise RuntimeError("the loss is a cat")


def _train(folder, callbacks, **arguments):
    trainer = tiny_trainer(folder, callbacks, **{"max_steps": 4, "num_samples": 64, **arguments})
    trainer.train()
    return trainer


def test_every_step_and_each_evaluation_arrives_once_and_never_from_the_training_thread(
    tmp_path,
) -> None:
    tracker = Memory()
    _train(
        tmp_path, [tracker], logging_steps=2, eval_strategy="steps", eval_steps=2, run_name="kite"
    )
    assert tracker.steps("train/CE loss") == [1, 2, 3, 4]
    assert tracker.steps("train/loss") == [2, 4]
    assert tracker.steps("eval/loss") == [2, 4]
    assert threading.current_thread().name not in tracker.threads
    (facts,) = tracker.opened
    assert facts.name == "kite" and facts.resumed_step is None
    assert facts.config["learning_rate"] and facts.config["max_steps"] == 4
    assert [e.label for e in tracker.endings] == ["completed"]
    assert tracker.finalized


def test_secrets_in_the_config_are_hidden(tmp_path) -> None:
    tracker = Memory(config={"api_key": "abc", "url": "https://me:pw@host/x", "depth": 3})
    _train(tmp_path, [tracker], max_steps=1)
    config = tracker.opened[0].config
    assert config["api_key"] == "<redacted>" and "pw" not in config["url"] and config["depth"] == 3


def test_an_error_and_its_text_end_the_run_at_the_service_too(tmp_path) -> None:
    tracker = Memory()
    with pytest.raises(RuntimeError, match="cat"):
        _train(tmp_path, [tracker, At(2, _fail)])
    (ending,) = tracker.endings
    assert ending.label == "failed" and ending.is_failure
    assert ending.error is not None
    told = "RuntimeError: callback 'At', on_step_end: the loss is a cat"
    assert ending.error.splitlines()[0] == told


def test_an_error_before_the_run_is_open_is_not_masked(tmp_path) -> None:
    class Early(TrainerCallback):
        priority = 50

        def on_train_begin(self) -> None:
            raise RuntimeError("early")

    tracker = Memory()
    with pytest.raises(RuntimeError, match="early"):
        _train(tmp_path, [tracker, Early()])
    assert tracker.opened == [] and tracker.endings == []


def test_stopped_and_aborted_runs_are_told_apart(tmp_path) -> None:
    for flag, label in (
        ("should_training_stop", "stopped"),
        ("should_abort_without_save", "aborted"),
    ):
        tracker = Memory()
        _train(tmp_path / flag, [tracker, At(2, lambda c, flag=flag: setattr(c, flag, True))])
        assert [e.label for e in tracker.endings] == [label]


def test_a_tag_cancels_the_run_in_whatever_case_it_is_written(tmp_path, caplog) -> None:
    tracker = Memory(cancel_tags=["HALT"], cancel_check_interval=1)

    class Wait(TrainerCallback):
        """Lets the background look finish, so that the test needs no sleep."""

        priority = -50

        def on_step_begin(self, state) -> None:
            if state.global_step == 1:
                tracker.remote_tags.append("Halt")

        def on_step_end(self, state) -> None:
            assert tracker.cancel._sender is None or tracker.cancel._sender.drain(10)

    with caplog.at_level(logging.WARNING):
        trainer = _train(tmp_path, [tracker, Wait()], max_steps=50)
    assert trainer.state.global_step == 3
    assert trainer.bus.stopped_by == ("Memory", "on_step_end", "stop")
    (ending,) = tracker.endings
    assert ending.label == "cancelled" and ending.is_cut_short and not ending.is_failure
    assert "'Halt' asks to stop" in caplog.text


def test_failures_to_look_for_tags_are_ignored(tmp_path) -> None:
    class Away(Memory):
        def fetch_tags(self):
            raise OSError("away")

    tracker = Away(cancel_check_interval=1)
    trainer = _train(tmp_path, [tracker])
    assert trainer.state.global_step == 4 and tracker.endings[0].label == "completed"


def test_a_service_that_is_away_at_first_gets_everything_later(
    tmp_path, monkeypatch, caplog
) -> None:
    tracker = Memory(fail_to_open=2)
    monkeypatch.setattr(tracker._closing, "wait", lambda s: None)
    with caplog.at_level(logging.WARNING):
        _train(tmp_path, [tracker])
    assert tracker.steps("train/CE loss") == [1, 2, 3, 4]
    assert "no route" in caplog.text and "tried again" in caplog.text


def test_a_package_whose_import_failed_halfway_is_imported_afresh(tmp_path, monkeypatch) -> None:
    part = f"{Memory.__name__}_half.part"

    class Half(Memory):
        def open_run(self, facts) -> None:
            if not self.opened:
                self.opened.append(facts)
                sys.modules[part] = sys
                raise SystemError("an import was cut off")
            assert part not in sys.modules
            self.opened.append(facts)

    tracker = Half()
    tracker.package = part.partition(".")[0]
    monkeypatch.setattr(tracker._closing, "wait", lambda s: None)
    _train(tmp_path, [tracker])
    assert len(tracker.opened) == 2 and tracker.endings[0].label == "completed"


def test_a_service_that_stays_away_costs_a_warning_and_not_the_run(tmp_path, caplog) -> None:
    tracker = Memory(fail_to_open=10**9)
    with caplog.at_level(logging.WARNING):
        trainer = _train(tmp_path, [tracker])
    assert trainer.state.outcome == "completed"
    assert tracker.rows == [] and "failed" in caplog.text


def test_a_service_that_hangs_does_not_hold_the_end_for_longer_than_allowed(tmp_path) -> None:
    release = threading.Event()

    class Hangs(Memory):
        def send(self, step, figures) -> None:
            release.wait(30)

    tracker = Hangs(close_timeout_s=0.05, queue_size=2)
    trainer = _train(tmp_path, [tracker], max_steps=10)
    assert trainer.state.outcome == "completed" and tracker.endings == []
    assert tracker._sender.num_dropped > 0
    release.set()


def test_a_resumed_run_is_told_where_it_goes_on_and_keeps_its_state(tmp_path) -> None:
    common = {"save_strategy": "steps", "save_steps": 2}
    first = Memory()
    with pytest.raises(RuntimeError):
        _train(tmp_path, [first, At(3, _fail)], **common)
    second = Memory()
    _train(tmp_path, [second], resume_from_checkpoint=True, **common)
    (facts,) = second.opened
    assert facts.resumed_step == 2 and facts.run_id == first.opened[0].run_id
    assert second._resumed_state == {"version": 1, "run_id": "mine"}
    assert second.steps("train/CE loss") == [3, 4]


def test_a_rollback_is_told_and_its_steps_are_sent_again(tmp_path) -> None:
    tracker = Memory()
    done = []

    def roll_back(control) -> None:
        if not done:
            done.append(1)
            control.rollback = True

    _train(tmp_path, [tracker, At(3, roll_back)], save_strategy="steps", save_steps=2)
    assert tracker.rewinds == [2]
    assert tracker.steps("train/CE loss") == [1, 2, 3, 3, 4]


def test_other_ranks_and_disabled_trackers_do_nothing(tmp_path) -> None:
    tracker = Memory(enabled=False)
    _train(tmp_path, [tracker])
    assert tracker.opened == []


def test_the_callback_goes_by_its_class_and_the_run_by_its_name(tmp_path) -> None:
    tracker = Memory(name="kite")
    trainer = _train(tmp_path, [tracker], max_steps=1)
    assert list(trainer.callbacks) == ["Memory"] and tracker.opened[0].name == "kite"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enabled": "yes"}, "enabled"),
        ({"name": 3}, "name"),
        ({"config": [1]}, "config"),
        ({"cancel_tags": "cancel"}, "cancel_tags"),
        ({"cancel_tags": [1]}, "cancel_tags"),
        ({"cancel_check_interval": 0}, "cancel_check_interval"),
        ({"queue_size": 0}, "queue_size"),
        ({"close_timeout_s": 0}, "close_timeout_s"),
    ],
)
def test_bad_options_are_refused_by_name(options, named) -> None:
    with pytest.raises(ConfigError, match=named):
        Memory(**options)


def test_an_absent_package_is_named_with_its_extra() -> None:
    class Absent(Memory):
        package = "no_such_package"

    with pytest.raises(ConfigError, match=r"headway\[memory\]"):
        Absent()
    Absent(enabled=False)


def test_names_numbers_and_nested_settings() -> None:
    assert rename({"loss": 1, "eval_loss": 2, "test_x": 3, "gap/y": 4, "step": 5}) == {
        "train/loss": 1,
        "eval/loss": 2,
        "test/x": 3,
        "gap/y": 4,
    }
    assert numbers({"a": 1, "b": "x", "c": [1, 2], "d": None, "e": {"f": 1}}) == {
        "a": 1.0,
        "c/0": 1.0,
        "c/1": 2.0,
    }
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}


def test_importing_and_constructing_the_trackers_imports_none_of_their_packages(tmp_path) -> None:
    import subprocess

    code = (
        "import sys, headway.callbacks as c\n"
        "for n in ('WandBCallback', 'CometCallback', 'MLflowCallback', 'TrackioCallback',\n"
        "          'TBLogger'):\n"
        "    getattr(c, n)\n"
        "bad = {'wandb','comet_ml','mlflow','trackio','tensorboard','torch'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
