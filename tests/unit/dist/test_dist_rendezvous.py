"""Where ranks meet: the launcher's variables first, else what a Slurm job says."""

from __future__ import annotations

import pytest

from headway.dist.rendezvous import Endpoint, find_endpoint, first_host
from headway.errors import ConfigError

SLURM = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "gpu[03-06,9],login1"}


def test_the_launcher_s_variables_are_taken_as_they_are() -> None:
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", **SLURM}
    assert find_endpoint(given) == Endpoint("10.0.0.1", 29500)
    agent = find_endpoint({**given, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent.in_launcher and agent.keeper == "the launcher"


def test_a_slurm_job_gives_its_first_host_and_a_port_of_its_own() -> None:
    found = find_endpoint(SLURM)
    assert found.host == "gpu03" and found.keeper == "rank 0"
    assert 15000 <= found.port < 30000
    others = {
        find_endpoint({**SLURM, "SLURM_JOB_ID": "123457"}).port,
        find_endpoint({**SLURM, "SLURM_STEP_ID": "2"}).port,
    }
    assert found.port not in others and len(others) == 2
    assert find_endpoint({**SLURM, "MASTER_PORT": "1234"}) == Endpoint("gpu03", 1234)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node1,node2", "node1"),
        ("node[001-128]", "node001"),
        ("rack2-[5,7-9]-gpu", "rack2-5-gpu"),
        ("a.b-c[10]", "a.b-c10"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_what_is_missing_or_wrong_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        find_endpoint({})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
    with pytest.raises(ConfigError, match="MASTER_PORT: 'http' is not a port"):
        find_endpoint({"MASTER_ADDR": "here", "MASTER_PORT": "http"})
