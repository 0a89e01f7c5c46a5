"""Which ranks the launcher ends after one has ended badly; with a clock that the test moves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.cli import launch
from headway.dist.exits import RankEnd
from headway.dist.processes import ProcessIdentity, identify


@pytest.mark.parametrize("came_later", [False, True])
def test_only_ranks_that_a_bad_end_left_behind_are_ended(
    came_later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that joins makes ranks start again as the same attempt, each in its own time."""
    clock = SimpleNamespace(now=0.0)
    ended: list[ProcessIdentity] = []
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(launch, "_kill", ended.append)
    supervisor = launch._Supervisor([], {}, tmp_path)
    rank = identify()

    def come() -> None:
        (tmp_path / "0-0.pid").write_text(json.dumps(asdict(rank)))

    if not came_later:
        come()
    (tmp_path / "0-1.end").write_text(json.dumps(asdict(RankEnd(1, 0, 1, victim=True))))
    supervisor._tend()
    clock.now = 60.0
    if came_later:
        come()
    supervisor._tend()
    assert ended == ([] if came_later else [rank])
