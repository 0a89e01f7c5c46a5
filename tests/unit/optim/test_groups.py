import logging

import pytest
import torch
from torch import nn

from headway import ConfigError, TrainingArguments
from headway.optim.build import build_optimizer
from headway.optim.groups import make_groups


def model():
    return nn.ModuleDict(
        {"embed": nn.Embedding(4, 3), "body": nn.Linear(3, 3), "norm": nn.LayerNorm(3)}
    )


def groups_of(groups):
    found = make_groups(model().named_parameters(), groups)
    return {g["group_name"]: g["param_names"] for g in found}


def test_first_match_wins_and_the_default_comes_last():
    found = groups_of(
        {
            "no_decay": {"regex": "norm|bias|embed", "config": {"weight_decay": 0.0}},
            "norms": {"regex": "norm"},
            "body": {"regex": r"^body\."},
        }
    )
    assert list(found) == ["no_decay", "body"], "an empty group vanishes"
    assert found["no_decay"] == ["embed.weight", "body.bias", "norm.weight", "norm.bias"]
    assert found["body"] == ["body.weight"]


def test_unmatched_go_to_the_default_and_none_removes_a_group():
    found = groups_of({"embed": {"regex": "embed", "config": None}, "gone": None})
    assert list(found) == ["embed", "__default__"]
    assert len(found["__default__"]) == 4


def test_a_pattern_that_matches_nothing_is_reported(caplog):
    with caplog.at_level(logging.WARNING):
        groups_of({"typo": {"regex": "embde"}})
    assert "optimizer_groups.typo" in caplog.text and "embde" in caplog.text


def test_frozen_and_tied_parameters_appear_at_most_once():
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    net["b"].weight = net["a"].weight
    frozen = nn.Linear(2, 2)
    frozen.requires_grad_(False)
    net["c"] = frozen
    [group] = make_groups(net.named_parameters(), None)
    assert group["param_names"] == ["a.weight"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"__default__": {"regex": "x"}}, "kept for parameters"),
        ({"g": "x"}, "optimizer_groups.g: must be a mapping"),
        ({"g": {"config": {}}}, "optimizer_groups.g.regex"),
        ({"g": {"regex": "("}}, "does not compile"),
        ({"g": {"regex": "x", "config": 3}}, "optimizer_groups.g.config"),
        ({"g": {"regex": "x", "confg": {}}}, "did you mean 'config'"),
        ({"g": {"regex": "x", "factory": "SGD"}}, "must be callable"),
    ],
)
def test_malformed_groups(groups, message):
    with pytest.raises(ConfigError, match=message):
        groups_of(groups)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as raised:
        groups_of({"a": "x", "b": {"regex": "("}})
    assert len(raised.value.problems) == 2


def test_group_settings_reach_the_optimizer():
    args = TrainingArguments(weight_decay=0.1, learning_rate=1e-3, use_cpu=True)
    optimizer = build_optimizer(
        model(),
        args,
        groups={"no_decay": {"regex": "norm|bias", "config": {"weight_decay": 0.0}}},
    )
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1]
    assert all(g["fused"] for g in optimizer.param_groups)


def test_factory_before_class_before_arguments():
    args = TrainingArguments(use_cpu=True)
    built = build_optimizer(
        model(),
        args,
        factory=lambda params: torch.optim.SGD(params, lr=0.5),
        cls_and_kwargs=(torch.optim.Adam, {}),
    )
    assert type(built) is torch.optim.SGD
    built = build_optimizer(model(), args, cls_and_kwargs=(torch.optim.Adam, {"lr": 0.1}))
    assert type(built) is torch.optim.Adam
    with pytest.raises(ConfigError, match=r"must return a torch\.optim\.Optimizer"):
        build_optimizer(model(), args, factory=lambda params: None)


def test_a_model_without_trainable_parameters_is_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        build_optimizer(frozen, TrainingArguments(use_cpu=True))
