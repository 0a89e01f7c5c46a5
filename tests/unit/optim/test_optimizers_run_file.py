"""Optimizers in run files: any class by its path, also for one group."""

import pytest
import torch

from headway import ConfigError
from headway.config import load_run
from headway.optim.multi import JoinedOptimizer
from headway.trainers.from_config import build_model_init, build_optimizer_and_scheduler

BASE = """
model: {vocab_size: 258, hidden_size: 32, num_layers: 1, num_heads: 4, intermediate_size: 64}
args: {use_cpu: true, learning_rate: 0.125}
"""


class OwnOptimizer(torch.optim.SGD):
    """Somebody's own class, found by its path."""

    def __init__(self, params, rate: float = 0.1) -> None:
        super().__init__(params, lr=rate, momentum=0.9)


def build(folder, text):
    path = folder / "run.yaml"
    path.write_text(BASE + text)
    run = load_run(path)
    return build_optimizer_and_scheduler(run, build_model_init(run)())[0]


def test_any_class_by_its_path(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys.py").write_text(f"from {__name__} import OwnOptimizer\n")
    built = build(
        tmp_path, "optimizer: {class_path: somebodys.OwnOptimizer, init_args: {rate: 0.5}}\n"
    )
    assert type(built).__name__ == "OwnOptimizer" and built.param_groups[0]["lr"] == 0.5
    built = build(tmp_path, "optimizer: torch.optim.NAdam\n")
    assert type(built) is torch.optim.NAdam
    assert len(built.param_groups[0]["param_names"]) == len(built.param_groups[0]["params"]) > 0


def test_a_factory_for_a_group(tmp_path):
    text = """
optimizer_groups:
  norms: {regex: norm, factory: {class_path: SGD, init_args: {lr: 0.5}}, config: {momentum: 0.9}}
  embed: {regex: embed, factory: {class_path: SGD, init_args: {lr: 0.5}}}
  attention: {regex: attn, factory: Adagrad}
"""
    built = build(tmp_path, text)
    assert type(built) is JoinedOptimizer and len(built.parts) == 3, "equal factories are one"
    assert [
        (g["group_name"], g["optimizer_class"], g["lr"], g.get("momentum"))
        for g in built.param_groups
    ] == [
        ("norms", "SGD", 0.5, 0.9),
        ("embed", "SGD", 0.5, 0),
        ("attention", "Adagrad", 0.01, None),
        ("__default__", "AdamW", 0.125, None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: AdmW\n", "run.yaml:4: optimizer.class_path: .*did you mean 'AdamW'"),
        ("optimizer: {class_path: SGD, init_args: {momentun: 1}}\n", "did you mean 'momentum'"),
        (
            "optimizer_groups: {g: {regex: x, factory: SDG}}\n",
            r"optimizer_groups\.g\.factory\.class_path: .*did you mean 'SGD'",
        ),
        ("optimizer_groups: {g: {regex: x, factroy: SGD}}\n", "did you mean 'factory'"),
        ("optimizer: Muon\n", "set optim='muon'"),
    ],
)
def test_mistakes_are_told_with_the_nearest_name(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, text)
