"""Programs written for transformers' Trainer: what is not honoured is refused, with what to use."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import transformers

import headway
from headway import Trainer, TrainingArguments
from headway.config import load_run
from headway.errors import ConfigError
from headway.testing import tiny_dataset, tiny_decoder

THEIRS = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
OURS = {field.name for field in dataclasses.fields(TrainingArguments)}


def make(tmp_path, cls=Trainer, **options):
    args = TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=2, use_cpu=True)
    given = {"model": tiny_decoder(), "args": args, "train_dataset": tiny_dataset(8)}
    return cls(**{**given, **options})


@pytest.mark.parametrize("name", sorted(THEIRS - OURS))
def test_an_option_of_theirs_that_we_do_not_have_says_what_to_do(name):
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(output_dir="run", **{name: True})
    (problem,) = caught.value.problems
    assert problem.startswith(f"unknown option {name!r}")
    assert "did you mean" not in problem and "Allowed:" not in problem


@pytest.mark.parametrize(("name", "instead"), [
    ("warmup_steps", "warmup_ratio"), ("eval_steps", "eval_every"), ("save_steps", "save_every"),
    ("logging_steps", "log_every"),
])  # fmt: skip
def test_a_share_of_the_training_as_steps_says_what_takes_one(name, instead):
    with pytest.raises(ConfigError, match=f"^{name} must be int, got 0.1 .* use {instead}"):
        TrainingArguments(output_dir="run", **{name: 0.1})
    with pytest.raises(ConfigError, match=f"use {instead}"):
        TrainingArguments.from_dict({name: 0.1})
    with pytest.raises(ConfigError, match=r"got 10.0 \(float\)$"):
        TrainingArguments(output_dir="run", **{name: 10.0})


@pytest.mark.parametrize("given", [{"one": [], "two": []}, "data.json"])
def test_what_is_no_dataset_is_told_by_its_option(tmp_path, given):
    with pytest.raises(ConfigError, match=r"^train_dataset: a"):
        make(tmp_path, train_dataset=given).train()
    with pytest.raises(ConfigError, match=r"^eval_dataset: a"):
        make(tmp_path, eval_dataset=given).evaluate()
    with pytest.raises(ConfigError, match=r"^test_dataset: a"):
        make(tmp_path).predict(given)


def test_every_unknown_option_is_told_and_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(output_dir="run", learning_rat=1e-4, bf16=True)
    assert caught.value.problems == [
        "unknown option 'learning_rat'; did you mean 'learning_rate'?",
        "unknown option 'bf16' (Hugging Face's): use mixed_precision='bf16'",
    ]


def test_a_run_file_says_the_same(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {vocab_size: 8, hidden_size: 8, num_layers: 1, num_heads: 1}\nargs: {fp16: true}\n"
    )
    with pytest.raises(ConfigError, match=r"run.yaml:2: .*use mixed_precision='fp16'"):
        load_run(str(file))


def test_arguments_may_be_extended():
    class Wider(TrainingArguments):
        def __init__(self, width, **options):
            super().__init__(**options)
            self.width = width

    assert Wider(width=3, max_steps=2).width == 3
    with pytest.raises(ConfigError, match="mixed_precision"):
        Wider(width=3, bf16=True)


@pytest.mark.parametrize(
    "name", sorted(set(inspect.signature(transformers.Trainer).parameters) | {"tokenizer"})
)
def test_a_parameter_of_their_trainer_is_taken_or_refused_with_what_to_use(tmp_path, name):
    if name in inspect.signature(Trainer).parameters:
        return
    with pytest.raises(ConfigError, match=f"unknown parameter '{name}' .Hugging Face's.: "):
        make(tmp_path, **{name: None})


def test_parameters_go_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"model=\.\.\., args=\.\.\."):
        Trainer(tiny_decoder(), TrainingArguments(output_dir=str(tmp_path)))


def test_their_arguments_are_told_from_ours(tmp_path):
    theirs = transformers.TrainingArguments(output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"headway.*TrainingArguments.*transformers\."):
        make(tmp_path, args=theirs)


def test_a_method_that_nobody_would_call_is_refused(tmp_path):
    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss * 0

    with pytest.raises(ConfigError, match=r"Weighted defines compute_loss.*compute_loss_func"):
        make(tmp_path, Weighted)


def test_so_is_one_that_comes_from_a_mixin(tmp_path):
    class Sampling:
        def _get_train_sampler(self):
            return None

    class Mine(Sampling, Trainer):
        pass

    with pytest.raises(ConfigError, match="Mine defines _get_train_sampler"):
        make(tmp_path, Mine)


def test_a_trainer_may_be_extended(tmp_path):
    class Mine(Trainer):
        def __init__(self, *, extra, **options):
            super().__init__(**options)
            self.extra = extra

    assert make(tmp_path, Mine, extra=1).train().global_step == 2
    with pytest.raises(ConfigError, match=r"optimizers.*optimizer_factory"):
        make(tmp_path, Mine, extra=1, optimizers=(None, None))


def test_our_own_trainers_define_none_of_their_methods():
    for name in ("Trainer", "DDPTrainer", "FSDP2Trainer", "PipelineTrainer", "AccelTrainer"):
        assert getattr(headway, name).uncalled_methods() == []


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("is_world_process_zero", "state.is_world_process_zero"),
        ("log_metrics", "trainer_logs.jsonl"),
        ("push_to_hub", "save_model"),
        ("tokenizer", "processing_class"),
        ("get_train_dataloader", "train_dataset"),
    ],
)
def test_what_their_trainer_has_and_ours_has_not_says_what_to_use(tmp_path, name, advice):
    trainer = make(tmp_path)
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError, match=f"'{name}'.*{advice}"):
        getattr(trainer, name)
    with pytest.raises(AttributeError, match=r"no attribute 'trian'$"):
        trainer.trian  # noqa: B018


def test_arguments_go_by_name_too():
    with pytest.raises(
        TypeError, match=r"TrainingArguments takes its options by name, .*output_dir="
    ):
        TrainingArguments("run", learning_rate=1e-3)


@pytest.mark.parametrize("passes_on", [False, True])
def test_a_log_method_of_theirs_is_called_for_every_record(tmp_path, passes_on):
    class Older(Trainer):
        def log(self, logs):
            super().log({**logs, "own": 1.0})

    class Newer(Trainer):
        def log(self, logs, start_time=None):
            super().log({**logs, "own": 1.0}, start_time)

    class Adds(headway.TrainerCallback):
        def on_log_step(self, logs):
            logs["added"] = 2.0

    trainer = make(tmp_path, Newer if passes_on else Older, callbacks=[Adds()])
    trainer.train()
    *steps, summary = trainer.state.log_history
    assert steps and all((record["own"], record["added"]) == (1.0, 2.0) for record in steps)
    assert summary["own"] == 1.0 and "added" not in summary


def test_overridden_methods_that_a_run_does_not_go_through_are_told(tmp_path, caplog):
    class Own(Trainer):
        def evaluate(self, *given, **named):
            return super().evaluate(*given, **named)

        def save_model(self, *given, **named):
            return super().save_model(*given, **named)

    make(tmp_path, eval_dataset=tiny_dataset(8))
    quiet = TrainingArguments(output_dir=str(tmp_path), save_strategy="no")
    make(tmp_path, Own, args=quiet, eval_dataset=tiny_dataset(8))
    assert "called by your program alone" not in caplog.text
    wanted = TrainingArguments(output_dir=str(tmp_path), eval_strategy="epoch")
    make(tmp_path, Own, args=wanted, eval_dataset=tiny_dataset(8))
    for name, event in (("evaluate", "on_evaluate"), ("save_model", "on_save")):
        assert f"Own.{name} is called by your program alone" in caplog.text
        assert f"a callback with {event} for these" in caplog.text


@pytest.mark.parametrize("name", ["_maybe_log_save_evaluate", "_remove_unused_columns"])
def test_inner_methods_that_programs_override_are_refused_too(tmp_path, name):
    with pytest.raises(ConfigError, match=f"Own defines {name}, which Headway never calls"):
        make(tmp_path, type("Own", (Trainer,), {name: lambda self, *given: None}))


@pytest.mark.parametrize(
    "kind",
    [
        TrainingArguments,
        headway.DDPTrainingArguments,
        headway.FSDP2TrainingArguments,
        headway.PipelineTrainingArguments,
    ],
)
def test_its_parser_of_the_command_line_takes_our_arguments(kind, tmp_path):
    words = {
        "output_dir": str(tmp_path), "train_for": "2B tokens", "save_every": "20min",
        "log_every": "5", "learning_rate": "1e-3", "sdpa_backend": "math", "seed": "7",
        "load_components": "model", "gradient_checkpointing": "true",
    }  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", value)]
    (args,) = transformers.HfArgumentParser(kind).parse_args_into_dataclasses(given)
    assert (args.train_for, args.save_every, args.log_every) == ("2B tokens", "20min", "5")
    assert args.learning_rate == 1e-3 and args.seed == 7 and args.gradient_checkpointing is True
    assert args.sdpa_backend == "math" and args.load_components == ["model"]
    (plain,) = transformers.HfArgumentParser(kind).parse_args_into_dataclasses(given[:2])
    assert plain.report_to == "none" and plain.save_every is None and plain.optim_args is None
