"""What every callback of the library promises: from a run file to the end of a run, whatever fails.

The lives of runs are shared by many tests: one per group of callbacks on one process, and all
groups in one start of two ranks.
"""

from __future__ import annotations

import fnmatch
import json
import logging
from collections import Counter
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
from callback_cases import CASES, callback_classes, config_classes, is_there, need, other_exports
from callback_lives import (
    LAST_STEP,
    Life,
    component,
    group_of,
    life_of,
    live,
    live_on_rank,
    run_file,
)

from headway import CallbackConfig, TrainerCallback
from headway.config import load_run
from headway.config.components import instantiate
from headway.config.registry import short_names
from headway.config.schema import Component
from headway.data.tokens import TokenFileWriter
from headway.engine.events import EVENTS
from headway.testing import assert_no_import, count_host_syncs, run_ranks
from headway.trainers.from_config import build_callbacks, build_trainer

NAMES = sorted(callback_classes())
OBSERVING = ("log", "watch", "profile", "remote", "control")
DECIDING = ("guard", "save", "schedule", "evaluate", "diloco")
GROUPS = tuple(g for g in (*OBSERVING, *DECIDING) if any(group_of(n) == g for n in NAMES))
OBSERVERS = [name for name in NAMES if group_of(name) in OBSERVING]
DECIDERS = [name for name in NAMES if group_of(name) in DECIDING]
SERVICES = ("open_run", "send", "mark_rewind", "finish_run", "deliver")
OPTIONAL = sorted({case.package for case in CASES.values() if case.package})


def members(life: str) -> list[str]:
    """The callbacks that live together: those of a group, or one that changes its run."""
    return [n for n in NAMES if n in CASES and life_of(n) == life and is_there(n)]


def make(name: str, url: str, folder: Path, **changes: Any) -> Any:
    return instantiate(Component(**component(name, url, folder, **changes)), "callbacks")


# The places of a test run


@pytest.fixture(scope="module")
def lives(tmp_path_factory: Any, posted: Any, offline: Any) -> Any:
    """The life of each group on one process, and of a run without any; made when asked for."""
    made: dict[str, Life] = {}

    def get(group: str) -> Life:
        if group not in made:
            names = members(group) if group else []
            made[group] = live(tmp_path_factory.mktemp(f"life-{group}"), names, posted[0])
        return made[group]

    get("")
    return get


@pytest.fixture(scope="module")
def rank_lives(tmp_path_factory: Any, posted: Any, offline: Any) -> list[dict[str, Life]]:
    """The lives of all groups on two ranks, of one start."""
    # What traces allocations may not be able to end that, and it slows down what follows.
    last_of_all = sorted(GROUPS, key=lambda group: group == "profile")
    groups = {"": [], **{group: members(group) for group in last_of_all}}
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(live_on_rank, 2, str(folder), groups, posted[0], timeout_s=240)


# The table


def test_every_callback_has_a_case() -> None:
    assert sorted(CASES) == NAMES, "the table of cases and what the library exports differ"
    assert {group_of(name) for name in NAMES} == set(GROUPS)
    assert all(isfunction(value) for value in other_exports().values())
    assert sorted(short_names("callbacks")) == sorted([*NAMES, *config_classes()])
    assert sorted(CONFIGS) == sorted(config_classes())


def test_importing_them_imports_neither_torch_nor_a_service() -> None:
    assert_no_import(
        "import sys, headway.callbacks as library\n"
        "for name in library.__all__: getattr(library, name)\n"
        f"found = set({OPTIONAL}) & set(sys.modules)\n"
        "assert not found, found"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_run_file_makes_it_by_its_short_name(name: str, tmp_path: Path, offline: Path) -> None:
    need(name)
    given = component(name, "http://127.0.0.1:1/hook", tmp_path)
    for callbacks in ([given], {"mine": given}):
        run = load_run(run_file(tmp_path, callbacks))
        made = build_callbacks(run)
        (callback,) = made.values() if isinstance(made, dict) else made
        assert type(callback) is callback_classes()[name]
        trainer = build_trainer(run)
        expected = "mine" if isinstance(callbacks, dict) else type(callback).__name__
        assert list(trainer.callbacks) == [expected]


CONFIGS: dict[str, dict[str, Any]] = {
    "DownstreamEvaluatorCallbackConfig": {"tasks": ["everyday"]},
    "LMEvaluatorCallbackConfig": {"eval_dataset": {"kite": "kite.hwt"}, "sequence_length": 8},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_file_makes_what_a_configuration_is_built_to(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with TokenFileWriter("kite.hwt") as writer:
        writer.add_document(list(range(30)))
    given = {"class_path": name, "init_args": {**CONFIGS[name], "eval_interval": 2}}
    trainer = build_trainer(load_run(run_file(tmp_path, {"mine": given})))
    assert list(trainer.callbacks) == ["mine"]
    assert not isinstance(trainer.callbacks["mine"], CallbackConfig)
    trainer.train()
    steps = [r["step"] for r in trainer.state.log_history if any("eval/" in key for key in r)]
    assert steps == [2, 4]
    off = {**given, "init_args": {**given["init_args"], "enabled": False}}
    assert build_trainer(load_run(run_file(tmp_path, {"mine": off}))).callbacks == {}


@pytest.mark.parametrize("name", NAMES)
def test_it_says_whether_it_observes_or_decides(name: str) -> None:
    expected = "disable" if name in OBSERVERS else "raise"
    assert callback_classes()[name].failure_policy == expected


# The life of a run


def draws(life: Life, group: str) -> dict[str, float]:
    # Packages of services draw names from Python's own generator.
    return {k: v for k, v in life.draws.items() if (k, group) != ("python", "remote")}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("group", GROUPS)
def test_a_run_with_them_is_the_run_without(group: str, lives: Any) -> None:
    life, alone = lives(group), lives("")
    assert life.outcomes == alone.outcomes == ["failed", "completed"]
    assert [step for step, _ in alone.losses] == list(range(1, LAST_STEP + 1))
    assert life.losses == alone.losses
    assert life.weights == alone.weights
    assert draws(life, group) == draws(alone, group), "random numbers of the run were used up"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("group", GROUPS)
def test_nothing_of_it_is_left_after_the_run(group: str, lives: Any) -> None:
    assert lives(group).leaks == lives("").leaks == []


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", NAMES)
def test_it_lives_through_error_and_resume(name: str, lives: Any, posted: Any) -> None:
    need(name)
    case, life = CASES[name], lives(life_of(name))
    assert life.disabled.get(name) is None
    for pattern in case.writes:
        assert life.has_file(pattern), f"no {pattern} was written; said: {life.said}"
    assert set(case.records) <= life.figures
    if case.posts:
        assert posted[1], "nothing was sent"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", NAMES)
def test_its_state_goes_through_json_unchanged(
    name: str, lives: Any, posted: Any, tmp_path: Path
) -> None:
    need(name)
    if not hasattr(callback_classes()[name], "state_dict"):
        assert name not in lives(life_of(name)).states
        return
    state = lives(life_of(name)).states[name]
    assert state["version"] == 1
    text = json.dumps(state, allow_nan=False)
    fresh = make(name, posted[0], tmp_path)
    fresh.load_state_dict(json.loads(text))
    assert fresh.state_dict() == state
    assert json.dumps(fresh.state_dict()) == text
    # From an older or a newer version: what is missing has its default, the rest is not looked at.
    for odd in ({}, {"version": 99, "surprise": [1]}):
        other = make(name, posted[0], tmp_path)
        other.load_state_dict(odd)
        json.dumps(other.state_dict(), allow_nan=False)


# On two ranks


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", GROUPS)
def test_on_two_ranks_a_run_with_them_is_the_run_without(group: str, rank_lives: Any) -> None:
    for lives_here in rank_lives:
        life, alone = lives_here[group], lives_here[""]
        assert life.outcomes == alone.outcomes == ["failed", "completed"]
        assert life.disabled == {}
        assert life.losses == alone.losses and len(life.losses) == LAST_STEP
        assert life.weights == alone.weights
        assert draws(life, group) == draws(alone, group)
        assert life.leaks == alone.leaks == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", GROUPS)
def test_only_the_first_rank_writes_prints_and_connects(group: str, rank_lives: Any) -> None:
    zero, one = (lives_here[group] for lives_here in rank_lives)
    alone = rank_lives[1][""]
    allowed = [pattern for name in members(group) for pattern in CASES[name].writes_on_ranks]
    allowed += [".post_mortem*", "post_mortem*"]  # the run's, by the rank that fails first
    extra = {
        path
        for path in one.written - alone.written
        if not any(fnmatch.fnmatch(path, pattern) for pattern in allowed)
    }
    assert extra == set()
    assert one.connected == alone.connected == 0
    assert one.said == []
    assert one.console == alone.console == []
    for name in members(group):
        for pattern in CASES[name].writes:
            assert zero.has_file(pattern), f"{name} wrote no {pattern}; said: {zero.said}"
        for pattern in CASES[name].writes_on_ranks:
            assert any(fnmatch.fnmatch(path, pattern) for path in one.written), pattern
        if CASES[name].prints:
            assert zero.console


# Between the records


class Meter(TrainerCallback):
    """Takes down where the host waited, in the steps between the first and the last."""

    priority = -2000

    def __init__(self, syncs: Any) -> None:
        self.syncs = syncs
        self.between: Counter[str] = Counter()

    def on_step_end(self, state: Any) -> None:
        if state.global_step > 1:
            self.between.update(map(str, self.syncs.records))
        self.syncs.reset()


def quiet(callback: Any) -> Any:
    """The same callback without its service: what is called there is not ours to test."""
    for verb in SERVICES:
        if hasattr(callback, verb):
            setattr(callback, verb, lambda *args: None)
    return callback


def long_trainer(folder: Path, callbacks: list[Any], **args: Any) -> Any:
    options = {
        "max_steps": 5,
        "logging_steps": 1000,
        "metrics_collect_interval": 1000,
        "save_strategy": "no",
        "eval_strategy": "no",
    }
    folder.mkdir(exist_ok=True)
    trainer = build_trainer(load_run(run_file(folder, [], **{**options, **args})))
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def waits_of(folder: Path, callbacks: list[Any]) -> tuple[Counter[str], Any]:
    with count_host_syncs(device_type="cpu") as syncs:
        meter = Meter(syncs)
        trainer = long_trainer(folder, [*callbacks, meter])
        trainer.train()
    return meter.between, trainer


@pytest.fixture(scope="module")
def waits_of_none(tmp_path_factory: Any) -> Counter[str]:
    """What the loop itself waits for on a CPU, where all reading counts, such as of data."""
    return waits_of(tmp_path_factory.mktemp("alone"), [])[0]


def test_no_callback_waits_for_the_device_between_records(
    tmp_path: Path, posted: Any, offline: Any, waits_of_none: Counter[str]
) -> None:
    names = [n for n in NAMES if n in CASES and is_there(n) and not CASES[n].changes_run]
    made = [quiet(make(n, posted[0], tmp_path, **CASES[n].sparse)) for n in names]
    waits, trainer = waits_of(tmp_path, made)
    assert trainer.bus.disabled == {}
    assert waits == waits_of_none


def test_the_count_of_waits_sees_one(tmp_path: Path, waits_of_none: Counter[str]) -> None:
    class Waits(TrainerCallback):
        def on_train_metrics(self, loss: Any) -> None:
            float(loss)

    waits, _ = waits_of(tmp_path, [Waits()])
    more = waits - waits_of_none
    assert list(more.values()) == [4] and "__float__" in next(iter(more))


# A handler that fails


def handlers_of(name: str) -> list[str]:
    """The events that a callback handles and that come in a resumed run that ends well."""
    absent = ("on_error", "on_predict", "on_load_model_weights", "on_push_begin")
    return [event for event in EVENTS if event not in absent and _handles(name, event)]


def _handles(name: str, event: str) -> bool:
    return hasattr(callback_classes()[name], event)


class Breakage(RuntimeError):
    pass


def broken(callback: Any, event: str) -> Any:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise Breakage(event)

    setattr(callback, event, fail)
    return callback


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    long_trainer(folder, [], max_steps=2, save_strategy="steps", save_steps=2).train()
    return folder / "out" / "checkpoint-2"


NUM_ROUNDS = max(len(handlers_of(name)) for name in OBSERVERS)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("turn", range(NUM_ROUNDS))
def test_a_handler_that_fails_costs_its_callback_and_not_the_run(
    turn: int,
    tmp_path: Path,
    checkpoint: Path,
    posted: Any,
    offline: Any,
    lives: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each turn breaks another handler of each callback."""
    chosen = {
        n: handlers_of(n)[turn] for n in OBSERVERS if is_there(n) and turn < len(handlers_of(n))
    }
    callbacks = {
        n: broken(quiet(make(n, posted[0], tmp_path)), event) for n, event in chosen.items()
    }
    monkeypatch.setattr("headway.trainers.from_config.build_callbacks", lambda run: callbacks)
    with caplog.at_level(logging.DEBUG, "headway.engine.events"):
        trainer = build_trainer(load_run(run_file(tmp_path, [])))
        output = trainer.train(resume_from_checkpoint=str(checkpoint))
    assert output.global_step == LAST_STEP and trainer.state.outcome == "completed"
    failed = {name: text.partition(":")[0] for name, text in trainer.bus.disabled.items()}
    assert failed == chosen
    assert all("Breakage" in text for text in trainer.bus.disabled.values())
    told = Counter(r.args[0] for r in caplog.records if "is disabled" in r.getMessage())
    assert told == Counter(list(chosen))
    # The end of a callback that was stopped halfway works too.
    again = [r.getMessage() for r in caplog.records if r.getMessage().startswith("disabled ")]
    assert again == []


def test_an_observer_that_fails_on_an_error_does_not_hide_it(
    tmp_path: Path, posted: Any, offline: Any
) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self) -> None:
            raise RuntimeError("power")

    names = [n for n in OBSERVERS if is_there(n) and _handles(n, "on_error")]
    assert names
    callbacks = [broken(quiet(make(n, posted[0], tmp_path)), "on_error") for n in names]
    trainer = long_trainer(tmp_path, [*callbacks, Fails()])
    with pytest.raises(RuntimeError, match="power"):
        trainer.train()
    assert sorted(trainer.bus.disabled) == names
    assert trainer.state.outcome == "failed"


@pytest.mark.parametrize("name", DECIDERS)
def test_a_handler_of_one_that_decides_ends_the_run_and_is_named(
    name: str, tmp_path: Path, checkpoint: Path, posted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(name)
    # Not all of them come in so short a run; one that begins it does.
    event = next(e for e in handlers_of(name) if e not in ("on_load", "on_save", "on_evaluate"))
    callbacks = {"mine": broken(make(name, posted[0], tmp_path), event)}
    monkeypatch.setattr("headway.trainers.from_config.build_callbacks", lambda run: callbacks)
    trainer = build_trainer(load_run(run_file(tmp_path, [])))
    with pytest.raises(Breakage) as caught:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.outcome == "failed"
    assert "mine" in str(caught.value) and event in str(caught.value)
