"""Statistics of gradients, activations and parameters, and dumps of gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from headway.callbacks import FreezeCallback, GAPMonitorCallback
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerState
from headway.errors import ConfigError
from headway.testing import count_host_syncs, tiny_trainer
from headway.trainers.trainer import Trainer

MLP = "model.layers.0.mlp"
WEIGHT = f"{MLP}.up_proj.weight"
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


class Sink(TrainerCallback):
    """Every metric of every step, and the raw gradients that torch had."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.weights: dict[int, torch.Tensor] = {}

    def on_gradients(self, state: TrainerState, model: nn.Module) -> None:
        step = state.global_step + 1
        named = model.named_parameters()
        self.gradients[step] = {n: p.grad.clone() for n, p in named if p.grad is not None}
        self.weights[step] = dict(model.named_parameters())[WEIGHT].detach().clone()

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics[step] = {n: v for n, v in metrics.items() if n.startswith("gap/")}


def _hooked(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_hooks]


def _run(folder: Path, gap: GAPMonitorCallback, **arguments: Any) -> tuple[Sink, Any]:
    sink = Sink()
    settings = {"max_steps": 4, "max_grad_norm": 0.01, "learning_rate": 0.01, **arguments}
    trainer = tiny_trainer(folder, [gap, sink], num_samples=16, **settings)
    trainer.train()
    assert not _hooked(trainer.model)
    return sink, trainer


def test_statistics_are_those_of_torch_before_clipping(tmp_path: Path) -> None:
    sink, _ = _run(tmp_path, GAPMonitorCallback(interval=2))
    assert [step for step, found in sink.metrics.items() if found] == [2, 4]
    for step in (2, 4):
        for kind, tensor in (
            ("params", sink.weights[step]),
            ("grads", sink.gradients[step][WEIGHT]),
        ):
            found = [sink.metrics[step][f"gap/{kind}/{WEIGHT}/{f}"] for f in ("max", "mean", "var")]
            wanted = [float(v) for v in (tensor.abs().max(), tensor.mean(), tensor.var())]
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-12)
    names = {name.split("/")[1] for name in sink.metrics[2]}
    assert names == {"params", "grads", "activations", "activation_grads"}


class Outputs(TrainerCallback):
    """What a module gave in training, and its gradient, by hooks of the test's own."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def on_train_begin(self, model: nn.Module) -> None:
        def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                output.retain_grad()
                self.outputs.append(output)

        self.handle = model.get_submodule(MLP).register_forward_hook(keep)

    def on_train_end(self) -> None:
        self.handle.remove()


@pytest.mark.parametrize("recomputed", [False, True])
def test_activations_are_of_training_alone_and_once(tmp_path: Path, recomputed: bool) -> None:
    gap, sink, outputs = GAPMonitorCallback(include="*.mlp"), Sink(), Outputs()
    trainer = tiny_trainer(
        tmp_path,
        [gap, sink, outputs],
        max_steps=1,
        gradient_accumulation_steps=2,
        gradient_checkpointing=recomputed,
        **EVALUATED,
    )
    trainer.train()
    metrics = sink.metrics[1]
    values = torch.cat([output.detach() for output in outputs.outputs])
    assert values.shape[0] == 4  # two micro-batches of two
    rows = values.flatten(1)
    found = [metrics[f"gap/activations/{MLP}/{figure}"] for figure in ("max", "mean", "var")]
    wanted = [rows.abs().max(), rows.mean(1).mean(), rows.var(1).mean()]
    assert found == pytest.approx([float(value) for value in wanted], rel=1e-5)
    rows = torch.cat([output.grad for output in outputs.outputs]).flatten(1)
    found = [metrics[f"gap/activation_grads/{MLP}/{figure}"] for figure in ("max", "mean", "var")]
    wanted = [rows.abs().max(), rows.mean(1).mean(), rows.var(1).mean()]
    assert found == pytest.approx([float(value) for value in wanted], rel=1e-5)
    assert not any("params" in name for name in metrics)  # no parameter has such a name


class Looks(TrainerCallback):
    """Calls the model outside of training, as a callback that samples text would."""

    def on_window(self, window: Any, model: nn.Module) -> None:
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_each_output_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import headway.callbacks.watch.activation_hooks as module

    look, keys = module.look_at_instances, []
    monkeypatch.setattr(
        module, "look_at_instances", lambda key, values: keys.append(key) or look(key, values)
    )
    for arguments, callbacks in (
        ({}, []),
        ({"gradient_checkpointing": True}, []),
        (
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_policy": "block",
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            [],
        ),
        (EVALUATED, [Looks()]),
    ):
        keys.clear()
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        observers = [GAPMonitorCallback(), *callbacks]
        tiny_trainer(folder, observers, max_steps=1, **arguments).train()
        looked = [name for kind, name in keys if kind == "activations"]
        assert f"{MLP}.up_proj" in looked
        assert len(looked) == len(set(looked))


class Odd(nn.Module):
    """Modules that return what is no batch of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(258, 8)
        self.several, self.nothing = _Gives("tuple"), _Gives("none")
        self.table, self.flat = _Gives("dict"), _Gives("flat")
        self.once = nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 258)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids) * self.once
        hidden = self.several(hidden)[0]
        self.nothing(hidden)
        hidden = self.table(hidden)["out"]
        self.flat(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class _Gives(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        found = {"tuple": (x * 2, None), "none": None, "dict": {"out": x}, "flat": x.sum((1, 2))}
        return found[self.kind]


def test_outputs_without_statistics_are_left_out(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [], max_steps=1)
    odd = Trainer(
        args=trainer.args,
        model=Odd(),
        train_dataset=trainer.train_dataset,
        callbacks=[GAPMonitorCallback()],
        default_callbacks=False,
    )
    seen: dict[str, float] = {}

    class Keep(TrainerCallback):
        def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
            seen.update(metrics)

    odd.add_callback(Keep())
    odd.train()
    modules = {n.split("/")[2] for n in seen if n.startswith("gap/activations")}
    assert modules == {"embed", "several", "head"}
    grads = {n.split("/")[2] for n in seen if n.startswith("gap/grads")}
    assert grads == {"embed.weight", "head.weight", "head.bias"}
    assert not any("once" in name for name in seen)


def test_what_has_no_gradient_in_a_step_has_no_figures_in_it(tmp_path: Path) -> None:
    sink = Sink()
    freeze = FreezeCallback(patterns=["layers.0.mlp"], since=1, until=2)
    gap = GAPMonitorCallback(include="*.mlp.up_proj.weight")
    tiny_trainer(tmp_path, [sink, freeze, gap], num_samples=16, max_steps=3).train()
    names = {f"gap/grads/{WEIGHT}/{figure}" for figure in ("max", "mean", "var")}
    assert [len(names & sink.metrics[step].keys()) for step in (1, 2, 3)] == [3, 0, 3]
    figures = [value for metrics in sink.metrics.values() for value in metrics.values()]
    assert all(map(math.isfinite, figures))


def test_patterns_choose_names_and_training_is_the_same(tmp_path: Path) -> None:
    gap = GAPMonitorCallback(include=["*.q_proj", "*.q_proj.weight"])
    sink, watched = _run(tmp_path / "with", gap)
    kinds = {tuple(name.split("/")[1:3]) for name in sink.metrics[1]}
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert kinds == {
        *((kind, f"{name}.weight") for kind in ("params", "grads") for name in modules),
        *((kind, name) for kind in ("activations", "activation_grads") for name in modules),
    }
    _, plain = _run(tmp_path / "without", GAPMonitorCallback(enabled=False))
    for one, other in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_read_between_logs(tmp_path: Path) -> None:
    counts = []

    class Count(TrainerCallback):
        def on_step_end(self, state: TrainerState) -> None:
            here = "/callbacks/watch/"
            counts.append([str(r) for r in syncs.records if here in r.file])

    trainer = tiny_trainer(tmp_path, [GAPMonitorCallback(), Count()], max_steps=3, logging_steps=3)
    with count_host_syncs(device_type="cpu") as syncs:
        trainer.train()
    assert counts == [[], [], []]


def test_hooks_go_with_a_run_that_fails(tmp_path: Path) -> None:
    class Fail(TrainerCallback):
        def on_forward_backward_end(self, model: nn.Module) -> None:
            assert _hooked(model)
            raise RuntimeError("lost")

    trainer = tiny_trainer(tmp_path, [GAPMonitorCallback(), Fail()], max_steps=2)
    with pytest.raises(RuntimeError, match="lost"):
        trainer.train()
    assert not _hooked(trainer.model)


def test_a_hook_that_fails_costs_the_statistics_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import headway.callbacks.watch.activation_hooks as module

    def fail(key: Any, values: Any) -> None:
        raise RuntimeError("no statistics today")

    monkeypatch.setattr(module, "look_at_instances", fail)
    trainer = tiny_trainer(tmp_path, [GAPMonitorCallback()], max_steps=2)
    assert trainer.train().global_step == 2
    assert "no statistics today" in caplog.text
    assert not _hooked(trainer.model)


# -- dumps ----------------------------------------------------------------------------------------


def test_gradients_are_dumped_whole_and_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dump_gradients": True, "monitor": False}
    options |= {"dump_gradients_start_step": 1, "dump_gradients_end_step": 3}
    options["dump_gradients_step_interval"] = 2
    root = tmp_path / "out" / "gradients"
    (root / "step1" / "full_gradients").mkdir(parents=True)
    (root / "step1" / "full_gradients" / "of.another.run.safetensors").write_bytes(b"")
    sink, _ = _run(tmp_path, GAPMonitorCallback(**options))
    assert sorted(folder.name for folder in root.iterdir()) == ["step1", "step3"]
    for step in (1, 3):
        files = list((root / f"step{step}" / "full_gradients").iterdir())
        assert len(files) == len(sink.gradients[step])
        for file in files:
            name = file.name.removesuffix(".safetensors")
            assert torch.equal(load_file(file)["gradient"], sink.gradients[step][name])
    assert not any(sink.metrics.values())


def test_samples_are_the_first_of_each_dimension(tmp_path: Path) -> None:
    gap = GAPMonitorCallback(dump_gradients=True, dump_gradients_save_first_n=3, include="*weight")
    sink, _ = _run(tmp_path, gap, max_steps=1)
    folder = tmp_path / "out" / "gradients" / "step1" / "sampled_gradients"
    assert len(list(folder.iterdir())) == len(sink.gradients[1])
    for name, gradient in sink.gradients[1].items():
        wanted = gradient[:3, :3] if gradient.dim() == 2 else gradient[:3]
        assert torch.equal(load_file(folder / f"{name}.safetensors")["gradient"], wanted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enabled": False, "monitor": True}, ("enabled", "monitor")),
        ({"enabled": False, "dump_gradients": True}, ("enabled", "dump_gradients")),
        ({"monitor": False}, ("monitor", "dump_gradients")),
        ({"interval": 0}, ("interval", "0")),
        ({"dump_gradients_start_step": -1}, ("dump_gradients_start_step", "-1")),
        (
            {"dump_gradients_start_step": 5, "dump_gradients_end_step": 4},
            ("dump_gradients_end_step", "4", "5"),
        ),
        ({"dump_gradients_step_interval": 0}, ("dump_gradients_step_interval", "0")),
        ({"dump_gradients_save_first_n": 0}, ("dump_gradients_save_first_n", "0")),
        ({"include": 7}, ("include", "7")),
        ({"enabled": "yes"}, ("enabled", "'yes'")),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        GAPMonitorCallback(**options)
    assert all(word in str(caught.value) for word in words)
