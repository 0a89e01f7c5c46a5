"""`report_to`: names become trackers."""

from __future__ import annotations

import importlib.util

import pytest

from headway.callbacks.log.tb_logger import TBLogger
from headway.callbacks.remote.reporting import make_trackers
from headway.config.rules_values import TRACKERS
from headway.errors import ConfigError
from headway.testing import tiny_trainer


def test_none_and_nothing_add_nothing(tmp_path) -> None:
    for given in ("none", [], ["none"]):
        assert make_trackers(given) == []
    assert not tiny_trainer(tmp_path, report_to="none").callbacks


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="not installed")
def test_a_name_adds_its_callback_also_without_the_defaults(tmp_path) -> None:
    trainer = tiny_trainer(tmp_path, report_to=["tensorboard"], max_steps=1)
    assert list(trainer.callbacks) == ["TBLogger"]
    trainer.train()
    assert list((tmp_path / "out" / "runs").rglob("events.out.tfevents.*"))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="not installed")
def test_a_callback_of_the_same_class_takes_its_place(tmp_path) -> None:
    own = TBLogger(tmp_path / "tb")
    trainer = tiny_trainer(tmp_path, [own], report_to="tensorboard")
    assert list(trainer.callbacks.values()) == [own]


def test_all_is_what_is_installed(monkeypatch) -> None:
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name in ("wandb", "mlflow") else None
    )
    assert {type(t).__name__ for t in make_trackers("all")} == {"WandBCallback", "MLflowCallback"}


def test_every_name_of_the_option_has_a_callback() -> None:
    pytest.importorskip("tensorboard")
    for name in TRACKERS:
        try:
            (tracker,) = make_trackers(name)
        except ConfigError as error:  # its extra is not installed here
            assert "pip install" in str(error)
        else:
            assert type(tracker).__module__.startswith("headway.callbacks.")
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        make_trackers(["wandbb"])
