"""Evaluators in a run: when they are due, and what becomes of their figures.

Owns: the cadence, the order of passes, what follows when one fails, the names of metrics.
Does not own: a pass (passes.py), what is measured (the evaluators).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from headway.callbacks.evaluate.evaluator import Evaluator, ModelLimits
from headway.callbacks.evaluate.options import EvalOptions
from headway.callbacks.evaluate.passes import LostForward, Pass, PassResult
from headway.callbacks.evaluate.scoring import Scorer
from headway.callbacks.watch.sharing import SharedFailure, on_all_ranks
from headway.callbacks.watch.text_options import position_limit
from headway.config.duration import Duration
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

EVAL_TIME = "throughput/in-loop eval time (s)"
EVAL_BATCHES = "throughput/in-loop eval batches"


class EvaluatorCallback(TrainerCallback):
    """Runs evaluators at steps of a run and records `eval/{evaluator}/{metric}`.

    `eval_interval` is in steps, None for none; `fixed_steps` are further ones. `eval_on_startup`
    evaluates before the first step, `eval_on_finish` after the last one, unless that was just done
    or somebody waits for the end. `cancel_after_first_eval` ends the run after the first pass:
    with `eval_on_startup` it only evaluates. `eval_duration` limits each evaluator: batches
    (`"100 steps"`), tokens, passes over its data (epochs) or seconds. `log_interval` is the number
    of batches between two lines of progress.

    `with_evaluation` evaluates also whenever the run itself evaluates, and adds the figures to the
    metrics of that evaluation: there `metric_for_best_model`, early stopping and the best
    checkpoint find them. None does so if `metric_for_best_model` names one of them.

    `time_budget_s` ends all evaluators of one pass together; one that it cuts short has no
    figures. `evaluator_errors`: an evaluator that fails ends the run (`raise`), or is left out of
    this pass with a warning (`skip`); what fails inside a forward that ranks make together (FSDP2,
    pipelines, DeepSpeed) ends the run in either case. If one without figures was to give
    `metric_for_best_model`, that is not a number this time, which is never the best.
    """

    priority = 1  # figures are there when others look at an evaluation

    def __init__(
        self,
        evaluators: Sequence[Evaluator] = (),
        eval_interval: int | None = 1000,
        fixed_steps: Sequence[int] | None = None,
        eval_on_startup: bool = False,
        eval_on_finish: bool = False,
        cancel_after_first_eval: bool = False,
        eval_duration: Duration | str | int = "1 epochs",
        log_interval: int = 5,
        with_evaluation: bool | None = None,
        time_budget_s: float | None = None,
        evaluator_errors: str = "raise",
    ) -> None:
        kind = type(self).__name__
        self.options = EvalOptions.check(
            kind,
            eval_interval=eval_interval,
            fixed_steps=fixed_steps,
            eval_on_startup=eval_on_startup,
            eval_on_finish=eval_on_finish,
            cancel_after_first_eval=cancel_after_first_eval,
            eval_duration=eval_duration,
            log_interval=log_interval,
            with_evaluation=with_evaluation,
            time_budget_s=time_budget_s,
            evaluator_errors=evaluator_errors,
        )
        self.evaluators = _check_evaluators(kind, evaluators)
        self.trainer: Any = None
        self._joins = False
        self._evaluated_step: int | None = None
        self._was_loaded = False
        """Whether the run goes on from a checkpoint, which may lack an evaluation of its step."""
        self._silent: set[str] = set()
        """Names of evaluators that gave no figures in the last pass."""

    # The run

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self.trainer = trainer
        if not self._was_loaded:
            self._evaluated_step = None
        _refuse_twins(trainer)
        self._check_evaluators_fit()
        wanted = str(args.metric_for_best_model or "")
        named = any(wanted.startswith(f"eval/{e.name}/") for e in self.evaluators)
        self._joins = (
            named if self.options.with_evaluation is None else self.options.with_evaluation
        )
        if self._joins and not args.do_eval:
            raise ConfigError(
                f"{type(self).__name__}: with_evaluation, or metric_for_best_model={wanted!r}, "
                f"goes with the evaluations of the run itself, but eval_strategy="
                f"{args.eval_strategy!r} asks for none"
            )

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._was_loaded = True

    def on_start_settled(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._evaluate(state, lambda options: options.eval_on_startup)
        self._make_up(state)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._make_up(state)

    def _make_up(self, state: TrainerState) -> None:
        """The save of a step comes before its evaluation: what was logged of it is gone."""
        if self._was_loaded:
            self._was_loaded = False
            self._evaluate(
                state, lambda options: state.global_step > 0 and options.is_due(state.global_step)
            )

    def on_step_settled(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._evaluate(state, lambda options: options.is_due(state.global_step))

    def on_run_settled(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._evaluate(state, lambda options: options.eval_on_finish)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any,
        metrics: dict[str, float],
    ) -> None:
        if not self._joins or "eval_runtime" not in metrics:  # of other data, by another prefix
            return
        with trainer.evaluation_weights():
            figures = self.perform_eval() or {}
        for wanted in (str(args.metric_for_best_model), str(args.best_model_metric)):
            if any(wanted.startswith(f"eval/{name}/") for name in self._silent):
                # Whoever looks for the best takes no notice of what is not a number.
                figures.setdefault(wanted, math.nan)
        metrics.update(figures)
        self._cancel_if_last(lambda options: False)

    def _evaluate(self, state: TrainerState, is_due: Callable[[EvalOptions], bool]) -> None:
        if not self._is_pending(state, is_due):
            return
        # All metrics up to here first: the device is idle then, and a bad loss is known.
        self.trainer.flush_metrics()
        with self.trainer.evaluation_weights():
            figures = self.trainer.timing.tell("evaluate", self.perform_eval)()
        if figures is not None:
            self.trainer.flush_metrics()
            self._cancel_if_last(is_due)

    def _is_pending(self, state: TrainerState, is_due: Callable[[EvalOptions], bool]) -> bool:
        return is_due(self.options) and self._evaluated_step != state.global_step

    def _cancel_if_last(self, is_due: Callable[[EvalOptions], bool]) -> None:
        """End the run if that was asked for, but not before others that are due here."""
        trainer = self.trainer
        alike = [cb for cb in trainer.callbacks.values() if isinstance(cb, EvaluatorCallback)]
        done = [cb for cb in alike if cb._evaluated_step == trainer.state.global_step]
        if any(cb._is_pending(trainer.state, is_due) for cb in alike):
            return
        if any(cb.options.cancel_after_first_eval for cb in done) and not trainer.is_canceled:
            trainer.cancel_run("cancel_after_first_eval: the evaluation is done", no_sync=True)

    # State

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "evaluated_step": self._evaluated_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        step = state.get("evaluated_step")
        self._evaluated_step = step if isinstance(step, int) else None

    # An evaluation

    def perform_eval(self, prefix: str = "eval") -> dict[str, float] | None:
        """Run all evaluators now; every rank must call it.

        Returns the metrics by their full names, `{prefix}/{evaluator}/{metric}`; None if it was
        ended early, by a signal or the like: then nothing is recorded.
        """
        from headway.engine.evaluate import evaluation_mode
        from headway.optim.preserved import preserved_randomness

        trainer = self.trainer
        if trainer is None:
            raise RuntimeError("perform_eval() needs a trainer; its run sets it, or a config")
        if trainer.strategy is None:
            trainer._prepare_model()
            self._check_evaluators_fit()
        strategy, state = trainer.strategy, trainer.state
        if strategy.before_save is not None:
            strategy.before_save()  # ranks may have grown apart
        with preserved_randomness(), evaluation_mode(trainer.model):
            results = self._run_all(strategy, state)
        done = {title for title, result in (results or {}).items() if result.metrics is not None}
        self._silent = {e.name for e in self.evaluators if e.title not in done}
        if results is None:
            logger.warning(
                "the evaluators at step %d ended early, unused: the run is asked to end",
                state.global_step,
            )
            return None
        if prefix == "eval":
            self._evaluated_step = state.global_step
        return self._record(results, prefix)

    def _run_all(self, strategy: Any, state: TrainerState) -> dict[str, PassResult] | None:
        import torch

        from headway.dist.seed import derive_seed, seed_all

        scorer, results = Scorer(self.trainer.model), {}
        deadline_s = time.monotonic() + (self.options.time_budget_s or math.inf)
        for evaluator in self.evaluators:
            order = 0 if evaluator.deterministic else state.global_step
            # The same on all ranks: loaders that draw an order from it draw the same one.
            seed_all(derive_seed(state.seed or 0, order))
            title = evaluator.title
            run = Pass(
                evaluator,
                strategy,
                scorer,
                self.options.eval_duration,
                order=order,
                leads=state.is_world_process_zero,
                asked_to_end=lambda: self.trainer.asked_to_end,
                deadline_s=deadline_s,
                on_batch=partial(self._tell, state, title),
            )
            try:
                result = run.run()
            except Exception as error:
                self._on_error(evaluator, error)
                continue
            if result.ended_by == "asked":
                return None
            if result.ended_by == "budget":
                logger.warning(
                    "evaluator %r: time_budget_s=%s is used up; it has no figures at step %d",
                    title,
                    self.options.time_budget_s,
                    state.global_step,
                )
            results[title] = result
            if strategy.device.type == "cuda":
                torch.cuda.empty_cache()
        return results

    def _on_error(self, evaluator: Evaluator, error: Exception) -> None:
        name = f"evaluator {evaluator.title!r}"
        final = isinstance(error, ConfigError | LostForward)
        if self.options.evaluator_errors == "skip" and not final:
            logger.warning("%s failed and is left out of this pass: %s", name, error)
            return
        if isinstance(error, ConfigError):
            problems = [text if name in text else f"{name}: {text}" for text in error.problems]
            raise ConfigError(problems) from error
        told = SharedFailure if isinstance(error, SharedFailure) else RuntimeError
        what = str(error) if isinstance(error, LostForward) else f"{type(error).__name__}: {error}"
        raise told(f"{name} failed: {what}") from error

    def _tell(self, state: TrainerState, title: str, num_batches: int) -> None:
        self.trainer.timing.note_progress()
        if state.is_world_process_zero and num_batches % self.options.log_interval == 0:
            logger.info("evaluator %r: %d batches of this rank", title, num_batches)

    def _record(self, results: dict[str, PassResult], prefix: str) -> dict[str, float]:
        trainer, figures = self.trainer, {}
        for evaluator in self.evaluators:
            result = results.get(evaluator.title)
            for name, value in ((result.metrics if result else None) or {}).items():
                figures[f"{prefix}/{evaluator.name}/{name}"] = float(value)
        for name, value in figures.items():
            trainer.record_metric(name, value, merge_strategy="latest")
        seconds = sum(result.seconds for result in results.values())
        num_batches = sum(result.num_batches for result in results.values())
        trainer.record_metric(EVAL_TIME, seconds, merge_strategy="sum")
        trainer.record_metric(EVAL_BATCHES, num_batches, merge_strategy="sum")
        if trainer.state.is_world_process_zero:
            for title, result in results.items():
                logger.info(
                    "evaluator %r: %d batches in %.1f s", title, result.num_batches, result.seconds
                )
        if figures:
            trainer.log(dict(figures))
        return figures

    def _check_evaluators_fit(self) -> None:
        """Refuse what the model cannot take; told alike on all ranks."""
        model = self.trainer.strategy.unwrap()

        def check() -> None:
            limits = ModelLimits(_vocabulary(model), position_limit(model))
            for evaluator in self.evaluators:
                evaluator.check(limits)

        on_all_ranks(check)


def _check_evaluators(kind: str, given: Any) -> tuple[Evaluator, ...]:
    if not isinstance(given, Sequence) or not all(isinstance(e, Evaluator) for e in given):
        raise ConfigError(f"{kind}: evaluators: {given!r} given; allowed: a list of evaluators")
    titles = [evaluator.title for evaluator in given]
    twice = sorted({title for title in titles if titles.count(title) > 1})
    if twice:
        raise ConfigError(f"{kind}: evaluators: two have the name {twice[0]!r}; give each its own")
    return tuple(given)


def _refuse_twins(trainer: Any) -> None:
    """Two callbacks whose evaluators have one name would write into each other's metrics."""
    seen: dict[str, str] = {}
    for name, callback in trainer.callbacks.items():
        for evaluator in getattr(callback, "evaluators", ()):
            if not isinstance(evaluator, Evaluator):
                continue
            other = seen.setdefault(evaluator.title, name)
            if other != name:
                raise ConfigError(
                    f"callbacks {other!r} and {name!r} both have an evaluator {evaluator.title!r}, "
                    "so their metrics would have the same names; give one of them another name"
                )


def _vocabulary(model: Any) -> int | None:
    """How many ids the model's embedding has; not known where it is on another rank."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        weight = getattr(get() if callable(get) else None, "weight", None)
    except NotImplementedError:
        return None
    return None if weight is None else int(weight.shape[0])
