"""Cutting models into stages: balance, names, and the stages in a row as the whole model."""

import itertools
import logging
import random

import pytest
import torch
from torch import nn

from headway.errors import ConfigError
from headway.models import Decoder, DecoderConfig
from headway.models.split import can_split, count_costs, cut_causal_lm
from headway.strategies.objective import Objective
from headway.strategies.pipeline.balance import MOST_IMBALANCE, cut_layers
from headway.strategies.pipeline.layout import Layout
from headway.strategies.pipeline.part import ModelPart
from headway.strategies.pipeline.pieces import cut_batch, pad_rows
from headway.strategies.pipeline.placement import fill_stages, find_ties
from headway.strategies.pipeline.splitter import (
    check_stages,
    create_manual_causal_lm_splitter,
    split_automatically,
)
from headway.strategies.source import ModelSource
from headway.testing import tiny_decoder, tiny_llama

# hidden, ffn, heads, key/value heads, vocabulary: Llama 3 8B and 1B, Qwen3 0.6B, Mistral 7B, GPT-2
SHAPES = [
    (4096, 14336, 32, 8, 128256),
    (2048, 8192, 32, 8, 128256),
    (1024, 3072, 16, 8, 151936),
    (4096, 14336, 32, 8, 32768),
    (768, 3072, 12, 12, 50257),
]


def on_meta(shape, num_layers, **fields):
    hidden, ffn, heads, kv_heads, vocabulary = shape
    with torch.device("meta"):
        return Decoder(
            DecoderConfig(
                hidden_size=hidden,
                intermediate_size=ffn,
                num_heads=heads,
                num_kv_heads=kv_heads,
                vocab_size=vocabulary,
                num_layers=num_layers,
                **fields,
            )
        )


def fits(costs, after, num_stages, limit):
    """Whether whole layers go into stages of at most `limit`, filling each as far as it goes."""
    stages, room = 1, limit
    for cost in costs:
        if cost > limit:
            return False
        if cost > room:
            stages, room = stages + 1, limit
        room -= cost
    if after > room:
        stages += 1
    return after <= limit and stages <= num_stages


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_split_within_the_limit_is_found_wherever_there_is_one(shape):
    layer, head = (count_costs(on_meta(shape, 1)).layers[0], count_costs(on_meta(shape, 1)).head)
    found = 0
    for num_layers, num_stages in itertools.product((4, 8, 16, 24, 28, 32, 36, 80), (2, 4, 8, 16)):
        if num_stages > num_layers:
            continue
        costs = [layer] * num_layers
        cut = cut_layers(costs, num_stages, after=head)
        assert [number for span in cut.spans for number in span] == list(range(num_layers))
        assert all(cut.spans[:-1])
        mean = (sum(costs) + head) / num_stages
        possible = fits(costs, head, num_stages, MOST_IMBALANCE * mean)
        assert (cut.imbalance <= MOST_IMBALANCE) == possible, (num_layers, num_stages)
        found += possible
    assert found >= 5


def test_no_cut_of_any_kind_is_better():
    draw = random.Random(0)
    for _ in range(500):
        costs = [float(draw.randint(1, 9)) for _ in range(draw.randint(2, 8))]
        num_stages = draw.randint(2, len(costs))
        before, after = draw.choice([0.0, 1.0]), draw.choice([0.0, 3.0, 9.0])
        best = min(
            max(
                sum(costs[a:b]) + before * (a == 0) + after * (n == num_stages - 1)
                for n, (a, b) in enumerate(itertools.pairwise((0, *stops, len(costs))))
            )
            for stops in itertools.combinations(range(1, len(costs) + 1), num_stages - 1)
        )
        cut = cut_layers(costs, num_stages, before=before, after=after)
        assert max(cut.costs) == pytest.approx(best)


def test_equal_layers_are_spread_evenly():
    cut = cut_layers([1.0] * 10, 4)
    assert sorted(map(len, cut.spans)) == [2, 2, 3, 3]


def test_a_split_that_cannot_be_even_is_told_with_numbers(caplog):
    with caplog.at_level(logging.WARNING):
        split_automatically(on_meta(SHAPES[2], 8), 8)
    assert "times the mean" in caplog.text and "stage 7" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        split_automatically(on_meta(SHAPES[3], 32), 4)
    assert not caplog.text


def test_the_manual_splitter_counts_layers():
    model = on_meta(SHAPES[0], 8)
    split = create_manual_causal_lm_splitter(8, input_weight=1, output_weight=3)
    sizes = [len(stage.model.layers) for stage in split(model, 3)]
    assert sizes == [3, 4, 1]
    with pytest.raises(ConfigError, match="num_layers=7: the model has 8"):
        create_manual_causal_lm_splitter(7)(model, 2)
    with pytest.raises(ConfigError, match="output_weight"):
        create_manual_causal_lm_splitter(output_weight=-1)


def test_more_stages_than_layers_are_refused():
    for split in (split_automatically, create_manual_causal_lm_splitter()):
        with pytest.raises(ConfigError, match=r"pipeline_size: 4 stages.*2 layers"):
            split(tiny_decoder(num_layers=2), 4)


def test_an_unknown_model_needs_a_splitter():
    with pytest.raises(ConfigError, match=r"model_splitter: Sequential .* give a model_splitter"):
        split_automatically(nn.Sequential(nn.Linear(2, 2)), 2)


FAMILIES = {
    "decoder": lambda: tiny_decoder(num_layers=4, sliding_window=6),
    "tied": lambda: tiny_decoder(num_layers=4, tie_embeddings=True),
    "llama": lambda: tiny_llama(num_hidden_layers=4),
    "mistral": lambda: hf("Mistral", sliding_window=5),
    "qwen2": lambda: hf("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3": lambda: hf("Qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=2),
}


def hf(family, **fields):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=258,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        **fields,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def in_a_row(stages, ids, **inputs):
    x = ids
    for stage in stages[:-1]:
        x = stage(x, **{name: v for name, v in inputs.items() if name != "labels"})
    return stages[-1](x, num_items_in_batch=10, **inputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bounds", [(0, 1, 3, 4), (0, 2, 4, 4)], ids=["layers", "head-alone"])
def test_stages_in_a_row_are_the_model(family, bounds):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    assert can_split(model)
    stages = cut_causal_lm(model, [range(a, b) for a, b in itertools.pairwise(bounds)])
    ids = torch.randint(0, 258, (2, 16))
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    wanted = model(ids, attention_mask=mask, labels=ids, num_items_in_batch=10).loss
    found = in_a_row(stages, ids, attention_mask=mask, labels=ids).loss
    assert torch.equal(found, wanted)
    wanted.backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    in_a_row(stages, ids, attention_mask=mask, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, theirs[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_keep_the_names_and_leave_the_model_whole(family):
    model = FAMILIES[family]()
    before = list(model.state_dict())
    stages = split_automatically(model, 3)
    check_stages(stages, model, 3)
    assert list(model.state_dict()) == before
    assert sorted(name for stage in stages for name in stage.state_dict()) == sorted(before)


@pytest.mark.parametrize("family", ["decoder", "llama"])
def test_activation_checkpointing_of_a_stage_is_its_own(family):
    model = FAMILIES[family]()
    stages = split_automatically(model, 2)
    ids = torch.randint(0, 258, (2, 8))
    plain = in_a_row(stages, ids, labels=ids).loss
    stages[0].gradient_checkpointing_enable()
    assert stages[0].is_gradient_checkpointing and not stages[1].is_gradient_checkpointing
    assert torch.equal(in_a_row(stages, ids, labels=ids).loss, plain)


def test_the_plain_loss_is_the_chunked_one():
    model = tiny_decoder(num_layers=2)
    stages = split_automatically(model, 2)
    ids = torch.randint(0, 258, (2, 8))
    chunked = in_a_row(stages, ids, labels=ids)
    stages[-1].plain_loss = True
    plain = in_a_row(stages, ids, labels=ids)
    torch.testing.assert_close(plain.loss, chunked.loss)
    assert plain.logits is not None


class Half(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (lambda a, b: [Half(a=a), Half(a=a, b=b)], "a.weight is on 2 stages"),
        (lambda a, b: [Half(a=a), Half()], "no stage has b.weight"),
        (lambda a, b: [Half(a=a), Half(b=b, c=nn.Linear(2, 2))], "c.weight, which the model"),
        (lambda a, b: [Half(a=a, b=b)], "list of 2 modules"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(stages, words):
    model = Half(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=words):
        check_stages(stages(model.a, model.b), model, 2)


def build_part(make, layout, place):
    source = ModelSource(make=make)
    torch.manual_seed(0)
    model = source.build_meta()
    stages = split_automatically(model, layout.num_stages)
    ties = find_ties(model, stages, layout)
    own = [stages[number] for number in layout.stages_of(place)]
    fill_stages(own, ties, place, model, source, torch.device("cpu"))
    return ModelPart(model, own, ties, place)


@pytest.mark.parametrize("family", ["decoder", "tied", "llama"])
@pytest.mark.parametrize("layout", [Layout(2), Layout(2, 2), Layout(2, 2, is_v=True)], ids=str)
def test_parts_hold_the_values_of_the_whole_under_its_names(family, layout):
    torch.manual_seed(0)
    whole = FAMILIES[family]().state_dict()
    seen = set()
    for place in range(2):
        for name, tensor in build_part(FAMILIES[family], layout, place).state_dict().items():
            assert torch.equal(tensor, whole[name]), name
            seen.add(name)
    assert seen == set(whole)


def test_a_tied_copy_is_known_by_the_stored_name():
    from headway.checkpoint.model import collect_model

    parts = [build_part(FAMILIES["tied"], Layout(2), place) for place in range(2)]
    for part in parts:
        names = [name for name, _ in part.named_parameters()]
        assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
        assert "model.embed_tokens.weight" in collect_model(part).stored
    assert collect_model(parts[1]).aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    # The name does not reach into the stage, which gets hidden states and no ids.
    assert isinstance(parts[1].stages[0].model.embed_tokens, nn.Identity)


def test_a_v_holds_both_ends_of_a_tie_as_one_weight():
    part = build_part(FAMILIES["tied"], Layout(2, 2, is_v=True), 0)
    first, last = part.stages
    assert first.model.embed_tokens.weight is last.lm_head.weight
    assert len(list(part.parameters())) == len({id(p) for p in part.parameters()})


@pytest.mark.parametrize("family", ["decoder", "llama"])
def test_a_part_speaks_for_the_whole_model(family):
    from headway.models.hf import hf_config_of
    from headway.trainers.model import flops_per_token

    whole = FAMILIES[family]()
    part = build_part(FAMILIES[family], Layout(2), 1)
    assert hf_config_of(part) == hf_config_of(whole)
    assert flops_per_token(part, []) == flops_per_token(whole, []) > 0
    own = {"_leaves_cache": False}  # stages see to that themselves
    assert vars(Objective(part)) | own == vars(Objective(whole)) | own
    part.eval()
    assert not any(module.training for module in part.stages[0].modules())
    with pytest.raises(RuntimeError, match="holds a part of"):
        part(torch.zeros(1, 4, dtype=torch.int64))


def test_added_rows_have_no_target():
    batch = {"input_ids": torch.arange(6).view(3, 2), "labels": torch.arange(6).view(3, 2), "k": 1}
    padded = pad_rows(batch, 4)
    assert padded["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    assert padded["labels"].tolist() == [[0, 1], [2, 3], [4, 5], [-100, -100]]
    pieces = cut_batch(padded, 2)
    assert [piece["input_ids"].shape[0] for piece in pieces] == [2, 2]
    assert [len(piece["input_ids"]) for piece in cut_batch(batch, 4)] == [1, 1, 1]
