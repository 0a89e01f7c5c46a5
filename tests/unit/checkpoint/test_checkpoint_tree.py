"""Nested state survives JSON plus tensors exactly, and what cannot be stored is named."""

import collections
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.tree import join_tree, split_tree
from headway.errors import ConfigError


def round_trip(state):
    encoded, tensors = split_tree(state)
    text = json.dumps(encoded, allow_nan=False)
    return join_tree(json.loads(text), {name: t.clone() for name, t in tensors.items()})


def same(a, b):
    """Equality that tells 1 from 1.0 and True, 0.0 from -0.0, and takes NaN as equal to NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items())
        return len(a) == len(b) and all(same(k, l) and same(v, w) for (k, v), (l, w) in pairs)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a == b


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary()
)
keys = st.text(max_size=4) | st.sampled_from(["$tuple", "$", "a/b", "0"]) | st.integers()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_any_tree_round_trips_exactly(state):
    assert same(round_trip(state), state)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4).to(torch.bfloat16),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.randn(4, 6).t(),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        np.arange(6, dtype=">u4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(2.5, dtype=np.float16),
        np.zeros((0, 2)),
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.float32(-0.0),
        np.int64(-5),
        np.bool_(True),
        np.float64("nan"),
        10**5000,
        -(2**63),
        collections.OrderedDict(b=1, a=2),
        collections.Counter({3: 2}),
        collections.deque([1, 2], maxlen=2),
        {1, 2},
        frozenset({(1, 2)}),
    ],
    ids=lambda v: f"{type(v).__name__}-{getattr(v, 'dtype', '')}",
)
def test_leaf_round_trips(value):
    assert same(round_trip({"x": [value]}), {"x": [value]})


def test_generator_states_continue_identically():
    generator = np.random.default_rng(3)
    generator.standard_normal(5)
    state = generator.bit_generator.state
    other = np.random.default_rng(0)
    other.bit_generator.state = round_trip(state)
    assert other.integers(1 << 60, size=4).tolist() == generator.integers(1 << 60, size=4).tolist()
    python_state = random.Random(5).getstate()
    assert round_trip(python_state) == python_state


def test_same_names_do_not_collide():
    one, two, three = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    state = {"a": {"b": one}, "a/b": two, "l": [three]}
    assert same(round_trip(state), state)
    mixed = {1: one, "1": two}
    assert same(round_trip(mixed), mixed)


def test_plain_json_stays_readable():
    plain = {"epoch": 1.5, "log_history": [{"loss": 2.0, "step": 1}], "best": None}
    assert split_tree(plain) == (plain, {})


class Foo:
    pass


@pytest.mark.parametrize("bad", [Foo(), object, np.array([object()]), np.str_("x"), lambda: 1])
def test_refused_leaf_is_named(bad):
    with pytest.raises(ConfigError, match=r"callback 'X' state: key a\.b\.1 is a .*; only dict"):
        split_tree({"a": {"b": [0, bad]}}, what="callback 'X' state")


def test_refuses_cycles_and_meta_tensors():
    loop = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        split_tree({"loop": loop})
    with pytest.raises(ConfigError, match=r"key t is a tensor that cannot be stored.*meta"):
        split_tree({"t": torch.empty(2, device="meta")})


@pytest.mark.parametrize("bad", [{"$evil": 1}, {"$tensor": "absent"}, {"$array": ["a", "O", [1]]}])
def test_malformed_entries_are_errors(bad):
    with pytest.raises(CheckpointError, match="malformed"):
        join_tree(bad, {"a": torch.zeros(8, dtype=torch.uint8)})
