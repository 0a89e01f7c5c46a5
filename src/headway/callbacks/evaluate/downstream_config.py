"""Tasks with questions and answers, from a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.callbacks.evaluate.downstream_evaluator import DownstreamEvaluator
from headway.callbacks.evaluate.evaluator_callback import EvaluatorCallback
from headway.callbacks.evaluate.options import EvalOptions
from headway.callbacks.evaluate.tasks import find_tasks
from headway.callbacks.watch.ranges import require_count, require_flag, require_name
from headway.config.duration import Duration
from headway.data.tokenizer import load_tokenizer
from headway.engine.callback_config import CallbackConfig
from headway.errors import ConfigError

_KIND = "DownstreamEvaluatorCallbackConfig"


class DownstreamEvaluatorCallbackConfig(CallbackConfig):
    """An `EvaluatorCallback` with a `DownstreamEvaluator` for each task.

    `tasks` are names of tasks that come with Headway and paths of `.jsonl` files, or a mapping of
    names to files. `tokenizer` is by default that of the run. `batch_tokens` is the most tokens
    that go through the model at once. `lazy` reads the tasks when the first pass begins; mistakes
    in them show only then. Metrics are `eval/{name}/{task} (...)`. The other options are those of
    `EvaluatorCallback`.
    """

    def __init__(
        self,
        tasks: list[str] | Mapping[str, str],
        tokenizer: Any = None,
        batch_tokens: int = 16384,
        name: str = "downstream",
        eval_interval: int | None = 1000,
        fixed_steps: list[int] | None = None,
        eval_duration: str | int | Duration = "1 epochs",
        eval_on_startup: bool = False,
        eval_on_finish: bool = False,
        cancel_after_first_eval: bool = False,
        log_interval: int = 5,
        lazy: bool = False,
        enabled: bool = True,
        with_evaluation: bool | None = None,
        time_budget_s: float | None = None,
        evaluator_errors: str = "raise",
    ) -> None:
        self.tasks = find_tasks(f"{_KIND}: tasks", tasks)
        require_count(f"{_KIND}: batch_tokens", batch_tokens, least=1)
        require_name(f"{_KIND}: name", name)
        require_flag(f"{_KIND}: lazy", lazy)
        require_flag(f"{_KIND}: enabled", enabled)
        self.tokenizer, self.batch_tokens, self.name = tokenizer, batch_tokens, name
        self.lazy, self.enabled = lazy, enabled
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
        if own is None:
            raise ConfigError(
                f"{_KIND}: tokenizer: none given, and the run has none; give one, such as 'bytes' "
                "or a folder with tokenizer.json"
            )
        tokenizer = load_tokenizer(own)
        try:
            evaluators = [
                DownstreamEvaluator(
                    self.name,
                    task,
                    path,
                    tokenizer,
                    batch_tokens=self.batch_tokens,
                    lazy=self.lazy,
                )
                for task, path in self.tasks.items()
            ]
        except ConfigError as error:
            raise ConfigError([f"{_KIND}: tasks: {p}" for p in error.problems]) from error
        callback = EvaluatorCallback(evaluators, **self._options)
        callback.trainer = trainer
        return callback
