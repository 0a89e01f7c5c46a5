"""What the launcher makes of its options, and of the ways ranks end; no rank is started."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cli import rank
from headway.cli.launch import Ranks, choose_code, strip_options, supervise
from headway.cli.main import main
from headway.dist.exits import FOLDER_VARIABLE, RankEnd


def test_the_launcher_s_options_are_taken_out_of_the_command() -> None:
    words = ["train", "run.yaml", "--nproc", "2", "--json", "--max-restarts=3", "--args.seed=1",
             "--nnodes", "2:4", "--rdzv-endpoint=host:29400", "-q"]  # fmt: skip
    assert strip_options(words) == ["train", "run.yaml", "--json", "--args.seed=1", "-q"]


def test_the_command_is_torchrun_s() -> None:
    alone = Ranks(2).command("headway", ["train", "run.yaml"])
    assert alone[1:] == ["-m", "headway.cli.torchrun", "--nproc-per-node", "2", "--standalone",
                         "--max-restarts", "0", "-m", "headway", "train", "run.yaml"]  # fmt: skip
    many = Ranks(8, "2:4", "first:29400", 3)
    assert many.find_problems() == [] and many.smallest_world == 16
    command = many.command("headway", ["train", "run.yaml"])
    assert "--standalone" not in command
    for option, value in (("--nnodes", "2:4"), ("--rdzv-endpoint", "first:29400")):
        assert command[command.index(option) + 1] == value


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (Ranks(0), "--nproc: 0 given; allowed: 1 and up"),
        (Ranks(2, "two"), "--nnodes: 'two' given; allowed: a number, or MIN:MAX"),
        (Ranks(2, "0"), "--nnodes: '0' given; allowed: a number, or MIN:MAX"),
        (Ranks(2, "4:2", "a:1"), "--nnodes: '4:2' given; MIN must not exceed MAX"),
        (Ranks(2, "2"), "--rdzv-endpoint: missing; --nnodes=2 needs a place to meet"),
        (Ranks(2, "2", "host"), "--rdzv-endpoint: 'host' given; allowed: HOST:PORT"),
        (Ranks(2, max_restarts=-1), "--max-restarts: -1 given; allowed: 0 and up"),
    ],
)
def test_what_cannot_be_started_is_refused_by_name(ranks: Ranks, told: str) -> None:
    (problem,) = ranks.find_problems()
    assert problem.startswith(told)


def test_a_launcher_inside_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", "run.yaml", "--nproc", "2"]) == 2
    assert "--nproc: this process is already rank 1 of 4" in capsys.readouterr().err


def test_options_of_the_launcher_without_nproc_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "run.yaml", "--max-restarts", "2"]) == 2
    assert "--max-restarts: 2 given without --nproc" in capsys.readouterr().err


def ends(*codes: int, victims: tuple[int, ...] = ()) -> list[RankEnd]:
    return [RankEnd(rank, 0, code, victim=rank in victims) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("found", "torchrun", "code"),
    [
        (ends(0, 0), 0, 0),
        (ends(143, 143), 0, 143),
        (ends(130, 130), 0, 130),
        (ends(2, 2), 0, 2),
        (ends(1, 1, victims=(0,)), 1, 1),
        (ends(2, 2, victims=(1,)), 0, 2),
        (ends(1, victims=(0,)), 1, 1),  # the culprit was killed and left no word
        (ends(0, 143), 0, 143),
        ([], 1, 1),
        ([], 0, 0),
    ],
)
def test_one_exit_code_for_all_ranks(found: list[RankEnd], torchrun: int, code: int) -> None:
    assert choose_code(found, torchrun) == code


@pytest.mark.parametrize(
    ("outcome", "code", "told"),
    [
        (1, 1, ""),
        (0, 0, ""),
        (RuntimeError("broken"), 1, "error: rank 0 failed: RuntimeError: broken\n"),
    ],
    ids=["an answer", "success", "a failure"],
)
def test_only_a_failure_of_ranks_is_told_as_one(
    outcome: Any, code: int, told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A verb may answer with exit code 1, as `lr-find` does where it has nothing to suggest."""

    def work(*given: Any) -> int:
        if isinstance(outcome, Exception):
            raise outcome
        return int(outcome)

    monkeypatch.setattr(rank, "_work", work)
    monkeypatch.setattr(rank, "_lower_voice", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(rank, "_close", lambda: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    codes = []
    for number in ("0", "1"):
        monkeypatch.setenv("RANK", number)
        with pytest.raises(SystemExit) as ended:
            rank.run_as_rank(lambda: (None, {}), lambda job: 0)
        codes.append(ended.value.code)
    program = f"import sys; sys.exit({max(codes)})"  # as torchrun would
    monkeypatch.undo()
    capfd.readouterr()
    assert supervise([sys.executable, "-c", program], 2, str(tmp_path), quiet=True) == code
    assert capfd.readouterr().err == told
