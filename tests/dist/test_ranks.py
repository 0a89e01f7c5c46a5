"""Real ranks: results come back, the culprit is named, nothing hangs and nothing is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.testing import RankFailure, RankTimeout, run_ranks


def sum_over_ranks(start: int, *, scale: int = 1) -> tuple[int, torch.Tensor, str | None]:
    value = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), value * scale, os.environ.get("OMP_NUM_THREADS")


def test_each_rank_returns_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    results = run_ranks(sum_over_ranks, 2, 10, scale=2)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert [value.item() for _, value, _ in results] == [42.0, 42.0]
    assert [threads for _, _, threads in results] == ["1", "1"]


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the shape is wrong")
    dist.barrier()


def test_the_rank_that_raised_is_named_not_the_one_that_waited_for_it() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(raise_on_rank_1, 2)
    failure = caught.value
    assert (failure.rank, failure.exitcode) == (1, 1)
    assert "rank 1 of 2 failed first (exit code 1)" in str(failure)
    assert "in raise_on_rank_1" in failure.traceback
    assert failure.traceback.rstrip().endswith("ValueError: the shape is wrong")


def kill_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2 .*\(killed by SIGKILL\)") as caught:
        run_ranks(kill_rank_1, 2)
    assert caught.value.exitcode == -signal.SIGKILL
    assert caught.value.victims in ([], [0])


def exit_with_code_3() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_a_rank_that_just_exits_is_named_with_its_code() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 of 2 .*\(exit code 3\)"):
        run_ranks(exit_with_code_3, 2)


def wait_for_nothing_on_rank_1(directory: str) -> int:
    Path(directory, str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        Path(directory, "child").write_text(str(child.pid))
        threading.Event().wait()
    return 0


def is_gone(pid: int) -> bool:
    """Whether the process has ended; one that was killed gets a moment to do so."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([descriptor], [], [], 5)
    os.close(descriptor)
    return bool(ended)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="asks Linux about processes")
def test_a_rank_that_hangs_is_named_with_its_stack_and_ended(tmp_path: Path) -> None:
    with pytest.raises(RankTimeout) as caught:
        run_ranks(wait_for_nothing_on_rank_1, 2, str(tmp_path), timeout_s=3)
    timeout = caught.value
    assert timeout.ranks == [1]
    assert str(timeout).startswith("rank 1 of 2 still running after 3 s")
    assert "in wait_for_nothing_on_rank_1" in timeout.stacks[1]
    pids = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert pids.keys() == {"0", "1", "child"}
    assert [name for name, pid in pids.items() if not is_gone(pid)] == []


def read_environment() -> tuple[str, str, bool]:
    return os.environ["RANK"], os.environ["COLOUR"], dist.is_initialized()


def test_environment_reaches_the_ranks_and_a_group_is_optional() -> None:
    results = run_ranks(read_environment, 2, backend=None, env={"COLOUR": "blue"})
    assert results == [("0", "blue", False), ("1", "blue", False)]
    assert "COLOUR" not in os.environ and "RANK" not in os.environ


def return_something_unsendable() -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RankFailure, match="return_something_unsendable"):
        run_ranks(return_something_unsendable, 1, backend=None)


def test_a_local_function_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="top of a module"):
        run_ranks(lambda: None, 2)


def test_the_number_of_ranks_is_checked() -> None:
    with pytest.raises(ValueError, match="num_ranks: 0"):
        run_ranks(read_environment, 0)
