"""One worker of several ranks: the leader talks, the others receive, whatever cuts the model."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.callbacks import DiLoCoCallback
from headway.checkpoint.distributed import DistributedRanks
from headway.checkpoint.ranks import SoloRanks
from headway.checkpoint.tensors import read_shards
from headway.diloco.parameters import ParameterView
from headway.dist import init_distributed, watch
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import run_ranks, tiny_dataset, tiny_decoder
from headway.testing.diloco import serving
from headway.trainers.parallel import DDPTrainer, FSDP2Trainer, PipelineTrainer

# A number of rows that two ranks cannot share evenly.
make = partial(tiny_decoder, num_layers=2, vocab_size=259)

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "ddp": (DDPTrainer, {"per_device_train_batch_size": 2}),
    "fsdp2": (FSDP2Trainer, {"per_device_train_batch_size": 2}),
    "pipeline": (
        PipelineTrainer,
        {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "n_microbatches": 2},
    ),
}


class Look(TrainerCallback):
    """Reads the model on the leader, writes it doubled, and reads it again."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_begin(self, trainer: Any) -> None:
        view = ParameterView(trainer.strategy.unwrap(), DistributedRanks())
        first = view.read_on_leader()
        view.write_from_leader({name: 2 * value for name, value in first.items()})
        second = view.read_on_leader()
        self.facts = {
            "fingerprint": view.specification.fingerprint,
            "leads": view.leads,
            "first": first,
            "doubled": all(torch.equal(second[n], 2 * first[n]) for n in first),
            "owned": view.sum_over_owned(view.copies()),
        }


def look(folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for kind, (trainer_class, own) in KINDS.items():
        for tied in (False, True):
            seen = Look()
            trainer_class(
                args={
                    "output_dir": f"{folder}/{kind}",
                    "max_steps": 1,
                    "save_strategy": "no",
                    "seed": 0,
                    "use_cpu": True,
                    **own,
                },
                model_init=partial(make, tie_embeddings=tied),
                train_dataset=tiny_dataset(8, sequence_length=8, vocab_size=259),
                callbacks=[seen],
                default_callbacks=False,
            ).train()
            found[f"{kind}-{tied}"] = seen.facts
    return found


def test_every_strategy_shows_the_same_model_on_the_leader(tmp_path: Any) -> None:
    first, second = run_ranks(look, 2, str(tmp_path))
    for key, facts in first.items():
        alone = ParameterView(make(tie_embeddings=key.endswith("True")), SoloRanks())
        assert facts["leads"] and not second[key]["leads"], key
        assert facts["fingerprint"] == second[key]["fingerprint"], key
        assert facts["fingerprint"] == alone.specification.fingerprint, key
        assert second[key]["first"] == {} and facts["doubled"], key
        for name, value in facts["first"].items():
            assert torch.equal(value, first[f"ddp-{key.endswith('True')}"]["first"][name]), (
                key,
                name,
            )
        total = sum(float(v.double().pow(2).sum()) for v in facts["first"].values())
        assert abs(4 * total - facts["owned"] - second[key]["owned"]) < 1e-6 * total, key


# Training

LAST = 7


class Stop(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, state: Any, control: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def train(
    kind: str, folder: Path, address: str, stop_at: int | None = None, **options: Any
) -> dict[str, Any]:
    trainer_class, own = KINDS[kind]
    callback = DiLoCoCallback(address, sync_every=3, **{"comm": "float32", **options})
    trainer_class(
        args={
            "output_dir": str(folder),
            "max_steps": LAST,
            "save_strategy": "steps",
            "save_steps": LAST,
            "seed": 0,
            "use_cpu": True,
            "learning_rate": 1e-2,
            **own,
        },
        model_init=make,
        train_dataset=tiny_dataset(32, sequence_length=8, vocab_size=259),
        callbacks=[callback, Stop(stop_at)],
        default_callbacks=False,
    ).train(resume_from_checkpoint=True)
    return callback.state_dict()


def train_all(folder: Path, addresses: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        train(kind, folder / kind / "alone", "")
        train(kind, folder / kind / "worker", addresses[kind], stop_at=4)
        found[kind] = train(kind, folder / kind / "worker", addresses[kind])
    # The snapshot of one strategy is cut anew for another.
    train("fsdp2", folder / "other", addresses["other"], stop_at=5)
    found["other"] = train("pipeline", folder / "other", addresses["other"])
    # What int8 leaves over is in parts on the ranks.
    train("fsdp2", folder / "int8-a", addresses["int8-a"], comm="int8")
    train("fsdp2", folder / "int8-b", addresses["int8-b"], stop_at=4, comm="int8")
    train("fsdp2", folder / "int8-b", addresses["int8-b"], comm="int8")
    found["fragments"] = train(
        "fsdp2", folder / "fragments", addresses["fragments"], num_fragments=2
    )
    try:
        train("ddp", folder / "nobody", "127.0.0.1:1", max_sync_retries=0)
    except ConfigError as error:
        found["nobody"] = str(error)
    return found


def require_equal(first: Path, second: Path) -> None:
    one, other = (read_shards(f / f"checkpoint-{LAST}", "model") for f in (first, second))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), (first, name)


def test_a_worker_of_two_ranks_trains_as_without_a_server(tmp_path: Path) -> None:
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "accumulate": "float64"}
    names = [*KINDS, "other", "int8-a", "int8-b", "fragments"]
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                serving(tmp_path / f"s-{name}", num_fragments=1 + (name == "fragments"), **plain)
            )
            for name in names
        }
        addresses = {name: server.address for name, server in servers.items()}
        first, second = run_ranks(train_all, 2, tmp_path, addresses, timeout_s=150)
        rounds = {name: server.core.totals.num_rounds for name, server in servers.items()}
    require_equal(tmp_path / "int8-a", tmp_path / "int8-b")
    for kind in KINDS:
        require_equal(tmp_path / kind / "alone", tmp_path / kind / "worker")
        assert rounds[kind] == 2, "one registration for both ranks, two rounds of three steps"
        assert first[kind]["sync_count"] == second[kind]["sync_count"] == 2
        # Only the leader has what proves who the worker is.
        assert first[kind]["worker_id"] == second[kind]["worker_id"]
        assert first[kind]["session"] and second[kind]["session"] is None
    assert rounds["other"] == 2 and first["other"]["sync_count"] == 2
    assert rounds["fragments"] == first["fragments"]["fragment_syncs"] == LAST
    assert "127.0.0.1:1 does not answer" in first["nobody"] and first["nobody"] == second["nobody"]


def listen(told: Path) -> None:
    """What this rank would say goes to a file; signs come often."""
    watch.BEAT_S = 0.1

    def say(text: str, kind: str = "error") -> None:
        with told.open("a") as file:
            file.write(f"{kind}: {text}\n")

    watch.say = say  # type: ignore[assignment]


def wait_alone(folder: Path, address: str) -> None:
    told = folder / "told"
    listen(told)
    init_distributed(use_cpu=True)
    train("ddp", folder / "worker", address, timeout=3.0)


def test_ranks_are_told_that_their_leader_waits_for_the_server(tmp_path: Path) -> None:
    with serving(tmp_path / "server", num_workers=2) as server:
        env = {"HEADWAY_WAITING_AFTER_S": "1"}
        run_ranks(wait_alone, 2, tmp_path, server.address, backend=None, env=env)
    line = (tmp_path / "told").read_text().splitlines()[0]
    assert line.startswith("warning: rank 0 of 2 has kept the others waiting for 1 s: it is at ")
    words = f"where it waits for the DiLoCo server {server.address} and the other workers"
    assert words in line
