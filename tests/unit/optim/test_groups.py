import logging

import pytest
import torch
from torch import nn

from headway import ConfigError, TrainingArguments
from headway.optim.build import build_optimizer
from headway.optim.groups import deal_parameters, make_groups
from headway.optim.multi import JoinedOptimizer


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


def test_a_pattern_that_matches_nothing_is_reported_with_the_closest_names(caplog):
    with caplog.at_level(logging.WARNING):
        groups_of({"typo": {"regex": r"^embde\.w"}})
    assert "optimizer_groups.typo" in caplog.text and "embde" in caplog.text
    assert "matches no parameter; the closest are: embed.weight" in caplog.text


def test_a_pattern_whose_parameters_are_taken_or_frozen_is_reported_as_such(caplog):
    net = model()
    net["norm"].requires_grad_(False)
    groups = {"all": {"regex": "."}, "body": {"regex": "body"}, "norms": {"regex": "^norm"}}
    make_groups(net.named_parameters(), groups)
    assert "matches only what earlier groups took (all: body.weight, body.bias)" in caplog.text
    assert "matches frozen parameters only (norm.weight, norm.bias)" in caplog.text


def test_no_warning_for_what_another_rank_has(caplog):
    named = model().named_parameters()
    deal_parameters(named, {"head": {"regex": "lm_head"}}, elsewhere=["lm_head.weight"])
    assert not caplog.text


def tied_model():
    net = nn.ModuleDict({"embed": nn.Embedding(4, 3), "lm_head": nn.Linear(3, 4, bias=False)})
    net["lm_head"].weight = net["embed"].weight
    return net


def test_a_tied_parameter_goes_by_any_of_its_names():
    args = TrainingArguments(use_cpu=True)
    groups = {"head": {"regex": "lm_head", "config": {"lr": 0.5}}, "rest": {"regex": "embed"}}
    [group] = build_optimizer(tied_model(), args, groups=groups).param_groups
    assert group["group_name"] == "head" and group["lr"] == 0.5
    assert group["param_names"] == ["embed.weight"], "and keeps its stored name"


def test_debug_tells_every_assignment(caplog):
    args = TrainingArguments(use_cpu=True, debug_optimizer_groups=True)
    with caplog.at_level(logging.INFO):
        build_optimizer(tied_model(), args, groups={"head": {"regex": "lm_head"}})
    assert "optimizer group head <- embed.weight (also lm_head.weight)" in caplog.text


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
        ([{"regex": "x"}], "optimizer_groups must be a mapping of names to groups"),
        *[
            ({"g": {"regex": "x", "config": config}}, rf"optimizer_groups\.g\.config\.{message}")
            for config, message in [
                ({"lr": -1}, "lr must be a number, 0 or more, got -1"),
                ({"lr": "fast"}, "lr must be a number, 0 or more, got 'fast'"),
                ({"lr": "0.1"}, "lr .* without quotes"),
                ({"lr": None}, "lr must be a number, 0 or more, got None"),
                ({"lr": True}, "lr must be a number"),
                ({"lr": float("nan")}, "lr must be a number"),
                ({"weight_decay": -0.1}, "weight_decay must be"),
                ({"betas": [0.5]}, r"betas must be a list of 2 numbers in \[0, 1\)"),
                ({"betas": [0.9, 1.0]}, "betas must be"),
                ({"nesterov": "no"}, "nesterov must be true or false, got 'no'"),
                ({"group_name": "h"}, "group_name must be left out"),
            ]
        ],
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


class ScaledRows(nn.Module):
    """A norm by its name only, with a table that is none."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.table = nn.Parameter(torch.ones(2, 3))


class MyNorm(ScaledRows):
    pass


def test_no_decay_on_tells_kinds_by_module_and_not_by_name():
    net = nn.ModuleDict(
        {
            "tokens": nn.Embedding(4, 3),
            "norm_free_proj": nn.Linear(3, 3),
            "scale": nn.LayerNorm(3),
            "own": MyNorm(),
            "rows": ScaledRows(),
            "lm_head": nn.Linear(3, 4, bias=False),
        }
    )
    args = TrainingArguments(
        use_cpu=True, weight_decay=0.1, no_decay_on=["norm", "bias", "embedding"]
    )
    decayed, free = build_optimizer(net, args).param_groups
    assert decayed["weight_decay"] == 0.1 and free["weight_decay"] == 0.0
    assert sorted(free["param_names"]) == [
        "norm_free_proj.bias",
        "own.gain",
        "scale.bias",
        "scale.weight",
        "tokens.weight",
    ]
    more = TrainingArguments(use_cpu=True, no_decay_on=["vector", "head"])
    _, free = build_optimizer(net, more).param_groups
    assert "rows.gain" in free["param_names"] and "lm_head.weight" in free["param_names"]
    assert len(build_optimizer(net, TrainingArguments(use_cpu=True)).param_groups) == 1


def test_a_group_with_its_own_decay_keeps_it_and_tied_heads_are_embeddings():
    args = TrainingArguments(use_cpu=True, weight_decay=0.1, no_decay_on="embedding")
    [free] = build_optimizer(tied_model(), args).param_groups
    assert free["weight_decay"] == 0.0
    groups = {"mine": {"regex": "embed", "config": {"weight_decay": 0.3}}}
    [kept] = build_optimizer(tied_model(), args, groups=groups).param_groups
    assert kept["weight_decay"] == 0.3 and kept["group_name"] == "mine"


def test_an_optimizer_without_decay_cannot_leave_it_off():
    args = TrainingArguments(use_cpu=True, no_decay_on=["norm"])
    with pytest.raises(ConfigError, match="no_decay_on: Rprop has no weight_decay"):
        build_optimizer(model(), args, cls_and_kwargs=(torch.optim.Rprop, {}))


@pytest.mark.parametrize(
    ("optim", "config", "message"),
    [
        ("adamw", {"wieght_decay": 0.0}, ": unknown .*mean 'weight_decay'"),
        ("muon", {"wieght_decay": 0.0}, ": unknown .*mean 'weight_decay'"),
        ("adamw", {"learning_rate": 0.1}, ": unknown .*mean 'lr'"),
        ("muon", {"learning_rate": 0.1}, ": unknown .*mean 'lr'"),
        # By the kind of the optimizer's own value.
        ("sgd", {"dampening": "much"}, r"\.dampening must be a number, got 'much'"),
        ("adamw", {"betas": [0.1, 0.2, 0.3]}, r"\.betas must be a list of 2 numbers"),
        ("adamw", {"eps": [0.1, 0.2]}, r"\.eps must be a number"),
        ("muon", {"ns_coefficients": [1.0]}, r"\.ns_coefficients must be a list of 3 numbers"),
    ],
)
def test_a_setting_that_the_optimizer_cannot_use_is_refused(optim, config, message):
    args = TrainingArguments(use_cpu=True, optim=optim)
    groups = {"g": {"regex": "norm|body", "config": config}}
    with pytest.raises(ConfigError, match=rf"optimizer_groups\.g\.config{message}"):
        build_optimizer(model(), args, groups=groups)


def test_settings_of_other_kinds_are_taken():
    args = TrainingArguments(use_cpu=True)
    config = {"lr": torch.tensor(0.1), "betas": [0.5, 0.6], "eps": 0, "fused": None}
    built = build_optimizer(model(), args, groups={"g": {"regex": "norm", "config": config}})
    assert built.param_groups[0]["betas"] == (0.5, 0.6) and built.param_groups[0]["lr"] == 0.1
    groups = {"g": {"regex": "norm", "config": {"eps": [None, 0.1]}}}
    built = build_optimizer(
        model(), args, groups=groups, cls_and_kwargs=(torch.optim.Adafactor, {})
    )
    assert built.param_groups[0]["eps"] == (None, 0.1)
    groups["g"]["config"]["eps"] = 0.1
    with pytest.raises(ConfigError, match=r"g\.config\.eps must be a list, got 0\.1"):
        build_optimizer(model(), args, groups=groups, cls_and_kwargs=(torch.optim.Adafactor, {}))


def sgd(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def test_groups_with_factories_make_one_joined_optimizer():
    args = TrainingArguments(use_cpu=True, learning_rate=1e-3)
    groups = {
        "norms": {"regex": "norm", "factory": sgd},
        "body": {"regex": "body.weight"},
        "embed": {"regex": "embed", "factory": sgd, "config": {"lr": 0.25}},
    }
    built = build_optimizer(model(), args, groups=groups)
    assert type(built) is JoinedOptimizer and len(built.parts) == 2, "one for both of sgd's"
    assert [(g["group_name"], g["optimizer_class"], g["lr"]) for g in built.param_groups] == [
        ("norms", "SGD", 0.5),
        ("body", "AdamW", 1e-3),
        ("embed", "SGD", 0.25),
        ("__default__", "AdamW", 1e-3),
    ]


def test_a_group_factory_must_make_an_optimizer():
    groups = {"g": {"regex": "norm", "factory": lambda params: None}}
    with pytest.raises(ConfigError, match=r"optimizer_groups\.g\.factory must return"):
        build_optimizer(model(), TrainingArguments(use_cpu=True), groups=groups)


def test_factories_of_groups_and_the_step_in_the_backward_pass_exclude_each_other():
    args = TrainingArguments(use_cpu=True, fuse_optim_with_backward=True)
    with pytest.raises(ConfigError, match="cannot be used with a factory in optimizer_groups"):
        build_optimizer(model(), args, groups={"g": {"regex": "norm", "factory": sgd}})
