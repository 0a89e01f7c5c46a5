"""The kernel of AdamW in Triton's interpreter, against torch's own step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_on_cpu import open_kernels
from torch import Tensor, nn
from torch.optim import AdamW

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.optim import adamw_step
from headway.optim.adamw_step import KernelStep
from headway.strategies import single

open_kernels(adamw_step)

# Around the size of a block, and several in one tensor.
SIZES = [(1,), (7, 3), (4096,), (4097,), (3, 3000), (64, 64), (0,)]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none without a GPU."""
    monkeypatch.setattr(adamw_step, "_send", lambda values, device: values.to(device))


def make(**settings: Any) -> tuple[list[nn.Parameter], AdamW]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size)) for size in SIZES]
    groups = [{"params": weights[:2], "weight_decay": 0.0}, {"params": weights[2:]}]
    return weights, AdamW(groups, **{**SETTINGS, "fused": True, **settings})


def give_grads(weights: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


def factor_of(weights: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    norm = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    return norm, (1.0 / (norm + 1e-6)).clamp(max=1.0)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_its_updates_are_those_of_torch(as_tensor: bool) -> None:
    weights, optimizer = make()
    others, reference = make()
    for number in range(6):
        for group in (*optimizer.param_groups, *reference.param_groups):
            lr = 1e-2 / (1 + number)
            group["lr"] = torch.tensor(lr) if as_tensor else lr
        give_grads(weights, number)
        give_grads(others, number)
        if number % 3 == 1:  # parameters that had no part in this step, one group whole
            for index in (0, 1, 3):
                weights[index].grad = others[index].grad = None
        KernelStep(optimizer).take()
        reference.step()
    for one, other in zip(weights, others):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            ours, theirs = optimizer.state[one][key], reference.state[other][key]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert optimizer.state[weights[3]]["step"] == 4
    assert optimizer.state[weights[4]]["step"] == 6


def test_clipping_in_the_step_is_clipping_before_it_to_the_bit() -> None:
    weights, optimizer = make()
    others, before = make()
    for number in range(3):
        give_grads(weights, number)
        give_grads(others, number)
        norm, factor = factor_of(weights)
        step = KernelStep(optimizer)
        step.grad_factor = factor
        step.take()
        nn.utils.clip_grads_with_norm_(others, 1.0, norm)
        KernelStep(before).take()
    assert all(torch.equal(one, other) for one, other in zip(weights, others))


def test_a_step_is_withheld_by_the_flag_alone() -> None:
    weights, optimizer = make()
    give_grads(weights, 0)
    KernelStep(optimizer).take()
    held = copy.deepcopy([weights, optimizer.state_dict()["state"]])
    give_grads(weights, 1)
    assert weights[3].grad is not None
    weights[3].grad[5] = float("nan")
    step = KernelStep(optimizer)
    step.grad_factor = factor_of(weights)[1]
    assert step.grad_factor.isnan()
    step.take(torch.ones(()))
    for one, other in zip(weights, held[0]):
        assert torch.equal(one, other)
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, held[1][number][key]) for key, value in state.items())
    give_grads(weights, 2)
    KernelStep(optimizer).take(torch.zeros(()))
    assert optimizer.state[weights[3]]["step"] == 2
    assert not torch.equal(weights[3], held[0][3])


def test_a_first_step_that_is_withheld_leaves_nothing_behind() -> None:
    weights, optimizer = make()
    give_grads(weights, 0)
    before = copy.deepcopy(weights)
    KernelStep(optimizer).take(torch.ones(()))
    assert all(torch.equal(one, other) for one, other in zip(weights, before))
    for weight in weights:
        assert all(not value.any() for value in optimizer.state[weight].values())


def test_a_graph_that_holds_the_weights_finds_them_changed() -> None:
    weight = nn.Parameter(torch.randn(5))
    optimizer = AdamW([weight], **SETTINGS, fused=True)
    loss = weight.square().sum()
    weight.grad = torch.ones(5)
    KernelStep(optimizer).take()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_betas_that_are_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would take them for addresses."""
    monkeypatch.setattr(adamw_step, "_is_plain", lambda tensor, like: True)
    monkeypatch.setattr(adamw_step, "triton_works", lambda: True)
    for betas, fits in (((0.9, 0.98), True), ((torch.tensor(0.9), torch.tensor(0.98)), False)):
        weights, optimizer = make(betas=betas)
        give_grads(weights, 0)
        assert (KernelStep.of(optimizer) is not None) == fits


class Listener(TrainerCallback):
    """Wants to see gradients as they are updated with."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, model: nn.Module) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(grads)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(x) - 1).square().mean()}


def train(folder: Path, *callbacks: TrainerCallback, **options: Any) -> list[Tensor]:
    """Weights after a few steps."""
    torch.manual_seed(0)
    model, generator = Small(), torch.Generator().manual_seed(1)
    settings = {"max_grad_norm": 0.25, **options}
    Trainer(
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=5,
            per_device_train_batch_size=2,
            weight_decay=0.1,
            learning_rate=0.05,
            save_strategy="no",
            use_cpu=True,
            seed=0,
            **settings,
        ),
        model=model,
        train_dataset=[{"x": torch.randn(5, generator=generator)} for _ in range(10)],
        callbacks=list(callbacks),
        default_callbacks=False,
    ).train()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, [2] * 5),
        ({"max_grad_norm": 100.0}, [2] * 5),
        ({"optim": "muon"}, [1] * 5),
        ({"fuse_optim_with_backward": True, "max_grad_norm": 0.0}, [1] * 10),
    ],
    ids=["alone", "nothing to clip", "beside muon", "in the backward pass"],
)
def test_runs_with_it_are_those_of_torch(
    options: dict[str, Any], taken: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`taken`: how many weights each of its steps has."""
    plain = {name: value for name, value in options.items() if name != "fuse_optim_with_backward"}
    wanted = train(tmp_path / "torch", **plain)
    sizes: list[int] = []

    class Noted(KernelStep):
        @classmethod
        def of(cls, optimizer: torch.optim.Optimizer) -> Noted | None:  # type: ignore[override]
            return cls(optimizer) if type(optimizer) is AdamW else None

        def take(self, found_inf: Tensor | None = None) -> None:
            sizes.append(sum(len(group["params"]) for group in self._optimizer.param_groups))
            super().take(found_inf)

    for module in (adamw_step, single):
        monkeypatch.setattr(module, "KernelStep", Noted)
    found = train(tmp_path / "kernel", **options)
    assert sizes == taken
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_run_that_is_clipped_in_the_step_is_that_of_one_that_is_clipped_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    factors: list[Tensor | None] = []

    class Noted(KernelStep):
        @classmethod
        def of(cls, optimizer: torch.optim.Optimizer) -> Noted:  # type: ignore[override]
            assert type(optimizer) is AdamW
            return cls(optimizer)

        def take(self, found_inf: Tensor | None = None) -> None:
            factors.append(self.grad_factor)
            super().take(found_inf)

    for module in (adamw_step, single):
        monkeypatch.setattr(module, "KernelStep", Noted)

    in_step = train(tmp_path / "in step")
    assert len(factors) == 5 and all(f is not None and f < 1 for f in factors)
    factors.clear()
    listener = Listener()
    before = train(tmp_path / "before", listener)
    assert factors == [None] * 5
    assert listener.norms == pytest.approx([0.25] * 5, rel=1e-4), "as they are updated with"
    assert all(map(torch.equal, in_step, before))
