"""What a trainer offers to measure a model: evaluation and prediction.

Owns: the public methods and the pass that a training run asks for. Does not own: the averages
(engine/evaluate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from headway.data.loader import WindowLoader
from headway.data.streams import copy_for_evaluation
from headway.dist.agreement import exchange
from headway.dist.failure import guard_run, raised_together
from headway.engine.evaluate import EvalResult, evaluation_mode, run_evaluation
from headway.errors import ConfigError
from headway.optim.preserved import preserved_randomness
from headway.strategies.torch_settings import torch_settings
from headway.trainers.outputs import PredictionOutput, gather_batches, join_batches
from headway.trainers.own_metrics import ComputeMetrics, PreprocessLogits, compute_own_metrics

if TYPE_CHECKING:
    from torch import nn

    from headway.args import TrainingArguments
    from headway.engine.events import EventBus
    from headway.strategies.base import Strategy
    from headway.strategies.objective import Objective


class Evaluation:
    """The part of a trainer that evaluates and predicts."""

    args: TrainingArguments
    bus: EventBus
    model: nn.Module | None
    strategy: Strategy | None
    train_dataset: Any
    eval_dataset: Any
    compute_metrics: ComputeMetrics | None
    preprocess_logits_for_metrics: PreprocessLogits | None
    _objective: Objective | None
    _eval_loader: WindowLoader | None

    def _prepare_model(self) -> None:
        raise NotImplementedError

    def _loader(self, dataset: Any, option: str, *, training: bool = False) -> WindowLoader:
        raise NotImplementedError

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        raise NotImplementedError

    def evaluate(
        self, eval_dataset: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss, speed and what `compute_metrics` adds, for `eval_dataset` or the trainer's own."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluate() needs eval_dataset, here or in the constructor")
        with guard_run(), torch_settings(self.args):
            result = self._pass(dataset, "on_evaluate", metric_key_prefix)
        return result.metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Logits, labels and metrics for a dataset, on every rank; the logits are on the host.

        Where `preprocess_logits_for_metrics` is given, its results in the place of the logits.
        """
        with guard_run(), torch_settings(self.args):
            result = self._pass(test_dataset, "on_predict", metric_key_prefix, keep_outputs=True)
        labels = join_batches(result.labels)
        return PredictionOutput(join_batches(result.logits), labels, result.metrics)

    def evaluate_weights(self, prefix: str) -> dict[str, float]:
        """In a run: evaluate the weights as they are now, which are not those in training.

        The results are logged under `prefix`; they decide nothing, so `on_evaluate` does not fire.
        """
        assert self._eval_loader is not None, "the run evaluates"
        result = self._run_pass(self._eval_loader, "", prefix, False)
        assert result is not None, "nobody asks it to end"
        self.log(dict(result.metrics))
        return result.metrics

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Inside, the model has the weights that a callback brings for evaluations, if one does."""
        with ExitStack() as stack:
            for name, callback in self.bus.callbacks.items():
                bring = getattr(callback, "evaluation_weights", None)
                if callable(bring) and name not in self.bus.disabled:
                    stack.enter_context(bring(self))
            yield

    def _pass(
        self, dataset: Any, event: str, prefix: str, keep_outputs: bool = False
    ) -> EvalResult:
        self._prepare_model()
        assert self.model is not None
        loader = self._evaluation_loader(dataset, f"{prefix}_dataset")
        self.bus.kwargs["eval_dataloader"] = loader
        try:
            result = self._run_pass(loader, event, prefix, keep_outputs)
            assert result is not None, "nobody asks it to end"
            return result
        finally:
            loader.close()
            self.bus.kwargs["eval_dataloader"] = self._eval_loader

    def _evaluation_loader(self, dataset: Any, option: str) -> WindowLoader:
        """A pass over what training reads must not move training's place in it."""
        if dataset is self.train_dataset:
            dataset = copy_for_evaluation(dataset, option)
        return self._loader(dataset, option)

    def _evaluate_in_training(self, must_end: Callable[[], bool]) -> dict[str, float] | None:
        if self._eval_loader is None:
            raise ConfigError("an evaluation was asked for, but there is no eval_dataset")
        result = self._run_pass(self._eval_loader, "on_evaluate", "eval", False, must_end)
        return None if result is None else result.metrics

    def _run_pass(
        self,
        loader: WindowLoader,
        event: str,
        prefix: str,
        keep_outputs: bool,
        must_end: Callable[[], bool] | None = None,
    ) -> EvalResult | None:
        assert self.strategy is not None and self._objective is not None and self.model is not None
        # Handlers of the event may save: by then the model has its own weights again.
        weights = self.evaluation_weights() if event == "on_evaluate" else nullcontext()
        with evaluation_mode(self.model):
            # A model, or a loader that is opened, may draw: training goes on as if it had not.
            with weights, preserved_randomness():
                result = run_evaluation(
                    self.strategy,
                    self._objective,
                    loader,
                    self.bus,
                    max_steps=self.args.max_eval_steps,
                    prefix=prefix,
                    keep_outputs=keep_outputs or self.compute_metrics is not None,
                    preprocess_logits=self.preprocess_logits_for_metrics,
                    must_end=must_end,
                )
            if result is None:
                return None
            self._add_own_metrics(result, prefix, keep_outputs)
            if event == "on_evaluate":
                self.log(dict(result.metrics))
            if event:
                self.bus.fire(event, metrics=result.metrics)
        return result

    def _add_own_metrics(self, result: EvalResult, prefix: str, keep_outputs: bool) -> None:
        """Outputs of all ranks, and what `compute_metrics` makes of them; every rank calls it."""
        assert self.strategy is not None
        compute, shard = self.compute_metrics, self.strategy.data_shard()
        if compute is None and not keep_outputs:
            return
        lists = result.logits, result.labels
        result.logits, result.labels = gather_batches(shard, *lists, everywhere=keep_outputs)
        if compute is None or (keep_outputs and not result.labels):
            return  # a prediction may be of data that nobody has labelled
        if self.args.world_size == 1:
            result.metrics |= compute_own_metrics(compute, result, prefix)
            return
        # By one rank, so that all decide by the same numbers whatever the function does.
        own, failure = {}, None
        if self.args.process_index == 0:
            try:
                own = compute_own_metrics(compute, result, prefix)
            except Exception as error:
                failure = error
        own, told = exchange((own, None if failure is None else repr(failure)))[0]
        if told is not None:
            raise raised_together(failure, f"compute_metrics failed: {told}", rank=0)
        result.metrics |= own
