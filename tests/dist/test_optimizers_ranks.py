"""Optimizers over ranks: the same training under every strategy, and states that any can load."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway import (
    ConfigError,
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from headway.checkpoint import CheckpointError
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

ROWS = 4
STEPS = 6
LOW_BIT = ("adamw_8bit", "adamw_4bit", "adamw_fp8")
TIED = {"tie_embeddings": True}
WIDE = {"hidden_size": 64, "intermediate_size": 128}
KINDS: dict[str, tuple[Any, Any, int]] = {
    "single": (Trainer, TrainingArguments, 1),
    "ddp": (DDPTrainer, DDPTrainingArguments, 2),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments, 2),
    "pipeline": (PipelineTrainer, PipelineTrainingArguments, 1),
}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


GROUPS = {
    "none": None,
    "head": {"head": {"regex": "lm_head", "config": {"lr": 0.02, "weight_decay": 0.0}}},
    "factories": {
        "norms": {"regex": "norm", "factory": sgd},
        "head": {"regex": "lm_head", "factory": sgd, "config": {"lr": 0.05}},
    },
}


@dataclass(frozen=True)
class Job:
    """One training on this rank, to step 6 or to `stop_at`."""

    kind: str
    folder: Path
    optim: str = "adamw"
    stop_at: int | None = None
    resume: Path | None = None
    groups: str = "none"
    model: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def train(job: Job) -> dict[str, Any]:
    trainer_class, arguments_class, shares = KINDS[job.kind]
    init_distributed(use_cpu=True)
    settings: dict[str, Any] = {
        "output_dir": str(job.folder / job.kind),
        "per_device_train_batch_size": ROWS // shares,
        "per_device_eval_batch_size": ROWS // shares,
        "max_steps": STEPS,
        "stop_at": job.stop_at,
        "logging_steps": 1,
        "save_steps": 1000,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        # With a smaller one Adam takes full steps along gradients that are rounding noise.
        "adam_epsilon": 1e-5,
        "seed": 0,
        "use_cpu": True,
        "optim": job.optim,
        "resume_from_checkpoint": str(job.resume) if job.resume else False,
        **({"n_microbatches": 2} if job.kind == "pipeline" else {}),
        **job.arguments,
    }
    trainer = trainer_class(
        args=arguments_class(**settings),
        model_init=lambda: tiny_decoder(**job.model),
        train_dataset=tiny_dataset(ROWS * STEPS, sequence_length=8),
        optimizer_groups=GROUPS[job.groups],
        default_callbacks=False,
    )
    # torchao compiles its update, which takes long on a CPU; what it computes is the same.
    with torch.compiler.set_stance("force_eager") if job.optim in LOW_BIT else _nothing():
        trainer.train()
    history = [record for record in trainer.state.log_history if "grad_norm" in record]
    return {
        "losses": [record["loss"] for record in history],
        "norms": [record["grad_norm"] for record in history],
        "weights": sum(p.detach().double().sum().item() for p in trainer.model.parameters()),
        "groups": {
            name: (group["group_name"], group["lr"])
            for group in trainer.optimizer.param_groups
            for name in group["param_names"]
        },
    }


_nothing = contextlib.nullcontext


def train_all(jobs: list[Job]) -> list[dict[str, Any]]:
    return [train(job) for job in jobs]


def stored(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """All tensors of the only checkpoint of a run, by name."""
    [checkpoint] = folder.glob("checkpoint-*")
    found: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob(f"{prefix}-*.safetensors"):
        found.update(load_file(file))
    assert found
    return found


def assert_close(first: Path, second: Path, atol: float = 0.0) -> None:
    for prefix in ("model", "optimizer"):
        ours, theirs = stored(first, prefix), stored(second, prefix)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            other = theirs[name]
            assert (value.shape, value.dtype) == (other.shape, other.dtype), name
            if atol == 0:
                same = value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
                assert torch.equal(*same), name
            else:
                torch.testing.assert_close(value, other, atol=atol, rtol=1e-3, msg=name)


@pytest.mark.timeout(400)
def test_muon_and_adamw_train_alike_under_every_strategy_and_exchange_their_state(tmp_path):
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    options = {"optim": "muon", "model": TIED, "arguments": {"no_decay_on": ["norm", "embedding"]}}
    reference = train(Job("single", whole, **options))
    half = [Job(kind, first, stop_at=3, **options) for kind in ("ddp", "fsdp2", "pipeline")]
    saved = {job.kind: first / job.kind / "checkpoint-3" for job in half}
    # Each goes on from what another one saved.
    rest = [
        Job("pipeline", second, resume=saved["fsdp2"], **options),
        Job("fsdp2", second, resume=saved["pipeline"], **options),
        Job("ddp", second, resume=saved["fsdp2"], **options),
    ]
    by_rank = run_ranks(train_all, 2, half + rest, timeout_s=300)
    for number, job in enumerate(half + rest):
        for outcome in (found[number] for found in by_rank):
            losses = reference["losses"][: len(outcome["losses"])]
            assert outcome["losses"] == pytest.approx(losses, rel=2e-3), job.kind
    # Muon's product is in bfloat16, and sums over ranks have another order.
    for job in rest:
        assert_close(whole / "single", second / job.kind, atol=2e-2)
    last = Job("single", second, resume=saved["pipeline"], **options)
    assert train(last)["losses"] == pytest.approx(reference["losses"], rel=2e-3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_low_bit_states_over_ranks_come_back_bit_for_bit_at_any_number_of_them(tmp_path):
    jobs, one_rank = [], []
    for optim in LOW_BIT:
        options = {"optim": optim, "model": WIDE}
        folder = tmp_path / optim
        jobs += [
            Job("fsdp2", folder / "whole", **options),
            Job("fsdp2", folder / "half", stop_at=3, **options),
        ]
        saved = folder / "half" / "fsdp2" / "checkpoint-3"
        jobs += [Job("fsdp2", folder / "rest", resume=saved, **options)]
        one_rank += [Job("single", folder / "rest", resume=saved, **options)]
    by_rank = run_ranks(train_all, 2, jobs, timeout_s=300)
    for number, job in enumerate(one_rank):
        folder = tmp_path / job.optim
        assert_close(folder / "whole" / "fsdp2", folder / "rest" / "fsdp2")
        codes = {n for n in stored(folder / "rest" / "fsdp2", "optimizer") if ":codes" in n}
        assert any("q_proj" in name for name in codes), "2048 values on each rank, 4096 in all"
        # One rank goes on from what two have saved.
        losses = by_rank[0][3 * number]["losses"]
        assert train(job)["losses"] == pytest.approx(losses, rel=1e-3)
        assert codes == {
            n for n in stored(folder / "rest" / "single", "optimizer") if ":codes" in n
        }


def go_on(job: Job) -> str:
    with pytest.raises(CheckpointError) as raised:
        train(job)
    return str(raised.value)


@pytest.mark.timeout(300)
def test_ranks_that_would_cut_through_blocks_are_told_so(tmp_path):
    options = {"optim": "adamw_8bit", "model": {**WIDE, "num_layers": 1}}
    with torch.compiler.set_stance("force_eager"):
        train(Job("single", tmp_path, stop_at=3, **options))
    saved = tmp_path / "single" / "checkpoint-3"
    for message in run_ranks(go_on, 3, Job("fsdp2", tmp_path, resume=saved, **options)):
        assert "saved in blocks of 256 values, which this number of ranks would cut" in message
        assert "load_components" in message


@pytest.mark.timeout(300)
def test_replicas_round_alike_and_plain_sgd_trains_shards(tmp_path):
    bf16 = {"optim": "adamw_bf16", "arguments": {"default_dtype": "bfloat16"}}
    jobs = [Job("ddp", tmp_path, **bf16), Job("fsdp2", tmp_path, **bf16)]
    jobs += [Job("pipeline", tmp_path, model=TIED, **bf16)]
    jobs += [Job("fsdp2", tmp_path / "sgd", optim="sgd", arguments={"learning_rate": 0.3})]
    by_rank = run_ranks(train_all, 2, jobs, timeout_s=200)
    assert by_rank[0][0]["weights"] == by_rank[1][0]["weights"], "replicas drifted apart"
    for number in range(3):
        losses = by_rank[0][number]["losses"]
        assert losses[-1] < losses[0] - 0.5
    alone = train(Job("single", tmp_path, optim="sgd", arguments={"learning_rate": 0.3}))
    assert by_rank[0][3]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.timeout(300)
def test_pipeline_groups_are_those_of_the_whole_model(tmp_path, caplog):
    options = {"groups": "head", "model": TIED}
    factories = {"groups": "factories", "model": TIED}
    jobs = [
        Job("pipeline", tmp_path / "a", **options),
        Job("pipeline", tmp_path / "b", **factories),
    ]
    by_rank = run_ranks(train_all, 2, jobs, timeout_s=200)
    embedding = "model.embed_tokens.weight"
    for number, name in enumerate(("head", "head")):
        groups = [found[number]["groups"] for found in by_rank]
        assert all(own[embedding][0] == name for own in groups), "by the name on the other rank"
    with caplog.at_level(logging.WARNING):
        for folder, job in (("a", options), ("b", factories)):
            alone = train(Job("single", tmp_path / folder, **job))
            number = "ab".index(folder)
            assert by_rank[0][number]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert_close(tmp_path / folder / "single", tmp_path / folder / "pipeline", atol=1e-4)
    assert "matches no parameter" not in caplog.text


@pytest.mark.timeout(300)
def test_groups_that_changed_are_resumed_and_told_alike_under_every_strategy(tmp_path):
    train(Job("single", tmp_path / "saved", stop_at=3, model=TIED))
    options = {
        "resume": tmp_path / "saved" / "single" / "checkpoint-3",
        "stop_at": 4,
        "groups": "head",
        "model": TIED,
        "arguments": {"weight_decay": 0.3},
    }
    jobs = [Job(kind, tmp_path, **options) for kind in ("ddp", "fsdp2", "pipeline")]
    by_rank = run_ranks(train_all, 2, jobs, timeout_s=200)
    alone = train(Job("single", tmp_path, **options))
    # After 4 of 6 steps down to 0: a new group has its own rate, another that of the checkpoint.
    assert alone["groups"]["model.embed_tokens.weight"] == ("head", pytest.approx(0.02 / 3))
    assert alone["groups"]["model.norm.weight"] == ("__default__", pytest.approx(0.01 / 3))
    reports = [report_of(tmp_path / kind) for kind in KINDS]
    [decay] = reports[0]["overruled"]
    assert (decay["groups"], decay["in_force"]) == (["__default__"], 0.1)
    assert "the configured ones, since it is new" in reports[0]["regrouped"][0]
    assert all(report == reports[0] for report in reports)
    for number, _ in enumerate(jobs):
        for found in by_rank:
            groups = found[number]["groups"]
            assert groups.items() <= alone["groups"].items()
            assert found[number]["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def report_of(folder: Path) -> dict[str, Any]:
    told = json.loads((folder / "run" / "resume-3.json").read_text())
    return {name: told[name] for name in ("overruled", "regrouped", "schedule")}


@pytest.mark.timeout(300)
def test_the_step_in_a_pipelines_backward_pass_gives_the_same_bits(tmp_path):
    jobs = []
    for name, options in {
        "tied": {"model": TIED},
        "muon": {"optim": "muon"},
        "several-stages": {
            "model": {**TIED, "num_layers": 4},
            "arguments": {
                "pipe_schedule": "LoopedBFS",
                "stages_per_rank": 2,
                "is_multistage": True,
            },
        },
    }.items():
        for fused in (False, True):
            arguments = {
                **options.get("arguments", {}),
                "n_microbatches": 1,
                "fuse_optim_with_backward": fused,
            }
            folder = tmp_path / name / ("fused" if fused else "plain")
            jobs.append(Job("pipeline", folder, **{**options, "arguments": arguments}))
    by_rank = run_ranks(train_all, 2, jobs, timeout_s=250)
    for number in range(0, len(jobs), 2):
        folder = jobs[number].folder.parent
        assert_close(folder / "plain" / "pipeline", folder / "fused" / "pipeline")
        for outcomes in by_rank:
            plain, fused = outcomes[number : number + 2]
            assert plain["losses"] == fused["losses"]
            assert plain["norms"] == pytest.approx(fused["norms"], rel=1e-6)


def refuse(folder: Path) -> str:
    arguments = {"pipeline_size": 2, "n_microbatches": 1, "fuse_optim_with_backward": True}
    with pytest.raises(ConfigError) as raised:
        train(Job("pipeline", folder, arguments=arguments))
    return str(raised.value)


@pytest.mark.timeout(200)
def test_pipelines_side_by_side_cannot_step_in_their_backward_pass(tmp_path):
    for message in run_ranks(refuse, 4, tmp_path, timeout_s=100):
        assert "cannot be used with 2 pipelines side by side (pipeline_size=2)" in message
