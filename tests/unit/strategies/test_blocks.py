"""Blocks of a model: by a path, or found."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from headway.errors import ConfigError
from headway.strategies.blocks import DEFAULT_PATH, find_blocks, keep_apart
from headway.testing import tiny_decoder, tiny_llama


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(16))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Experts() for _ in range(2))
        self.decoder = nn.ModuleList(Experts() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.drops = nn.ModuleList(nn.Dropout() for _ in range(9))


def names(model: nn.Module, path: str = DEFAULT_PATH) -> list[str]:
    found = find_blocks(model, path)
    assert all(model.get_submodule(name) is block for name, block in found)
    return [name for name, _ in found]


@pytest.mark.parametrize("make", [tiny_decoder, tiny_llama])
def test_layers_of_decoders_are_found(make) -> None:
    assert names(make()) == ["model.layers.0", "model.layers.1"]


def test_the_outermost_lists_of_the_commonest_class_are_found() -> None:
    found = names(EncoderDecoder())
    assert found == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"]


def test_a_path_is_taken_at_its_word() -> None:
    model = EncoderDecoder()
    assert names(model, "encoder") == ["encoder.0", "encoder.1"]
    assert len(names(model, "encoder.0.experts")) == 16
    assert names(model, "") == []
    wrapped = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert names(nn.ModuleDict({"net": wrapped}), "net") == ["net.0", "net.1"]


def test_a_model_whose_default_path_exists_uses_it() -> None:
    model = nn.ModuleDict()
    model["causal_lm"] = nn.ModuleDict({"layer_stack": nn.ModuleDict()})
    model["causal_lm"]["layer_stack"]["layers"] = nn.ModuleList([nn.Linear(2, 2)])
    model["longer"] = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    assert names(model) == [f"{DEFAULT_PATH}.0"]


def test_recomputed_blocks_are_found_with_their_wrappers() -> None:
    model = tiny_decoder()
    model.model.layers = nn.ModuleList(map(checkpoint_wrapper, model.model.layers))
    assert [name for name, _ in find_blocks(model, "model.layers")] == [
        "model.layers.0",
        "model.layers.1",
    ]
    assert all(block in set(model.model.layers) for _, block in find_blocks(model, DEFAULT_PATH))


def test_a_model_without_blocks_is_one_piece(caplog: pytest.LogCaptureFixture) -> None:
    assert names(nn.Linear(2, 2)) == []
    assert "Linear has no list of blocks" in caplog.text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("model.layer", "leads to nothing in Decoder; did you mean 'model.layers'?"),
        ("transformer.h", "Lists of modules in it: model.layers"),
        ("model.norm", "is a RMSNorm, not a list of blocks"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"fsdp2\.transformer_layers_path=") as caught:
        find_blocks(tiny_decoder(), path)
    assert text in str(caught.value)


def test_a_path_in_a_model_without_lists_is_refused() -> None:
    with pytest.raises(ConfigError, match="which has no list of modules; '' shards"):
        find_blocks(nn.Linear(2, 2), "layers")


class Shared(nn.Module):
    """Layers: the first two have one weight, the third one's is the head's, the fourth is twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(5))
        self.layers.append(self.layers[3])
        self.head = nn.Linear(2, 2)
        self.layers[1][0].weight = self.layers[0][0].weight
        self.layers[2][0] = self.head

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for _, block in find_blocks(self, "layers")]


def test_parts_that_share_parameters_are_left_to_the_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Shared()
    assert keep_apart(model, model.blocks) == [model.layers[3], model.layers[4]]
    assert "Shared: 3 of 5 parts share parameters" in caplog.text
    assert caplog.text.rstrip().endswith("layers.0, layers.1, layers.2")


def test_a_part_around_one_that_shares_is_left_to_the_whole_too() -> None:
    model = Shared()
    inner, outer = model.layers[0][0], model.layers[0]
    assert keep_apart(model, [inner, outer, model.layers[4]]) == [model.layers[4]]


def test_what_is_shared_inside_of_a_part_alone_does_not_matter() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0][0].weight = model[0][1].weight
    assert keep_apart(model, [model[0][0], model[0], model[1]]) == [model[0], model[1]]


def test_parts_of_a_model_that_shares_nothing_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_decoder(tie_embeddings=True)
    blocks = [block for _, block in find_blocks(model, DEFAULT_PATH)]
    assert keep_apart(model, blocks) == blocks and not caplog.text
