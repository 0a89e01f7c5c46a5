"""How a trainer is called and extended: what it would not heed is refused.

Owns: which parameters a trainer takes, and what stands here for those and for the methods of
Hugging Face's Trainer that programs give or override. Does not own: the arguments (config).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from headway.args import TrainingArguments
from headway.config.keywords import parameters_of
from headway.config.typecheck import unknown_keys
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

_METRICS = "give compute_metrics to the trainer, call predict(), or give an EvaluatorCallback"
_OPTIMIZER = "give optimizer_factory, optimizer_cls_and_kwargs or optimizer_groups"
_LOADER = "give a DataLoader of your own as train_dataset or eval_dataset"
_LOSS = "give compute_loss_func(outputs, labels, num_items_in_batch) to the trainer"
_STEP = "give a callback with on_window, on_gradients or on_step_end"

_HF_PARAMETERS = {
    "optimizers": "give optimizer_factory(param_groups) and lr_scheduler_factory(optimizer)",
    "tokenizer": "use processing_class",
}
_NO_CONTEXT = "use mixed_precision; a forward hook of the model can do the rest"
_SAVES = "give a callback with on_save, checkpoint_files or state_dict"
_LOADS = "give a callback with on_load or load_state_dict"
_COLUMNS = "give a data_collator of your own, which gets all columns"
_HF_METHODS = {
    "_determine_best_metric": "use metric_for_best_model",
    "_evaluate": _METRICS,
    "_get_collator_with_removed_columns": _COLUMNS,
    "_get_eval_sampler": _LOADER,
    "_get_train_sampler": _LOADER,
    "_inner_training_loop": _STEP,
    "_load_best_model": "give a callback with on_load_model_weights",
    "_load_from_checkpoint": _LOADS,
    "_load_optimizer_and_scheduler": _LOADS,
    "_maybe_log_save_evaluate": "give a callback with on_log_step, on_evaluate or on_save",
    "_prepare_input": "give a data_collator, or a callback with on_window",
    "_prepare_inputs": "give a data_collator, or a callback with on_window",
    "_remove_unused_columns": _COLUMNS,
    "_save": _SAVES,
    "_save_checkpoint": _SAVES,
    "_save_optimizer_and_scheduler": _SAVES,
    "_set_signature_columns_if_needed": _COLUMNS,
    "_wrap_model": "give the model wrapped, or model_init",
    "autocast_smart_context_manager": _NO_CONTEXT,
    "compute_loss": _LOSS,
    "compute_loss_context_manager": _NO_CONTEXT,
    "create_optimizer": _OPTIMIZER,
    "create_optimizer_and_scheduler": f"{_OPTIMIZER}, and lr_scheduler_factory",
    "create_scheduler": "give lr_scheduler_factory",
    "evaluation_loop": _METRICS,
    "get_batch_samples": _LOADER,
    "get_decay_parameter_names": "use no_decay_on, or give optimizer_groups",
    "get_eval_dataloader": _LOADER,
    "get_optimizer_cls_and_kwargs": _OPTIMIZER,
    "get_test_dataloader": _LOADER,
    "get_train_dataloader": _LOADER,
    "prediction_loop": _METRICS,
    "prediction_step": _METRICS,
    "training_step": _STEP,
}
_OWN_CALLS = {
    "evaluate": ("evaluations", "on_evaluate"),
    "save_model": ("checkpoints", "on_save"),
}
"""Methods that both have, but Hugging Face's loop calls too -> where, and what is called here."""
_UPLOAD = "nothing is uploaded here, push the folder that save_model() writes"
_LOGGED = "log records are in trainer_logs.jsonl and state.log_history"
_HF_ATTRIBUTES = {
    **_HF_METHODS,
    "accelerator": "use strategy or env; AccelTrainer takes an accelerator of your own",
    "callback_handler": "use callbacks",
    "create_model_card": _UPLOAD,
    "floating_point_ops": "use state.total_flos",
    "hyperparameter_search": "make a trainer for each trial, with an output_dir of its own",
    "is_local_process_zero": "use state.is_local_process_zero",
    "is_world_process_zero": "use state.is_world_process_zero",
    "log_metrics": _LOGGED,
    "model_wrapped": "use model, or strategy",
    "num_examples": "use len(train_dataset)",
    "push_to_hub": _UPLOAD,
    "save_metrics": _LOGGED,
    "save_state": "every checkpoint has the state",
    "tokenizer": "use processing_class",
}

# The functions that a trainer takes, and what each is called with; "=" stands for a name.
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "model_init": (),
    "data_collator": ("samples",),
    "compute_loss_func": ("outputs", "labels", "num_items_in_batch="),
    "compute_metrics": ("prediction",),
    "preprocess_logits_for_metrics": ("logits", "labels"),
    "_optimizer_factory": ("param_groups",),
    "_lr_scheduler_factory": ("optimizer",),
    "_enable_activation_checkpoint_fn": ("rank", "module"),
}


class Calling:
    """The part of a trainer that looks at how it is made."""

    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments
    args: TrainingArguments

    def __new__(cls, *positional: Any, **given: Any) -> Self:
        parameters = parameters_of(cls)
        if positional and all(p.kind is p.KEYWORD_ONLY for p in parameters.values()):
            raise ConfigError(
                f"{cls.__name__} takes its parameters by name: model=..., args=..., "
                f"train_dataset=...; got {len(positional)} without one"
            )
        problems = unknown_keys(given, list(parameters), kind="parameter", theirs=_HF_PARAMETERS)
        if problems:
            raise ConfigError([f"{cls.__name__}: {problem.message}" for problem in problems])
        uncalled = cls.uncalled_methods()
        if uncalled:
            raise ConfigError(
                [
                    f"{cls.__name__} defines {name}, which Headway never calls: {_HF_METHODS[name]}"
                    for name in uncalled
                ]
            )
        return super().__new__(cls)

    if not TYPE_CHECKING:  # which would take any attribute for one that is there

        def __getattr__(self, name: str) -> Any:
            if name not in _HF_ATTRIBUTES:
                return super().__getattribute__(name)  # raises what it raised before
            raise AttributeError(
                f"{type(self).__name__!r} has no attribute {name!r} (Hugging Face's): "
                f"{_HF_ATTRIBUTES[name]}"
            )

    def _take_arguments(
        self, given: TrainingArguments | Mapping[str, Any] | None
    ) -> TrainingArguments:
        """The arguments of this trainer's class, of a dict or of nothing too."""
        wanted = self.arguments_class
        if given is None or isinstance(given, Mapping):
            given = wanted.from_dict(dict(given or {}))
        if not isinstance(given, wanted):
            name, kind = type(self).__name__, type(given)
            raise ConfigError(
                f"args: {name} takes {wanted.__module__}.{wanted.__qualname__}, got "
                f"{kind.__module__}.{kind.__qualname__}"
            )
        return given

    def _check_functions(self) -> None:
        """Refuse what cannot be called as it will be, in part only after much training."""
        given = {name: getattr(self, name) for name in _FUNCTIONS}
        problems = [
            f"{name.removeprefix('_')}: {function!r} {why}"
            for name, function in given.items()
            if function is not None and (why := _uncallable(function, _FUNCTIONS[name]))
        ]
        if problems:
            raise ConfigError(problems)

    def _warn_of_overrides(self) -> None:
        """Tell which methods of a subclass the run itself goes without."""
        wanted = {"evaluate": self.args.do_eval, "save_model": self.args.save_strategy != "no"}
        for name, (what, event) in _OWN_CALLS.items():
            owner = next(cls for cls in type(self).__mro__ if name in vars(cls))
            if wanted[name] and not owner.__module__.startswith("headway."):
                logger.warning(
                    "%s.%s is called by your program alone, not for the %s of a run: give a "
                    "callback with %s for these",
                    owner.__name__,
                    name,
                    what,
                    event,
                )

    @classmethod
    def uncalled_methods(cls) -> list[str]:
        """Methods of Hugging Face's Trainer that this class has, to no effect."""
        return [name for name in _HF_METHODS if hasattr(cls, name)]


def _uncallable(function: Any, words: tuple[str, ...]) -> str | None:
    """Why a function cannot be called with these words; None if it can."""
    form = ", ".join(f"{word}..." if word.endswith("=") else word for word in words)
    if not callable(function):
        return f"is no function; allowed: one that is called with ({form})"
    named = {word.removesuffix("="): None for word in words if word.endswith("=")}
    try:
        # A decorator may take other words than what it wraps: its own ones count.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some that are not written in Python tell none
        return None
    try:
        signature.bind(*[None] * (len(words) - len(named)), **named)
    except TypeError as error:
        return f"cannot be called with ({form}): {error}"
    return None
