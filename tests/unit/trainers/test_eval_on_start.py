"""`eval_on_start`: an evaluation before the first step, of a fresh run only."""

import json

import pytest

from headway import ConfigError, TrainerCallback
from headway.callbacks import JsonLogger
from headway.testing.trainer import tiny_trainer


class Notes(TrainerCallback):
    """What happened, with the step."""

    def __init__(self):
        self.events = []

    def on_evaluate(self, state, metrics):
        self.events.append(("evaluated", state.global_step, metrics["eval_loss"]))

    def on_step_end(self, state):
        self.events.append(("step", state.global_step))


def make(folder, *callbacks, **options):
    settings = {"max_steps": 4, "eval_on_start": True, "save_strategy": "steps", "save_steps": 2}
    return tiny_trainer(folder, list(callbacks), **{**settings, **options})


def test_the_model_is_evaluated_as_it_was_made(tmp_path):
    notes, plain = Notes(), make(tmp_path / "plain", eval_on_start=False)
    untrained = plain.evaluate()["eval_loss"]
    trainer = make(tmp_path, notes, JsonLogger())
    trainer.train()
    assert notes.events == [("evaluated", 0, untrained), *(("step", n) for n in range(1, 5))]
    records = [json.loads(line) for line in (tmp_path / "out" / "trainer_logs.jsonl").open()]
    (evaluated,) = [r for r in records if "eval_loss" in r]
    assert evaluated["global_step"] == 0 and evaluated["eval_loss"] == untrained
    plain.train()
    assert trainer.state.log_history[-2]["loss"] == plain.state.log_history[-2]["loss"]


def test_a_run_that_goes_on_is_not_evaluated_at_its_start(tmp_path):
    make(tmp_path, stop_at=2).train()
    notes = Notes()
    make(tmp_path, notes).train()
    assert notes.events == [("step", 3), ("step", 4)]


def test_what_fails_in_an_evaluation_fails_before_anything_is_trained(tmp_path):
    notes = Notes()
    trainer = make(tmp_path, notes, metric_for_best_model="accuracy", load_best_model_at_end=True,
                   eval_strategy="steps", eval_steps=2)  # fmt: skip
    with pytest.raises(ConfigError, match="accuracy"):
        trainer.train()
    assert [event for event, *_ in notes.events] == ["evaluated"]
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_handler_may_stop_the_run_there(tmp_path):
    class Enough(Notes):
        def on_evaluate(self, state, metrics, control):
            super().on_evaluate(state, metrics)
            control.should_training_stop = True

    enough = Enough()
    trainer = make(tmp_path, enough)
    trainer.train()
    assert [event for event, *_ in enough.events] == ["evaluated"]
    assert trainer.state.global_step == 0


def test_it_needs_data(tmp_path):
    trainer = make(tmp_path)
    trainer.eval_dataset = None
    with pytest.raises(ConfigError, match="eval_on_start=True: eval_dataset is needed"):
        trainer.train()
    assert not (tmp_path / "out").exists()
