"""One set of checks over all strategies."""

from __future__ import annotations

import pytest
import torch
from strategy_checks import check_all

from headway.testing import run_ranks

STRATEGIES = {"ddp2": 2, "ddp2-own": 2, "fsdp2": 2, "pp2": 2, "accel2": 2, "dp2pp2": 4}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_ranks(check_all, 1, "single", str(tmp_path_factory.mktemp("one")), timeout_s=200)[0]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_keeps_the_contract(strategy, alone, tmp_path):
    if strategy.startswith("accel"):
        pytest.importorskip("accelerate")
    by_rank = run_ranks(check_all, STRATEGIES[strategy], strategy, str(tmp_path), timeout_s=300)
    for found in by_rank:
        for name in ("events", "save_asked", "stop_asked", "signalled", "nonfinite", "copied"):
            assert found[name] == alone[name], name
        assert found["predicted"]["labels"] == alone["predicted"]["labels"]
        torch.testing.assert_close(
            found["predicted"]["logits"], alone["predicted"]["logits"], rtol=1e-4, atol=1e-5
        )
        assert found["evaluated"]["loss"] == pytest.approx(alone["evaluated"]["loss"], rel=1e-5)
        assert found["evaluated"]["own"] == pytest.approx(alone["evaluated"]["own"], rel=1e-4)
        assert found["written"]["complaints"] == []
        for what in ("in_checkpoint", "in_folder"):
            wanted = pytest.approx(alone["written"][what], rel=1e-3, abs=1e-3)
            assert found["written"][what] == wanted
        assert found["evaluated"]["tokens"] == alone["evaluated"]["tokens"]


def test_the_checks_see_something(alone):
    assert alone["events"] == {
        "step_begin": 6, "step_end": 6, "substep_end": alone["events"]["substep_end"], "log": 7,
        "evaluate": 3, "saved": [4, 6], "epoch": alone["events"]["epoch"],
    }  # fmt: skip
    assert alone["save_asked"] == {"saved": [3], "there": True}
    assert alone["stop_asked"] == {"step": 4}
    assert alone["signalled"] == {"step": 2, "by": "SIGTERM", "there": True}
    assert alone["nonfinite"] == {"held": True, "moved": True}
    assert alone["copied"] == {"asked": [True, False] * 3}
