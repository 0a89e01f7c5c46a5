"""Perplexity on labelled token files, from a run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.callbacks.evaluate.evaluator_callback import EvaluatorCallback
from headway.callbacks.evaluate.lm_evaluator import LMEvaluator
from headway.callbacks.evaluate.options import EvalOptions
from headway.callbacks.evaluate.token_batches import TokenBatches
from headway.callbacks.watch.ranges import require_count, require_flag, require_name
from headway.config.duration import Duration
from headway.data.tokenizer import load_tokenizer
from headway.engine.callback_config import CallbackConfig
from headway.errors import ConfigError

_KIND = "LMEvaluatorCallbackConfig"


class LMEvaluatorCallbackConfig(CallbackConfig):
    """An `EvaluatorCallback` with an `LMEvaluator`.

    `eval_dataset` names token files by label: `{wiki: wiki.hwt, code: [a.hwt, b.hwt]}`. They are
    cut into sequences of `sequence_length` (as `packing` of TokenDataset says), `batch_size` of
    which go through the model at once (None: `per_device_eval_batch_size`). `tokenizer`, by default
    that of the run, is for bits per byte. Metrics are `eval/{name}/{label}/...`. The other options
    are those of `EvaluatorCallback`.
    """

    def __init__(
        self,
        eval_dataset: Mapping[str, str | list[str]],
        sequence_length: int = 1024,
        batch_size: int | None = None,
        packing: str = "stream",
        tokenizer: Any = None,
        name: str = "lm",
        eval_interval: int | None = 1000,
        fixed_steps: list[int] | None = None,
        eval_on_startup: bool = False,
        eval_on_finish: bool = False,
        cancel_after_first_eval: bool = False,
        eval_duration: str | int | Duration = "1 epochs",
        log_interval: int = 5,
        deterministic: bool = True,
        enabled: bool = True,
        with_evaluation: bool | None = None,
        time_budget_s: float | None = None,
        evaluator_errors: str = "raise",
    ) -> None:
        _check_files(eval_dataset)
        require_count(f"{_KIND}: sequence_length", sequence_length, least=2)
        require_count(f"{_KIND}: batch_size", batch_size, least=1, optional=True)
        require_name(f"{_KIND}: name", name)
        require_flag(f"{_KIND}: enabled", enabled)
        require_flag(f"{_KIND}: deterministic", deterministic)
        self.eval_dataset, self.sequence_length = dict(eval_dataset), sequence_length
        self.batch_size, self.packing, self.tokenizer = batch_size, packing, tokenizer
        self.name, self.deterministic, self.enabled = name, deterministic, enabled
        self._options: dict[str, Any] = {
            "eval_interval": eval_interval,
            "fixed_steps": fixed_steps,
            "eval_on_startup": eval_on_startup,
            "eval_on_finish": eval_on_finish,
            "cancel_after_first_eval": cancel_after_first_eval,
            "eval_duration": eval_duration,
            "log_interval": log_interval,
            "with_evaluation": with_evaluation,
            "time_budget_s": time_budget_s,
            "evaluator_errors": evaluator_errors,
        }
        EvalOptions.check(_KIND, **self._options)

    def build(self, trainer: Any) -> EvaluatorCallback | None:
        if not self.enabled:
            return None
        own = self.tokenizer if self.tokenizer is not None else trainer.processing_class
        try:
            batches = TokenBatches(
                self.eval_dataset,
                self.sequence_length,
                self.batch_size or trainer.args.per_device_eval_batch_size,
                packing=self.packing,
            )
        except ConfigError as error:
            raise ConfigError([f"{_KIND}: eval_dataset: {p}" for p in error.problems]) from error
        evaluator = LMEvaluator(
            self.name,
            batches,
            deterministic=self.deterministic,
            tokenizer=None if own is None else load_tokenizer(own),
        )
        callback = EvaluatorCallback([evaluator], **self._options)
        callback.trainer = trainer
        return callback


def _check_files(given: Any) -> None:
    allowed = "labels with their token files, such as {wiki: wiki.hwt}"
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{_KIND}: eval_dataset: {given!r} given; allowed: {allowed}")
    for label, paths in given.items():
        require_name(f"{_KIND}: eval_dataset: label", label)
        listed = [paths] if isinstance(paths, str) or hasattr(paths, "__fspath__") else paths
        if not isinstance(listed, Sequence) or not listed:
            raise ConfigError(
                f"{_KIND}: eval_dataset: label {label!r} has no files ({paths!r} given); allowed: "
                + allowed
            )
