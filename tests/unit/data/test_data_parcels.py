"""A batch packed into bytes comes out as it went in, and what cannot travel is named."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from headway.data.parcels import pack, unpack
from headway.errors import ConfigError

Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
        torch.ones(1, 1).expand(4, 5),
        torch.tensor([True, False]),
        torch.tensor([1.5, float("nan"), -float("inf")]),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(2, 2).to(torch.float8_e4m3fn),
        torch.randn(2, dtype=torch.complex128),
        torch.tensor([2**63 - 1]),
        torch.randn(3, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}",
)
def test_a_tensor_keeps_shape_type_and_bits(tensor: torch.Tensor) -> None:
    # The odd one in front shifts it to where it would not be aligned by itself.
    _, found = unpack(pack([torch.tensor([1, 2, 3], dtype=torch.uint8), tensor]))
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    flat = tensor.detach().contiguous().reshape(-1).clone()
    assert torch.equal(found.reshape(-1).view(torch.uint8), flat.view(torch.uint8))


def test_containers_and_plain_values() -> None:
    value: dict[Any, Any] = {
        "text": "ä",
        3: [None, True, 1.5, float("inf"), 10**20],
        "nested": ({"empty": {}}, [], ()),
    }
    assert unpack(pack(value)) == value
    found = unpack(pack({"pair": Pair(torch.ones(1), "x"), "user": UserDict(a=1)}))
    assert type(found["pair"]).__name__ == "Pair" and found["pair"].left.item() == 1.0
    assert found["pair"].right == "x" and found["user"] == {"a": 1}


def test_arrays() -> None:
    value = [np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2], np.float32(0.25), np.bool_(True)]
    array, number, flag = unpack(pack(value))
    assert array.dtype == np.int16 and array.tolist() == [[0, 2], [3, 5]]
    assert (type(number), number) == (np.float32, 0.25)
    assert (type(flag), bool(flag)) == (np.bool_, True)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        (torch.eye(2).to_sparse(), "sparse"),
        (np.array(["a"]), "<U1"),
        ({(1, 2): 0}, "keys"),
    ],
)
def test_what_cannot_travel_is_named_with_the_way_out(value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match="dispatch_batches=False") as caught:
        pack({"x": [value]})
    assert named in str(caught.value)
