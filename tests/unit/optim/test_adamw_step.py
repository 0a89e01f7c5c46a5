"""Whose steps the GPU kernel may take, as far as that can be told without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headway.optim.adamw_step import KernelStep, _is_watched


def make() -> tuple[nn.Parameter, torch.optim.AdamW]:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    return weight, torch.optim.AdamW([weight], lr=0.1, fused=True)


def test_on_a_cpu_torch_takes_the_step() -> None:
    assert KernelStep.of(make()[1]) is None


def test_other_optimizers_step_by_themselves() -> None:
    class Own(torch.optim.AdamW):
        pass

    weight = make()[0]
    assert KernelStep.of(Own([weight])) is None
    assert KernelStep.of(torch.optim.SGD([weight], lr=0.1)) is None


def test_whoever_waits_for_a_call_of_step_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make()[1]
    assert not _is_watched(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert not _is_watched(optimizer)  # it wraps `step` only to see whether there was one
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", lambda: None)
        assert _is_watched(optimizer)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert _is_watched(optimizer)
    handle.remove()
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert _is_watched(optimizer)
    handle.remove()
    assert not _is_watched(optimizer)
