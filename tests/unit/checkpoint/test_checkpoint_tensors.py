"""Shards: layout, limits, digests, and that the safetensors library reads them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from headway.checkpoint.digest import digest_file
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.tensors import ShardReader, read_shards, write_shards
from headway.models.shards import plan_shards
from headway.models.ties import input_embedding_names, split_ties


def many_kinds():
    return {
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(10)[::3],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False, True]),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "name with ü": torch.ones(1),
    }


@pytest.mark.parametrize("digest", ["xxh3_128", "sha256"])
def test_all_kinds_round_trip_and_digests_are_those_of_the_files(tmp_path, digest):
    tensors = many_kinds()
    records = write_shards(tmp_path, "model", tensors, max_shard_bytes=64, digest=digest)
    assert len(records) > 3
    for name, record in records.items():
        path = tmp_path / name
        assert record == (path.stat().st_size, digest_file(path, digest))
    loaded = read_shards(tmp_path, "model")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        found = loaded[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            found.contiguous().reshape(-1).view(torch.uint8),
            tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8),
        )


def test_safetensors_library_reads_the_file_and_names_follow_hugging_face(tmp_path):
    tensors = {"a": torch.arange(4.0), "b": torch.arange(3, dtype=torch.int8)}
    records = write_shards(tmp_path, "model", tensors, aliases={"c": "a"})
    assert sorted(records) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    loaded = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 19, "headway_aliases": {"c": "a"}}
    assert index["weight_map"] == dict.fromkeys("ab", "model-00001-of-00001.safetensors")


def test_limit_is_respected_before_adding():
    sizes = {"t9_big": 100, **{f"t{i}": 10 for i in range(5)}}
    shards = plan_shards(sizes, 25)
    assert shards == [["t0", "t1"], ["t2", "t3"], ["t4"], ["t9_big"]]
    assert plan_shards({}, 25) == []


def test_no_tensors_is_an_index_alone(tmp_path):
    assert list(write_shards(tmp_path, "optimizer", {})) == ["optimizer.safetensors.index.json"]
    assert read_shards(tmp_path, "optimizer") == {}


def test_reading_by_name(tmp_path):
    write_shards(tmp_path, "m", {"a": torch.zeros(2), "b": torch.ones(3, 1)}, max_shard_bytes=8)
    assert list(read_shards(tmp_path, "m", names=["b"])) == ["b"]
    assert ShardReader(tmp_path, "m").shapes() == {"a": (2,), "b": (3, 1)}
    with pytest.raises(CheckpointError, match=r"m\.safetensors\.index\.json does not list zz"):
        read_shards(tmp_path, "m", names=["zz"])


def test_index_cannot_lead_outside(tmp_path):
    index = {"metadata": {}, "weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="plain file name"):
        ShardReader(tmp_path, "m")


def test_unstorable_tensors_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor 'x' cannot be stored.*meta"):
        write_shards(tmp_path, "m", {"x": torch.empty(1, device="meta")})
    with pytest.raises(CheckpointError, match=r"tensor 'x' cannot be stored.*complex128"):
        write_shards(tmp_path, "n", {"x": torch.zeros(1, dtype=torch.complex128)})


def test_ties_keep_the_input_embedding_and_else_the_first_name():
    weight, other = torch.randn(4, 3), torch.randn(2)
    names = {"lm_head.weight": weight, "model.embed_tokens.weight": weight, "z": other, "y": other}
    stored, aliases = split_ties(names)
    assert list(stored) == ["model.embed_tokens.weight", "y"]
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight", "z": "y"}
    reversed_names = dict(reversed(names.items()))
    assert split_ties(reversed_names)[1] == aliases


def test_views_are_ties_only_if_they_are_the_same_view():
    base = torch.arange(6.0)
    stored, aliases = split_ties({"a": base[:3], "b": base[3:], "c": base[:3], "d": base})
    assert set(stored) == {"a", "b", "d"} and aliases == {"c": "a"}
    empties = split_ties({"e": torch.empty(0), "f": torch.empty(0)})
    assert empties[1] == {}
    meta = torch.empty(2, device="meta")
    assert split_ties({"m": meta, "n": torch.empty(2, device="meta"), "o": meta})[1] == {"o": "m"}


def test_input_embedding_is_asked_from_the_model():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a_out = torch.nn.Linear(2, 3, bias=False)
            self.wte = torch.nn.Embedding(3, 2)
            self.a_out.weight = self.wte.weight

    model = Model()
    assert input_embedding_names(model) == {"wte.weight"}
    named = dict(model.named_parameters(remove_duplicate=False))
    assert split_ties(named, input_embedding_names(model))[1] == {"a_out.weight": "wte.weight"}
