"""The options of the DDP wrapper reach torch, and one it does not have is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headway.args import DDPArguments
from headway.errors import ConfigError
from headway.strategies import ddp


class OldWrapper:
    """A DistributedDataParallel of a torch without the newest options."""

    def __init__(self, module: Any, broadcast_buffers: bool = True, init_sync: bool = True) -> None:
        pass


def test_every_option_is_handed_on() -> None:
    given = {
        "broadcast_buffers": False,
        "init_sync": False,
        "bucket_cap_mb": 7,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": False,
        "static_graph": True,
        "skip_all_reduce_unused_params": True,
    }
    assert ddp.wrapper_options(DDPArguments(**given)) == given


def test_an_option_that_torch_lacks_is_refused_only_where_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ddp, "DistributedDataParallel", OldWrapper)
    assert ddp.wrapper_options(DDPArguments(init_sync=False)) == {
        "broadcast_buffers": True,
        "init_sync": False,
    }
    with pytest.raises(ConfigError) as caught:
        ddp.wrapper_options(DDPArguments(static_graph=True, bucket_cap_mb=9))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "ddp.bucket_cap_mb",
        "ddp.static_graph",
    ]
