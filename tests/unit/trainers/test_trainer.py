"""What a user of the Python API relies on."""

from __future__ import annotations

import json
import logging
import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from headway import ConfigError, Trainer, TrainerCallback, TrainingArguments
from headway.engine.delivery import NonFiniteError
from headway.models.decoder import Decoder
from headway.strategies.single import SingleDevice
from headway.testing import (
    count_host_syncs,
    tiny_dataset,
    tiny_decoder,
    tiny_llama,
    tiny_trainer,
)


class Poison(TrainerCallback):
    """Makes the loss of one step not finite."""

    def __init__(self, step):
        self.step = step

    def on_gradients(self, state, model):
        if state.global_step == self.step:
            next(model.parameters()).grad.fill_(math.nan)


def weights_of(trainer):
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


class KeepWeights(TrainerCallback):
    def __init__(self):
        self.weights = []

    def on_step_end(self, trainer):
        self.weights.append(weights_of(trainer))


OPTIMIZERS = {
    "fused AdamW": None,
    "plain AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": False, "foreach": False}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


def as_if_reading_waited(trainer):
    """Take the path of an accelerator, where the host must not look at a value."""
    trainer._prepare_model()
    trainer.strategy._reading_waits = True
    return trainer


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_non_finite_step_never_reaches_the_weights(tmp_path, optimizer, on_device):
    keep = KeepWeights()
    trainer = tiny_trainer(
        tmp_path, [Poison(2), keep], max_steps=4, nonfinite_action="skip", logging_steps=4
    )
    trainer._optimizer_cls_and_kwargs = OPTIMIZERS[optimizer]
    if on_device:
        as_if_reading_waited(trainer)
    trainer.train()
    assert not torch.equal(keep.weights[0], keep.weights[1])
    assert torch.equal(keep.weights[1], keep.weights[2]), "step 3 was withheld"
    assert not torch.equal(keep.weights[2], keep.weights[3])
    assert all(torch.isfinite(w).all() for w in keep.weights)
    assert all(
        torch.isfinite(value).all()
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    record = next(r for r in trainer.state.log_history if "grad_norm" in r)
    assert record["skipped_steps"] == 1
    assert math.isnan(record["grad_norm"]), "never shown as a finite average"


@pytest.mark.filterwarnings("error:Detected call of")
def test_a_first_step_that_is_withheld_is_no_mistake_of_the_order(tmp_path):
    tiny_trainer(tmp_path, [Poison(0)], max_steps=2, nonfinite_action="skip").train()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("loss", "norm"), [(math.inf, 1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_a_loss_that_is_not_finite_withholds_finite_gradients_too(loss, norm, on_device):
    strategy, weight = SingleDevice(torch.device("cpu")), nn.Parameter(torch.ones(3))
    strategy._reading_waits = on_device
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for given, moves in (((loss, norm), False), ((1.0, 1.0), True)):
        weight.grad = torch.ones(3)
        strategy.apply(optimizer, *map(torch.tensor, given))
        assert (weight != 1).all() == moves


def test_non_finite_stops_at_the_next_flush_by_default(tmp_path):
    trainer = tiny_trainer(tmp_path, [Poison(1)], max_steps=10, logging_steps=3)
    output = trainer.train()
    assert output.global_step == 3
    assert trainer.bus.stopped_by == ("loop", "nonfinite", "stop")


def test_non_finite_may_raise(tmp_path):
    trainer = tiny_trainer(tmp_path, [Poison(1)], max_steps=10, nonfinite_action="raise")
    with pytest.raises(NonFiniteError, match="not finite at step 2"):
        trainer.train()


def test_no_host_sync_between_log_steps(tmp_path):
    class Count(TrainerCallback):
        """Counts what happens from the end of one log to the start of the next."""

        def __init__(self):
            self.counter, self.between, self.delivered = None, [], []

        def on_log(self, logs):
            if "loss" in logs:
                # Loading reads batches before they leave for the device.
                loading = ["headway/data/", "trainers/preflight"]
                self.counter = count_host_syncs(ignore=loading)
                self.found = self.counter.__enter__()

        def on_metrics(self, step, state):
            self.delivered.append((state.global_step, step))

        def on_log_step(self):
            self._end()

        def on_train_end(self):
            self._end()

        def _end(self):
            if self.counter is not None:
                self.counter.__exit__(None, None, None)
                self.between.append(self.found)
                self.counter = None

    count = Count()
    trainer = tiny_trainer(
        tmp_path,
        [count],
        num_samples=64,
        max_steps=12,
        logging_steps=4,
        metrics_collect_interval=3,
        max_grad_norm=1.0,
    )
    as_if_reading_waited(trainer).train()
    assert len(count.between) == 3, "two intervals, and what follows the last log"
    for found in count.between:
        assert found.count == 0, found.report()
    # Deliveries in between come one step after the flush, at which the device is not waited for.
    assert count.delivered[:9] == [
        (2, 1), (4, 2), (4, 3), (4, 4), (7, 5), (7, 6), (8, 7), (8, 8), (10, 9),
    ]  # fmt: skip


def test_evaluation_averages_over_targets_not_batches(tmp_path):
    data = tiny_dataset(10, sequence_length=20, ragged=True)
    trainer = tiny_trainer(tmp_path, per_device_eval_batch_size=4)
    found = trainer.evaluate(data)["eval_loss"]
    model = trainer.model.eval()
    total = count = 0
    with torch.no_grad():
        for item in data:
            ids = torch.tensor([item["input_ids"]])
            logits = model(ids).logits[0, :-1]
            total += nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
    assert found == pytest.approx(total / count, rel=1e-5)


def test_max_eval_steps_averages_only_what_was_seen(tmp_path):
    data = tiny_dataset(12, sequence_length=8)
    trainer = tiny_trainer(tmp_path, max_eval_steps=2)
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(
        trainer.evaluate(data[:4])["eval_loss"], rel=1e-6
    )


def test_evaluation_leaves_training_undisturbed(tmp_path):
    plain, evaluated = KeepWeights(), KeepWeights()
    tiny_trainer(tmp_path / "a", [plain], max_steps=4, learning_rate=1e-2).train()
    tiny_trainer(
        tmp_path / "b", [evaluated], max_steps=4, learning_rate=1e-2, eval_strategy="steps",
        eval_steps=1,
    ).train()  # fmt: skip
    assert torch.equal(plain.weights[-1], evaluated.weights[-1])


def test_predictions_of_rows_of_several_lengths_are_one_array(tmp_path):
    rows = [{"input_ids": list(range(1, 3 + n))} for n in range(4)]
    found = tiny_trainer(tmp_path, per_device_eval_batch_size=1).predict(rows)
    assert found.predictions.shape[:2] == (4, 5) and found.label_ids.shape == (4, 5)
    assert found.label_ids[0].tolist() == [1, 2, -100, -100, -100]
    assert (found.predictions[0, 2:] == -100).all() and (found.predictions[3] != -100).any()


def test_predict_returns_logits_and_labels(tmp_path):
    data = tiny_dataset(5, sequence_length=8)
    output = tiny_trainer(tmp_path).predict(data)
    assert isinstance(output.predictions, np.ndarray) and output.label_ids.shape == (5, 8)
    assert output.predictions.shape[:2] == (5, 8)
    assert output.metrics["test_loss"] > 0


def test_rollback_returns_to_the_newest_checkpoint(tmp_path):
    class RollBackOnce(TrainerCallback):
        def __init__(self, skip):
            self.skip, self.done = skip, False

        def on_step_end(self, state, control):
            if state.global_step == 5 and not self.done:
                self.done = True
                control.rollback = True
                control.rollback_skip_data = self.skip

    class Ledger(TrainerCallback):
        def __init__(self):
            self.samples, self.steps = [], []

        def on_window(self, window, state):
            self.samples.append(window.sample_ids.tolist())
            self.steps.append(state.global_step)

    def run(directory, callbacks):
        ledger, keep = Ledger(), KeepWeights()
        tiny_trainer(
            directory, [*callbacks, ledger, keep], num_samples=32, max_steps=8, learning_rate=1e-2,
            save_strategy="steps", save_steps=3,
        ).train()  # fmt: skip
        return ledger, keep.weights[-1]

    plain, plain_weights = run(tmp_path / "plain", [])
    again, again_weights = run(tmp_path / "again", [RollBackOnce(skip=False)])
    assert again.steps == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert again.samples[:5] + again.samples[7:] == plain.samples
    assert torch.equal(again_weights, plain_weights), "the same data again: the same run"
    skipped, skipped_weights = run(tmp_path / "skip", [RollBackOnce(skip=True)])
    assert skipped.steps == again.steps
    assert skipped.samples[5] == plain.samples[5], "goes on behind the data it had read"
    assert not torch.equal(skipped_weights, plain_weights)


def test_rollback_without_a_checkpoint_is_an_error(tmp_path):
    class RollBack(TrainerCallback):
        def on_step_end(self, control):
            control.rollback = True

    with pytest.raises(RuntimeError, match="no checkpoint to return to"):
        tiny_trainer(tmp_path, [RollBack()], max_steps=3).train()


def test_best_model_is_kept_and_loaded_at_the_end(tmp_path):
    class Script(TrainerCallback):
        priority = 100
        losses = [5.0, 1.0, 3.0, 4.0]

        def on_evaluate(self, metrics, state):
            metrics["eval_loss"] = self.losses[state.global_step - 1]

    keep = KeepWeights()
    trainer = tiny_trainer(
        tmp_path, [Script(), keep], max_steps=4, learning_rate=1e-2, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=1,
        load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 1.0 and trainer.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert torch.equal(weights_of(trainer), keep.weights[1])
    assert trainer.state.global_step == 4, "counters stay"
    kept = sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*"))
    assert kept == ["checkpoint-2", "checkpoint-4"]


def test_preserve_n_best(tmp_path):
    class Script(TrainerCallback):
        priority = 100
        losses = [3.0, 2.0, 2.5, 9.0, 8.0]

        def on_evaluate(self, metrics, state):
            metrics["eval_loss"] = self.losses[state.global_step - 1]

    tiny_trainer(
        tmp_path, [Script()], max_steps=5, num_samples=16, eval_on_save=True, save_strategy="steps",
        save_steps=1, save_total_limit=1, preserve_best_model=True, preserve_n_best=2,
    ).train()  # fmt: skip
    kept = sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*"))
    assert kept == ["checkpoint-2", "checkpoint-3", "checkpoint-5"]


def test_token_budget_and_token_cadence(tmp_path):
    trainer = tiny_trainer(
        tmp_path, num_samples=64, train_for="100 tokens", lr_scheduler_type="constant",
        logging_strategy="steps",
    )  # fmt: skip
    trainer.train()  # 16 tokens a step
    assert trainer.state.num_input_tokens_seen == 112 and trainer.state.global_step == 7


def test_decaying_schedule_needs_a_known_length(tmp_path):
    trainer = tiny_trainer(tmp_path, train_for="1h", lr_scheduler_type="cosine")
    with pytest.raises(ConfigError, match="lr_scheduler_type='cosine' needs to know how many"):
        trainer.train()
    assert not (tmp_path / "out").exists(), "nothing is written before the run is sound"


def test_wall_time_stop(tmp_path):
    output = tiny_trainer(tmp_path, num_samples=64, max_steps=10**6, stop_at="0.2s").train()
    assert output.interrupted_by == "stop_at" and output.global_step < 10**6


def test_global_batch_size_derives_accumulation(tmp_path):
    class Sizes(TrainerCallback):
        seen = []

        def on_window(self, window):
            self.seen.append(len(window.micro_batches))

    tiny_trainer(tmp_path, [Sizes()], global_batch_size=8, max_steps=1).train()
    assert Sizes.seen == [4]


def test_gradient_checkpointing_trains_the_same(tmp_path):
    plain, recomputed = KeepWeights(), KeepWeights()
    tiny_trainer(tmp_path / "a", [plain], max_steps=3).train()
    tiny_trainer(tmp_path / "b", [recomputed], max_steps=3, gradient_checkpointing=True).train()
    assert torch.allclose(plain.weights[-1], recomputed.weights[-1], atol=1e-6)


def test_a_fresh_start_does_not_overwrite_a_run(tmp_path):
    tiny_trainer(tmp_path, max_steps=2, save_strategy="steps").train()
    again = tiny_trainer(tmp_path, max_steps=2, resume_from_checkpoint=False)
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=False.*overwrite_output_dir"):
        again.train()
    allowed = tiny_trainer(
        tmp_path, max_steps=3, resume_from_checkpoint=False, overwrite_output_dir=True,
        save_strategy="steps",
    )  # fmt: skip
    assert allowed.train().global_step == 3


def test_logs_are_whole_json_lines_and_follow_a_resume(tmp_path):
    def run(**arguments):
        return Trainer(
            args=TrainingArguments(
                output_dir=str(tmp_path), per_device_train_batch_size=2, logging_steps=1,
                save_steps=2, seed=0, use_cpu=True, **arguments,
            ),
            model_init=tiny_decoder,
            train_dataset=tiny_dataset(32, sequence_length=8),
        ).train()  # fmt: skip

    run(max_steps=3)
    log = tmp_path / "trainer_logs.jsonl"
    with log.open("a") as file:
        file.write('{"global_step": 99, "loss": 1.0}\n{"global_step": 4, "lo')  # it was killed
    run(max_steps=5)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [r["global_step"] for r in records if r["type"] == "train"]
    assert steps == [1, 2, 3, 4, 5]
    first = next(r for r in records if r["type"] == "train")
    assert {"loss", "grad_norm", "learning_rate", "epoch", "tokens", "timestamp"} <= set(first)
    assert (tmp_path / "run" / "config.json").exists()
    assert (tmp_path / "run" / "environment.json").exists()


def test_default_callbacks_are_added_to_and_replaced_by_class(tmp_path):
    from headway.callbacks import JsonLogger

    mine = JsonLogger("other.jsonl")
    trainer = Trainer(
        args={"output_dir": str(tmp_path), "use_cpu": True}, model_init=tiny_decoder,
        callbacks=[mine],
    )  # fmt: skip
    names = list(trainer.callbacks)
    assert names.count("JsonLogger") == 1 and trainer.callbacks["JsonLogger"] is mine
    assert {"DefaultMetrics", "ProgressCallback", "InfoCallback"} <= set(names)


def test_save_model_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    ids = torch.arange(8)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(ids).logits
    assert torch.allclose(theirs, trainer.model.eval()(ids).logits, atol=1e-5)
    with pytest.raises(ConfigError, match="already holds"):
        trainer.save_model(str(tmp_path / "model"))


def test_a_checkpoint_is_a_model_folder(tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = tiny_trainer(tmp_path, max_steps=2, save_strategy="steps")
    trainer.model_init = tiny_llama
    trainer.train()
    ids = torch.arange(8)[None]
    folder = tmp_path / "out" / "checkpoint-2"
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    assert torch.allclose(theirs, trainer.model.eval()(ids).logits, atol=1e-6)
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2


def test_iterable_data_without_length(tmp_path):
    def stream():
        yield from tiny_dataset(200, sequence_length=8)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return stream()

    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=6,
            epoch_train_steps=4, gradient_accumulation_steps=2, save_strategy="no", use_cpu=True,
        ),
        model_init=tiny_decoder, train_dataset=Endless(), default_callbacks=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.epoch == 1.5, "epochs count optimizer steps, not micro-batches"


class Unsized(torch.utils.data.IterableDataset):
    """Five batches of two."""

    def __iter__(self):
        return iter(tiny_dataset(10, sequence_length=8))


@pytest.mark.parametrize(
    "length", [{"num_train_epochs": 2}, {"train_for": "2 epochs"}, {"num_train_epochs": 1.5}]
)
def test_epochs_of_a_stream_are_passes_over_it_although_nobody_knows_their_length(
    tmp_path, caplog, length
):
    def make(**options):
        return Trainer(
            args=TrainingArguments(
                output_dir=str(tmp_path), per_device_train_batch_size=2, use_cpu=True, **options
            ),
            model_init=tiny_decoder, train_dataset=Unsized(), default_callbacks=False,
        )  # fmt: skip

    with caplog.at_level(logging.WARNING):
        make(stop_at=3, **length).train()
    assert "train_dataset does not tell its length: epoch_train_steps=100000" in caplog.text
    trainer = make(**length)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.epoch) == (10, 2.0)
    assert trainer.state.outcome == "completed"
    trainer = make(max_steps=12)
    trainer.train()
    assert trainer.state.global_step == 12, "steps are steps"


def test_ready_dataloader_is_used_as_it_is(tmp_path):
    data = [{k: torch.tensor(v) for k, v in item.items()} for item in tiny_dataset(12, 8)]
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    trainer = tiny_trainer(tmp_path, num_train_epochs=1, per_device_train_batch_size=1)
    trainer.train_dataset = loader
    assert trainer.train().global_step == 4


def test_more_than_one_rank_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="one of 2"):
        tiny_trainer(tmp_path)


def test_a_model_that_cannot_train_leaves_nothing_behind(tmp_path):
    class NoLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input_ids):
            return {"hidden": input_ids * self.weight}

    trainer = Trainer(
        args={"output_dir": str(tmp_path / "out"), "use_cpu": True, "max_steps": 2},
        model=NoLoss(),
        train_dataset=tiny_dataset(8, 8),
    )
    with pytest.raises(ConfigError, match="NoLoss returns no loss"):
        trainer.train()
    assert not (tmp_path / "out").exists()


def test_the_seed_fixes_the_weights_also_when_an_evaluation_comes_first(tmp_path):
    def first_weights():
        trainer = tiny_trainer(tmp_path, seed=5)
        trainer.evaluate()
        return weights_of(trainer)

    assert torch.equal(first_weights(), first_weights())


def test_a_fresh_run_in_a_used_folder_never_touches_the_earlier_one(tmp_path):
    class Script(TrainerCallback):
        priority = 100

        def __init__(self, losses):
            self.losses = losses

        def on_evaluate(self, metrics, state):
            metrics["eval_loss"] = self.losses[state.global_step - 1]

    every_step = dict.fromkeys(("eval_strategy", "save_strategy"), "steps")
    every_step |= {"eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    tiny_trainer(tmp_path, [Script([0.1, 0.2])], max_steps=2, **every_step).train()
    keep = KeepWeights()
    again = tiny_trainer(
        tmp_path, [Script([3.0, 2.0, 4.0]), keep], max_steps=3, learning_rate=1e-2, seed=9,
        resume_from_checkpoint=False, overwrite_output_dir=True, **every_step,
    )  # fmt: skip
    again.train()
    assert torch.equal(weights_of(again), keep.weights[1]), "the best of this run"
    assert sorted(p.name for p in (tmp_path / "out" / "replaced-1").iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


def test_the_best_model_is_that_of_the_best_evaluation_wherever_it_was_saved(tmp_path, caplog):
    class Script(TrainerCallback):
        priority = 100

        def on_evaluate(self, metrics, state):
            metrics["eval_loss"] = [5.0, 1.0, 3.0, 4.0, 2.0, 6.0][state.global_step - 1]

    keep = KeepWeights()
    settings = dict.fromkeys(("eval_strategy", "save_strategy"), "steps")
    settings |= {"eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    settings |= {"learning_rate": 1e-2, "max_steps": 6, "save_total_limit": 2}
    tiny_trainer(tmp_path / "a", [Script(), keep], stop_at=4, **settings).train()
    earlier = {"resume_from_checkpoint": str(tmp_path / "a/out/checkpoint-4")}
    other = tiny_trainer(tmp_path / "b", [Script()], **settings, **earlier)
    other.train()
    assert (
        torch.equal(weights_of(other), keep.weights[1]) and "has no checkpoint" not in caplog.text
    )
    shutil.rmtree(tmp_path / "a/out/checkpoint-2")
    third = tiny_trainer(tmp_path / "c", [Script()], **settings, **earlier)
    third.train()
    assert third.state.best_model_checkpoint == str(tmp_path / "c/out/checkpoint-5")
    assert "the best evaluation, 1.0 at step 2, has no checkpoint" in caplog.text
    assert "c/out/checkpoint-5 (2.0)" in caplog.text


def test_a_resume_may_rank_by_another_metric(tmp_path, caplog):
    class Script(TrainerCallback):
        priority = 100

        def on_evaluate(self, metrics, state):
            step = state.global_step - 1
            metrics["eval_loss"] = [5.0, 4.0, 3.0, 2.5, 2.6, 2.7][step]
            metrics["eval_accuracy"] = [0.1, 0.3, 0.2, 0.6, 0.5, 0.4][step]

    keep = KeepWeights()
    settings = dict.fromkeys(("eval_strategy", "save_strategy"), "steps")
    settings |= {"eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    settings |= {"learning_rate": 1e-2, "max_steps": 6, "save_total_limit": 2}
    tiny_trainer(tmp_path, [Script()], stop_at=3, **settings).train()
    settings |= {"metric_for_best_model": "accuracy", "greater_is_better": True}
    trainer = tiny_trainer(tmp_path, [Script(), keep], **settings)
    trainer.train()
    assert "the best evaluation so far is now 0.3 (" in caplog.text
    assert trainer.state.best_metric == 0.6 and trainer.state.best_global_step == 4
    assert torch.equal(weights_of(trainer), keep.weights[0]), "those of step 4"


def test_steps_repeated_after_a_rollback_are_logged_and_evaluated(tmp_path):
    class RollBackOnce(TrainerCallback):
        done = False

        def on_step_end(self, state, control):
            if state.global_step == 9 and not self.done:
                self.done = control.rollback = True

    trainer = tiny_trainer(
        tmp_path, [RollBackOnce()], num_samples=64, max_steps=12, logging_steps=2, save_steps=5,
        save_strategy="steps", eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    trainer.train()
    history = trainer.state.log_history
    assert [r["step"] for r in history if "grad_norm" in r] == [2, 4, 6, 8, 10, 12]
    assert [r["step"] for r in history if "eval_loss" in r] == [2, 4, 6, 8, 10, 12]


def test_stop_at_steps_stops_there_also_when_asked_again(tmp_path):
    for _ in range(2):
        trainer = tiny_trainer(tmp_path, max_steps=9, stop_at=5, save_strategy="steps")
        output = trainer.train()
        assert (output.global_step, output.interrupted_by) == (5, "stop_at")


def test_a_skipped_step_does_not_spoil_the_mean_loss(tmp_path):
    trainer = tiny_trainer(tmp_path, [Poison(1)], max_steps=4, nonfinite_action="skip")
    assert math.isfinite(trainer.train().training_loss)


def test_samples_are_counted_as_read(tmp_path):
    trainer = tiny_trainer(tmp_path, num_samples=7, num_train_epochs=2)
    assert trainer.train().metrics["train_samples"] == 14


def test_epoch_follows_the_data_when_the_batch_size_changes(tmp_path):
    tiny_trainer(tmp_path, num_samples=30, stop_at=6, save_strategy="steps").train()  # 12 of 30
    again = tiny_trainer(
        tmp_path, num_samples=30, stop_at=8, save_strategy="steps", per_device_train_batch_size=3
    )
    again.train()
    assert again.state.epoch == pytest.approx(18 / 30)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("_optimizer_factory", lambda g: torch.optim.LBFGS([g[0]["params"][0]]), "LBFGS"),
        (
            "_lr_scheduler_factory",
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            "ReduceLROnPlateau needs a metric",
        ),
    ],
)
def test_what_the_loop_cannot_drive_is_refused_before_it_starts(tmp_path, option, value, message):
    trainer = tiny_trainer(tmp_path, max_steps=2)
    setattr(trainer, option, value)
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    assert not (tmp_path / "out").exists()


def test_an_evaluation_without_a_label_that_counts_is_told(tmp_path):
    masked = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 4
    trainer = tiny_trainer(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.eval_dataset = masked
    with pytest.raises(ConfigError, match=r"metric_for_best_model: .*eval_dataset has no label"):
        trainer.train()


def test_evaluations_on_save_need_data(tmp_path):
    trainer = tiny_trainer(tmp_path, eval_on_save=True, save_strategy="steps")
    trainer.eval_dataset = None
    with pytest.raises(ConfigError, match="eval_on_save=True: eval_dataset is needed"):
        trainer.train()


class Hidden(torch.utils.data.Dataset):
    """Map-style data that declares nothing; the bad sample is not the first."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": [1, 999, 3]}, "token id 999, but the model's vocabulary ends at 257"),
        ({"input_ids": [1] * 5000}, "sequences of 5000 tokens, but the model takes at most"),
        ({"input_ids": [1, -3, 3]}, "negative token id -3"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 999]}, "a label has the token id 999"),
        ({"input_ids": [1, 2, 3], "labels": [1, -1, 3]}, "a label is -1, .* has the label -100"),
    ],
)
def test_bad_samples_anywhere_are_named(tmp_path, bad, message):
    good = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(5)]
    bad = {"labels": bad["input_ids"], **bad}
    if "label" in message:
        bad["input_ids"] = [1, 2, 3]
    trainer = tiny_trainer(tmp_path, num_train_epochs=1)
    trainer.train_dataset = Hidden([*good, bad])
    with pytest.raises(ConfigError, match=message):
        trainer.train()


class OwnLoss(Decoder):
    def forward(self, input_ids, labels=None, **more):
        logits = super().forward(input_ids, **more).logits
        return {"loss": logits.sum() * 0, "logits": logits}


def test_a_loss_of_the_users_own_may_leave_out_other_labels(tmp_path):
    def loss_of(outputs, labels, num_items_in_batch):
        return outputs.logits.sum() * 0

    def make_fused(head):
        return lambda hidden, labels, num_items_in_batch: (hidden @ head.weight.T).sum() * 0

    own = OwnLoss(tiny_decoder().config)
    for n, given in enumerate([
        {"model": tiny_decoder(), "compute_loss_func": loss_of},
        {"model": tiny_decoder(), "fused_loss_factory": make_fused},
        {"model": own},
        {"model": tiny_decoder(), "labels": [-1, 2, 3]},  # nothing predicts the first one
    ]):  # fmt: skip
        args = TrainingArguments(use_cpu=True, output_dir=str(tmp_path / str(n)), max_steps=1)
        labels = given.pop("labels", [1, -1, 3])
        data = [{"input_ids": [1, 2, 3], "labels": labels} for _ in range(4)]
        assert Trainer(args=args, train_dataset=data, **given).train().global_step == 1


def test_labels_none_of_which_counts_are_told_once(tmp_path, caplog):
    trainer = tiny_trainer(tmp_path, max_steps=3)
    trainer.train_dataset = [{"input_ids": [1, 2, 3], "labels": [-100] * 3} for _ in range(12)]
    trainer.train()
    assert caplog.text.count("no label of step 1 counts") == 1
    assert caplog.text.count("counts (each is -100") == 1


def test_a_loss_of_ones_own_may_learn_from_samples_without_a_label_that_counts(tmp_path, caplog):
    data = [{"input_ids": [1, 2, 3], "labels": [-100] * 3} for _ in range(4)]
    args = TrainingArguments(use_cpu=True, output_dir=str(tmp_path), max_steps=1, logging_steps=1)
    trainer = Trainer(
        args=args, model=tiny_decoder(), train_dataset=data,
        compute_loss_func=lambda outputs, labels, num_items_in_batch: (outputs.logits**2).mean(),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    assert "no label of step" not in caplog.text


def test_arguments_show_where_the_process_stands(tmp_path):
    args = tiny_trainer(tmp_path).args
    assert (args.world_size, args.process_index, args.n_gpu) == (1, 0, 0)
