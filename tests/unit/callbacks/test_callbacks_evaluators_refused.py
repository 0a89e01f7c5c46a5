"""What evaluators and their configurations refuse, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluated import Counter, trainer_with, write_files, write_task

from headway import ConfigError
from headway.callbacks import (
    DownstreamEvaluatorCallbackConfig,
    EvaluatorCallback,
    LMEvaluatorCallbackConfig,
)
from headway.testing import tiny_dataset, tiny_decoder, tiny_trainer


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"eval_interval": 0}, "EvaluatorCallback: eval_interval: 0 given"),
        ({"eval_interval": -5}, "eval_interval: -5 given"),
        ({"eval_interval": 1.5}, "eval_interval: 1.5 given"),
        ({"log_interval": 0}, "log_interval: 0 given"),
        ({"fixed_steps": [2, 0]}, "fixed_steps: 0 given"),
        ({"fixed_steps": "12"}, "fixed_steps: '12' given"),
        ({"eval_on_startup": 1}, "eval_on_startup: 1 given"),
        ({"eval_duration": "2 epoks"}, "eval_duration: unknown unit 'epoks'"),
        ({"time_budget_s": 0}, "time_budget_s: 0 given"),
        ({"evaluator_errors": "skp"}, "did you mean 'skip'"),
        ({"with_evaluation": "yes"}, "with_evaluation: 'yes' given"),
        ({"evaluators": [1]}, "evaluators: [1] given"),
        ({"evaluators": [Counter(), Counter()]}, "two have the name 'counter'"),
    ],
)
def test_bad_options_are_told_at_once(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EvaluatorCallback(**options)
    assert told in str(caught.value) and "EvaluatorCallback" in str(caught.value)


@pytest.mark.parametrize("options", [{"eval_interval": 0}, {"batch_size": 0}, {"name": ""}])
def test_configurations_name_themselves(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^LMEvaluatorCallbackConfig: {next(iter(options))}"):
        LMEvaluatorCallbackConfig({"a": "a.hwt"}, **options)


@pytest.mark.parametrize("given", [{}, ["a.hwt"], {"a": []}, {"": "a.hwt"}, {"a": 3}])
def test_token_files_need_labels(given: Any) -> None:
    with pytest.raises(ConfigError, match="LMEvaluatorCallbackConfig: eval_dataset"):
        LMEvaluatorCallbackConfig(given)


def test_an_empty_set_is_told_before_the_first_step(tmp_path: Path) -> None:
    for evaluator in (Counter(num_batches=0), Counter(batches_factory=list, batches=None)):
        trainer = trainer_with(tmp_path, EvaluatorCallback([evaluator], 2))
        with pytest.raises(ConfigError, match=r"counter.*(empty|yields no batch)"):
            trainer.train()
    with pytest.raises(ConfigError, match="gone through only once"):
        Counter(batches=iter([1]))
    with pytest.raises(ConfigError, match="both were given"):
        Counter(batches=[1], batches_factory=list)


def test_files_that_the_model_cannot_take_are_told_before_the_first_step(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    for options, model, told in (
        ({"sequence_length": 256}, tiny_decoder, "sequence_length=256 is longer than the model's"),
        ({}, lambda: tiny_decoder(vocab_size=100), "the model takes ids below 100"),
    ):
        config = LMEvaluatorCallbackConfig(files, **{"sequence_length": 64, **options})
        trainer = trainer_with(tmp_path, config, model=model)
        trainer.train_dataset = tiny_dataset(8, 8, vocab_size=90)
        trainer.eval_dataset = None
        with pytest.raises(ConfigError, match="evaluator 'lm'") as caught:
            trainer.train()
        assert told in str(caught.value) and trainer.state.global_step == 0
    with pytest.raises(ConfigError, match=r"label 'x'.*nowhere\.hwt"):
        trainer_with(tmp_path, LMEvaluatorCallbackConfig({"x": str(tmp_path / "nowhere.hwt")}))


def test_two_callbacks_cannot_have_evaluators_of_one_name(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, *(EvaluatorCallback([Counter()], 2) for _ in range(2)))
    with pytest.raises(ConfigError, match="both have an evaluator 'counter'"):
        trainer.train()


def test_joining_evaluations_needs_some(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, EvaluatorCallback([Counter()], 2, with_evaluation=True))
    with pytest.raises(ConfigError, match="eval_strategy='no' asks for none"):
        trainer.train()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([{"prompt": "a", "choices": ["b", "c"]}], "line 1: lacks 'answer'"),
        ([{"prompt": "a", "completion": "b"}, {"completion": "b"}], "line 2: lacks 'prompt'"),
        ([{"prompt": "a"}], "line 1: needs 'choices' and 'answer', or 'completion'"),
        ([{"prompt": "a", "choices": ["b"], "answer": 0}], "two or more"),
        ([{"prompt": "a", "choices": ["b", "c"], "answer": 2}], "0 to 1, got 2"),
        ([{"prompt": "a", "choices": ["b", ""], "answer": 1}], "not empty"),
        ([{"prompt": 3, "completion": "b"}], "'prompt' must be text"),
        (["{"], "line 1: not JSON"),
        (["[1]"], "line 1: must be an object"),
        (
            [
                {"prompt": "a", "completion": "b"},
                {"prompt": "a", "choices": ["b", "c"], "answer": 0},
            ],
            "line 2: it is multiple_choice, the lines before are completion",
        ),
        ([], "holds no item"),
    ],
)
def test_a_mistake_in_a_task_names_file_and_line(
    tmp_path: Path, lines: list[Any], told: str
) -> None:
    path = write_task(tmp_path / "broken.jsonl", *lines)
    with pytest.raises(ConfigError) as caught:
        trainer_with(tmp_path, DownstreamEvaluatorCallbackConfig([path]))
    assert "broken.jsonl" in str(caught.value) and told in str(caught.value)
    assert str(caught.value).startswith("DownstreamEvaluatorCallbackConfig: tasks: task file")


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        (["opposite"], "did you mean 'opposites'"),
        (["nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["opposites", "x/opposites.jsonl"], "two tasks have the name 'opposites'"),
        ([], "[] given"),
        ("opposites", "'opposites' given"),
    ],
)
def test_tasks_that_are_not_there(tasks: Any, told: str) -> None:
    with pytest.raises(ConfigError, match="DownstreamEvaluatorCallbackConfig: tasks") as caught:
        DownstreamEvaluatorCallbackConfig(tasks)
    assert told in str(caught.value)


def test_tasks_need_a_tokenizer_that_fits_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DownstreamEvaluatorCallbackConfig: tokenizer: none"):
        tiny_trainer(tmp_path, [DownstreamEvaluatorCallbackConfig(["opposites"])])
    trainer = trainer_with(
        tmp_path,
        DownstreamEvaluatorCallbackConfig(["opposites"]),
        model=lambda: tiny_decoder(vocab_size=200),
    )
    trainer.train_dataset, trainer.eval_dataset = tiny_dataset(8, 8, vocab_size=190), None
    with pytest.raises(ConfigError, match="tokenizer 'bytes' has 258 ids, the model takes 200"):
        trainer.train()


def test_lazy_tasks_are_read_at_the_first_pass(tmp_path: Path) -> None:
    path = write_task(tmp_path / "later.jsonl", "{")
    config = DownstreamEvaluatorCallbackConfig([path], eval_interval=2, lazy=True)
    trainer = trainer_with(tmp_path, config)
    with pytest.raises(ConfigError, match=r"later\.jsonl, line 1: not JSON"):
        trainer.train()
    assert trainer.state.global_step == 2
