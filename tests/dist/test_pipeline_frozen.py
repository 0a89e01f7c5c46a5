"""Pipelines of which a rank trains nothing, since all its layers are frozen."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pipeline_jobs import CPU, Case, batches_of, count, make_pipeline

from headway import PipelineTrainer, PipelineTrainingArguments
from headway.args import TrainingArguments
from headway.data.windows import Window
from headway.dist import init_distributed
from headway.errors import ConfigError
from headway.optim.build import build_optimizer
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice
from headway.strategies.source import ModelSource
from headway.testing import run_ranks, tiny_dataset, tiny_decoder


def make_frozen(head=True):
    model = tiny_decoder(num_layers=4)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(head)
    return model


SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


def train_only(part, layers):
    """A model of which one part is trained; those before it are passed through."""
    model = tiny_decoder(num_layers=layers)
    model.requires_grad_(False)
    model.get_submodule(part).requires_grad_(True)
    return model


def train_frozen(schedule, part):
    """Losses, norms and what was trained: in the pipeline, and on one device."""
    num_ranks = init_distributed(use_cpu=True).world_size
    layers = 2 * num_ranks
    case = Case(schedule, steps=3, layers=layers, arguments={"n_microbatches": 8})

    def run(strategy):
        torch.manual_seed(0)
        model = strategy.setup(ModelSource(make=partial(train_only, part, layers)))
        optimizer = build_optimizer(model, TrainingArguments(use_cpu=True, learning_rate=1e-2))
        found = []
        for batches in batches_of(case):
            window = Window(batches, count(batches), 0, 0)
            loss = strategy.forward_backward(
                window, Objective(model), count(batches), lambda event: None
            )
            norm = strategy.clip(0.5)
            strategy.apply(optimizer, loss, norm)
            found += [strategy.reduce(loss, "sum").item(), norm.item()]
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        return found, trained

    return run(make_pipeline(case)), run(SingleDevice(CPU))


def train_all_frozen(parts):
    return {
        (schedule, part): train_frozen(schedule, part) for schedule in SCHEDULES for part in parts
    }


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_whose_layers_are_all_frozen_pass_them_through(num_ranks):
    """The head alone; and one layer in the middle, so that the last ranks are frozen as well."""
    parts = ("lm_head", f"model.layers.{num_ranks - 1}")
    by_rank = run_ranks(train_all_frozen, num_ranks, parts, timeout_s=300)
    for (schedule, part), (_, (wanted, names)) in by_rank[0].items():
        for found in by_rank:
            piped, own = found[schedule, part][0]
            assert piped == pytest.approx(wanted, rel=1e-6), (schedule, part)
            assert own <= names
        idle = [rank for rank, found in enumerate(by_rank) if not found[schedule, part][0][1]]
        assert len(idle) == num_ranks - 1, "one rank trains"


def run_trainer(folder, max_steps, make=make_frozen):
    init_distributed(use_cpu=True)
    args = PipelineTrainingArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        save_steps=2,
        lr_scheduler_type="constant",
        seed=1,
        use_cpu=True,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        n_microbatches=4,
    )
    trainer = PipelineTrainer(args=args, model_init=make, train_dataset=tiny_dataset(60))
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def resume(folder):
    return [run_trainer(folder / name, steps) for name, steps in (("a", 4), ("b", 2), ("b", 4))]


def refuse(folder):
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        run_trainer(folder, 2, lambda: make_frozen(head=False))


@pytest.mark.timeout(120)
def test_a_run_with_a_frozen_rank_resumes_bitwise_and_one_that_trains_nothing_is_refused(tmp_path):
    for straight, halfway, resumed in run_ranks(resume, 2, tmp_path, timeout_s=90):
        assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
        if "lm_head.weight" in halfway:
            assert not torch.equal(halfway["lm_head.weight"], resumed["lm_head.weight"])
    run_ranks(refuse, 2, tmp_path / "c", timeout_s=60)
