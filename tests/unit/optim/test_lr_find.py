"""`headway.optim.lr_find`: a plain model and a loader, left as they were."""

from __future__ import annotations

import builtins
import json
import math
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from headway.errors import ConfigError
from headway.optim import LRFinderResult, lr_find
from headway.optim.lr_finder import Rates, leading_rate
from headway.optim.multi import JoinedOptimizer
from headway.optim.preserved import Preserved, preserve, uninterrupted


class Net(nn.Module):
    """Has buffers that change, a part that is frozen in evaluation mode, and randomness."""

    def __init__(self, fails_at: int = -1, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)
        self.num_calls, self.fails_at, self.error = 0, fails_at, error

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise self.error("in the middle")
        random.random()
        np.random.rand()
        return {"loss": nn.functional.cross_entropy(self.head(self.drop(self.norm(x))), y)}


def make_data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    y = x[:, :4].argmax(1)
    pairs = [{"x": a, "y": b} for a, b in zip(x, y)]
    order = torch.Generator().manual_seed(5)
    return DataLoader(pairs, batch_size=16, shuffle=True, generator=order)  # type: ignore[arg-type]


def look_at(model: nn.Module, loader: Any) -> dict[str, Any]:
    """Everything a finder might leave changed, as comparable values."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "random": (random.getstate(), str(np.random.get_state(legacy=False))),
        "torch": torch.get_rng_state(),
        "loader": loader.generator.get_state(),
    }


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, Tensor):
        assert before.dtype == after.dtype and torch.equal(before, after)
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert_same(value, after[key])
    elif isinstance(before, list):
        assert len(before) == len(after)
        for one, other in zip(before, after):
            assert_same(one, other)
    else:
        assert before == after


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_everything_is_put_back(error: type[BaseException] | None) -> None:
    torch.manual_seed(0)
    model = Net(-1 if error is None else 7, error or RuntimeError)
    model.norm.eval()
    loader = make_data()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, gradient = look_at(model, loader), model.head.weight.grad
    if error is None:
        result = lr_find(model, loader, num_iterations=20, num_seeds=2)
        assert len(result.runs) == 2 and result.runs[0].losses != result.runs[1].losses
    else:
        with pytest.raises(error, match="in the middle"):
            lr_find(model, loader, num_iterations=20)
    assert_same(before, look_at(model, loader))
    assert model.head.weight.grad is gradient


def test_two_calls_find_the_same() -> None:
    torch.manual_seed(0)
    model, loader = Net(), make_data()
    first = lr_find(model, loader, num_iterations=20)
    torch.rand(7)
    assert lr_find(model, loader, num_iterations=20).to_dict() == first.to_dict()


def test_it_really_trains_at_the_rates_it_tells() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    rates: list[float] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    result = lr_find(
        model,
        [(torch.ones(1, 1), torch.ones(1, 1))],
        start_lr=0.1,
        end_lr=0.4,
        num_iterations=3,
        loss_fn=lambda model, batch, outputs: (outputs - batch[1]).square().sum(),
        optimizer_factory=lambda params: Watched(params, lr=1.0),
    )
    assert rates == result.lrs == pytest.approx([0.1, 0.2, 0.4])
    # (1 - w)^2 with steps of 2 lr (1 - w): what is left is multiplied by 1 - 2 lr.
    assert result.losses == pytest.approx([1.0, 0.8**2, (0.8 * 0.6) ** 2])


def test_groups_keep_their_ratio_and_tensors_their_place() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    seen = []

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, batch: Tensor) -> Tensor:
            return (self.first + self.second).sum() * batch.sum()

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append([float(group["lr"]) for group in self.param_groups])
            return super().step(closure)

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": torch.tensor(0.1)}]
        return Watched(groups, lr=0.01)

    lr_find(
        Two(), [torch.ones(1)], start_lr=1e-3, end_lr=1e-1, num_iterations=3, optimizer_factory=make
    )
    assert [b / a for a, b in seen] == pytest.approx([10] * 3)


def test_the_rate_of_muon_stands_for_that_of_the_adamw_beside_it() -> None:
    vector, matrix = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    parts = [torch.optim.AdamW([vector], lr=0.1), torch.optim.Muon([matrix], lr=1.0)]
    joined = JoinedOptimizer(parts)
    assert leading_rate(joined) == (True, 1.0) and leading_rate(parts[0]) == (False, 0.1)
    Rates(joined).set(0.5)
    assert [group["lr"] for group in joined.param_groups] == [0.05, 0.5]


class Unsized:
    """A loader without a length, which can be read again."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_a_loader_without_a_length_is_read_again_and_again() -> None:
    batch = {"x": torch.randn(4, 8), "y": torch.tensor([0, 1, 2, 3])}
    assert len(lr_find(Net(), Unsized([batch]), num_iterations=5).lrs) == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (Net(), []), "train_dataloader: .*yields no batch"),
        (lambda: (Net(), Unsized([])), "train_dataloader: .*yields no batch"),
        (lambda: (Net(), iter([1])), "train_dataloader: .*only once"),
        (lambda: (nn.Linear(2, 2), [torch.ones(3, 2)]), "loss_fn"),
        (lambda: (nn.Identity(), [torch.ones(1)]), "no parameter that requires a gradient"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    make: Callable[[], tuple[nn.Module, Any]], message: str
) -> None:
    model, loader = make()
    with pytest.raises(ConfigError, match=message):
        lr_find(model, loader)
    with pytest.raises(ConfigError, match="num_seeds: 0 given"):
        lr_find(model, loader, num_seeds=0)


def test_no_suggestion_for_a_model_that_does_not_learn() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, batch: Tensor) -> Tensor:
            return 3.0 + 0.0 * self.weight.sum()

    result = lr_find(Stubborn(), [torch.ones(1)], num_iterations=30)
    assert result.suggested_lr is None and result.suggestions == {} and result.spread == {}
    assert result.reason is not None and "never fell" in result.reason


def test_a_loss_that_is_no_number_from_the_start_is_told_as_that(tmp_path: Path) -> None:
    broken = nn.Linear(2, 1)
    nn.init.constant_(broken.weight, math.nan)
    result = lr_find(
        broken, [torch.ones(1, 2)], loss_fn=lambda m, b, outputs: outputs.sum(), start_lr=1e-6
    )
    assert (result.lrs, result.suggested_lr) == ([], None)
    assert str(result.reason).startswith("the loss is not finite at the smallest rate tried (1e-06")
    result.plot(tmp_path / "nothing.png")


def test_it_stops_where_the_loss_explodes() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    result = lr_find(
        nn.Linear(4, 1),
        data,
        end_lr=1e6,
        loss_fn=lambda model, batch, outputs: (outputs - batch[1]).square().mean(),
        optimizer_factory=lambda params: torch.optim.SGD(params, lr=1.0),
    )
    assert result.runs[0].stopped == "diverged"
    assert len(result.lrs) < 100 and all(map(math.isfinite, result.losses))
    assert result.suggested_lr is not None and 1e-3 < result.suggested_lr < 1


def test_the_result_is_plain_and_made_as_in_xaytune() -> None:
    made = LRFinderResult([1e-3, 1e-2], [2.0, 1.0], 1e-3)
    assert made.to_dict()["suggested_lr"] == 1e-3
    found = lr_find(Net(), make_data(), num_iterations=20, num_seeds=2)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["lrs"] == found.lrs and len(told["runs"]) == 2
    assert len(told["smoothed_losses"]) == len(told["losses"])


# Pictures


def make_result() -> LRFinderResult:
    torch.manual_seed(0)
    return lr_find(Net(), make_data(), num_iterations=60, num_seeds=2)


def test_pictures(tmp_path: Path) -> None:
    result = make_result()
    assert result.suggested_lr is not None
    result.plot(tmp_path / "deep" / "found.png")
    assert (tmp_path / "deep" / "found.png").read_bytes().startswith(b"\x89PNG\r\n")
    result.plot(tmp_path / "found.html")
    page = (tmp_path / "found.html").read_text()
    assert f"suggested learning rate: {result.suggested_lr:.3g}" in page and "minimum" in page
    assert "https://cdn.plot.ly" not in page.partition("plotly.js")[0]
    with pytest.raises(ConfigError, match=r"unknown ending '.jpg'.*\.html, \.png"):
        result.plot(tmp_path / "found.jpg")


@pytest.mark.parametrize(("name", "package"), [("a.png", "matplotlib"), ("a.html", "plotly")])
def test_pictures_without_their_package(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = LRFinderResult([1e-3, 1e-2], [2.0, 1.0], 1e-3)
    real = builtins.__import__

    def refuse(module: str, *rest: Any) -> Any:
        if module.partition(".")[0] == package:
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=rf"'{package}'.*headway\[plot\]"):
        result.plot(tmp_path / name)


# What is put back


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for number in range(num_steps):
        optimizer.zero_grad()
        model(torch.full((2, 8), number + 1.0)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("kind", ["adamw", "capturable", "momentum", "joined"])
def test_an_optimizer_is_put_back_also_to_no_state(kind: str, num_before: int) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.1)
        if kind == "capturable":
            return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        if kind == "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        first, second = model.parameters()
        parts = [torch.optim.AdamW([first], lr=0.1), torch.optim.SGD([second], lr=0.1)]
        return JoinedOptimizer(parts)

    models = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        optimizer = make(model)
        train(model, optimizer, num_before)
        if disturbed:
            state = optimizer.state_dict()["state"]
            tensors = {id(v) for s in optimizer.state.values() for v in s.values()}
            with preserve(model, optimizer):
                for group in optimizer.param_groups:
                    group["lr"], group["extra"] = group["lr"] * 7, 1
                optimizer.told = True  # type: ignore[attr-defined]
                train(model, optimizer, 3)
            assert_same(state, optimizer.state_dict()["state"])
            assert (num_before == 0) == (not optimizer.state_dict()["state"])
            # Whoever holds the tensors, such as a checkpoint's staging, holds the right ones.
            assert {id(v) for s in optimizer.state.values() for v in s.values()} == tensors
            assert "extra" not in optimizer.param_groups[0] and not hasattr(optimizer, "told")
        train(model, optimizer, 2)
        models.append(model)
    assert_same(dict(models[0].state_dict()), dict(models[1].state_dict()))


def test_buffers_that_come_go_and_change_objects_are_put_back() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.arange(3.0), persistent=False)
            self.register_buffer("later", None)
            self.count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    model = Caching()
    table = model.table
    with preserve(model):
        model.table.mul_(2)
        model.table = torch.zeros(9)
        model.later = torch.ones(1)
        model.register_buffer("new", torch.ones(1))
        model.count = 5
    assert model.table is table and torch.equal(table, torch.arange(3.0))
    assert model.later is None and "new" not in dict(model.named_buffers())
    assert model.count == 0


def test_copies_are_of_the_tensors_inside_a_wrapper_subclass() -> None:
    torchao = pytest.importorskip("torchao.optim")
    model = nn.Linear(256, 64, bias=False)
    optimizer = torchao.AdamW8bit(model.parameters(), lr=1e-2)
    run: Callable[[], None] = lambda: (  # noqa: E731
        model(torch.ones(2, 256)).square().sum().backward(),
        optimizer.step(),
        optimizer.zero_grad(),
    )
    with torch.compiler.set_stance("force_eager"):  # its step compiles itself, which takes long
        run()
    state = optimizer.state[model.weight]["exp_avg"]
    before = state.dequantize().clone()
    with preserve(model, optimizer), torch.compiler.set_stance("force_eager"):
        run()
        assert not torch.equal(optimizer.state[model.weight]["exp_avg"].dequantize(), before)
    assert optimizer.state[model.weight]["exp_avg"] is state
    assert torch.equal(state.dequantize(), before)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal; a test run in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_until_all_is_put_back(interruptible: None) -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_during_the_restoration(
    interruptible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight.detach().clone()
    restore = Preserved.restore

    def interrupted(self: Preserved) -> None:
        signal.raise_signal(signal.SIGINT)
        restore(self)

    monkeypatch.setattr(Preserved, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt), preserve(model), torch.no_grad():
        model.weight.zero_()
    assert torch.equal(model.weight, weight)
