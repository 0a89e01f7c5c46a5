"""Components: import by name, arguments against a signature, nested ones, what is given."""

import inspect

import pytest

from headway.config import Component, check_component, instantiate, registry
from headway.config.components import load_target
from headway.errors import ConfigError

HERE = __name__


class Engine:
    def __init__(self, power: int, *, name: str | None = None, parts: list[float] | None = None):
        self.power, self.name, self.parts = power, name, parts


class Open:
    def __init__(self, **options):
        self.options = options


class Car:
    def __init__(self, engines, tokenizer=None):
        self.engines, self.tokenizer = engines, tokenizer


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cars", sys.modules[HERE])


def test_builds_with_converted_arguments():
    engine = instantiate(Component("cars.Engine", {"power": 5, "parts": [1, 2.5]}), "model")
    assert engine.power == 5 and engine.parts == [1.0, 2.5] and engine.name is None
    assert instantiate(Component("cars.Open", {"anything": 1}), "model").options == {"anything": 1}


@pytest.mark.parametrize("shape", [list, dict])
def test_nested_components_are_built(shape):
    inner = {"class_path": "cars.Engine", "init_args": {"power": 3}}
    engines = [inner, inner] if shape is list else {"a": inner}
    car = instantiate(Component("cars.Car", {"engines": engines}), "data", tokenizer="bytes")
    built = car.engines if shape is list else list(car.engines.values())
    assert all(isinstance(engine, Engine) and engine.power == 3 for engine in built)
    assert car.tokenizer == "bytes"


def test_given_values_yield_to_written_ones():
    car = instantiate(
        Component("cars.Car", {"engines": [], "tokenizer": "own"}), "data", tokenizer=1
    )
    assert car.tokenizer == "own"


@pytest.mark.parametrize(
    ("component", "slot", "message"),
    [
        (Component("cars.Engine", {}), "model", "missing argument: power"),
        (Component("cars.Engine", {"power": "x"}), "model", "power must be int, got 'x'"),
        (Component("cars.Engine", {"power": 1, "nme": "a"}), "model", "did you mean 'name'"),
        (Component("cars.Engin"), "model", "did you mean 'Engine'"),
        (Component("cars.HERE"), "model", "is no class or function"),
        (Component("nowhere.Engine"), "model", "no module named 'nowhere'"),
        (Component("cars..x"), "model", "is no dotted path"),
        (Component("Decodr"), "model", "unknown model class 'Decodr'; did you mean 'Decoder'"),
        (Component("AdamV"), "optimizer", "unknown optimizer class 'AdamV'; did you mean 'Adam"),
        (Component("Decoder", {"vocab_size": 8}), "model", "missing arguments: hidden_size"),
        (
            Component(
                "Decoder", {"vocab_size": 8, "hidden_size": 16, "num_layers": 1, "num_heads": 3}
            ),
            "model",
            "num_heads",
        ),
        (
            Component("cars.Car", {"engines": [{"class_path": "cars.Engine"}]}),
            "model",
            "missing argument: power",
        ),
    ],
)
def test_mistakes(component, slot, message):
    with pytest.raises(ConfigError, match=f"here: .*{message}"):
        check_component(component, slot, "here")


def test_a_package_that_fails_to_import_is_told(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import absent_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"importing 'broken_package' failed.*absent_dependency"):
        check_component(Component("broken_package.Thing"), "model", "here")


def test_optimizer_gets_its_parameters():
    import torch

    weights = [torch.nn.Parameter(torch.zeros(2))]
    component = Component("AdamW", {"lr": 1e-3, "betas": [0.9, 0.95]})
    check_component(component, "optimizer", "here")
    optimizer = instantiate(component, "optimizer", params=weights)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    schedule = instantiate(
        Component("StepLR", {"step_size": 3}), "lr_scheduler", optimizer=optimizer
    )
    assert schedule.step_size == 3


def test_every_short_name_exists():
    for slot in registry.SLOTS:
        for name, dotted in registry.short_names(slot).items():
            if dotted == "torch.optim.Muon":
                continue
            assert callable(load_target(dotted, slot)), name


def test_parameters_of_torch_backed_components_are_current():
    for dotted, parameters in registry.NEEDS_TORCH.items():
        actual = inspect.signature(load_target(dotted, "model")).parameters.values()
        assert {p.name: p.default is inspect.Parameter.empty for p in actual} == parameters
