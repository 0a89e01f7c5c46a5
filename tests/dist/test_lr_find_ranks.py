"""`Trainer.lr_find` on real ranks: one decision, one result, and a run that does not notice."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.args import (
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    PipelineTrainingArguments,
    PostLocalSGDArguments,
)
from headway.checkpoint.sharding import local_tensor
from headway.dist import init_distributed
from headway.dist.agreement import exchange
from headway.engine.events import TrainerCallback
from headway.optim import preserved
from headway.testing import run_ranks, tiny_dataset, tiny_decoder
from headway.trainers import lr_find
from headway.trainers.parallel import DDPTrainer, FSDP2Trainer, PipelineTrainer

TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ddp": (DDPTrainer, DDPTrainingArguments, {}),
    "ddp fp16": (DDPTrainer, DDPTrainingArguments, {"mixed_precision": "fp16"}),
    "local steps": (
        DDPTrainer,
        DDPTrainingArguments,
        {"post_local_sgd": PostLocalSGDArguments(enabled=True, start_step=1, period=2)},
    ),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments, {"gradient_accumulation_steps": 2}),
    "pipeline": (
        PipelineTrainer,
        PipelineTrainingArguments,
        {"pipe_schedule": "GPipe", "n_microbatches": 2},
    ),
}


class Noisy(nn.Module):
    """The tiny decoder with dropout before it, so that generators matter."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = tiny_decoder(num_layers=2)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        output = self.decoder(input_ids, labels=labels, return_logits=True)
        logits = nn.functional.dropout(output.logits, 0.1) * self.scale.mean()
        return {"logits": logits}


class Finder(TrainerCallback):
    """Searches in the middle of a run."""

    def __init__(self) -> None:
        self.found: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any, **more: Any) -> None:
        if state.global_step == 2:
            self.found = trainer.lr_find(num_iterations=6)


def make_trainer(name: str, folder: str, callbacks: list[Any] | None = None) -> Any:
    trainer_class, arguments_class, options = TRAINERS[name]
    arguments = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
        "use_cpu": True,
        "max_steps": 4,
        "learning_rate": 1e-2,
        **options,
    }
    return trainer_class(
        args=arguments_class(**arguments),
        model_init=tiny_decoder if name == "pipeline" else Noisy,
        train_dataset=tiny_dataset(32, sequence_length=8),
        callbacks=callbacks,
        default_callbacks=False,
    )


def result_of(trainer: Any) -> dict[str, Any]:
    trainer.train()
    state = trainer.optimizer.state.values()
    return {
        "weights": [local_tensor(p).detach().clone() for p in trainer.model.parameters()],
        "moments": [local_tensor(s["exp_avg"]).clone() for s in state],
        "losses": [r["loss"] for r in trainer.state.log_history if "loss" in r],
        "random": torch.get_rng_state(),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    different = [] if one["losses"] == other["losses"] else ["losses"]
    different += [] if torch.equal(one["random"], other["random"]) else ["random"]
    for name in ("weights", "moments"):
        pairs = zip(one[name], other[name], strict=True)
        different += [] if all(torch.equal(a, b) for a, b in pairs) else [name]
    return different


def compare(names: list[str], folder: str) -> dict[str, Any]:
    """On every rank: three runs each, one after a search, one with a search in it."""
    init_distributed(use_cpu=True)
    told: dict[str, Any] = {}
    for name in names:
        plain = result_of(make_trainer(name, f"{folder}/a"))
        trainer = make_trainer(name, f"{folder}/b")
        found = trainer.lr_find(num_iterations=6, num_seeds=2)
        after = same(plain, result_of(trainer))
        finder = Finder()
        within = same(plain, result_of(make_trainer(name, f"{folder}/c", [finder])))
        told[name] = {
            "after": after,
            "within": within,
            "found": exchange(found.to_dict()),
            "found within": exchange(finder.found.to_dict()),
            "sharded": all(isinstance(p, DTensor) for p in trainer.model.parameters()),
        }
    return told


@pytest.mark.timeout(240)
def test_ranks_search_as_one_and_the_run_does_not_notice(tmp_path: Path) -> None:
    for told in run_ranks(compare, 2, list(TRAINERS), str(tmp_path), timeout_s=200):
        for name, facts in told.items():
            assert (name, facts["after"], facts["within"]) == (name, [], [])
            for found in (facts["found"], facts["found within"]):
                assert found[0] == found[1], name
                assert all(loss > 1 for loss in found[0]["losses"]), name
            assert facts["sharded"] == (name == "fsdp2")


class Fault(RuntimeError):
    """What a search is ended by."""


class Faulty(Noisy):
    """Fails once, in the forward or the backward of a micro-batch, inside of the model."""

    place, at_call, num_calls = "", 0, 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        Faulty.num_calls += 1
        fails = Faulty.num_calls == self.at_call
        layers: Any = self.decoder.model.layers
        if not fails:
            return super().forward(input_ids, labels)

        def fail(*given: Any) -> None:
            raise Fault

        if self.place == "forward":
            hook = layers[1].mlp.register_forward_hook(fail)
        else:
            hook = layers[0].mlp.register_forward_hook(
                lambda module, inputs, output: output.register_hook(fail) and None
            )
        try:
            return super().forward(input_ids, labels)
        finally:
            hook.remove()


def fail_and_train(folder: str) -> dict[str, Any]:
    """On every rank: searches that fail, all ranks in the same place, and then a run."""
    init_distributed(use_cpu=True)
    # The failure of a rank is told to the others, and ends them all before long.
    lr_find.guard_run = nullcontext  # type: ignore[assignment,attr-defined]
    plain = result_of(make_trainer("fsdp2", f"{folder}/a"))
    told: dict[str, Any] = {}
    for place, at_call in (("forward", 4), ("backward", 4)):  # the second of a window of two
        trainer = make_trainer("fsdp2", f"{folder}/b")
        trainer.model_init = Faulty
        Faulty.place, Faulty.at_call, Faulty.num_calls = place, at_call, 0
        with pytest.raises(Fault):
            trainer.lr_find(num_iterations=6)
        told[f"{place} {at_call}"] = same(plain, result_of(trainer))
    return told


@pytest.mark.timeout(240)
def test_a_search_that_fails_leaves_a_sharded_model_as_it_was(tmp_path: Path) -> None:
    for told in run_ranks(fail_and_train, 2, str(tmp_path), timeout_s=200):
        assert told == {"forward 4": [], "backward 4": []}


def diverge_on_one(folder: str, kind: str) -> Any:
    """Rank 1's share of the data alone spoils the loss, from some step on."""
    context = init_distributed(use_cpu=True)
    trainer = make_trainer(kind, folder)
    calls = [0]

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return {k: torch.tensor([s[k] for s in samples]) for k in ("input_ids", "labels")}

    trainer.data_collator = collate

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        logits = outputs["logits"]
        calls[0] += 1
        value = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        spoilt = context.rank == 1 and calls[0] > 6
        return value * (math.nan if spoilt else 1.0) / num_items_in_batch

    trainer.compute_loss_func = loss
    found = trainer.lr_find(num_iterations=20)
    run = found.runs[0]
    return exchange([run.stopped, len(run.lrs), calls[0]])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "micro_batches"), [("ddp", 1), ("fsdp2", 2)])
def test_what_one_rank_meets_stops_all(kind: str, micro_batches: int, tmp_path: Path) -> None:
    for said in run_ranks(diverge_on_one, 2, str(tmp_path), kind, timeout_s=100):
        num_good = 6 // micro_batches
        assert said == [["nonfinite", num_good, (num_good + 1) * micro_batches]] * 2


def look_at_copies(folder: str) -> tuple[int, int]:
    """Bytes that the copies of a sharded model take on this rank, and of the whole model."""
    init_distributed(use_cpu=True)
    kept: list[int] = []
    keep = preserved._KeptTensor.__init__

    def count(self: Any, tensor: Tensor) -> None:
        keep(self, tensor)
        kept.extend(value.numel() for value in self._copies)

    trainer = make_trainer("fsdp2", folder)
    trainer._prepare_model()
    whole = sum(p.numel() for p in trainer.model.parameters())
    preserved._KeptTensor.__init__ = count  # type: ignore[method-assign]
    trainer.lr_find(num_iterations=3)
    return sum(kept), whole


@pytest.mark.timeout(120)
def test_copies_of_sharded_tensors_are_of_the_own_part(tmp_path: Path) -> None:
    for kept, whole in run_ranks(look_at_copies, 2, str(tmp_path), timeout_s=100):
        assert 0.4 * whole < kept < 0.7 * whole


def differ(folder: str) -> str:
    context = init_distributed(use_cpu=True)
    try:
        make_trainer("ddp", folder).lr_find(num_iterations=5 + context.rank)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.timeout(120)
def test_ranks_that_ask_for_different_searches_are_told(tmp_path: Path) -> None:
    for said in run_ranks(differ, 2, str(tmp_path), timeout_s=100):
        assert "num_iterations" in said
