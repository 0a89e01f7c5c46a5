"""The argument classes: defaults, strictness, what is filled in, the Hugging Face surface."""

import enum
import json
from pathlib import Path

import numpy as np
import pytest

from headway import args as headway_args
from headway.args import (
    DDPArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
)
from headway.config import Duration, derive_accumulation
from headway.errors import ConfigError


class Interval(enum.StrEnum):
    EPOCH = "epoch"


@pytest.mark.parametrize("name", headway_args.__all__)
def test_every_class_has_valid_defaults(name):
    cls = getattr(headway_args, name)
    cls()
    with pytest.raises(TypeError):
        cls("positional")


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (TrainingArguments, {"learning_rat": 1.0}, "did you mean 'learning_rate'"),
        (TrainingArguments, {"ddp": {}}, "unknown option 'ddp'"),
        (TrainingArguments, {"learning_rate": "5e-5"}, "must be float.*without quotes"),
        (TrainingArguments, {"max_steps": True}, "max_steps must be int"),
        (TrainingArguments, {"max_steps": 1.0}, "max_steps must be int"),
        (TrainingArguments, {"use_cpu": 1}, "use_cpu must be bool"),
        (TrainingArguments, {"seed": None}, "seed must be int"),
        (TrainingArguments, {"eval_strategy": False}, "eval_strategy must be str"),
        (TrainingArguments, {"sdpa_backend": 3}, "sdpa_backend must be list of str or str"),
        (TrainingArguments, {"sdpa_backend": ["math", 3]}, "sdpa_backend must be list of str or"),
        (TrainingArguments, {"resume_from_checkpoint": 3}, "must be bool or str"),
        (TrainingArguments, {"lr_scheduler_kwargs": [1]}, "must be mapping or None"),
        (DDPTrainingArguments, {"ddp": {"bucket_cap": 1}}, "did you mean 'ddp.bucket_cap_mb'"),
        (DDPTrainingArguments, {"ddp": {"bucket_cap_mb": "1"}}, "ddp.bucket_cap_mb must be int"),
        (DDPTrainingArguments, {"ddp": 3}, "ddp must be mapping"),
    ],
)
def test_from_dict_refuses(cls, given, message):
    with pytest.raises(ConfigError, match=message):
        cls.from_dict(given)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as caught:
        TrainingArguments.from_dict(
            {"maxsteps": 3, "warmup_steps": "5", "adam_beta1": 2.0, "eval_strategy": "step"}
        )
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    for part in ("'max_steps'", "warmup_steps must be int", "adam_beta1", "'steps'"):
        assert part in text


def test_values_that_lose_nothing_are_taken():
    args = TrainingArguments(
        learning_rate=1,
        output_dir=Path("somewhere"),
        eval_strategy=Interval.EPOCH,
        max_steps=np.int64(7),
        save_every=Duration.tokens(10**9),
    )
    assert type(args.learning_rate) is float and type(args.max_steps) is int
    assert args.output_dir == "somewhere" and type(args.output_dir) is str
    assert args.eval_strategy == "epoch" and type(args.eval_strategy) is str
    assert args.save_every == "1B tokens"


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("loss", False),
        ("eval_loss", False),
        ("train/CE loss", False),
        ("perplexity", False),
        ("ppl", False),
        ("eval_bpb", False),
        ("bits_per_byte", False),
        ("word_error_rate", False),
        ("wer", False),
        ("accuracy", True),
        ("answer_f1", True),
    ],
)
def test_direction_of_a_metric(metric, greater):
    args = TrainingArguments(metric_for_best_model=metric, best_model_metric=metric)
    assert args.greater_is_better is greater
    assert args.best_model_greater_is_better is greater
    assert TrainingArguments(metric_for_best_model=metric, greater_is_better=True).greater_is_better


def test_filled_in(monkeypatch):
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    args = TrainingArguments(output_dir="out", dataloader_num_workers=2, eval_every="20min")
    assert Path(args.logging_dir).parent == Path("out/runs")
    assert args.torch_compile_backend == "inductor" and args.torch_compile_mode == "default"
    assert args.dataloader_prefetch_factor == 2
    assert args.eval_strategy == "steps" and args.do_eval
    assert TrainingArguments().dataloader_prefetch_factor is None
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "/somewhere/tb")
    assert TrainingArguments().logging_dir == "/somewhere/tb"


@pytest.mark.parametrize(
    "args",
    [
        TrainingArguments(eval_every="20min", save_every="1 epoch", log_every=5, train_for="71h"),
        TrainingArguments(dataloader_num_workers=1, sdpa_backend=None, device="cpu"),
        DDPTrainingArguments(),
        FSDP2TrainingArguments(),
        PipelineTrainingArguments(),
    ],
)
def test_dict_round_trip(args):
    again = type(args).from_dict(json.loads(args.to_json_string()))
    assert again == args


def test_hugging_face_surface():
    args = TrainingArguments(output_dir="out", per_device_eval_batch_size=4)
    assert (args.process_index, args.world_size, args.n_gpu) == (0, 1, 0)
    assert args.parallel_mode == "not_distributed"
    assert args.should_log and args.should_save and args.do_train and not args.do_eval
    assert (args.train_batch_size, args.eval_batch_size) == (16, 4)
    assert args.place_model_on_device and args.local_process_index == 0
    sanitized = args.to_sanitized_dict()
    assert all(type(value) in (bool, int, float, str) for value in sanitized.values())
    assert sanitized["eval_batch_size"] == 4
    args._process_index, args._world_size = 3, 8
    assert args.world_size == 8 and not args.should_save
    assert TrainingArguments().world_size == 1


def test_nested_class_given_as_dict_or_object():
    assert DDPTrainingArguments(ddp=DDPArguments()).ddp == DDPArguments()
    assert DDPTrainingArguments(ddp={"static_graph": False}).ddp == DDPArguments()


def test_unknown_trackers_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"report_to.*did you mean 'tensorboard'"):
        TrainingArguments(report_to=["tensorbord"])
    for given in ([], "none", "all", "wandb", ["tensorboard", "comet_ml"]):
        TrainingArguments(report_to=given)


@pytest.mark.parametrize(
    ("options", "world_size", "sequence_length", "expected"),
    [
        ({}, 4, 128, 1),
        ({"gradient_accumulation_steps": 3}, 4, 128, 3),
        ({"global_batch_size": 64, "per_device_train_batch_size": 4}, 2, None, 8),
        ({"global_batch_tokens": 65536, "per_device_train_batch_size": 4}, 2, 1024, 8),
    ],
)
def test_accumulation(options, world_size, sequence_length, expected):
    args = TrainingArguments(**options)
    assert (
        derive_accumulation(args, world_size=world_size, sequence_length=sequence_length)
        == expected
    )


@pytest.mark.parametrize(
    ("options", "world_size", "sequence_length", "message"),
    [
        ({"global_batch_size": 48}, 4, None, "multiple of 64 .*nearest: 64"),
        ({"global_batch_size": 80}, 4, None, "nearest: 64 or 128"),
        ({"global_batch_tokens": 1000}, 1, 64, "multiple of 1024"),
        ({"global_batch_tokens": 1024}, 1, None, "known sequence length"),
    ],
)
def test_accumulation_refused(options, world_size, sequence_length, message):
    args = TrainingArguments(**options)
    with pytest.raises(ConfigError, match=message):
        derive_accumulation(args, world_size=world_size, sequence_length=sequence_length)


def test_derived_accumulation_meets_the_rules_on_accumulation():
    args = TrainingArguments(global_batch_size=64)
    args.fuse_optim_with_backward = True
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=4"):
        derive_accumulation(args, world_size=1, sequence_length=None)
