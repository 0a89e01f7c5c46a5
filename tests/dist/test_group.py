"""The process group comes up and goes down, and what cannot work together is refused by all."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import asdict
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.dist import (
    DistributedContext,
    agree_bits,
    cleanup_distributed,
    current_context,
    exchange,
    host_group,
    init_distributed,
    require_equal,
    watch,
)
from headway.dist.failure import PeerFailure, current_watch, guard_run
from headway.dist.processes import ProcessIdentity, identify, look_at
from headway.dist.rendezvous import _PORTS, RendezvousError, find_endpoint
from headway.errors import ConfigError
from headway.testing import run_ranks


def come_and_go(times: int) -> list[DistributedContext]:
    contexts = []
    for number in range(times):
        context = init_distributed(use_cpu=True)
        assert current_context() is context and current_watch() is not None
        assert init_distributed(use_cpu=True) is context, "a group that is up is kept"
        total = torch.tensor([float(context.rank)])
        dist.all_reduce(total)
        assert total.item() == sum(range(context.world_size))
        assert context.broadcast({"from": context.rank, "round": number}) == {
            "from": 0,
            "round": number,
        }
        cleanup_distributed(context)
        assert not dist.is_initialized() and current_context() is None
        contexts.append(context)
    return contexts


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_group_comes_up_and_goes_down_ten_times(num_ranks: int) -> None:
    told = run_ranks(come_and_go, num_ranks, 10, backend=None, timeout_s=120)
    for rank, contexts in enumerate(told):
        assert (
            contexts
            == [DistributedContext(rank, num_ranks, rank, num_ranks, 0, "gloo", "cpu")] * 10
        )


def talk() -> tuple[int, list[object], str]:
    context = init_distributed(use_cpu=True)
    group = host_group()
    assert group is dist.group.WORLD, "plain gloo needs no second group"
    bits = agree_bits(1 << (20 * context.rank), group)
    told = exchange({"rank": context.rank, "text": "é" * context.rank}, group)
    require_equal({"version": "1"})
    with pytest.raises(ConfigError) as caught:
        require_equal({"version": "1", "configuration": f'{{"args": {{"seed": {context.rank}}}}}'})
    cleanup_distributed(context)
    return bits, told, str(caught.value)


def test_ranks_agree_exchange_and_refuse_what_differs() -> None:
    results = run_ranks(talk, 3, backend=None)
    bits, told, refusal = results[0]
    assert results == [(bits, told, refusal)] * 3
    assert bits == 1 + (1 << 20) + (1 << 40)
    assert told == [{"rank": rank, "text": "é" * rank} for rank in range(3)]
    assert refusal == (
        "args.seed: differs between ranks: 0 on rank 0; 1 on rank 1; 2 on rank 2; it must be the "
        "same on all"
    )


def come_with_a_problem() -> list[str]:
    rank = int(os.environ["RANK"])
    problems = ["data.train: no such file"] + (["args.seed: too large"] if rank == 1 else [])
    with pytest.raises(ConfigError) as caught:
        init_distributed(use_cpu=True, problems=problems)
    assert not dist.is_initialized()
    return caught.value.problems


def test_a_problem_of_any_rank_is_every_rank_s_in_the_same_words() -> None:
    told = run_ranks(come_with_a_problem, 3, backend=None)
    assert told == [["data.train: no such file", "args.seed: too large (rank 1)"]] * 3


def come_from_another_version() -> str:
    import headway.dist.group as group

    if os.environ["RANK"] == "2":
        group.__version__ = "0.0.1"
    with pytest.raises(ConfigError) as caught:
        init_distributed(use_cpu=True)
    return str(caught.value)


def test_ranks_with_other_versions_are_refused_by_all() -> None:
    first, *others = run_ranks(come_from_another_version, 3, backend=None)
    assert others == [first, first]
    assert first.startswith("version of headway: differs between ranks: ")
    assert "on ranks 0, 1; 0.0.1 on rank 2" in first


def claim_a_larger_world() -> str:
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(ConfigError) as caught:
        init_distributed(use_cpu=True)
    return str(caught.value)


def test_a_world_size_that_differs_between_ranks_is_refused_by_all() -> None:
    first, second = run_ranks(claim_a_larger_world, 2, backend=None)
    assert first == second
    assert first.startswith("WORLD_SIZE: differs between ranks: 2 on rank 0; 3 on rank 1")


def ask_for_nccl() -> str:
    with pytest.raises(ConfigError) as caught:
        init_distributed(use_cpu=True, backend="nccl")
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are devices")
def test_a_backend_that_is_not_there_is_refused() -> None:
    assert "backend: 'nccl'" in run_ranks(ask_for_nccl, 2, backend=None)[0]


def miss_a_rank() -> str:
    if os.environ["RANK"] == "1":
        return ""
    with pytest.raises(RendezvousError) as caught:
        init_distributed(use_cpu=True, rendezvous_s=1)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named() -> None:
    told = run_ranks(miss_a_rank, 3, backend=None)
    assert told[0] == "rank 1 of 3 did not come to the rendezvous within 1 s"
    assert "rank 2 waited 1 s at the rendezvous" in told[2]


def adopt() -> tuple[DistributedContext, bool, bool]:
    before = dist.group.WORLD
    context = init_distributed(use_cpu=True)
    watched = current_watch() is not None
    cleanup_distributed(context)
    return context, watched, dist.group.WORLD is before


def test_a_group_that_exists_is_watched_and_left_in_place() -> None:
    for rank, (context, watched, kept) in enumerate(run_ranks(adopt, 2)):
        assert context == DistributedContext(rank, 2, rank, 2, 0, "gloo", "cpu")
        assert watched and kept


def cleanup_after_a_failure() -> float:
    context = init_distributed(use_cpu=True)
    began = time.monotonic()
    try:
        if context.rank == 0:
            raise ValueError("on one rank only")
        with pytest.raises(RuntimeError):
            dist.barrier()
        cleanup_distributed(context)
    except ValueError:
        cleanup_distributed(context)  # does not wait for the others
    return time.monotonic() - began


def test_cleaning_up_after_a_failure_does_not_wait_for_the_others() -> None:
    assert max(run_ranks(cleanup_after_a_failure, 2, backend=None, timeout_s=60)) < 30


def end_without_cleaning_up(folder: str, last: int, *, in_launcher: bool) -> None:
    """Come, go on alone if this rank is to be the `last`, and end without a word."""
    watch.BEAT_S = 0.05
    watch.GRACE_S = 0.2
    watch.say = lambda text, kind="error": Path(folder, "told").write_text(text)  # type: ignore
    rank = int(os.environ["RANK"])
    sys.last_value = ValueError("of long ago, such as a cell of a notebook before")
    if not in_launcher:
        keep_the_store_in_rank_0()
    init_distributed(use_cpu=True)
    processes = exchange(asdict(identify()))
    agree_bits(0)
    if rank == last:
        # Before the watch is ended by anything: higher priorities are first.
        args = (ProcessIdentity.from_json(processes[1 - rank]), Path(folder, "done"))
        Finalize(None, outlast, args, exitpriority=1)


def outlast(other: ProcessIdentity, done: Path) -> None:
    """Let the other rank end, if it does without this one, and then some beats pass."""
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline and look_at(other) != "gone":
        time.sleep(0.01)
    deadline = time.monotonic() + 10 * watch.BEAT_S
    while time.monotonic() < deadline:
        time.sleep(0.01)
    done.touch()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("in_launcher", [True, False], ids=["launcher's store", "rank 0's store"])
@pytest.mark.parametrize("last", [0, 1])
def test_ranks_that_end_one_after_the_other_are_not_lost(
    last: int, in_launcher: bool, tmp_path: Path
) -> None:
    """Forked, as by multiprocessing itself: such end without what atexit has."""
    ended = partial(end_without_cleaning_up, str(tmp_path), last, in_launcher=in_launcher)
    run_ranks(ended, 2, backend=None, env={"OWN_PORT": free_port()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done"]


def keep_the_store_in_rank_0() -> None:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ["MASTER_PORT"] = os.environ["OWN_PORT"]


def be_rank(rank: int, port: str) -> None:
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OWN_PORT": port}
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(ours | size)


def end_spawned(rank: int, folder: str, last: int, port: str) -> None:
    be_rank(rank, port)
    end_without_cleaning_up(folder, last, in_launcher=False)


@pytest.mark.parametrize("last", [0, 1])
def test_spawned_ranks_that_end_one_after_the_other_are_not_lost(last: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(end_spawned, (str(tmp_path), last, free_port()), nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done"]


def wait_for_one_that_has_ended(how: str) -> str:
    keep_the_store_in_rank_0()
    rank = init_distributed(use_cpu=True).rank
    group = dist.new_group(backend="gloo") if how == "in a collective of a group" else None
    try:
        with guard_run():
            agree_bits(0)  # both are in the run
            if rank == 0:
                return ""
            miss_soon(2.0)
            if how != "elsewhere":
                dist.all_reduce(torch.ones(1), group=group)
            return see_failure()
    except PeerFailure as failure:
        return str(failure)
    finally:
        watch.LAST_S = 60.0
        dist.destroy_process_group()
        del group


def miss_soon(after_s: float) -> None:
    """Until a failure is seen: it is also the time that a process has to end after one."""
    watch.LAST_S = after_s


def see_failure() -> str:
    own = current_watch()
    assert own is not None
    while own.failure is None:
        assert own._threads[0].is_alive(), "the watch is over"
        time.sleep(0.01)
    watch.LAST_S = 60.0
    return own.failure.describe(2)


@pytest.mark.parametrize("how", ["in a collective", "in a collective of a group", "elsewhere"])
def test_a_rank_that_ends_in_the_middle_of_a_run_is_named_though_it_kept_the_store(
    how: str,
) -> None:
    """Elsewhere: NCCL does not notice that a rank is gone."""
    env = {"OWN_PORT": free_port()}
    told = run_ranks(wait_for_one_that_has_ended, 2, how, backend=None, env=env)
    assert told[1] == "rank 0 of 2 was lost: it ended before the others"


def adopt_in_a_run() -> str:
    """The group is the user's own, and is watched from the middle of the first run on."""
    keep_the_store_in_rank_0()
    dist.init_process_group("gloo")
    try:
        with guard_run():
            if init_distributed(use_cpu=True).rank == 0:
                return ""
            miss_soon(2.0)
            return see_failure()
    finally:
        dist.destroy_process_group()


def test_a_run_is_one_before_ranks_are_watched() -> None:
    env = {"OWN_PORT": free_port()}
    told = run_ranks(adopt_in_a_run, 2, backend=None, env=env)
    assert told[1] == "rank 0 of 2 was lost: it ended before the others"


def end_alone(rank: int, folder: str, port: str) -> None:
    """Rank 0 ends while rank 1 does what is its own at the end of the run."""
    watch.BEAT_S = 0.05
    be_rank(rank, port)
    keep_the_store_in_rank_0()
    init_distributed(use_cpu=True)
    processes = exchange(asdict(identify()))
    with guard_run() as end_together:
        end_together()
        agree_bits(0)
        if rank:
            miss_soon(0.5)
            outlast(ProcessIdentity.from_json(processes[0]), Path(folder, "done"))
            own = current_watch()
            assert own is not None and own.failure is None


def test_a_rank_that_takes_long_after_what_is_common_is_left_alone(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(end_alone, (str(tmp_path), free_port()), nprocs=2)
    assert (tmp_path / "done").exists()


def leave_by_force(rank: int, took: str, port: str) -> None:
    """Rank 1 ends as some programs do: at once."""
    be_rank(rank, port)
    keep_the_store_in_rank_0()
    init_distributed(use_cpu=True)
    process = ProcessIdentity.from_json(exchange(asdict(identify()))[1])
    own = current_watch()
    assert own is not None
    own.leave()
    agree_bits(0)
    if rank:
        os._exit(0)
    while look_at(process) != "gone":
        time.sleep(0.01)
    began = time.monotonic()
    own.take_leave()
    Path(took).write_text(str(time.monotonic() - began))


def test_nobody_waits_for_a_rank_that_is_gone_without_a_word(tmp_path: Path) -> None:
    took = tmp_path / "took"
    torch.multiprocessing.spawn(leave_by_force, (str(took), free_port()), nprocs=2)
    assert float(took.read_text()) < 3


def end_after_cleaning_up() -> float:
    keep_the_store_in_rank_0()
    context = init_distributed(use_cpu=True)
    own = current_watch()
    assert own is not None
    cleanup_distributed(context)
    began = time.monotonic()
    own.take_leave()
    own.wait_until_known()
    own.stop()
    return time.monotonic() - began


def test_nobody_is_waited_for_after_cleaning_up() -> None:
    env = {"OWN_PORT": free_port()}
    assert max(run_ranks(end_after_cleaning_up, 2, backend=None, env=env)) < 1


def meet_by_slurm() -> tuple[DistributedContext, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    for name in [*os.environ]:
        if name in names or name.startswith(("MASTER_", "TORCHELASTIC_")):
            del os.environ[name]
    context = init_distributed(use_cpu=True)
    endpoint = str(find_endpoint(os.environ))
    total = torch.tensor([float(context.rank)])
    dist.all_reduce(total)
    assert total.item() == 1
    cleanup_distributed(context)
    return context, endpoint


def slurm_rank(job: str) -> tuple[DistributedContext, str]:
    rank = os.environ["RANK"]
    os.environ.update(
        SLURM_JOB_ID=job,
        SLURM_JOB_NODELIST="localhost",
        SLURM_NTASKS="2",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID="0",
        SLURM_NNODES="1",
    )
    return meet_by_slurm()


def free_job_number() -> str:
    """A job whose derived port nobody listens at."""
    for number in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", _PORTS[number % len(_PORTS)])) != 0:
                return str(number)
    raise AssertionError("no free port")


def test_ranks_of_a_slurm_job_meet_without_any_variable_of_a_launcher() -> None:
    job = free_job_number()
    told = run_ranks(slurm_rank, 2, job, backend=None)
    for rank, (context, endpoint) in enumerate(told):
        assert context == DistributedContext(rank, 2, rank, 2, 0, "gloo", "cpu")
        assert endpoint == f"localhost:{_PORTS[int(job) % len(_PORTS)]}"


def test_a_process_alone_has_no_group() -> None:
    context = init_distributed(use_cpu=True)
    assert context == DistributedContext(device_name="cpu")
    assert context.is_main_process and not context.is_distributed
    assert context.device == torch.device("cpu")
    assert context.broadcast([1]) == [1]
    context.barrier()
    cleanup_distributed(context)
    assert not dist.is_initialized()


def test_a_group_of_one_can_be_asked_for() -> None:
    context = init_distributed(use_cpu=True, alone=True)
    assert dist.get_world_size() == 1 and context.backend == "gloo"
    assert agree_bits(5) == 5
    cleanup_distributed(context)
    assert not dist.is_initialized()
