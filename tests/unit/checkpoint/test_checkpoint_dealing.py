"""Which rank writes what: every tensor once, by one who holds it, about equally much each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.checkpoint.dealing import deal, describe
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.optimizer import merge_optimizers
from headway.checkpoint.replication import digest_tensor
from headway.checkpoint.slices import plan_rounds, sliced_files
from headway.checkpoint.staged import TensorSlice


def test_replicas_share_the_writing():
    held = describe({f"t{n}": torch.zeros(100 + n) for n in range(40)})
    plan = deal([held] * 4, "model", 10**9)
    assert list(plan.files) == [f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)]
    loads = [0] * 4
    for dealt in plan.tensors.values():
        loads[dealt.owner] += dealt.num_bytes
    assert max(loads) - min(loads) <= 4 * 140


def test_stages_write_what_they_hold_and_a_limit_splits_their_files():
    first = describe({"a": torch.zeros(10), "b": torch.zeros(10)})
    second = describe({"c": torch.zeros(10)})
    plan = deal([first, second], "model", 50)
    assert [plan.owner_of(name) for name in plan.files] == [0, 0, 1]
    assert plan.weight_map["c"] == "model-00003-of-00003.safetensors"


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6),
        st.tuples(st.integers(0, 50), st.sets(st.integers(0, 3), min_size=1)),
        max_size=20,
    ),
    st.integers(1, 300),
)
@settings(max_examples=200, deadline=None)
def test_every_tensor_is_in_one_file_of_a_rank_that_holds_it(tensors, limit):
    held = [
        describe({n: torch.zeros(size) for n, (size, ranks) in tensors.items() if rank in ranks})
        for rank in range(4)
    ]
    plan = deal(held, "x", limit)
    names = [name for members in plan.files.values() for name in members]
    assert sorted(names) == sorted(tensors)
    for file_name, members in plan.files.items():
        owner = plan.owner_of(file_name)
        assert all(owner in tensors[name][1] for name in members)
        size = sum(plan.tensors[name].num_bytes for name in members)
        assert size <= limit or len([n for n in members if plan.tensors[n].num_bytes]) == 1


def test_slices_must_make_up_the_whole():
    def piece(start, stop):
        return describe({"w": TensorSlice(torch.zeros(stop - start, 3), (8, 3), (start, 0))})

    plan = deal([piece(0, 4), piece(4, 8), piece(4, 8)], "x", 100)  # the last two are replicas
    (owner,) = {plan.owner_of(name) for name in sliced_files(plan)}
    assert [part.offsets for part in plan.tensors["w"].sources()] == [(0, 0), (4, 0)]
    assert [[(n, len(e)) for n, e in enumerate(r) if e] for r in plan_rounds(plan, 3)] == [
        [(owner, 1)]
    ]
    for bad in ([piece(0, 4)], [piece(0, 4), piece(5, 8)], [piece(0, 8), piece(4, 8)]):
        with pytest.raises(CheckpointError, match="slices of tensor 'w'"):
            deal(bad, "x", 100)


def test_ranks_that_disagree_on_a_tensor_are_named():
    with pytest.raises(CheckpointError, match=r"'w' is F32\[3\] on rank 1 and F32\[2\] on rank 0"):
        deal([describe({"w": torch.zeros(2)}), describe({"w": torch.zeros(3)})], "x", 100)


def test_optimizers_of_stages_are_joined_by_their_settings():
    def encoded(groups, rates):
        return {
            "class": "SGD",
            "groups": groups,
            "params": {name: {"shape": [1]} for members in groups for name in members},
            "rest": {"param_groups": [{"lr": rate} for rate in rates], "shared": {}},
        }

    joined = merge_optimizers([encoded([["a"], ["b"]], [1, 2]), encoded([["c"], ["d"]], [2, 3])])
    assert joined["groups"] == [["a"], ["b", "c"], ["d"]]
    assert [group["lr"] for group in joined["rest"]["param_groups"]] == [1, 2, 3]
    assert sorted(joined["params"]) == ["a", "b", "c", "d"]
    same = encoded([["a"], ["b"]], [1, 1])
    assert merge_optimizers([same, same]) == same
    with pytest.raises(CheckpointError, match="different optimizers: Adam, SGD"):
        merge_optimizers([same, {**same, "class": "Adam"}])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_a_digest_sees_one_bit_and_the_place_of_every_element(dtype):
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, (5000,)).to(dtype)
    digest = digest_tensor(tensor).tolist()
    assert digest_tensor(tensor.clone()).tolist() == digest
    assert digest_tensor(tensor.view(50, 100).t().contiguous().t()).tolist() == digest
    first, last = int((tensor == 0).nonzero()[0]), int((tensor == 1).nonzero()[-1])
    swapped = tensor.clone()
    swapped[first], swapped[last] = tensor[last], tensor[first]
    assert digest_tensor(swapped).tolist() != digest
    changed = tensor.clone()
    changed.view(torch.uint8)[-1] ^= 1
    assert digest_tensor(changed).tolist() != digest
