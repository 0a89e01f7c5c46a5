"""Optimizer state by name: bitwise, any group order, dtypes kept, misfits named."""

import pytest
import torch
from torch import nn

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.model import collect_model
from headway.checkpoint.optimizer import find_regrouped, plan_optimizer, split_optimizer
from headway.checkpoint.tensors import ShardReader, write_shards
from headway.errors import ConfigError


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def train(model, optimizer, num_steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        x = torch.randn(5, 4, generator=generator).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(tmp_path, model, optimizer):
    encoded, tensors = split_optimizer(optimizer, collect_model(model).names_by_id())
    write_shards(tmp_path, "optimizer", tensors)
    return encoded


def load(tmp_path, model, optimizer, encoded):
    names = collect_model(model).names_by_id()
    reader = ShardReader(tmp_path, "optimizer")
    plan = plan_optimizer(optimizer, names, encoded, reader)
    reader.fill(plan.destinations)
    plan.finish()


def copy_of(model, dtype=torch.float32):
    other = make_model(seed=9, dtype=dtype)
    other.load_state_dict(model.state_dict())
    return other


def weights_only(model):
    return [p for p in model.parameters() if p.ndim == 2]


FACTORIES = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True, amsgrad=True),
    "adamw_tensor_lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1)),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
}


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("name", FACTORIES)
def test_continues_bitwise(tmp_path, name, num_steps):
    model = make_model()
    optimizer = FACTORIES[name](model.parameters())
    train(model, optimizer, num_steps)
    encoded = save(tmp_path, model, optimizer)
    other = copy_of(model)
    other_optimizer = FACTORIES[name](other.parameters())
    train(copy := make_model(3), FACTORIES[name](copy.parameters()), 1)
    load(tmp_path, other, other_optimizer, encoded)
    train(model, optimizer, 2, seed=5)
    train(other, other_optimizer, 2, seed=5)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)
        assert optimizer.state[a].keys() == other_optimizer.state[b].keys()
        for key, value in optimizer.state[a].items():
            found = other_optimizer.state[b][key]
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, found) and value.dtype == found.dtype
            else:
                assert value == found


@pytest.mark.parametrize("name", ["adamw", "adamw_fused", "adamw_foreach", "sgd_momentum"])
def test_a_parameter_in_another_memory_order_continues_bitwise(tmp_path, name):
    """The fused kernels go through memory: a moment must lie as its parameter does."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 4))
        model[0].to(memory_format=torch.channels_last)
        model[1].weight = nn.Parameter(torch.randn(4, 4).t())
        return model, FACTORIES[name](model.parameters())

    def step(model, optimizer, num_steps):
        generator = torch.Generator().manual_seed(num_steps)
        for _ in range(num_steps):
            model(torch.randn(2, 2, 6, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    step(model, optimizer, 3)
    encoded = save(tmp_path, model, optimizer)
    other, other_optimizer = build()
    other.load_state_dict(model.state_dict())
    load(tmp_path, other, other_optimizer, encoded)
    step(model, optimizer, 2)
    step(other, other_optimizer, 2)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)


def test_muon_continues_bitwise(tmp_path):
    model = make_model()
    optimizer = torch.optim.Muon(weights_only(model), lr=0.02)
    train(model, optimizer, 2)
    encoded = save(tmp_path, model, optimizer)
    other = copy_of(model)
    other_optimizer = torch.optim.Muon(weights_only(other), lr=0.5)
    load(tmp_path, other, other_optimizer, encoded)
    assert other_optimizer.param_groups[0]["lr"] == 0.02
    train(model, optimizer, 2, seed=5)
    train(other, other_optimizer, 2, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_loading_over_a_used_optimizer_reuses_its_tensors(tmp_path):
    model = make_model()
    optimizer = FACTORIES["adamw"](model.parameters())
    train(model, optimizer, 2)
    encoded = save(tmp_path, model, optimizer)
    param = model[0].weight
    before = optimizer.state[param]["exp_avg"]
    expected = before.clone()
    train(model, optimizer, 2)
    assert not torch.equal(before, expected)
    load(tmp_path, model, optimizer, encoded)
    assert optimizer.state[param]["exp_avg"] is before and torch.equal(before, expected)
    assert optimizer.state[param]["step"] == 2


def test_state_before_the_first_step_clears_later_state(tmp_path):
    model = make_model()
    optimizer = FACTORIES["adamw"](model.parameters())
    encoded = save(tmp_path, model, optimizer)
    train(model, optimizer, 1)
    load(tmp_path, model, optimizer, encoded)
    assert len(optimizer.state) == 0


def test_state_dtype_is_kept_when_it_differs_from_the_parameters(tmp_path):
    model = make_model(dtype=torch.bfloat16)
    optimizer = FACTORIES["sgd_momentum"](model.parameters())
    train(model, optimizer, 1)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.randn(param.shape)  # float32
    encoded = save(tmp_path, model, optimizer)
    other = copy_of(model, torch.bfloat16)
    other_optimizer = FACTORIES["sgd_momentum"](other.parameters())
    load(tmp_path, other, other_optimizer, encoded)
    for a, b in zip(model.parameters(), other.parameters()):
        found = other_optimizer.state[b]["momentum_buffer"]
        assert found.dtype == torch.float32
        assert torch.equal(found, optimizer.state[a]["momentum_buffer"])


@pytest.mark.parametrize("name", ["adamw_fused", "adamw_foreach", "sgd_momentum", "adafactor"])
@pytest.mark.parametrize("now", [torch.bfloat16, torch.float64])
def test_moments_go_with_a_parameter_of_another_dtype(tmp_path, name, now):
    model = make_model()
    optimizer = FACTORIES[name](model.parameters())
    train(model, optimizer, 2)
    encoded = save(tmp_path, model, optimizer)
    other = copy_of(model, now)
    other_optimizer = FACTORIES[name](other.parameters())
    load(tmp_path, other, other_optimizer, encoded)
    for a, b in zip(model.parameters(), other.parameters()):
        for key, value in optimizer.state[a].items():
            found = other_optimizer.state[b][key]
            assert found.dtype == (torch.float32 if key == "step" else now)
            assert torch.equal(found, value.to(found.dtype))
    train(other, other_optimizer, 1)


def two_groups(model, *, reverse=False, merge=False, lr=(0.1, 0.2)):
    decay = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": decay, "weight_decay": 0.5, "lr": lr[0]},
        {"params": plain, "weight_decay": 0.5 if merge else 0.0, "lr": lr[1]},
    ]
    if reverse:
        groups = [{**g, "params": list(reversed(g["params"]))} for g in reversed(groups)]
    return torch.optim.AdamW(groups)


def test_group_order_does_not_matter(tmp_path):
    model = make_model()
    optimizer = two_groups(model)
    train(model, optimizer, 2)
    encoded = save(tmp_path, model, optimizer)
    other = copy_of(model)
    other_optimizer = two_groups(other, reverse=True, lr=(7.0, 8.0))
    load(tmp_path, other, other_optimizer, encoded)
    settings = [(g["lr"], g["weight_decay"]) for g in other_optimizer.param_groups]
    assert settings == [(0.2, 0.0), (0.1, 0.5)]
    train(model, optimizer, 2, seed=5)
    train(other, other_optimizer, 2, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_regrouping_is_refused_only_if_settings_differ(tmp_path):
    model = make_model()
    one_group = torch.optim.AdamW(model.parameters())
    encoded = save(tmp_path, model, two_groups(model))
    with pytest.raises(CheckpointError, match=r"group 0 joins the saved groups \[0, 1\]"):
        load(tmp_path, model, one_group, encoded)
    same = tmp_path / "same"
    same.mkdir()
    encoded = save(same, model, two_groups(model, merge=True, lr=(0.3, 0.3)))
    load(same, model, one_group, encoded)
    assert one_group.param_groups[0]["lr"] == 0.3


def named(model, split, **first):
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": params[:split], "group_name": "first", **first},
            {"params": params[split:], "group_name": "second", "lr": 0.2},
        ],
        lr=0.1,
    )


def test_named_groups_may_have_other_parameters(tmp_path):
    model = make_model()
    optimizer = named(model, 1, weight_decay=0.5)
    train(model, optimizer, 2)
    encoded = save(tmp_path, model, optimizer)
    other = copy_of(model)
    regrouped = named(other, 3, lr=7.0, weight_decay=0.7)
    load(tmp_path, other, regrouped, encoded)
    assert [(g["lr"], g["weight_decay"]) for g in regrouped.param_groups] == [
        (0.1, 0.5),
        (0.2, 0.01),
    ]
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(optimizer.state[a]["exp_avg"], regrouped.state[b]["exp_avg"])
    [line] = find_regrouped(regrouped, collect_model(other).names_by_id(), encoded)
    assert line.startswith("0.bias and 1 more are in the param group first now, in second in the")
    train(other, regrouped, 1)


def test_a_state_of_another_kind_is_refused(tmp_path):
    model = make_model()
    optimizer = named(model, 1, amsgrad=True)
    train(model, optimizer, 1)
    encoded = save(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match=r"groups\.first: amsgrad is True .* 0\.bias.*, 2\.w"):
        load(tmp_path, model, named(model, 3, amsgrad=True), encoded)


def test_machine_flags_stay_and_tensor_lr_is_filled_in_place(tmp_path):
    model = make_model()
    encoded = save(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=0.25, fused=True))
    lr = torch.tensor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    load(tmp_path, model, optimizer, encoded)
    group = optimizer.param_groups[0]
    assert group["lr"] is lr and float(lr) == 0.25
    assert group["fused"] is None and group["foreach"] is False


def test_misfits_are_named(tmp_path):
    model = make_model()
    optimizer = FACTORIES["adamw"](model.parameters())
    train(model, optimizer, 1)
    encoded = save(tmp_path, model, optimizer)

    wider = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    with pytest.raises(CheckpointError, match=r"2\.weight is \[3, 8\] there, \[5, 8\] here"):
        load(tmp_path, wider, FACTORIES["adamw"](wider.parameters()), encoded)
    renamed = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    with pytest.raises(CheckpointError, match=r"missing in it: 1\.bias .*does not have: 2\.bias"):
        load(tmp_path, renamed, FACTORIES["adamw"](renamed.parameters()), encoded)
    with pytest.raises(CheckpointError, match="state of AdamW, the run uses SGD"):
        load(tmp_path, model, FACTORIES["sgd"](model.parameters()), encoded)
    stranger = FACTORIES["adamw"]([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ConfigError, match="parameter 0 of optimizer group 0"):
        save(tmp_path, model, stranger)


def test_keys_are_state_then_parameter_name(tmp_path):
    model = make_model()
    optimizer = FACTORIES["adamw"](model.parameters())
    train(model, optimizer, 1)
    _, tensors = split_optimizer(optimizer, collect_model(model).names_by_id())
    assert {"exp_avg.0.weight", "exp_avg_sq.2.bias", "step.0.weight"} <= set(tensors)
