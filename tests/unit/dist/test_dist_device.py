"""Which device a rank gets, and what is said when the wished one is not there."""

from __future__ import annotations

import pytest
import torch

from headway.dist import DistributedEnv, get_device, get_device_type, resolve_device
from headway.errors import ConfigError


@pytest.fixture
def four_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.fixture
def no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cards")
def test_without_a_card_everything_is_on_the_cpu() -> None:
    assert get_device_type() == "cpu"
    assert get_device(3) == resolve_device() == torch.device("cpu")


@pytest.mark.usefixtures("four_cards")
def test_each_local_rank_has_its_own_card() -> None:
    env = DistributedEnv(rank=6, world_size=8, local_rank=2, local_world_size=4, node_rank=1)
    assert resolve_device(None, False, env) == torch.device("cuda", 2)
    assert resolve_device("cuda", False, env) == torch.device("cuda", 2)
    assert resolve_device("cuda:2", False, env) == torch.device("cuda", 2)


@pytest.mark.usefixtures("four_cards")
def test_use_cpu_wins_over_device() -> None:
    assert resolve_device("cuda:1", use_cpu=True) == torch.device("cpu")


@pytest.mark.usefixtures("four_cards")
def test_one_card_cannot_be_named_for_several_ranks() -> None:
    env = DistributedEnv(rank=1, world_size=4, local_rank=1, local_world_size=4)
    with pytest.raises(ConfigError, match="write 'cuda'"):
        resolve_device("cuda:0", False, env)


@pytest.mark.usefixtures("four_cards")
def test_more_ranks_than_cards() -> None:
    with pytest.raises(ConfigError, match="local rank 4 has no card of its own"):
        get_device(4)


def test_a_launcher_that_binds_cards_shows_each_rank_its_own_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert get_device(3) == torch.device("cuda", 0)


@pytest.mark.usefixtures("no_cards")
@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda", "there is no CUDA device"),
        ("cuda:0", "there is no CUDA device"),
        ("mps", "there is no MPS device"),
        ("cpu:1", "there is no device of that number"),
        ("cpuu", "not understood; did you mean 'cpu'?"),
        ("meta", "not understood"),
        ("", "not understood"),
    ],
)
def test_a_bad_device_says_what_is_available(device: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_device(device)
    message = str(caught.value)
    assert message.startswith(f"device: {device!r}: {reason}")
    assert message.endswith("Available here: cpu")


@pytest.mark.usefixtures("four_cards")
def test_the_cards_there_are_get_listed() -> None:
    with pytest.raises(ConfigError, match=r"cuda, cuda:0, cuda:1, cuda:2, cuda:3$"):
        resolve_device("cuda:7")
