"""What the loop and a user rely on from any strategy, as functions to run on every rank."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from headway import TrainerCallback
from headway.checkpoint import verify
from headway.checkpoint.tensors import read_shards
from headway.dist import init_distributed
from headway.models import load_causal_lm

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from strategy_jobs import Job, make_trainer


class Count(TrainerCallback):
    """How often each event came, and the steps at which the interesting ones did."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}
        self.saved: list[int] = []

    def _count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def on_step_begin(self) -> None:
        self._count("step_begin")

    def on_step_end(self) -> None:
        self._count("step_end")

    def on_substep_end(self) -> None:
        self._count("substep_end")

    def on_log(self) -> None:
        self._count("log")

    def on_evaluate(self) -> None:
        self._count("evaluate")

    def on_save(self, step: int) -> None:
        self.saved.append(step)


class AskOnOneRank(TrainerCallback):
    """Rank 1 alone asks for something at a step."""

    def __init__(self, flag: str, step: int) -> None:
        self.flag, self.step = flag, step

    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        if args.process_index == args.world_size - 1 and state.global_step == self.step:
            if self.flag == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                setattr(control, self.flag, True)


class SpoilEmbedding(TrainerCallback):
    """Token 257 makes everything that it meets infinite."""

    def on_train_begin(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                with torch.no_grad():
                    spoil_row(parameter, 257)


def spoil_row(parameter: torch.Tensor, row: int) -> None:
    if not isinstance(parameter, DTensor):
        parameter[row] = float("inf")
        return
    local, first = parameter.to_local(), 0
    # Rows are dealt in equal parts, the last one smaller; only its holder has the row.
    size = -(-parameter.shape[0] // parameter.device_mesh.size(-1))
    first = size * parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
    if first <= row < first + local.shape[0]:
        local[row - first] = float("inf")


class PutToken(TrainerCallback):
    """Puts token 257 into the last share of the data at one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_window(self, state: Any, window: Any, trainer: Any) -> None:
        shard = trainer.strategy.data_shard()
        if state.global_step == self.step and shard.rank == shard.world_size - 1:
            window.micro_batches[0]["input_ids"][0, 3] = 257


def build(strategy: str, folder: str, callbacks: list[Any], **arguments: Any) -> Any:
    max_steps = arguments.pop("max_steps", 6)
    job = Job(strategy, max_steps, folder, {"logging_steps": 2, **arguments})
    trainer = make_trainer(job, callbacks[0])
    for callback in callbacks[1:]:
        trainer.add_callback(callback)
    return trainer


def check_all(strategy: str, folder: str) -> dict[str, Any]:
    """Every check on this rank, by name; what is found must be the same on all ranks."""
    init_distributed(use_cpu=True)
    checks = (
        events, save_asked, stop_asked, signalled, nonfinite, copied, predicted, evaluated, written,
    )  # fmt: skip
    return {check.__name__: check(strategy, f"{folder}/{check.__name__}") for check in checks}


def events(strategy: str, folder: str) -> dict[str, Any]:
    count = Count()
    trainer = build(
        strategy, folder, [count], eval_strategy="steps", eval_steps=3, save_strategy="steps",
        save_steps=4, gradient_accumulation_steps=2, eval_on_start=True,
    )  # fmt: skip
    trainer.train()
    return {**count.events, "saved": count.saved, "epoch": trainer.state.epoch}


def save_asked(strategy: str, folder: str) -> dict[str, Any]:
    count = Count()
    build(strategy, folder, [count, AskOnOneRank("should_save", 3)]).train()
    return {"saved": count.saved, "there": (Path(folder) / "out" / "checkpoint-3").is_dir()}


def stop_asked(strategy: str, folder: str) -> dict[str, Any]:
    trainer = build(strategy, folder, [Count(), AskOnOneRank("should_training_stop", 4)])
    return {"step": trainer.train().global_step}


def signalled(strategy: str, folder: str) -> dict[str, Any]:
    asks = AskOnOneRank("signal", 2)
    trainer = build(strategy, folder, [Count(), asks], save_strategy="steps", save_steps=100)
    output = trainer.train()
    there = (Path(folder) / "out" / "checkpoint-2").is_dir()
    return {"step": output.global_step, "by": output.interrupted_by, "there": there}


def nonfinite(strategy: str, folder: str) -> dict[str, Any]:
    """The third step sees something infinite on one rank: no rank takes it."""
    weights: list[list[float]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, model: Any) -> None:
            norms = [p for n, p in model.named_parameters() if n.endswith("norm.weight")]
            local = [p.to_local() if isinstance(p, DTensor) else p for p in norms]
            weights.append([float(part.double().sum()) for part in local])

    callbacks = [Count(), SpoilEmbedding(), PutToken(2), Watch()]
    trainer = build(strategy, folder, callbacks, nonfinite_action="skip")
    trainer.train()
    return {"held": weights[2] == weights[1], "moved": weights[3] != weights[2]}


def copied(strategy: str, folder: str) -> dict[str, Any]:
    """Whoever still copies the state of the last step is asked before a step changes any of it."""
    asked: list[bool] = []

    class Copy(TrainerCallback):
        def on_train_begin(self, trainer: Any) -> None:
            trainer.strategy.before_apply = lambda: asked.append(self.is_unchanged(trainer))

        def on_step_begin(self, trainer: Any) -> None:
            self.before = [t.clone() for t in state_of(trainer.optimizer)]

        def on_step_end(self, trainer: Any) -> None:
            asked.append(self.is_unchanged(trainer))

        def is_unchanged(self, trainer: Any) -> bool:
            now = state_of(trainer.optimizer)
            return len(now) == len(self.before) and all(map(torch.equal, now, self.before))

    build(strategy, folder, [Count(), Copy()], max_steps=3).train()
    return {"asked": asked}


def state_of(optimizer: Any) -> list[torch.Tensor]:
    """This rank's part of the weights and of what the optimizer keeps for them."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [value for p in weights for value in optimizer.state.get(p, {}).values()]
    found = [t for t in (*weights, *kept) if isinstance(t, torch.Tensor)]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach() for t in found]


def predicted(strategy: str, folder: str) -> dict[str, Any]:
    trainer = build(strategy, folder, [Count()])
    result = trainer.predict(trainer.eval_dataset)
    return {"logits": torch.as_tensor(result.predictions), "labels": result.label_ids.tolist()}


def evaluated(strategy: str, folder: str) -> dict[str, Any]:
    trainer = build(strategy, folder, [Count()])
    trainer.compute_metrics = measure_all
    metrics = trainer.evaluate()
    own = {name: metrics[f"eval_{name}"] for name in ("samples", "labels", "logits")}
    prompt = torch.tensor([[5, 6, 7]])
    trainer.model.eval()
    tokens = trainer.strategy.generate(prompt, max_new_tokens=5, do_sample=False)
    return {"loss": metrics["eval_loss"], "tokens": tokens.tolist(), "own": own}


def measure_all(found: Any) -> dict[str, float]:
    """Figures that the order of samples and a sample too many or too few would change."""
    samples, length = found.label_ids.shape
    weights = np.arange(samples * length).reshape(samples, length)
    labels, logits = found.label_ids * weights, found.predictions.mean(-1) * weights
    return {"samples": samples, "labels": labels.sum(), "logits": np.abs(logits).sum()}


def written(strategy: str, folder: str) -> dict[str, Any]:
    """A checkpoint and a model folder asked for from outside the loop."""
    trainer = build(strategy, folder, [Count()], max_steps=2)
    trainer.train()
    path = trainer.save_checkpoint(f"{folder}/mine")
    trainer.save_model(f"{folder}/model")
    model = load_causal_lm(f"{folder}/model")
    return {
        "complaints": verify(path),
        "in_checkpoint": {name: float(t.sum()) for name, t in read_shards(path, "model").items()},
        "in_folder": {name: float(t.sum()) for name, t in model.state_dict().items()},
    }
