"""One worker of several ranks: the leader talks, the others receive, whatever cuts the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from headway.checkpoint.distributed import DistributedRanks
from headway.checkpoint.ranks import SoloRanks
from headway.diloco.parameters import ParameterView
from headway.engine.events import TrainerCallback
from headway.testing import run_ranks, tiny_dataset, tiny_decoder
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
