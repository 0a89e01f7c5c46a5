"""Rank facts: what launchers set is read, and what contradicts itself is refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headway.dist import DistributedEnv, DistributedEnvInterface, detect_env
from headway.errors import ConfigError
from headway.testing import assert_no_import


def test_a_process_without_a_launcher_is_alone() -> None:
    env = detect_env({}, use_cpu=True)
    assert env == DistributedEnv(0, 1, 0, 1, 0, "cpu")
    assert env.is_main_process and not env.is_distributed


def test_torchrun_variables() -> None:
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
    }
    env = detect_env(environ, use_cpu=True)
    assert env == DistributedEnv(5, 8, 1, 4, 1, "cpu")
    assert env.is_distributed and not env.is_main_process


def test_missing_local_variables_are_derived() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    env = detect_env(environ, use_cpu=True)
    assert (env.local_rank, env.node_rank) == (1, 1)
    assert detect_env({"RANK": "1", "WORLD_SIZE": "2"}, use_cpu=True).local_rank == 1


SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}


def test_slurm_is_the_fallback() -> None:
    assert detect_env(SLURM, use_cpu=True) == DistributedEnv(3, 4, 1, 2, 1, "cpu")


def test_torchrun_wins_over_slurm() -> None:
    env = detect_env({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}, use_cpu=True)
    assert (env.rank, env.world_size) == (0, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        # The shell of an allocation: several tasks are granted, this is none of them.
        {"SLURM_NTASKS": "4"},
    ],
)
def test_slurm_without_several_tasks_is_a_single_process(environ: dict[str, str]) -> None:
    assert not detect_env(environ, use_cpu=True).is_distributed


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "1.5"}, "WORLD_SIZE"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "zero"}, "GROUP_RANK"),
        ({**SLURM, "SLURM_LOCALID": "?"}, "SLURM_LOCALID"),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID"),
        ({**SLURM, "WORLD_SIZE": "2"}, "WORLD_SIZE"),
    ],
)
def test_garbage_and_contradictions_name_the_variable(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_env(environ, use_cpu=True)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{named}: ")


def test_all_bad_variables_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        detect_env({"RANK": "a", "WORLD_SIZE": "b", "LOCAL_RANK": "c"}, use_cpu=True)
    assert [p.split(":")[0] for p in caught.value.problems] == ["RANK", "WORLD_SIZE", "LOCAL_RANK"]


def test_any_object_with_the_four_facts_is_an_environment() -> None:
    assert isinstance(DistributedEnv(), DistributedEnvInterface)
    own = SimpleNamespace(rank=0, world_size=1, local_rank=0, device="cpu")
    assert isinstance(own, DistributedEnvInterface)
    assert not isinstance(SimpleNamespace(rank=0), DistributedEnvInterface)


def test_facts_on_cpu_need_no_torch() -> None:
    code = "from headway.dist import detect_env; print(detect_env(use_cpu=True).device)"
    assert assert_no_import(code).stdout == "cpu\n"
