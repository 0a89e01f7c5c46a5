"""Each event fires, how often, in which order, with which arguments."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from headway import ConfigError, Trainer, TrainerCallback
from headway.engine.events import COMMON_ARGUMENTS, EVENTS
from headway.testing import tiny_dataset, tiny_decoder, tiny_trainer


class Recorder(TrainerCallback):
    """Writes down every event with the step at which it came."""

    def __init__(self):
        self.events = []
        self.kwargs = {}

    def names(self):
        return [name for name, _ in self.events]


class Delivered(TrainerCallback):
    """The steps whose loss came, in order."""

    def __init__(self):
        self.steps = []

    def on_metrics(self, step, metrics):
        if "train/CE loss" in metrics:
            self.steps.append(step)


def _recording(event):
    def handler(self, args, state, control, **kwargs):
        self.events.append((event, state.global_step))
        self.kwargs.setdefault(event, kwargs)

    return handler


for _event in EVENTS:
    setattr(Recorder, _event, _recording(_event))


def test_order_of_one_step_with_everything_due(tmp_path):
    recorder = Recorder()
    tiny_trainer(
        tmp_path,
        [recorder],
        gradient_accumulation_steps=2,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_async=False,  # in the background, on_save comes once the write is done
    ).train()
    micro_batch = ["on_forward_backward_begin", "on_forward_backward_end", "on_substep_end"]
    assert recorder.names() == [
        "on_init_end",
        "on_train_begin",
        "on_start_settled",
        "on_epoch_begin",
        "on_step_begin",
        "on_window",
        *micro_batch,
        *micro_batch,
        "on_gradients",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_train_metrics",
        "on_step_end",
        "on_metrics",
        "on_log_step",
        "on_log",
        "on_prediction_step",
        "on_prediction_step",
        "on_log",  # the evaluation's own record
        "on_evaluate",
        "on_save",
        "on_step_settled",
        "on_metrics",  # how long the save took, which is known now
        "on_epoch_end",
        "on_run_settled",
        "on_log",  # the summary of the run, without on_log_step
        "on_train_end",
        "on_close",
    ]
    steps = dict(recorder.events)
    assert steps["on_train_metrics"] == 0, "before the step is counted"
    assert steps["on_step_end"] == 1


def test_on_save_of_a_background_save_comes_before_the_end_with_the_saved_step(tmp_path):
    seen = []

    class Listener(Recorder):
        def on_save(self, args, state, control, checkpoint_path, step, **kwargs):
            self.events.append(("on_save", state.global_step))
            seen.append((checkpoint_path, step, threading.current_thread()))

    recorder = Listener()
    tiny_trainer(tmp_path, [recorder], max_steps=5, save_strategy="steps", save_steps=2).train()
    assert [step for _, step, _ in seen] == [2, 4, 5]
    assert [path for path, _, _ in seen] == [
        str(tmp_path / "out" / f"checkpoint-{n}") for n in (2, 4, 5)
    ]
    assert {thread for _, _, thread in seen} == {threading.main_thread()}
    names = recorder.names()
    assert names.index("on_train_end") > max(i for i, n in enumerate(names) if n == "on_save")


def test_every_event_brings_its_arguments(tmp_path):
    recorder = Recorder()
    trainer = tiny_trainer(
        tmp_path,
        [recorder],
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_strategy="steps",
    )
    trainer.train()
    trainer.predict(tiny_dataset(2, sequence_length=8))
    for event, kwargs in recorder.kwargs.items():
        assert set(kwargs) == {*COMMON_ARGUMENTS, *EVENTS[event]}, event
    in_training = recorder.kwargs["on_step_end"]
    assert in_training["trainer"] is trainer
    assert in_training["model"] is trainer.model
    assert in_training["optimizer"] is trainer.optimizer
    assert isinstance(recorder.kwargs["on_train_metrics"]["loss"], torch.Tensor)
    assert recorder.kwargs["on_train_metrics"]["tokens"] == 16
    assert "eval_loss" in recorder.kwargs["on_evaluate"]["metrics"]
    assert recorder.kwargs["on_save"]["checkpoint_path"].endswith("checkpoint-1")
    assert recorder.kwargs["on_metrics"]["step"] == 1
    assert "train/CE loss" in recorder.kwargs["on_metrics"]["metrics"]


def test_counts_over_epochs_accumulation_and_a_partial_window(tmp_path):
    recorder, delivered = Recorder(), Delivered()
    # 10 samples, batches of 2, windows of 4 batches: 2 windows an epoch, the second partial.
    tiny_trainer(
        tmp_path,
        [recorder, delivered],
        num_samples=10,
        gradient_accumulation_steps=4,
        num_train_epochs=3,
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="epoch",
    ).train()
    counts = Counter(recorder.names())
    assert counts["on_epoch_begin"] == counts["on_epoch_end"] == 3
    assert counts["on_step_begin"] == counts["on_step_end"] == counts["on_window"] == 6
    assert counts["on_substep_end"] == counts["on_forward_backward_end"] == 15
    assert delivered.steps == [1, 2, 3, 4, 5, 6], "every step, though only one log was due"
    assert counts["on_evaluate"] == counts["on_save"] == 3
    assert counts["on_log_step"] == 2, "one by the cadence, one for the last interval"
    assert counts["on_train_begin"] == counts["on_train_end"] == counts["on_close"] == 1


def test_resume_fires_on_load_before_on_init_end(tmp_path):
    tiny_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    recorder = Recorder()
    tiny_trainer(tmp_path, [recorder], max_steps=4, save_strategy="steps", save_steps=2).train()
    assert recorder.names()[:3] == ["on_load", "on_init_end", "on_train_begin"]
    assert recorder.kwargs["on_load"]["path"].endswith("checkpoint-2")
    assert [step for name, step in recorder.events if name == "on_step_end"] == [3, 4]


def test_load_best_fires_on_load_model_weights(tmp_path):
    recorder = Recorder()
    tiny_trainer(
        tmp_path,
        [recorder],
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_strategy="steps",
        load_best_model_at_end=True,
    ).train()
    assert recorder.names().count("on_load_model_weights") == 1


def test_predict_fires_per_batch_and_at_the_end(tmp_path):
    recorder = Recorder()
    tiny_trainer(tmp_path, [recorder]).predict(tiny_dataset(4, sequence_length=8))
    assert recorder.names() == ["on_prediction_step", "on_prediction_step", "on_predict"]
    assert "test_loss" in recorder.kwargs["on_predict"]["metrics"]


def test_error_is_delivered_then_close_and_raised(tmp_path):
    class Failing(Recorder):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise RuntimeError("broken on purpose")

    recorder, failing = Recorder(), Failing()
    told = "callback 'Failing', on_step_end: broken on purpose"
    with pytest.raises(RuntimeError, match=told) as raised:
        tiny_trainer(tmp_path, [recorder, failing], max_steps=3).train()
    assert recorder.names()[-2:] == ["on_error", "on_close"]
    assert recorder.kwargs["on_error"]["exception"] is raised.value
    assert "on_train_end" not in recorder.names()


def test_a_raising_on_error_does_not_starve_the_others(tmp_path):
    class Bad(TrainerCallback):
        priority = 5

        def on_step_end(self, state):
            raise ValueError("first")

        def on_error(self, exception):
            raise KeyError("second")

    recorder = Recorder()
    with pytest.raises(ValueError, match="first"):
        tiny_trainer(tmp_path, [Bad(), recorder], max_steps=1).train()
    assert recorder.names()[-2:] == ["on_error", "on_close"]


def test_priority_then_order_of_registration(tmp_path):
    calls = []

    class Named(TrainerCallback):
        def __init__(self, label, priority=0):
            self.label, self.priority = label, priority

        def on_train_begin(self):
            calls.append(self.label)

    tiny_trainer(
        tmp_path, [Named("a"), Named("b", 2), Named("c"), Named("d", -1)], max_steps=1
    ).train()
    assert calls == ["b", "a", "c", "d"]


def test_a_priority_is_a_number(tmp_path):
    class High(TrainerCallback):
        priority = "high"

    with pytest.raises(ConfigError, match="'High': priority: 'high' given"):
        tiny_trainer(tmp_path, [High()])


def test_handlers_may_name_a_subset(tmp_path):
    seen = {}

    class Subset(TrainerCallback):
        def on_log_step(self, state, logs, **kwargs):
            logs["extra"] = state.global_step

        def on_log(self, logs):
            seen.update(logs)

        def on_step_end(self, model, *, trainer):
            seen["model"] = model is trainer.model

    tiny_trainer(tmp_path, [Subset()], max_steps=1).train()
    assert seen["extra"] == 1 and seen["model"] is True


def test_misspelt_hook_and_unknown_argument_are_refused(tmp_path):
    class Misspelt(TrainerCallback):
        def on_setp_end(self, args, state, control, **kwargs):
            pass

    with pytest.raises(ConfigError, match=r"on_setp_end.*did you mean 'on_step_end'"):
        tiny_trainer(tmp_path, [Misspelt()])

    class Greedy(TrainerCallback):
        def on_step_end(self, args, state, control, metrics):
            pass

    with pytest.raises(ConfigError, match=r"Greedy.*on_step_end asks for 'metrics'"):
        tiny_trainer(tmp_path, [Greedy()])


def test_names_are_unique_and_dict_keys_are_names(tmp_path):
    trainer = tiny_trainer(tmp_path, [Recorder(), Recorder()])
    assert list(trainer.callbacks) == ["Recorder", "Recorder_2"]
    trainer = Trainer(
        args={"output_dir": str(tmp_path), "use_cpu": True},
        model_init=tiny_decoder,
        callbacks={"mine": Recorder(), "off": None},
        default_callbacks=False,
    )
    assert list(trainer.callbacks) == ["mine"]
    with pytest.raises(ConfigError, match="two callbacks have the name 'mine'"):
        trainer.add_callback(Recorder(), "mine")
    with pytest.raises(ConfigError, match="'other' is registered already, as 'mine'"):
        trainer.add_callback(trainer.callbacks["mine"], "other")


def test_add_pop_and_remove(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.add_callback(Recorder)
    assert isinstance(trainer.pop_callback(Recorder), Recorder)
    assert trainer.pop_callback(Recorder) is None
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.remove_callback(recorder)
    assert trainer.callbacks == {}


def test_first_callback_that_stops_is_named(tmp_path):
    class Stopper(TrainerCallback):
        def on_step_end(self, state, control):
            if state.global_step == 2:
                control.should_training_stop = True

    trainer = tiny_trainer(tmp_path, [Stopper(), Stopper()], max_steps=10)
    output = trainer.train()
    assert output.global_step == 2
    assert trainer.bus.stopped_by == ("Stopper", "on_step_end", "stop")


def test_abort_writes_no_checkpoint(tmp_path):
    class Aborter(TrainerCallback):
        def on_step_end(self, control):
            control.should_abort_without_save = True

    trainer = tiny_trainer(tmp_path, [Aborter()], max_steps=10, save_strategy="steps", save_steps=5)
    assert trainer.train().global_step == 1
    assert trainer.bus.stopped_by == ("Aborter", "on_step_end", "abort")
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_fresh_control_keeps_an_earlier_stop(tmp_path):
    from transformers import TrainerControl as ForeignControl

    class Stopper(TrainerCallback):
        priority = 1

        def on_step_end(self, control):
            control.should_training_stop = True

    class Forgetful(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return ForeignControl()

    assert tiny_trainer(tmp_path, [Stopper(), Forgetful()], max_steps=5).train().global_step == 1


def test_flag_raised_in_on_log_acts_in_the_same_step(tmp_path):
    class SaveOnLog(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            if state.global_step == 2:
                control.should_save = True
                control.should_evaluate = True

    recorder = Recorder()
    tiny_trainer(tmp_path, [SaveOnLog(), recorder], max_steps=3, save_async=False).train()
    assert [step for name, step in recorder.events if name == "on_save"] == [2]
    assert [step for name, step in recorder.events if name == "on_evaluate"] == [2]


def test_on_window_may_edit_the_batch(tmp_path):
    class Mask(TrainerCallback):
        def on_window(self, window):
            for batch in window.micro_batches:
                batch["input_ids"] = torch.zeros_like(batch["input_ids"])
                batch["labels"] = torch.zeros_like(batch["labels"])

    plain = tiny_trainer(tmp_path / "a", max_steps=3, learning_rate=1e-2)
    edited = tiny_trainer(tmp_path / "b", [Mask()], max_steps=3, learning_rate=1e-2)
    assert plain.train().training_loss != edited.train().training_loss


def test_should_epoch_stop_ends_the_epoch_early(tmp_path):
    class Short(TrainerCallback):
        def on_step_end(self, state, control):
            if state.global_step - state.epoch_start_step == 2:
                control.should_epoch_stop = True

    recorder = Recorder()
    trainer = tiny_trainer(tmp_path, [Short(), recorder], num_train_epochs=2, max_steps=4)
    trainer.train()
    assert recorder.names().count("on_epoch_end") == 2
    assert trainer.state.global_step == 4 and trainer.state.epoch == 2.0


def test_scheduler_that_is_a_callback_is_registered(tmp_path):
    class Schedule(torch.optim.lr_scheduler.LambdaLR, TrainerCallback):
        began = False

        def __init__(self, optimizer):
            super().__init__(optimizer, lambda step: 1.0)

        def on_train_begin(self):
            Schedule.began = True

    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer._lr_scheduler_factory = Schedule
    trainer.train()
    assert Schedule.began


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin"])
def test_a_stop_before_the_first_step_trains_nothing(tmp_path, event):
    stopper = type("Early", (TrainerCallback,), {event: _stop})()
    trainer = tiny_trainer(tmp_path, [stopper], max_steps=3)
    assert trainer.train().global_step == 0
    trainer.remove_callback(stopper)
    assert trainer.train().global_step == 3, "the next run starts with a fresh control"


def _stop(self, control):
    control.should_training_stop = True


@pytest.mark.parametrize("stray", ["EarlyStoppingCallback", print, object(), object])
def test_what_would_never_be_called_is_refused(tmp_path, stray):
    with pytest.raises(ConfigError, match=r"callbacks: .* no on_\* method .* allowed: .*TrainerC"):
        tiny_trainer(tmp_path, [stray])
