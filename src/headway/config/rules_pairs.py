"""The rules of the option reference that arguments alone decide, and our own combinations.

Owns: rules between options. Does not own: the range of a single value (rules_values).
"""

from __future__ import annotations

from typing import Any

from headway.config.duration import Duration
from headway.config.pipe_schedules import ScheduleFacts, find_facts
from headway.config.rules import Check, Rule, default_of
from headway.config.rules_values import FLASH4, GRAPH_MODES
from headway.errors import ConfigError

_FUSE = "fuse_optim_with_backward"
_ACCUMULATION = "gradient_accumulation_steps"


def parse_or_none(value: Any) -> Duration | None:
    """The duration, or None where there is none or it cannot be read (another rule says so)."""
    try:
        return None if value is None else Duration.parse(value)
    except ConfigError:
        return None


def _endless(args: Any) -> str | None:
    if args.num_train_epochs >= 0 or args.max_steps > 0 or args.train_for is not None:
        return None
    return (
        f"num_train_epochs={args.num_train_epochs:g} sets no limit, so max_steps must be above 0, "
        f"got {args.max_steps}"
    )


def _fp8_with_qat(args: Any) -> str | None:
    if args.fp8_recipe is None or args.qat_recipe is None:
        return None
    return "fp8_recipe and qat_recipe exclude each other; set one of them to None"


def _fuse_with(option: str, why: str) -> Check:
    def check(args: Any) -> str | None:
        value = getattr(args, option)
        bad = value == "fp16" if option == "mixed_precision" else (value or 0) > 0
        if option in (_ACCUMULATION, "n_microbatches"):
            bad = value > 1
        if not (args.fuse_optim_with_backward and bad):
            return None
        return f"{_FUSE} cannot be used with {option}={value!r}: {why}"

    return check


def _fuse_in(trainer: str) -> Check:
    def check(args: Any) -> str | None:
        if not args.fuse_optim_with_backward:
            return None
        return (
            f"{_FUSE} cannot be used in {trainer}: gradients are reduced over ranks before "
            "the update; use Trainer or PipelineTrainer"
        )

    return check


def _graphs_do_not_go_with(args: Any, what: str) -> str | None:
    """A graph's memory, gradients included, is that of its next replay: nothing adds up in it."""
    mode = args.torch_compile_mode
    if mode not in GRAPH_MODES:
        return None
    instead = f"use torch_compile_mode={GRAPH_MODES[mode]!r}"
    return f"torch_compile_mode={mode!r} does not work {what}; {instead}"


def _graphs_accumulation(args: Any) -> str | None:
    steps = args.gradient_accumulation_steps
    return _graphs_do_not_go_with(args, f"with {_ACCUMULATION}={steps}") if steps > 1 else None


def _graphs_pipeline(args: Any) -> str | None:
    return _graphs_do_not_go_with(args, "in PipelineTrainer")


def _budget_needs_compile(args: Any) -> str | None:
    if args.activation_memory_budget is None or args.torch_compile:
        return None
    return "activation_memory_budget needs torch_compile=True"


def _best_needs_one_schedule(args: Any) -> str | None:
    if not args.load_best_model_at_end:
        return None
    if args.save_strategy == "no":
        return (
            "load_best_model_at_end needs checkpoints and their metrics, but save_strategy='no' "
            f"(and eval_strategy={args.eval_strategy!r}); set both to 'steps' or 'epoch'"
        )
    if args.save_strategy == args.eval_strategy:
        return None
    if getattr(args, "eval_on_save", False):
        return None
    return (
        "load_best_model_at_end needs save_strategy equal to eval_strategy, got "
        f"save_strategy={args.save_strategy!r} and eval_strategy={args.eval_strategy!r}; "
        "or set eval_on_save=True"
    )


def _one_metric_for_the_best(args: Any) -> str | None:
    if not (args.load_best_model_at_end and getattr(args, "preserve_best_model", False)):
        return None
    names = args.metric_for_best_model, args.best_model_metric
    directions = args.greater_is_better, args.best_model_greater_is_better
    if len({str(name).removeprefix("eval_") for name in names}) > 1:
        given = f"metric_for_best_model={names[0]!r} and best_model_metric={names[1]!r}"
    elif None not in directions and directions[0] != directions[1]:
        given = (
            f"greater_is_better={directions[0]} and best_model_greater_is_better={directions[1]}"
        )
    else:
        return None
    return (
        f"load_best_model_at_end and preserve_best_model rank checkpoints by one metric, got "
        f"{given}; set both to the same"
    )


def _kept_by_another_metric(args: Any) -> str | None:
    if not getattr(args, "preserve_best_model", False):
        return None
    metric, ranked_by = args.metric_for_best_model, args.best_model_metric
    same = str(metric).removeprefix("eval_") == str(ranked_by).removeprefix("eval_")
    if same or ranked_by != default_of(args, "best_model_metric"):
        return None
    return (
        f"preserve_best_model keeps checkpoints by best_model_metric={ranked_by!r}, not by "
        f"metric_for_best_model={metric!r}; give best_model_metric={metric!r} if that is meant"
    )


def _load_what_is_kept(args: Any) -> str | None:
    kept = getattr(args, "checkpoint_components", None)
    if kept is None or args.load_components is None:
        return None
    # The callbacks' state goes with the trainer's.
    strange = [
        name
        for name in args.load_components
        if ("trainer" if name == "callbacks" else name) not in kept
    ]
    if not strange:
        return None
    return (
        f"load_components names {', '.join(strange)}, which checkpoint_components={kept} leaves "
        f"out of what the run saves and loads"
    )


def _best_needs_model(args: Any) -> str | None:
    kept = getattr(args, "checkpoint_components", None)
    if not args.load_best_model_at_end or kept is None or "model" in kept:
        return None
    return (
        f"load_best_model_at_end needs checkpoints that hold the model, but "
        f"checkpoint_components={kept} leaves it out"
    )


def _divisible(option: str) -> Check:
    def check(args: Any) -> str | None:
        size, pieces = getattr(args, option), args.n_microbatches
        if pieces < 1 or size % pieces == 0:
            return None
        return f"{option} must be a multiple of n_microbatches={pieces}, got {size}"

    return check


def _pipeline_batches(args: Any) -> str | None:
    train, evaluation = args.per_device_train_batch_size, args.per_device_eval_batch_size
    if train == evaluation:
        return None
    return (
        "a pipeline needs per_device_eval_batch_size equal to per_device_train_batch_size, got "
        f"{evaluation} and {train}"
    )


def _multistage(args: Any) -> str | None:
    if args.stages_per_rank <= 1 or args.is_multistage:
        return None
    return f"stages_per_rank={args.stages_per_rank} needs is_multistage=True"


def _v_needs_two(args: Any) -> str | None:
    if args.pp_stage_type != "v" or args.stages_per_rank == 2:
        return None
    return f"pp_stage_type='v' needs stages_per_rank=2, got {args.stages_per_rank}"


def _named_schedule(args: Any) -> ScheduleFacts | None:
    return None if args.pipe_schedule is None else find_facts(args.pipe_schedule)


def uncompilable(facts: ScheduleFacts, torch_compile: bool) -> str | None:
    """Why a schedule and compilation do not go together."""
    if not (torch_compile and facts.is_zero_bubble):
        return None
    return (
        f"torch_compile=True does not work with pipe_schedule {facts.name}, which makes the "
        "gradients of inputs and weights apart; use Interleaved1F1B, or set torch_compile=False"
    )


def _compiled_schedule(name: str) -> Check:
    def check(args: Any) -> str | None:
        facts = _named_schedule(args)
        return uncompilable(facts, args.torch_compile) if facts and facts.name == name else None

    return check


def misrecomputed(facts: ScheduleFacts, args: Any) -> str | None:
    """Why a schedule and a way of recomputing do not go together."""
    given = args.gradient_checkpointing_kwargs or {}
    if not (args.gradient_checkpointing and facts.is_zero_bubble):
        return None
    if args.gradient_checkpointing_policy == "selective":
        way = "gradient_checkpointing_policy='selective'"
    elif given.get("use_reentrant"):
        way = "gradient_checkpointing_kwargs: use_reentrant=True"
    else:
        return None
    return (
        f"{way} does not work with pipe_schedule {facts.name}, which makes the gradients of inputs "
        "and weights apart; leave it out, or use Interleaved1F1B"
    )


def _recomputing_schedule(args: Any) -> str | None:
    facts = _named_schedule(args)
    return misrecomputed(facts, args) if facts else None


def set_by_hand(args: Any) -> bool:
    """Whether one of the options that follow from the schedule is not left to it."""
    names = ("is_multistage", "stages_per_rank", "pp_stage_type")
    return any(getattr(args, name) != default_of(args, name) for name in names)


def misfit(facts: ScheduleFacts, args: Any) -> str | None:
    """How options set by hand contradict the schedule."""
    if not set_by_hand(args):
        return None
    if facts.is_multistage != args.is_multistage:
        several = "several stages" if facts.is_multistage else "one stage"
        return (
            f"is_multistage={args.is_multistage} does not fit pipe_schedule {facts.name}, which "
            f"runs {several} on a rank; leave is_multistage, stages_per_rank and pp_stage_type out "
            "to have them follow from the schedule"
        )
    wanted = "v" if facts.is_v else "loop"
    if args.pp_stage_type != wanted:
        return (
            f"pp_stage_type={args.pp_stage_type!r} does not fit pipe_schedule {facts.name}, which "
            f"needs {wanted!r}"
        )
    return None


def _schedule_fits(args: Any) -> str | None:
    facts = _named_schedule(args)
    return None if facts is None else misfit(facts, args)


def _pipeline_fp16(args: Any) -> str | None:
    if args.mixed_precision != "fp16":
        return None
    return "mixed_precision='fp16' cannot be used in PipelineTrainer; use 'bf16'"


def _pipeline_construct(args: Any) -> str | None:
    if args.construct_model_on == "default":
        return None
    return (
        f"construct_model_on={args.construct_model_on!r} has no effect in PipelineTrainer, which "
        "always builds on the meta device"
    )


def _accel_precision(args: Any) -> str | None:
    if args.mixed_precision in (None, "no"):
        return None
    return "mixed_precision is ignored in AccelTrainer: configure it on the Accelerator"


def _exclusive(every: str, strategy: str, steps: str) -> Check:
    def check(args: Any) -> str | None:
        if getattr(args, every) is None:
            return None
        given = [
            f"{name}={getattr(args, name)!r}"
            for name, usual in ((strategy, "steps"), (steps, None))
            if getattr(args, name) not in (usual, default_of(args, name))
        ]
        if not given:
            return None
        return (
            f"{every}={getattr(args, every)!r} takes the place of {' and '.join(given)}; give one"
        )

    return check


def _one_length(args: Any) -> str | None:
    given = [
        f"{name}={getattr(args, name)!r}"
        for name in ("max_steps", "num_train_epochs")
        if getattr(args, name) != default_of(args, name)
    ]
    if args.train_for is None or not given:
        return None
    return f"train_for={args.train_for!r} takes the place of {' and '.join(given)}; give one"


def _one_batch(args: Any) -> str | None:
    names = ("global_batch_size", "global_batch_tokens", _ACCUMULATION)
    given = [
        f"{name}={getattr(args, name)}"
        for name in names
        if getattr(args, name) != default_of(args, name)
    ]
    if len(given) < 2:
        return None
    return f"{' and '.join(given)} each set the size of an optimizer step; give one of them"


def _global_batch_divides(args: Any) -> str | None:
    whole, part = args.global_batch_size, args.per_device_train_batch_size
    if whole is None or part < 1 or whole % part == 0:
        return None
    return (
        f"global_batch_size must be a multiple of per_device_train_batch_size={part}, got {whole}"
    )


def _stop_beyond_end(args: Any) -> str | None:
    stop, whole = parse_or_none(args.stop_at), parse_or_none(args.train_for)
    if whole is None and args.max_steps > 0:
        whole = Duration.steps(args.max_steps)
    if stop is None or whole is None or stop.unit != whole.unit or stop.value <= whole.value:
        return None
    return f"stop_at={str(stop)!r} lies beyond the end of training, {str(whole)!r}"


def _needs_workers(option: str) -> Check:
    def check(args: Any) -> str | None:
        value = getattr(args, option)
        if not value or args.dataloader_num_workers != 0:
            return None
        return f"{option}={value} needs dataloader_num_workers above 0"

    return check


def _priority_needs_list(args: Any) -> str | None:
    if not args.sdpa_set_priority or isinstance(args.sdpa_backend, list):
        return None
    return f"sdpa_set_priority=True needs sdpa_backend to be a list, got {args.sdpa_backend!r}"


def _flash4_is_alone(args: Any) -> str | None:
    given = args.sdpa_backend
    if not isinstance(given, list) or FLASH4 not in given:
        return None
    return (
        f"sdpa_backend={given!r}: {FLASH4!r} is given alone, not in a list; attention that is not "
        "plain and causal then goes by torch's choice"
    )


_PP = ("pipeline",)
_TRAIN, _EVAL = "per_device_train_batch_size", "per_device_eval_batch_size"
_WHOLE = "the gradient has to be whole before the update"
_SCALE = "gradients have to be unscaled before the update"
_PIECES = "every micro-batch would make its own update"

# fmt: off
RULES: list[Rule] = [
    Rule("4", ("num_train_epochs", "max_steps"), "args",
         "Negative num_train_epochs needs max_steps above 0.", _endless),
    Rule("8", ("fp8_recipe", "qat_recipe"), "args",
         "fp8_recipe and qat_recipe exclude each other.", _fp8_with_qat),
    Rule("12", (_FUSE, "max_grad_norm"), "args",
         "No fused optimizer with gradient clipping.", _fuse_with("max_grad_norm", _WHOLE)),
    Rule("13", (_FUSE, _ACCUMULATION), "args",
         "No fused optimizer with accumulation.", _fuse_with(_ACCUMULATION, _WHOLE)),
    Rule("14", (_FUSE, "mixed_precision"), "args",
         "No fused optimizer with fp16.", _fuse_with("mixed_precision", _SCALE)),
    Rule("15", (_FUSE,), "args", "No fused optimizer in DDPTrainer.",
         _fuse_in("DDPTrainer"), strategies=("ddp",)),
    Rule("16", (_FUSE,), "args", "No fused optimizer in AccelTrainer.",
         _fuse_in("AccelTrainer"), strategies=("accelerate",)),
    Rule("17", (_FUSE,), "args", "No fused optimizer in FSDP2Trainer.",
         _fuse_in("FSDP2Trainer"), strategies=("fsdp2",)),
    Rule("19", (_FUSE, "n_microbatches"), "args",
         "No fused optimizer with several pipeline micro-batches.",
         _fuse_with("n_microbatches", _PIECES), strategies=_PP),
    Rule("20", ("torch_compile_mode", _ACCUMULATION), "args",
         "Modes with CUDA graphs do not work with accumulation.", _graphs_accumulation),
    Rule("21", ("torch_compile_mode",), "args",
         "Modes with CUDA graphs do not work in PipelineTrainer.", _graphs_pipeline,
         strategies=_PP),
    Rule("22", ("pipe_schedule", "torch_compile"), "args",
         "ScheduleInterleavedZeroBubble cannot be compiled.",
         _compiled_schedule("InterleavedZeroBubble"), strategies=_PP),
    Rule("23", ("pipe_schedule", "torch_compile"), "args",
         "ScheduleZBVZeroBubble cannot be compiled.", _compiled_schedule("ZBVZeroBubble"),
         strategies=_PP),
    Rule("H72", ("pipe_schedule", "torch_compile"), "args",
         "ScheduleDualPipeV cannot be compiled.", _compiled_schedule("DualPipeV"),
         strategies=_PP),
    Rule("H129", ("pipe_schedule", "gradient_checkpointing_policy",
                  "gradient_checkpointing_kwargs"), "args",
         "Selective and reentrant recomputation do not go with a zero-bubble schedule.",
         _recomputing_schedule, strategies=_PP),
    Rule("24", ("activation_memory_budget", "torch_compile"), "args",
         "activation_memory_budget needs torch_compile.", _budget_needs_compile),
    Rule("27", ("load_best_model_at_end", "save_strategy", "eval_strategy", "eval_on_save"),
         "args", "load_best_model_at_end needs save_strategy equal to eval_strategy, or "
         "eval_on_save.", _best_needs_one_schedule),
    Rule("41", ("mixed_precision",), "args", "No fp16 in PipelineTrainer.", _pipeline_fp16,
         strategies=_PP),
    Rule("42", (_TRAIN, "n_microbatches"), "args",
         "n_microbatches must divide the train batch size.", _divisible(_TRAIN),
         strategies=_PP),
    Rule("43", (_EVAL, "n_microbatches"), "args",
         "n_microbatches must divide the eval batch size.", _divisible(_EVAL), strategies=_PP),
    Rule("44", (_EVAL, _TRAIN), "args",
         "A pipeline needs equal train and eval batch sizes.", _pipeline_batches,
         strategies=_PP),
    Rule("45", ("stages_per_rank", "is_multistage"), "args",
         "Several stages per rank need is_multistage.", _multistage, strategies=_PP),
    Rule("47", ("pp_stage_type", "stages_per_rank"), "args",
         "pp_stage_type 'v' needs two stages per rank.", _v_needs_two, strategies=_PP),
    Rule("49", ("pipe_schedule", "pp_stage_type", "is_multistage", "stages_per_rank"), "args",
         "The schedule fits pp_stage_type and is_multistage, which follow from it where all three "
         "are left out.", _schedule_fits, strategies=_PP),
    Rule("51", ("construct_model_on",), "args",
         "PipelineTrainer always builds on the meta device.", _pipeline_construct, "warn",
         _PP),
    Rule("57", ("mixed_precision",), "args",
         "AccelTrainer ignores mixed_precision.", _accel_precision, "warn", ("accelerate",)),
    Rule("H1", ("save_every", "save_strategy", "save_steps"), "args",
         "save_every excludes save_strategy and save_steps.",
         _exclusive("save_every", "save_strategy", "save_steps")),
    Rule("H2", ("eval_every", "eval_strategy", "eval_steps"), "args",
         "eval_every excludes eval_strategy and eval_steps.",
         _exclusive("eval_every", "eval_strategy", "eval_steps")),
    Rule("H3", ("log_every", "logging_strategy", "logging_steps"), "args",
         "log_every excludes logging_strategy and logging_steps.",
         _exclusive("log_every", "logging_strategy", "logging_steps")),
    Rule("H4", ("train_for", "max_steps", "num_train_epochs"), "args",
         "train_for excludes max_steps and num_train_epochs.", _one_length),
    Rule("H5", ("stop_at", "train_for", "max_steps"), "args",
         "stop_at lies within the length of training.", _stop_beyond_end),
    Rule("H6", ("global_batch_size", "global_batch_tokens", _ACCUMULATION), "args",
         "Only one option sets the size of an optimizer step.", _one_batch),
    Rule("H7", ("global_batch_size", _TRAIN), "args",
         "The global batch is a whole number of micro-batches.", _global_batch_divides),
    Rule("H8", ("dataloader_prefetch_factor", "dataloader_num_workers"), "args",
         "Prefetching needs workers.", _needs_workers("dataloader_prefetch_factor")),
    Rule("H9", ("dataloader_persistent_workers", "dataloader_num_workers"), "args",
         "Persistent workers need workers.", _needs_workers("dataloader_persistent_workers")),
    Rule("H10", ("sdpa_set_priority", "sdpa_backend"), "args",
         "A priority needs a list of backends.", _priority_needs_list),
    Rule("H128", ("sdpa_backend",), "args", f"{FLASH4} is in no list.", _flash4_is_alone),
    Rule("H11", ("metric_for_best_model", "best_model_metric", "load_best_model_at_end",
                 "preserve_best_model"), "args",
         "load_best_model_at_end and preserve_best_model together go by one metric.",
         _one_metric_for_the_best),
    Rule("H130", ("metric_for_best_model", "best_model_metric", "preserve_best_model"), "args",
         "preserve_best_model goes by best_model_metric.", _kept_by_another_metric, "warn"),
    Rule("H76", ("load_components", "checkpoint_components"), "args",
         "A resume restores parts that the run's checkpoints hold.", _load_what_is_kept),
    Rule("H77", ("load_best_model_at_end", "checkpoint_components"), "args",
         "The best model can be loaded only from checkpoints that hold it.", _best_needs_model),
]
# fmt: on
