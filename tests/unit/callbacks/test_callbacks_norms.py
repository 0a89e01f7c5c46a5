"""Norms of gradients and parameters: values, cost, what they leave alone, and their files."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.callbacks import GradNormLogger, ParameterNormLogger, WeightNormLogger
from headway.callbacks.watch.shards import find_shards
from headway.callbacks.watch.spectral import SpectralNorms, _Iteration
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError
from headway.testing import count_host_syncs, tiny_trainer

GRADIENTS, PARAMETERS = "gradient_norms.jsonl", "parameter_norms.jsonl"
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}


def _records(folder: Path, name: str) -> list[dict[str, Any]]:
    text = (folder / "out" / name).read_text()
    if name.endswith(".json"):
        whole: list[dict[str, Any]] = json.loads(text)
        return whole
    return [json.loads(line) for line in text.splitlines()]


def _true_spectral(parameter: torch.Tensor) -> float:
    if parameter.dim() < 2:
        return float(parameter.abs().max())
    return float(torch.linalg.matrix_norm(parameter, 2))


class Norms(TrainerCallback):
    """What torch says of the raw gradients, step by step."""

    def __init__(self) -> None:
        self.raw: dict[int, dict[str, float]] = {}
        self.clipped: dict[int, dict[str, float]] = {}

    def _take(self, model: nn.Module) -> dict[str, float]:
        return {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}

    def on_gradients(self, state: TrainerState, model: nn.Module) -> None:
        self.raw[state.global_step + 1] = self._take(model)

    def on_pre_optimizer_step(self, state: TrainerState, model: nn.Module) -> None:
        self.clipped[state.global_step + 1] = self._take(model)


def test_gradient_norms_are_raw_and_tell_the_clip_factor(tmp_path: Path) -> None:
    seen = Norms()
    tiny_trainer(tmp_path, [GradNormLogger(), seen], max_grad_norm=0.1, **EVALUATED).train()
    records = _records(tmp_path, GRADIENTS)
    assert [record["global_step"] for record in records] == [2, 4]
    for record in records:
        raw, clipped = seen.raw[record["global_step"]], seen.clipped[record["global_step"]]
        assert record["grad_norms"] == pytest.approx(raw, rel=1e-5)
        assert list(record["grad_norms"]) == list(raw)
        assert record["grad_norm"] == pytest.approx(math.hypot(*raw.values()), rel=1e-5)
        scaled = {name: norm * record["clip_factor"] for name, norm in raw.items()}
        assert scaled == pytest.approx(clipped, rel=1e-4)
        assert record["clip_factor"] < 0.1


def test_the_clip_factor_is_that_of_all_gradients_whatever_is_listed(tmp_path: Path) -> None:
    options = {"max_steps": 3, "max_grad_norm": 1.0}
    for name, include in (("all", None), ("some", "*norm*")):
        logger = GradNormLogger(log_steps=1, include=include)
        tiny_trainer(tmp_path / name, [logger], **options).train()
    both = [_records(tmp_path / name, GRADIENTS) for name in ("all", "some")]
    for one, other in zip(*both, strict=True):
        assert other["grad_norm"] < 0.5 < 1 < one["grad_norm"]
        assert other["clip_factor"] == one["clip_factor"]


@pytest.mark.parametrize(
    ("options", "arguments", "steps"),
    [
        ({}, {"logging_steps": 2, "max_steps": 5}, [2, 4, 5]),
        ({"log_steps": 3}, {"max_steps": 7, "eval_strategy": "steps", "eval_steps": 2}, [3, 6]),
        ({}, {"eval_strategy": "epoch", "num_train_epochs": 2}, [4, 8]),
        ({}, {"eval_every": "64 tokens", "max_steps": 8}, [4, 8]),
        ({}, {"eval_strategy": "steps", "eval_steps": 3, "eval_delay": 4, "max_steps": 7}, [6, 7]),
        (
            {},
            {"eval_on_save": True, "save_strategy": "steps", "save_steps": 3, "max_steps": 4},
            [3],
        ),
    ],
)
def test_records_come_with_evaluations_or_logs_or_a_period(
    tmp_path: Path, options: dict[str, Any], arguments: dict[str, Any], steps: list[int]
) -> None:
    loggers = [GradNormLogger(**options), ParameterNormLogger(log_spectral_norms=False, **options)]
    tiny_trainer(tmp_path, loggers, **arguments).train()
    for name in (GRADIENTS, PARAMETERS):
        assert [record["global_step"] for record in _records(tmp_path, name)] == steps


def test_parameter_norms_are_those_of_torch(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [ParameterNormLogger(power_iter_steps=200)], **EVALUATED)
    trainer.train()
    record = _records(tmp_path, PARAMETERS)[-1]
    assert trainer.model is not None
    wanted = dict(trainer.model.named_parameters())
    assert list(record["norms"]) == list(record["spectral_norms"]) == list(wanted)
    for name, parameter in wanted.items():
        parameter = parameter.detach()
        assert record["norms"][name] == pytest.approx(float(parameter.norm()), rel=1e-6)
        assert record["spectral_norms"][name] == pytest.approx(_true_spectral(parameter), rel=1e-3)
    assert record["spectral_change"] < 1e-4


def test_names_are_chosen_by_patterns(tmp_path: Path) -> None:
    loggers = [
        GradNormLogger(include="*.q_proj.*"),
        ParameterNormLogger(include=["lm_*", "*norm*"]),
    ]
    tiny_trainer(tmp_path, loggers, **EVALUATED).train()
    assert list(_records(tmp_path, GRADIENTS)[0]["grad_norms"]) == [
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)
    ]
    names = list(_records(tmp_path, PARAMETERS)[0]["norms"])
    assert "lm_head.weight" in names and all("norm" in n or n.startswith("lm_") for n in names)


def test_weight_norm_is_in_logs_and_in_the_summary(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [WeightNormLogger()], max_steps=3, learning_rate=0.1)
    trainer.train()
    *logged, summary = [r for r in trainer.state.log_history if "eval_loss" not in r]
    assert len({record["weight_norm"] for record in logged}) == 3
    assert trainer.model is not None
    total = math.hypot(*(float(p.detach().norm()) for p in trainer.model.parameters()))
    assert "train_runtime" in summary
    assert summary["weight_norm"] == pytest.approx(total, rel=1e-6)


# -- the iteration --------------------------------------------------------------------------------


def _spectral(model: nn.Module, norms: SpectralNorms) -> list[float]:
    shards = find_shards(model, observer="the test")
    assert shards is not None
    norms.begin(model, shards)
    with torch.no_grad():
        return norms.measure(len(shards.names)).tolist()[:-1]


def test_a_zero_matrix_is_zero_and_found_again_when_it_grows() -> None:
    model, norms = nn.Linear(6, 4, bias=False), SpectralNorms(20)
    nn.init.zeros_(model.weight)
    assert _spectral(model, norms) == [0.0]
    nn.init.orthogonal_(model.weight, gain=3.0)
    assert _spectral(model, norms) == pytest.approx([3.0], rel=1e-4)
    # What the vector of the last look points at is gone, though the matrix is not zero.
    with torch.no_grad():
        model.weight.zero_()[0, 0] = 1.0
    assert _spectral(model, norms) == pytest.approx([1.0])
    with torch.no_grad():
        model.weight.zero_()[1, 1] = 2.0
    assert _spectral(model, norms) == pytest.approx([2.0])


def test_stacks_convolutions_and_odd_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(3, 5, 4))
    model.conv = nn.Conv1d(4, 6, 3, bias=False)
    model.scalar = nn.Parameter(torch.tensor(-7.0))
    model.low = nn.Parameter(torch.randn(8, 3, dtype=torch.bfloat16))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    shards = find_shards(model, observer="the test")
    assert shards is not None
    found = dict(zip(shards.names, _spectral(model, SpectralNorms(300))))
    assert found["experts"] == pytest.approx(
        max(_true_spectral(expert) for expert in model.experts.detach()), rel=1e-3
    )
    flat = model.conv.weight.detach().flatten(1)
    assert found["conv.weight"] == pytest.approx(_true_spectral(flat), rel=1e-3)
    assert found["scalar"] == 7.0
    assert found["low"] == pytest.approx(_true_spectral(model.low.detach().float()), rel=1e-3)
    assert found["empty"] == 0.0


def test_a_second_look_starts_where_the_first_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, turns = _Iteration.turn, []
    monkeypatch.setattr(_Iteration, "turn", lambda self: turns.append(turn(self)))
    torch.manual_seed(0)
    model = nn.Linear(40, 40, bias=False)
    true = _true_spectral(model.weight.detach())
    norms, errors = SpectralNorms(2), []
    for _ in range(4):
        errors.append(true - _spectral(model, norms)[0])
    assert len(turns) == 4 + 3 * 2  # twice as many the first time
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 2
    # A checkpoint has the vectors: another process goes on in the same way.
    stored = json.loads(json.dumps(norms.state_dict()))
    restored = SpectralNorms(2)
    restored.load_state_dict(stored)
    assert restored.state_dict() == stored
    assert _spectral(model, restored) == _spectral(model, norms)
    restored.load_state_dict({"weight": {"shape": [1, 3], "float16": "!"}, "other": 3})
    assert _spectral(model, restored) == _spectral(model, SpectralNorms(2))


# -- cost and side effects ------------------------------------------------------------------------


def _many_parameters() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 3) for _ in range(500))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    "logger", [GradNormLogger(), ParameterNormLogger(power_iter_steps=2), WeightNormLogger()]
)
def test_a_thousand_parameters_cost_one_sync(tmp_path: Path, logger: Any) -> None:
    trainer = tiny_trainer(tmp_path, **EVALUATED)
    args, state, control = trainer.args, TrainerState(global_step=1, eval_steps=2), TrainerControl()
    logger.on_train_begin(args, state, control, _many_parameters())
    logs: dict[str, Any] = {}
    with count_host_syncs(device_type="cpu") as syncs:
        if isinstance(logger, GradNormLogger):
            logger.on_gradients(args, state, control)
        assert syncs.count == 0, syncs.report()
        state.global_step = 2
        if isinstance(logger, WeightNormLogger):
            logger.on_log_step(args, state, control, logs)
        else:
            logger.on_evaluate(args, state, control)
    assert syncs.count == 1, syncs.report()
    logger.on_close(args, state, control)
    if not logs:
        record = _records(tmp_path, logger.LOG_FILENAME)[0]
        assert len(record.get("grad_norms") or record["norms"]) == 1000


def test_steps_that_are_not_written_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    import headway.callbacks.watch.grad_norm_logger as module

    measure = module._measure
    trainer = tiny_trainer(tmp_path, [GradNormLogger()], **EVALUATED)
    monkeypatch.setattr(
        module,
        "_measure",
        lambda shards: asked.append(trainer.state.global_step) or measure(shards),
    )
    trainer.train()
    assert asked == [1, 3]


def test_training_is_the_same_with_and_without_them(tmp_path: Path) -> None:
    weights = []
    for name, loggers in (
        ("with", [GradNormLogger(), ParameterNormLogger(), WeightNormLogger()]),
        ("without", []),
    ):
        trainer = tiny_trainer(tmp_path / name, loggers, learning_rate=0.01, **EVALUATED)
        trainer.train()
        assert trainer.model is not None
        weights.append((trainer.model.state_dict(), torch.get_rng_state()))
    (first, draws), (second, other_draws) = weights
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert torch.equal(draws, other_draws)


# -- files, state, mistakes -----------------------------------------------------------------------


def test_a_resumed_run_writes_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    arguments = {**EVALUATED, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    arguments["learning_rate"] = 0.05

    def run(folder: Path, **more: Any) -> None:
        loggers = [GradNormLogger(), ParameterNormLogger(power_iter_steps=1)]
        tiny_trainer(folder, loggers, num_samples=16, **{**arguments, **more}).train()

    run(tmp_path / "whole")
    run(tmp_path / "parts", stop_at="4 steps")
    # As after a kill: a record of a step that the checkpoint does not know.
    path = tmp_path / "parts" / "out" / PARAMETERS
    path.write_text(path.read_text() + '{"type": "norms", "global_step": 5, "norms": {}}\n')
    run(tmp_path / "parts")
    for name in (GRADIENTS, PARAMETERS):
        whole, parts = _records(tmp_path / "whole", name), _records(tmp_path / "parts", name)
        for record in [*whole, *parts]:
            del record["timestamp"]
        assert whole == parts
        assert [record["global_step"] for record in parts] == [2, 4, 6]


class GoBack(TrainerCallback):
    """Asks once, after step 5, to go back to the checkpoint."""

    asked = False

    def on_step_end(self, state: TrainerState, control: TrainerControl) -> None:
        if state.global_step == 5 and not self.asked:
            self.asked = control.rollback = True


@pytest.mark.parametrize("form", ["lines", "array"])
def test_what_a_rollback_undoes_is_not_in_the_files(tmp_path: Path, form: str) -> None:
    options: dict[str, Any] = {"log_steps": 1, "format": form}
    loggers = [GradNormLogger(**options), ParameterNormLogger(**options), GoBack()]
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    tiny_trainer(tmp_path, loggers, num_samples=16, **arguments).train()
    for name, key in ((GRADIENTS, "grad_norms"), (PARAMETERS, "spectral_norms")):
        records = _records(tmp_path, name if form == "lines" else name.removesuffix("l"))
        assert [record["global_step"] for record in records] == [1, 2, 3, 4, 5, 6]
        assert all("lm_head.weight" in record[key] for record in records)


@pytest.mark.parametrize("make", [GradNormLogger, ParameterNormLogger])
def test_state_of_another_version_is_no_error(make: type[Any]) -> None:
    logger = make()
    logger.load_state_dict({})
    stored = json.loads(json.dumps(logger.state_dict()))
    assert stored["version"] == 1
    again = make()
    again.load_state_dict(stored)
    assert again.state_dict() == stored


def test_fused_updates_leave_no_gradients_to_measure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {**EVALUATED, "fuse_optim_with_backward": True}
    with caplog.at_level(logging.WARNING):
        tiny_trainer(tmp_path, [GradNormLogger()], **arguments).train()
    assert "fuse_optim_with_backward" in caplog.text
    assert not (tmp_path / "out" / GRADIENTS).exists()


def test_a_model_without_values_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING):
        assert find_shards(model, observer="SomeLogger") is None
        assert find_shards(nn.Linear(2, 2), ["nothing.*"], observer="OtherLogger") is None
    assert "SomeLogger has nothing to measure: weight is on the meta device" in caplog.text
    assert "no parameter that matches nothing.*" in caplog.text


def test_an_unwritable_folder_costs_the_log_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    logger = GradNormLogger()
    trainer = tiny_trainer(
        tmp_path, [logger], logging_dir=str(tmp_path / "file" / "in"), **EVALUATED
    )
    assert trainer.train().global_step == 4
    assert "GradNormLogger" in caplog.text


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (GradNormLogger, {"log_steps": 0}, ("log_steps", "0", "1 up")),
        (GradNormLogger, {"log_steps": True}, ("log_steps", "True")),
        (GradNormLogger, {"format": "aray"}, ("GradNormLogger", "did you mean 'array'")),
        (GradNormLogger, {"include": 3}, ("include", "3")),
        (GradNormLogger, {"include": []}, ("include", "[]")),
        (ParameterNormLogger, {"power_iter_steps": 0}, ("power_iter_steps", "0", "1 up")),
        (ParameterNormLogger, {"power_iter_steps": 1.5}, ("power_iter_steps", "1.5")),
        (ParameterNormLogger, {"log_norms": "yes"}, ("log_norms", "'yes'")),
        (
            ParameterNormLogger,
            {"log_norms": False, "log_spectral_norms": False},
            ("log_norms", "log_spectral_norms", "False"),
        ),
    ],
)
def test_mistakes_are_named(make: type[Any], options: dict[str, Any], words: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert all(word in str(caught.value) for word in words)


def test_a_second_run_of_one_object_begins_anew(tmp_path: Path) -> None:
    again, alone = (ParameterNormLogger(log_steps=1, power_iter_steps=1) for _ in range(2))
    tiny_trainer(tmp_path / "one", [again], max_steps=4).train()
    for name, one in (("two", again), ("alone", alone)):
        tiny_trainer(tmp_path / name, [one], max_steps=1).train()
    second, first = (_records(tmp_path / name, PARAMETERS) for name in ("two", "alone"))
    assert [r["spectral_norms"] for r in second] == [r["spectral_norms"] for r in first]
