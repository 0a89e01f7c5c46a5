"""Every rule that arguments alone decide: broken, its message says so; kept, it is silent."""

import warnings

import pytest

from headway import args as headway_args
from headway.config import rules, rules_values
from headway.config.fields import all_options, doc_of, run_keys
from headway.errors import ConfigError

LIFTED = {"3", "26", "50", "52", "63"}
CLASSES = {
    "single": headway_args.TrainingArguments,
    "accelerate": headway_args.AccelTrainingArguments,
    "ddp": headway_args.DDPTrainingArguments,
    "fsdp2": headway_args.FSDP2TrainingArguments,
    "pipeline": headway_args.PipelineTrainingArguments,
}
FUSE = "fuse_optim_with_backward"

# number, trainer, options set, a part of the message
CASES = [
    ("2", "single", {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be 1"),
    ("2", "single", {"gradient_accumulation_steps": -1}, "got -1"),
    ("4", "single", {"num_train_epochs": -1.0}, "max_steps must be above 0"),
    ("5", "single", {"mixed_precision": "fp61"}, "did you mean 'fp16'"),
    ("6", "single", {"fp8_recipe": "row"}, "unknown fp8_recipe 'row'"),
    ("7", "single", {"qat_recipe": "int4"}, "unknown qat_recipe 'int4'"),
    ("8", "single", {"fp8_recipe": "rowwise", "qat_recipe": "int4-weight-only"}, "exclude"),
    ("12", "single", {FUSE: True, "max_grad_norm": 1.0}, "max_grad_norm=1.0"),
    ("13", "single", {FUSE: True, "gradient_accumulation_steps": 2}, "accumulation_steps=2"),
    ("14", "single", {FUSE: True, "mixed_precision": "fp16"}, "mixed_precision='fp16'"),
    ("15", "ddp", {FUSE: True}, "cannot be used in DDPTrainer"),
    ("16", "accelerate", {FUSE: True}, "cannot be used in AccelTrainer"),
    ("17", "fsdp2", {FUSE: True}, "cannot be used in FSDP2Trainer"),
    ("19", "pipeline", {FUSE: True}, "n_microbatches=4"),
    ("20", "single", {"torch_compile_mode": "max-autotune", "gradient_accumulation_steps": 2},
     "max-autotune-no-cudagraphs"),
    ("20", "single", {"torch_compile_mode": "reduce-overhead", "gradient_accumulation_steps": 2},
     "torch_compile_mode='default'"),
    ("21", "pipeline", {"torch_compile_mode": "max-autotune"}, "PipelineTrainer"),
    ("21", "pipeline", {"torch_compile_mode": "reduce-overhead"}, "PipelineTrainer"),
    ("22", "pipeline", {"pipe_schedule": "InterleavedZeroBubble", "torch_compile": True},
     "torch_compile=True does not work with pipe_schedule InterleavedZeroBubble"),
    ("23", "pipeline", {"pipe_schedule": "ScheduleZBVZeroBubble", "torch_compile": True},
     "torch_compile=True does not work with pipe_schedule ZBVZeroBubble"),
    ("24", "single", {"activation_memory_budget": 0.5}, "needs torch_compile=True"),
    ("27", "single", {"load_best_model_at_end": True}, "save_strategy equal to eval_strategy"),
    ("27", "single", {"load_best_model_at_end": True, "save_strategy": "no"},
     r"save_strategy='no' \(and eval_strategy='no'\)"),
    ("27", "single", {"load_best_model_at_end": True, "save_strategy": "no",
                      "eval_strategy": "steps", "eval_on_save": True}, "save_strategy='no'"),
    ("32", "single", {"construct_model_on": "metal"}, "did you mean 'meta'"),
    ("33", "single", {"checkpoint_components": ["model", "optim"]}, "unknown checkpoint_"),
    ("33", "single", {"checkpoint_components": []}, "checkpoint_components is an empty list"),
    ("41", "pipeline", {"mixed_precision": "fp16"}, "use 'bf16'"),
    ("42", "pipeline", {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 6},
     "per_device_train_batch_size must be a multiple of n_microbatches=4"),
    ("43", "pipeline", {"per_device_eval_batch_size": 6}, "eval_batch_size must be a multiple"),
    ("44", "pipeline", {"per_device_eval_batch_size": 8}, "got 8 and 16"),
    ("45", "pipeline", {"stages_per_rank": 2}, "needs is_multistage=True"),
    ("47", "pipeline", {"pp_stage_type": "v"}, "needs stages_per_rank=2"),
    ("48", "pipeline", {"pp_stage_type": "loops"}, "did you mean 'loop'"),
    ("49", "pipeline", {"pipe_schedule": "ZBVZeroBubble", "stages_per_rank": 2,
                        "is_multistage": True}, "pp_stage_type='loop' does not fit"),
    ("49", "pipeline", {"pipe_schedule": "1F1B", "is_multistage": True},
     "is_multistage=True does not fit pipe_schedule 1F1B"),
    ("49", "pipeline", {"pipe_schedule": "LoopedBFS", "pp_stage_type": "v", "stages_per_rank": 2,
                        "is_multistage": True}, "pp_stage_type='v' does not fit"),
    ("60", "fsdp2", {"fsdp2.param_dtype": "bf61"}, "unknown fsdp2.param_dtype"),
    ("60", "fsdp2", {"fsdp2.reduce_dtype": "f32"}, "unknown fsdp2.reduce_dtype"),
    ("60", "fsdp2", {"fsdp2.buffer_dtype": "int8"}, "unknown fsdp2.buffer_dtype"),
    *[("67", "single", {f"{what}_strategy": "step"}, "did you mean 'steps'")
      for what in ("eval", "logging", "save")],
    *[("67", "single", {f"{what}_steps": 0}, f"{what}_steps must be 1 or more")
      for what in ("eval", "logging", "save")],
    ("68", "single", {"sdpa_backend": "flsh"}, "did you mean 'flash'"),
    ("68", "single", {"sdpa_backend": ["math", "fast"]}, "unknown sdpa_backend 'fast'"),
    ("H1", "single", {"save_every": "1h", "save_steps": 5}, "takes the place of save_steps=5"),
    ("H1", "single", {"save_every": "1h", "save_strategy": "epoch"}, "save_strategy='epoch'"),
    ("H2", "single", {"eval_every": "1h", "eval_steps": 5}, "takes the place of eval_steps=5"),
    ("H2", "single", {"eval_every": "1h", "eval_strategy": "epoch"}, "eval_strategy='epoch'"),
    ("H3", "single", {"log_every": 5, "logging_strategy": "no"}, "logging_strategy='no'"),
    ("H4", "single", {"train_for": "1h", "max_steps": 5}, "takes the place of max_steps=5"),
    ("H4", "single", {"train_for": "1h", "num_train_epochs": 2.0}, "num_train_epochs=2.0"),
    ("H5", "single", {"stop_at": 10, "max_steps": 5}, "beyond the end of training, '5 steps'"),
    ("H5", "single", {"stop_at": "2h", "train_for": "1h"}, "beyond the end"),
    ("H6", "single", {"global_batch_size": 32, "global_batch_tokens": 32}, "give one of them"),
    ("H6", "single", {"global_batch_size": 32, "gradient_accumulation_steps": 2}, "give one"),
    ("H7", "single", {"global_batch_size": 17}, "multiple of per_device_train_batch_size=16"),
    ("H8", "single", {"dataloader_prefetch_factor": 4}, "needs dataloader_num_workers"),
    ("H9", "single", {"dataloader_persistent_workers": True}, "needs dataloader_num_workers"),
    ("H10", "single", {"sdpa_set_priority": True}, "sdpa_backend to be a list"),
    ("H128", "single", {"sdpa_backend": ["flash4", "math"]}, "'flash4' is given alone"),
    ("H90", "single", {"optim": "adamw_8bits"}, "did you mean 'adamw_8bit'"),
    ("H90", "single", {"optim": "moun"}, "did you mean 'muon'"),
    ("H91", "single", {"optim": "sgd", "optim_args": {"momentm": 0.9}}, "did you mean 'momentum'"),
    ("H91", "single", {"optim_args": {"ns_steps": 3}}, "not for optim='adamw' but for muon"),
    ("H91", "single", {"optim": "sgd", "optim_args": {"lr": 0.1}}, "set learning_rate"),
    ("H92", "single", {"no_decay_on": ["norms"]}, "did you mean 'norm'"),
    ("H92", "single", {"no_decay_on": "biases"}, "unknown no_decay_on 'biases'"),
    ("H93", "single", {FUSE: True, "save_on_error": True}, "save_on_error: an error in the back"),
    ("H94", "single", {FUSE: True, "global_batch_size": 32}, "global_batch_size=32"),
    *[("H20", "single", {option: 0}, f"{option} must be 1 or more, got 0")
      for option in ("per_device_train_batch_size", "per_device_eval_batch_size",
                     "global_batch_size", "global_batch_tokens", "epoch_train_steps",
                     "save_total_limit", "preserve_n_best", "dataloader_prefetch_factor",
                     "dynamo_recompile_limit", "keep_every_n_steps")],
    ("H11", "single", {"load_best_model_at_end": True, "preserve_best_model": True,
                       "eval_on_save": True, "metric_for_best_model": "accuracy"},
     "metric_for_best_model='accuracy' and best_model_metric='loss'"),
    ("H11", "single", {"load_best_model_at_end": True, "preserve_best_model": True,
                       "eval_on_save": True, "greater_is_better": True,
                       "best_model_greater_is_better": False},
     "greater_is_better=True and best_model_greater_is_better=False"),
    ("H20", "pipeline", {"n_microbatches": 0}, "n_microbatches must be 1 or more"),
    ("H20", "ddp", {"ddp.bucket_cap_mb": 0}, "ddp.bucket_cap_mb must be 1 or more"),
    ("H20", "ddp", {"post_local_sgd.period": 0}, "post_local_sgd.period must be 1 or more"),
    *[("H21", "single", {option: -1}, f"{option} must be 0 or more")
      for option in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps",
                     "warmup_tokens", "eval_delay", "dataloader_num_workers", "fp8_dim_alignment",
                     "speed_metrics_start_step")],
    ("H21", "single", {"learning_rate": float("nan")}, "learning_rate must be 0 or more, got nan"),
    ("H21", "single", {"max_grad_norm": float("inf")}, "max_grad_norm must be 0 or more, got inf"),
    ("H22", "single", {"max_steps": 0}, "max_steps must be 1 or more, or -1"),
    ("H22", "single", {"max_eval_steps": 0}, "max_eval_steps must be 1 or more, or -1"),
    ("H23", "single", {"adam_beta1": 1.0}, r"adam_beta1 must lie in \[0, 1\)"),
    ("H23", "single", {"adam_beta2": -0.1}, "adam_beta2 must lie in"),
    ("H24", "single", {"gc_threshold": 1.5}, r"gc_threshold must lie in \[0, 1\]"),
    ("H25", "single", {"adam_epsilon": 0.0}, "adam_epsilon must be above 0"),
    ("H26", "single", {"seed": -2}, "seed must lie in"),
    ("H27", "single", {"save_every": "0 steps"}, "save_every must be above 0"),
    ("H27", "single", {"train_for": "2 epoch!"}, "train_for: cannot read"),
    ("H27", "single", {"stop_at": "5 stps"}, "stop_at: unknown unit 'stps'"),
    ("H28", "single", {"output_dir": " "}, "output_dir must not be empty"),
    ("H28", "single", {"resume_from_checkpoint": ""}, "resume_from_checkpoint must not be empty"),
    ("H40", "single", {"num_train_epochs": 0.0}, "num_train_epochs must be above 0"),
    ("H41", "single", {"save_safetensors": False}, "headway checkpoint convert --to bin"),
    ("H54", "single", {"output_dir": "s3://bucket/run"},
     "set checkpoint_address='s3://bucket/run' for the checkpoints, and output_dir to a local"),
    ("H55", "single", {"checkpoint_address": "bucket/run"}, "must look like 's3://bucket/run'"),
    ("H55", "single", {"checkpoint_address": "s3://"}, "must look like 's3://bucket/run'"),
    ("H42", "single", {"device": "the gpu"}, "device must look like"),
    ("H43", "single", {"nonfinite_action": "halt"}, "unknown nonfinite_action 'halt'"),
    ("H44", "single", {"default_dtype": "bfloat"}, "did you mean 'bfloat16'"),
    ("H45", "single", {"torch_compile_mode": "fast"}, "unknown torch_compile_mode"),
    ("H46", "single", {"float32_matmul_precision": "low"}, "unknown float32_matmul_precision"),
    ("H47", "fsdp2", {"fsdp2.reshard_after_forward": 1}, "reshard_after_forward must be"),
    ("H48", "single", {"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
    ("H48", "single", {"lr_scheduler_type": "reduce_lr_on_plateau"}, "needs a metric at each step"),
    ("H52", "single", {"fused_loss": "ligre"}, "did you mean 'liger'"),
    ("H53", "single", {"report_to": ["wandbb"]}, "did you mean 'wandb'"),
    ("H49", "single", {"on_damaged_checkpoint": "ignore"}, "unknown on_damaged_checkpoint"),
    ("H50", "single", {"load_components": ["model", "optimiser"]}, "did you mean 'optimizer'"),
    ("H50", "single", {"load_components": []}, "load_components is an empty list"),
    ("H51", "fsdp2", {"fsdp2.shard_size": 1}, "shard_size must be 2 and more ranks, or None"),
    ("H70", "pipeline", {"pipe_schedule": "GPip"}, "did you mean 'GPipe'"),
    ("H71", "pipeline", {"pipeline_size": 1}, "pipeline_size must be 2 or more"),
    ("H72", "pipeline", {"pipe_schedule": "DualPipeV", "torch_compile": True},
     "torch_compile=True does not work with pipe_schedule DualPipeV"),
    ("H129", "pipeline", {"pipe_schedule": "ZBVZeroBubble", "gradient_checkpointing": True,
                          "gradient_checkpointing_policy": "selective"},
     "'selective' does not work with pipe_schedule ZBVZeroBubble"),
    ("H129", "pipeline", {"pipe_schedule": "DualPipeV", "gradient_checkpointing": True,
                          "gradient_checkpointing_kwargs": {"use_reentrant": True}},
     "use_reentrant=True does not work with pipe_schedule DualPipeV"),
    ("H110", "single", {"fp8_exclude": ["lm_head", "(up"]}, r"fp8_exclude: '\(up' is no regular"),
    ("H110", "ddp", {"qat_exclude": ["*"]}, r"qat_exclude: '\*' is no regular expression"),
    ("H111", "single", {"qat_group_size": 64}, "qat_group_size=64 needs qat_recipe"),
    ("H111", "single", {"qat_group_size": 1, "qat_recipe": "int4-weight-only"}, "2 or more"),
    ("H111", "single", {"qat_group_size": 64, "qat_recipe": "float8-dynamic-act-float8-weight"},
     "has a scale for each row"),
    ("H112", "accelerate", {"fp8_recipe": "rowwise"}, "cannot be used in AccelTrainer"),
    ("H24", "single", {"warmup_ratio": 1.5}, r"warmup_ratio must lie in \[0, 1\]"),
    ("H80", "single", {"warmup_steps": 5, "warmup_ratio": 0.1}, "give one of them"),
    ("H81", "single", {"warmup_tokens": 5}, "set lr_scheduler_unit='tokens'"),
    ("H81", "single", {"warmup_steps": 5, "lr_scheduler_unit": "tokens"}, "give warmup_tokens"),
    ("H82", "single", {"warmup_steps": 6, "max_steps": 5}, "longer than the training of 5 steps"),
    ("H82", "single", {"warmup_tokens": 2000, "lr_scheduler_unit": "tokens",
                       "train_for": "1K tokens"}, "longer than the training of 1000 tokens"),
    ("H83", "single", {"lr_scheduler_unit": "token"}, "did you mean 'tokens'"),
    ("H76", "single", {"load_components": ["model", "rng"], "checkpoint_components": ["model"]},
     "load_components names rng"),
    ("H120", "single", {"gradient_checkpointing_policy": "selectiv"}, "did you mean 'selective'"),
    ("H120", "single", {"gradient_checkpointing_policy": "every_1"}, "with another N from 2"),
    ("H121", "single", {"gradient_checkpointing_kwargs": {"use_reentrent": False}},
     "did you mean 'use_reentrant'"),
    ("H122", "single", {"gradient_checkpointing_policy": "every_2",
                        "gradient_checkpointing_kwargs": {"use_reentrant": True}},
     "use_reentrant=True cannot be used with"),
    ("H123", "single", {"gradient_checkpointing_policy": "selective",
                        "gradient_checkpointing_kwargs": {"context_fn": print}},
     "both say what is kept"),
    ("H125", "single", {"torch_compile_scope": "block"}, "did you mean 'blocks'"),
    ("H126", "single", {"torch_compile_mode": "reduce-overhead", "torch_compile_backend": "eager"},
     "is a mode of torch_compile_backend='inductor'"),
    ("H76", "ddp", {"load_components": ["callbacks"], "checkpoint_components": ["model"]},
     "load_components names callbacks"),
    ("H77", "single", {"load_best_model_at_end": True, "eval_strategy": "steps",
                       "checkpoint_components": ["optimizer"]}, "hold the model"),
]  # fmt: skip


def make(trainer, options):
    args = CLASSES[trainer]()
    for option, value in options.items():
        *path, last = option.split(".")
        target = args
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return args


def broken_numbers(args):
    return {rule.number for rule, _ in rules._apply(args, "reject", ())}


@pytest.mark.parametrize(
    ("number", "trainer", "options", "message"),
    CASES,
    ids=[f"{case[0]}-{'-'.join(case[2])}" for case in CASES],
)
def test_a_broken_rule_is_told(number, trainer, options, message):
    args = make(trainer, options)
    with pytest.raises(ConfigError, match=message):
        args.validate()
    assert number in broken_numbers(args)


def test_every_rule_on_arguments_has_a_case():
    checked = {rule.number for rule in rules.all_rules() if rule.check and rule.outcome == "reject"}
    assert checked == {case[0] for case in CASES}


def test_every_number_of_the_reference_is_in_the_table():
    numbers = {rule.number for rule in rules.all_rules()}
    assert numbers >= {str(number) for number in range(1, 74)} - LIFTED
    assert not numbers & LIFTED


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ("single", {"num_train_epochs": -1.0, "max_steps": 5}),
        ("single", {"num_train_epochs": -1.0, "train_for": None, "max_steps": 1}),
        ("single", {FUSE: True, "max_grad_norm": 0.0, "mixed_precision": "bf16"}),
        ("pipeline", {FUSE: True, "n_microbatches": 1}),
        ("single", {"torch_compile_mode": "max-autotune"}),
        ("single", {"torch_compile_mode": "max-autotune-no-cudagraphs",
                    "gradient_accumulation_steps": 4}),
        ("single", {"activation_memory_budget": 0.5, "torch_compile": True}),
        ("single", {"load_best_model_at_end": True, "eval_strategy": "steps"}),
        ("single", {"load_best_model_at_end": True, "eval_on_save": True}),
        ("single", {"load_best_model_at_end": True, "eval_on_save": True,
                    "preserve_best_model": True, "metric_for_best_model": "eval_accuracy",
                    "best_model_metric": "accuracy"}),
        ("single", {"preserve_best_model": True, "best_model_metric": "accuracy"}),
        ("pipeline", {"pp_stage_type": "v", "stages_per_rank": 2, "is_multistage": True}),
        ("pipeline", {"pipe_schedule": "ScheduleDualPipeV", "pipeline_size": 2}),
        ("pipeline", {"pipe_schedule": "Interleaved1F1B", "stages_per_rank": 3,
                      "is_multistage": True}),
        ("fsdp2", {"fsdp2.param_dtype": "bf16", "fsdp2.reshard_after_forward": 8}),
        ("pipeline", {"qat_recipe": "int4-weight-only", "qat_group_size": 64, "qat_exclude": []}),
        ("single", {"sdpa_backend": ["flash", "math"], "sdpa_set_priority": True}),
        ("single", {"save_total_limit": None}),
        ("single", {"load_components": ["callbacks", "model"],
                    "checkpoint_components": ["trainer", "model", "rng"]}),
        ("single", {"stop_at": "5 epochs", "max_steps": 3}),
        ("single", {"device": "cuda:0", "seed": 0, "warmup_steps": 0}),
    ],
)  # fmt: skip
def test_allowed_combinations(trainer, options):
    make(trainer, options).validate()


@pytest.mark.parametrize(
    ("trainer", "options", "message"),
    [
        ("pipeline", {"construct_model_on": "device"}, "has no effect in PipelineTrainer"),
        ("accelerate", {"mixed_precision": "bf16"}, "ignored in AccelTrainer"),
    ],
)
def test_rules_that_only_warn(trainer, options, message):
    with pytest.warns(UserWarning, match=message):
        make(trainer, options).validate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("single", options).validate()


@pytest.mark.parametrize("metric", ["accuracy", "eval_accuracy"])
def test_what_the_best_are_kept_by_is_told_where_another_metric_is_given(metric):
    options = {"preserve_best_model": True, "metric_for_best_model": metric}
    with pytest.warns(UserWarning, match="by best_model_metric='loss', not by metric_for_best"):
        make("single", options).validate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("single", {**options, "best_model_metric": "accuracy"}).validate()
        make("single", {"metric_for_best_model": metric}).validate()
        make("single", {"preserve_best_model": True}).validate()


@pytest.mark.parametrize(
    ("options", "message", "cure"),
    [
        ({"adam_beta1": 0.8, "adam_epsilon": 1e-6, "optim": "sgd"},
         "adam_beta1=0.8 and adam_epsilon=1e-06: without effect, since optim='sgd'",
         {"optim": "adamw_torch"}),
        ({"fp8_exclude": ["up"], "fp8_dim_alignment": 8},
         r"fp8_dim_alignment=8 and fp8_exclude=\['up'\]: without effect, since fp8_recipe is None",
         {"fp8_recipe": "rowwise"}),
        ({"qat_exclude": []}, r"qat_exclude=\[\]: without effect, since qat_recipe is None",
         {"qat_recipe": "int4-weight-only"}),
    ],
)  # fmt: skip
def test_options_without_effect_are_told(options, message, cure):
    with pytest.warns(UserWarning, match=message):
        make("single", options).validate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("single", {**options, **cure}).validate()


def test_every_option_is_documented():
    for name, facts in {**all_options(), **run_keys()}.items():
        assert len(facts.meaning) > 10, name
    assert doc_of(CLASSES["ddp"], "max_steps") == all_options()["max_steps"].meaning


def test_schedule_names_are_those_of_the_optimizer_room():
    from headway.optim.schedules import SCHEDULES

    assert sorted(rules_values.LR_SCHEDULES) == sorted(SCHEDULES)
