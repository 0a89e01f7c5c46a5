"""Evaluators: their figures are those of a plain computation, their cadence is as asked."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import virtual_time
from evaluated import (
    LENGTH,
    TEXTS,
    Counter,
    Seen,
    evaluate,
    expected_lm,
    expected_task,
    nats,
    task_lines,
    trainer_with,
    write_files,
    write_task,
)

from headway import Duration, TrainerCallback
from headway.callbacks import (
    DefaultMetrics,
    DownstreamEvaluatorCallbackConfig,
    EvaluatorCallback,
    JsonLogger,
    LMEvaluatorCallbackConfig,
    TBLogger,
)
from headway.callbacks.evaluate.tasks import read_task, suite_tasks
from headway.callbacks.log.json_reader import read_json_log
from headway.testing import tiny_decoder, tiny_llama

EVAL_BATCHES = "throughput/in-loop eval batches"


# Figures


def test_perplexity_is_that_of_a_plain_computation(tmp_path: Path) -> None:
    files, seen = write_files(tmp_path), Seen()
    config = LMEvaluatorCallbackConfig(
        files, sequence_length=LENGTH, batch_size=3, eval_interval=None, eval_on_finish=True
    )
    trainer = trainer_with(tmp_path, config, seen)
    trainer.train()
    expected = expected_lm(trainer.model, files)
    assert seen.figures(4, "eval/lm/") == pytest.approx(expected, rel=1e-6)
    assert set(seen.steps) == {4}


@pytest.mark.slow
def test_models_of_transformers_are_scored_alike(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t.jsonl", *task_lines("opposites", 5))
    seen = Seen()
    # It takes no document ids, so each document is a sequence of its own, cut where it is too long.
    lm = LMEvaluatorCallbackConfig(
        {"sums": write_files(tmp_path)["sums"]}, sequence_length=LENGTH, batch_size=1,
        eval_interval=None, eval_on_finish=True, packing="none",
    )  # fmt: skip
    tasks = DownstreamEvaluatorCallbackConfig([task], eval_interval=None, eval_on_finish=True)
    trainer = trainer_with(tmp_path, lm, tasks, seen, model=tiny_llama)
    trainer.train()
    total = count = 0.0
    for text in TEXTS["sums"]:
        ids = [*text.encode(), 256]
        for start in range(0, len(ids), LENGTH):
            own = nats(trainer.model.eval(), ids[start : start + LENGTH])
            total, count = total + sum(own), count + len(own)
    assert seen.steps[4]["eval/lm/sums/CE loss"] == pytest.approx(total / count, rel=1e-6)
    found = seen.figures(4, "eval/downstream/t ")
    expected = {f"({k})": v for k, v in expected_task(trainer.model, task).items()}
    assert found == pytest.approx(expected, rel=1e-6)


def test_tasks_are_scored_as_by_a_plain_computation(tmp_path: Path) -> None:
    own = write_task(
        tmp_path / "mine.jsonl",
        {"prompt": "näht ", "choices": ["ein", "zwei und drei", "ö"], "answer": 2},
        {"prompt": "a longer prompt that pads the others", "choices": ["x", "yy"], "answer": 0},
    )
    names = {n: write_task(tmp_path / f"{n}.jsonl", *task_lines(n, 5)) for n in suite_tasks()} | {
        "mine": own
    }
    config = DownstreamEvaluatorCallbackConfig(
        names, eval_interval=None, eval_on_finish=True, batch_tokens=700
    )
    seen = Seen()
    trainer = trainer_with(tmp_path, config, seen)
    trainer.train()
    found = seen.figures(4, "eval/downstream/")
    assert len(names) == 4
    for name, path in names.items():
        expected = expected_task(trainer.model, path)
        mine = {label: found.pop(f"{name} ({label})") for label in expected}
        assert mine == pytest.approx(expected, rel=1e-6), name
    assert found == {}


def test_a_model_that_knows_the_answers_gets_all_of_them(tmp_path: Path) -> None:
    line = {"prompt": "abc abc abc a", "completion": "bc abc abc"}
    path = write_task(tmp_path / "abc.jsonl", line)
    seen, ids = Seen(), list(b"abc abc abc abc abc abc ")
    trainer = trainer_with(
        tmp_path,
        DownstreamEvaluatorCallbackConfig(
            [path], eval_interval=None, eval_on_startup=True, eval_on_finish=True
        ),
        seen,
        max_steps=40,
    )
    trainer.train_dataset = [{"input_ids": ids, "labels": ids}] * 8
    trainer.train()
    before, after = (seen.figures(n, "eval/downstream/abc ") for n in (0, 40))
    assert before["(accuracy)"] == 0 and after["(accuracy)"] == 1
    assert after["(BPB)"] < 0.5 < before["(BPB)"]


def test_a_text_without_a_prompt_follows_the_end_of_another(tmp_path: Path) -> None:
    path = write_task(tmp_path / "t.jsonl", {"prompt": "", "completion": "the boat"})
    seen = Seen()
    config = DownstreamEvaluatorCallbackConfig([path], eval_interval=None, eval_on_finish=True)
    trainer = trainer_with(tmp_path, config, seen)
    trainer.train()
    trainer.model.eval()
    expected = sum(nats(trainer.model, [256, *b"the boat"])) / 8
    assert seen.figures(4, "eval/downstream/")["t (CE loss)"] == pytest.approx(expected, rel=1e-6)


def test_of_a_text_that_is_too_long_the_beginning_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "x" * 300
    path = write_task(tmp_path / "t.jsonl", {"prompt": prompt, "completion": " end"})
    seen = Seen()
    config = DownstreamEvaluatorCallbackConfig([path], eval_interval=None, eval_on_finish=True)
    trainer = trainer_with(tmp_path, config, seen)
    trainer.train()
    trainer.model.eval()
    expected = sum(nats(trainer.model, list((prompt + " end").encode())[-128:])[-4:]) / 4
    assert seen.figures(4, "eval/downstream/")["t (CE loss)"] == pytest.approx(expected, rel=1e-6)
    assert "1 of 1 texts are longer" in caplog.text


def test_without_the_tokenizer_of_the_files_there_are_no_bits_per_byte(tmp_path: Path) -> None:
    seen = Seen()
    config = LMEvaluatorCallbackConfig(
        write_files(tmp_path), sequence_length=LENGTH, eval_interval=None, eval_on_finish=True
    )
    trainer = trainer_with(tmp_path, seen)
    trainer.processing_class = None
    trainer.add_callback(config, "lm")
    trainer.train()
    labels = {name.split("/")[-1] for name in seen.figures(4, "eval/lm/")}
    assert labels == {"CE loss", "PPL"}


def test_the_tasks_of_headway_are_whole() -> None:
    for name, path in suite_tasks().items():
        task = read_task(name, path)
        assert len(task.items) >= 40
        assert len({(item.prompt, item.choices) for item in task.items}) == len(task.items)
        assert all(len(set(item.choices)) == len(item.choices) for item in task.items)
        if task.kind == "multiple_choice":  # an answer is not known by its place
            places = [item.answer for item in task.items]
            assert max(map(places.count, places)) < 0.5 * len(places)


def test_separators_inside_a_text_end_no_line(tmp_path: Path) -> None:
    lines = [{"prompt": "a\u2028b\u0085c", "completion": " d"}] * 2
    text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path = tmp_path / "t.jsonl"
    path.write_bytes(text.encode())
    assert [item.prompt for item in read_task("t", path).items] == ["a\u2028b\u0085c"] * 2


# How much


@pytest.mark.parametrize(
    ("duration", "batches"),
    [
        ("1 epochs", [0, 1, 2, 3]),
        (Duration.epochs(2), [0, 1, 2, 3, 0, 1, 2, 3]),
        ("1.5 epochs", [0, 1, 2, 3, 0, 1]),
        ("0.3 epochs", [0, 1]),
        (3, [0, 1, 2]),
        ("99 steps", [0, 1, 2, 3]),
        ("21 tokens", [0, 1]),
        ("20 tokens", [0]),
        ("1h", [0, 1, 2, 3]),
        ("0.000001s", [0]),
    ],
)
def test_a_duration_counts_what_it_says(tmp_path: Path, duration: Any, batches: list[int]) -> None:
    counter = Counter()
    seen, _ = evaluate(tmp_path, counter, eval_duration=duration)
    assert counter.seen == batches
    assert seen.steps[0]["eval/counter/batches"] == len(batches)
    assert seen.steps[0][EVAL_BATCHES] == len(batches)


def test_a_duration_of_nothing_measures_nothing(tmp_path: Path) -> None:
    counter = Counter()
    seen, _ = evaluate(tmp_path, counter, eval_duration=Duration.epochs(0))
    assert counter.seen == [] and seen.figures(0, "eval/") == {}
    assert seen.steps[0][EVAL_BATCHES] == 0


def test_a_label_that_a_short_pass_did_not_see_is_not_a_number(tmp_path: Path) -> None:
    seen = Seen()
    config = LMEvaluatorCallbackConfig(
        write_files(tmp_path), sequence_length=LENGTH, batch_size=2, eval_interval=None,
        eval_on_finish=True, eval_duration=1,
    )  # fmt: skip
    trainer_with(tmp_path, config, seen).train()
    losses = [v for k, v in seen.figures(4, "eval/lm/").items() if k.endswith("CE loss")]
    assert sorted(map(math.isnan, losses)) == [False, True]


def test_short_passes_see_the_same_data_unless_told_otherwise(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    for deterministic in (True, False):
        seen = Seen()
        config = LMEvaluatorCallbackConfig(
            files, sequence_length=4, batch_size=1, eval_interval=1, eval_duration=3,
            deterministic=deterministic,
        )  # fmt: skip
        trainer_with(
            tmp_path, config, seen, learning_rate=0.0, lr_scheduler_type="constant"
        ).train()
        passes = [str(seen.figures(n, "eval/lm/")) for n in (1, 2, 3, 4)]
        assert (len(set(passes)) == 1) == deterministic


def test_a_loader_that_draws_its_order_is_taken_too(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8)} for n in range(6)]
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    orders = []
    for _ in range(2):
        counter = Counter(batches=loader)
        evaluate(tmp_path, counter)
        orders.append(list(counter.seen))
    assert orders[0] == orders[1] and len(orders[0]) == 3


# When


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"eval_interval": 2}, [2, 4]),
        ({"eval_interval": 1}, [1, 2, 3, 4]),
        ({"eval_interval": None, "fixed_steps": [1, 3, 9]}, [1, 3]),
        ({"eval_interval": 3, "fixed_steps": [3, 4]}, [3, 4]),
        ({"eval_interval": None, "eval_on_startup": True, "eval_on_finish": True}, [0, 4]),
        ({"eval_interval": 4, "eval_on_finish": True}, [4]),
        ({"eval_interval": None}, []),
    ],
)
def test_it_evaluates_when_asked_and_never_twice(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    seen, counter = Seen(), Counter()
    trainer_with(tmp_path, EvaluatorCallback([counter], **options), seen).train()
    assert sorted(seen.steps) == steps
    assert counter.passes == len(steps)


def test_a_resumed_run_evaluates_at_the_steps_of_an_uninterrupted_one(tmp_path: Path) -> None:
    kinds = {"save_strategy": "steps", "save_steps": 3}
    trainer_with(tmp_path, EvaluatorCallback([Counter()], 2), max_steps=3, **kinds).train()
    seen = Seen()
    again = trainer_with(tmp_path, EvaluatorCallback([Counter()], 2), seen, max_steps=6, **kinds)
    again.train(resume_from_checkpoint=True)
    assert sorted(seen.steps) == [4, 6]


class Interrupt(TrainerCallback):
    """Breaks off, or goes back, once after a step."""

    def __init__(self, step: int, rolls_back: bool) -> None:
        self.step, self.rolls_back = step, rolls_back

    def on_step_end(self, state: Any, control: Any) -> None:
        if state.global_step != self.step:
            return
        self.step = -1
        if not self.rolls_back:
            raise RuntimeError("power")
        control.rollback = True


@pytest.mark.parametrize("rolls_back", [False, True])
def test_what_came_after_the_save_of_its_step_comes_again(tmp_path: Path, rolls_back: bool) -> None:
    def run(*callbacks: Any, **options: Any) -> None:
        kinds = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        both = JsonLogger(), EvaluatorCallback([Counter()], 2)
        trainer_with(tmp_path, *both, *callbacks, **kinds).train(**options)

    if rolls_back:
        run(Interrupt(3, True))
    else:
        with pytest.raises(RuntimeError, match="power"):
            run(Interrupt(3, False))
        run(resume_from_checkpoint=True)
    records = read_json_log(tmp_path / "out" / "trainer_logs.jsonl")
    assert [r["global_step"] for r in records if r["type"] == "eval"] == [2, 4, 6]


def test_what_the_last_save_holds_is_not_evaluated_again(tmp_path: Path) -> None:
    kinds = {"save_strategy": "steps", "save_steps": 100}
    trainer_with(tmp_path, EvaluatorCallback([Counter()], 2), max_steps=2, **kinds).train()
    seen = Seen()
    again = trainer_with(tmp_path, EvaluatorCallback([Counter()], 2), seen, max_steps=4, **kinds)
    again.train(resume_from_checkpoint=True)
    assert sorted(seen.steps) == [4]


def test_an_evaluation_at_the_start_reaches_every_log(tmp_path: Path) -> None:
    first = EvaluatorCallback([Counter()], None, eval_on_startup=True)
    trainer = trainer_with(tmp_path, first, JsonLogger(), TBLogger())
    trainer.train()
    assert trainer.bus.disabled == {}
    records = read_json_log(tmp_path / "out" / "trainer_logs.jsonl")
    assert [r["global_step"] for r in records if r["type"] == "eval"] == [0]


def test_with_startup_and_cancel_a_run_only_evaluates(tmp_path: Path) -> None:
    seen, first, second = Seen(), Counter("one"), Counter("two")
    trainer = trainer_with(
        tmp_path,
        *(
            EvaluatorCallback([c], None, eval_on_startup=True, cancel_after_first_eval=True)
            for c in (first, second)
        ),
        seen,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    assert trainer.state.global_step == 0 and trainer.state.outcome == "canceled"
    assert first.passes == second.passes == 1, "both are due before the end"
    assert {*seen.steps[0]} >= {"eval/one/batches", "eval/two/batches"}
    assert not list(tmp_path.glob("out/checkpoint-*"))


def test_cancel_after_a_later_evaluation_keeps_what_was_trained(tmp_path: Path) -> None:
    counter = Counter()
    callback = EvaluatorCallback([counter], 2, cancel_after_first_eval=True)
    trainer = trainer_with(tmp_path, callback, save_strategy="steps", save_steps=100)
    trainer.train()
    assert trainer.state.global_step == 2 and counter.passes == 1
    assert [p.name for p in tmp_path.glob("out/checkpoint-*")] == ["checkpoint-2"]


# The run around it


def noisy_decoder() -> Any:
    return tiny_decoder(dropout=0.2)


class Greedy(Counter):
    """Draws from every global generator and leaves the model in training mode."""

    def update_metrics(self, batch: Any, scores: Any) -> None:
        super().update_metrics(batch, scores)
        random.random(), np.random.rand(), torch.rand(3)

    def compute_metrics(self, join: Any) -> dict[str, float]:
        return {}


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    def train(*callbacks: Any) -> list[float]:
        trainer = trainer_with(tmp_path, *callbacks, model=noisy_decoder)
        trainer.train()
        assert trainer.model.training
        return [float(p.detach().double().sum()) for p in trainer.model.parameters()]

    assert train(EvaluatorCallback([Greedy()], 1, eval_on_startup=True)) == train()


def test_evaluating_is_no_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Long(Counter):
        def update_metrics(self, batch: Any, scores: Any) -> None:
            doing.append(trainer.timing.doing)
            time.now_s += 100.0

    doing: list[Any] = []
    rates = []
    for more in ([], [EvaluatorCallback([Long()], 1)]):
        time, seen = virtual_time.VirtualTime().use(monkeypatch), virtual_time.Seen()
        callbacks = [virtual_time.Work(time), DefaultMetrics(1e12), seen, *more]
        trainer = virtual_time.make_trainer(
            tmp_path, time, callbacks, max_steps=6, logging_steps=3, metrics_collect_interval=100
        )
        trainer.train()
        rates.append([logs.get("tok_per_sec") for logs in seen.logs if "loss" in logs])
    assert rates[0] == pytest.approx(rates[1]) and len(rates[0]) == 2
    assert set(doing) == {"evaluate"}


def test_an_evaluator_sees_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    modes = []

    class Looks(Counter):
        def update_metrics(self, batch: Any, scores: Any) -> None:
            modes.append((trainer.model.training, torch.is_grad_enabled()))

    trainer = trainer_with(tmp_path, EvaluatorCallback([Looks()], 4), model=noisy_decoder)
    trainer.train()
    assert set(modes) == {(False, False)}


def test_a_signal_ends_a_long_evaluation_and_the_run_is_saved(tmp_path: Path) -> None:
    class Slow(Counter):
        def update_metrics(self, batch: Any, scores: Any) -> None:
            super().update_metrics(batch, scores)
            if len(self.seen) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    slow, seen = Slow(num_batches=50), Seen()
    callback = EvaluatorCallback([slow], 2, eval_on_finish=True)
    trainer = trainer_with(tmp_path, callback, seen, save_strategy="steps", save_steps=100)
    output = trainer.train()
    assert output.interrupted_by == "SIGTERM" and output.global_step == 2
    assert len(slow.seen) == 2 and seen.steps == {}
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


class Broken(Counter):
    def update_metrics(self, batch: Any, scores: Any) -> None:
        raise KeyError("no such thing")


def test_an_evaluator_that_fails_is_named(tmp_path: Path) -> None:
    callback = EvaluatorCallback([Broken("fragile")], 2)
    with pytest.raises(RuntimeError, match=r"evaluator 'fragile' failed: KeyError.*no such thing"):
        trainer_with(tmp_path, callback).train()


def test_or_is_left_out_where_that_is_the_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    evaluators = [Broken("fragile"), Counter()]
    callback = EvaluatorCallback(evaluators, 2, evaluator_errors="skip")
    trainer_with(tmp_path, callback, seen).train()
    assert seen.figures(2, "eval/") == {"counter/batches": 4.0}
    assert "evaluator 'fragile' failed and is left out" in caplog.text


def test_a_forward_that_fails_is_left_out_unless_ranks_make_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = torch.full((1, 8), 10**6)
    batches = [{"input_ids": strange, "labels": strange}]
    callback = EvaluatorCallback([Counter(batches=batches)], 2, evaluator_errors="skip")
    trainer_with(tmp_path, callback).train()
    monkeypatch.setattr("headway.callbacks.evaluate.passes.num_ranks", lambda: 2)
    monkeypatch.setattr("headway.strategies.single.SingleDevice.forward_is_shared", True)
    with pytest.raises(RuntimeError, match=r"'counter' failed: IndexError.*cannot be left out"):
        trainer_with(tmp_path, callback).train()


def test_a_time_budget_leaves_out_what_does_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = Counter("one"), Counter("two")
    seen = Seen()
    callback = EvaluatorCallback([one, two], 4, time_budget_s=1e-9)
    trainer_with(tmp_path, callback, seen).train()
    assert seen.figures(4, "eval/") == {} and one.seen == two.seen == []
    assert caplog.text.count("time_budget_s=1e-09 is used up") == 2


def test_figures_are_in_the_history_and_called_evaluation(tmp_path: Path) -> None:
    from headway.callbacks import JsonLogger

    trainer = trainer_with(tmp_path, EvaluatorCallback([Counter()], 4), JsonLogger())
    trainer.train()
    name = "eval/counter/batches"
    assert [r["step"] for r in trainer.state.log_history if name in r] == [4]
    lines = (tmp_path / "out" / "trainer_logs.jsonl").read_text().splitlines()
    kinds = [record["type"] for record in map(json.loads, lines) if name in record]
    assert kinds == ["eval"]


def test_another_prefix_for_other_weights(tmp_path: Path) -> None:
    callback, seen = EvaluatorCallback([Counter()], eval_interval=None, eval_on_finish=True), Seen()

    class Merges(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            if state.global_step == 4:
                assert callback.perform_eval("eval/merged") == {"eval/merged/counter/batches": 4.0}

    trainer_with(tmp_path, callback, Merges(), seen).train()
    assert seen.figures(4, "eval/") == {"merged/counter/batches": 4.0, "counter/batches": 4.0}
