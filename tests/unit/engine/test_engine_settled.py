"""Steps that are settled: the event after all that was due; callbacks that are to be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway import CallbackConfig, ConfigError, TrainerCallback
from headway.callbacks import ProgressCallback
from headway.engine.events import EventBus
from headway.engine.state import TrainerControl, TrainerState
from headway.testing import tiny_dataset, tiny_decoder, tiny_trainer


class Told(TrainerCallback):
    """Writes down what came, and asks for something at one of it."""

    def __init__(self, **wishes: Any) -> None:
        self.events: list[str] = []
        self.wishes = wishes

    def _note(self, event: str, state: Any, control: Any) -> None:
        self.events.append(f"{event}@{state.global_step}")
        for name in self.wishes.pop(self.events[-1].replace("@", "_at_"), ()):
            setattr(control, name, True)

    def on_log(self, state: Any, control: Any) -> None:
        self._note("log", state, control)

    def on_evaluate(self, state: Any, control: Any) -> None:
        self._note("evaluate", state, control)

    def on_save(self, state: Any, control: Any) -> None:
        self._note("save", state, control)

    def on_step_settled(self, state: Any, control: Any) -> None:
        self._note("settled", state, control)

    def on_run_settled(self, state: Any, control: Any) -> None:
        self._note("run", state, control)


def run(folder: Path, told: Told, **args: Any) -> Any:
    trainer = tiny_trainer(
        folder, [told], max_steps=3, logging_steps=2, eval_strategy="steps", eval_steps=2,
        save_steps=2, save_async=False, **{"save_strategy": "steps", **args},
    )  # fmt: skip
    trainer.train()
    return trainer


def test_a_step_settles_after_its_log_evaluation_and_save(tmp_path: Path) -> None:
    told = Told()
    run(tmp_path, told)
    before = [event for event in told.events if not event.startswith("log")]
    assert before == [
        "settled@1", "evaluate@2", "save@2", "settled@2", "settled@3", "evaluate@3", "save@3",
        "run@3",
    ]  # fmt: skip
    assert told.events.index("log@2") < told.events.index("settled@2")


def test_what_is_asked_for_then_is_done_at_that_step(tmp_path: Path) -> None:
    told = Told(settled_at_1=["should_save", "should_evaluate", "should_log"])
    run(tmp_path, told)
    at_one = [event.partition("@")[0] for event in told.events if event.endswith("@1")]
    assert at_one[0] == "settled" and {"log", "evaluate", "save"} <= set(at_one)


def test_a_stop_asked_for_then_ends_the_run_there(tmp_path: Path) -> None:
    told = Told(settled_at_1=["should_training_stop"])
    trainer = run(tmp_path, told)
    assert trainer.state.global_step == 1 and "run@1" in told.events
    assert trainer.bus.stopped_by == ("Told", "on_step_settled", "stop")


def test_an_abort_asked_for_then_saves_nothing(tmp_path: Path) -> None:
    told = Told(settled_at_1=["should_abort_without_save"])
    trainer = run(tmp_path, told)
    assert trainer.state.outcome == "aborted" and "run@1" not in told.events
    assert not list(tmp_path.glob("out/checkpoint-*"))


def test_a_rollback_asked_for_then_goes_back(tmp_path: Path) -> None:
    told = Told(settled_at_3=["rollback"])
    trainer = run(tmp_path, told)
    assert [e for e in told.events if e.startswith("settled")] == [
        "settled@1", "settled@2", "settled@3", "settled@3",
    ]  # fmt: skip
    assert trainer.state.global_step == 3


def test_without_a_listener_ranks_agree_no_more_often(tmp_path: Path) -> None:
    def count(*callbacks: Any) -> int:
        trainer = tiny_trainer(tmp_path, list(callbacks), max_steps=3, logging_steps=100)
        trainer._prepare_model()
        plain, calls = trainer.strategy.agree, []
        trainer.strategy.agree = lambda bits: calls.append(bits) or plain(bits)  # type: ignore
        trainer.train()
        return len(calls)

    class Listens(TrainerCallback):
        def on_step_settled(self) -> None:
            pass

    assert count(Listens()) == count(TrainerCallback()) + 3


# Configurations of callbacks


class Quiet(ProgressCallback):
    pass


class MakesQuiet(CallbackConfig):
    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def build(self, trainer: Any) -> TrainerCallback | None:
        self.trainer = trainer
        return Quiet() if self.enabled else None


def made_trainer(folder: Path, callbacks: Any, defaults: bool = True) -> Any:
    from headway import Trainer, TrainingArguments

    return Trainer(
        args=TrainingArguments(output_dir=str(folder), use_cpu=True),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(4, 8),
        callbacks=callbacks,
        default_callbacks=defaults,
    )


def test_a_configuration_is_built_under_its_name_in_a_defaults_place(tmp_path: Path) -> None:
    config = MakesQuiet()
    trainer = made_trainer(tmp_path, {"mine": config})
    assert config.trainer is trainer and isinstance(trainer.callbacks["mine"], Quiet)
    kinds = [type(callback) for callback in trainer.callbacks.values()]
    assert ProgressCallback not in kinds and kinds.count(Quiet) == 1
    for given in ([config], [MakesQuiet]):
        assert "Quiet" in made_trainer(tmp_path, given).callbacks


def test_one_that_builds_nothing_is_none(tmp_path: Path) -> None:
    trainer = made_trainer(tmp_path, {"mine": MakesQuiet(enabled=False)}, defaults=False)
    assert trainer.callbacks == {}
    trainer.add_callback(MakesQuiet(), "later")
    trainer.add_callback(MakesQuiet(enabled=False), "never")
    assert list(trainer.callbacks) == ["later"]


def test_what_is_not_built_is_no_callback(tmp_path: Path) -> None:
    bus = EventBus(None, TrainerState(), TrainerControl())
    with pytest.raises(ConfigError, match="MakesQuiet says how to make a callback and is none"):
        bus.add(MakesQuiet())

    class Wrong(CallbackConfig):
        def build(self, trainer: Any) -> Any:
            return 3

    with pytest.raises(ConfigError, match=r"'mine': build.. must return a TrainerCallback or None"):
        made_trainer(tmp_path, {"mine": Wrong()})
