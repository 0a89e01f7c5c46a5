"""The strategies of xaytune's trainer in one process; test_compat_ranks.py has two."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from xaytune_runs import Record, make_config, make_model, train

from headway.compat.xaytune import strategy as strategies
from headway.compat.xaytune.strategy import ready_optimizer, strategy_options
from headway.errors import ConfigError
from headway.trainers.parallel import AccelTrainer, DDPTrainer, FSDP2Trainer


@pytest.mark.parametrize("name", ["auto", "ddp", "fsdp"])
def test_on_one_rank_every_strategy_is_the_single_device(name: str, tmp_path: Path) -> None:
    runs = {}
    for strategy in ("none", name):
        record, model = Record(), make_model()
        config = make_config(tmp_path / strategy, strategy=strategy)
        train(config, record.manager, model=model)
        runs[strategy] = [one["loss"] for one in record.of("step_end", "metrics")]
    assert len(runs[name]) == 12 and runs[name] == runs["none"]
    assert not torch.distributed.is_initialized()


def test_the_trainers_are_headways_own() -> None:
    for name, base in (("ddp", DDPTrainer), ("fsdp", FSDP2Trainer), ("deepspeed", AccelTrainer)):
        assert issubclass(strategies.TRAINERS[name], base)


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed"
)
def test_deepspeed_that_is_not_installed_is_named_with_its_extra(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'deepspeed', which is not installed.*headway\[deeps"):
        train(make_config(tmp_path, strategy="deepspeed"))
    assert not list(tmp_path.iterdir())


def test_deepspeed_is_told_what_the_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    told: dict[str, Any] = {}
    monkeypatch.setattr(
        strategies, "make_deepspeed_plugin", lambda **settings: told.update(settings)
    )
    monkeypatch.setattr("accelerate.Accelerator", lambda **settings: settings)
    config, args = make_config(Path("unused"), mixed_precision="bf16"), object()
    options = strategy_options("deepspeed", config, args, torch.device("cpu"))  # type: ignore[arg-type]
    assert told == {"args": args, "mixed_precision": "no"}
    assert [h.backend for h in options["accelerator"]["kwargs_handlers"]] == ["gloo"]
    options = strategy_options("deepspeed", config, args, torch.device("cuda"))  # type: ignore[arg-type]
    assert told["mixed_precision"] == "bf16"
    assert options["accelerator"]["kwargs_handlers"] == []
    assert strategy_options("fsdp", config, args, torch.device("cpu")) == {}  # type: ignore[arg-type]


def test_a_ready_optimizer_follows_the_parameters_that_took_the_place_of_its_own() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    give = ready_optimizer(optimizer, model)
    assert give(None).param_groups[0]["params"] == list(model.parameters())

    give = ready_optimizer(optimizer, model)
    model.linear.weight = nn.Parameter(torch.ones(1, 4))
    held = give(None).param_groups[0]["params"]
    assert any(p is model.linear.weight for p in held) and len(held) == 4

    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    give = ready_optimizer(optimizer, model)
    model.linear.weight = nn.Parameter(torch.ones(1, 4))
    with pytest.raises(ConfigError, match="it has taken steps already"):
        give(None)
