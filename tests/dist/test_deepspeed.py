"""ZeRO through Accelerate on two gloo ranks gives what one process gives, and saves by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")

from headway.args import AccelTrainingArguments
from headway.data.loader import WindowLoader
from headway.errors import ConfigError
from headway.strategies import (
    DeepSpeedConfig,
    make_deepspeed_plugin,
    wrap_model_distributed,
)
from headway.strategies.base import Strategy
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice
from headway.strategies.source import ModelSource
from headway.testing import run_ranks, tiny_dataset, tiny_decoder, tiny_llama

MAX_NORM = 0.5
NUM_STEPS, SAVED_AT = 5, 3


class Run:
    """A model in training, step by step; the second parameter group decays on its own."""

    def __init__(self, strategy: Strategy, batch_size: int, make: Any = tiny_decoder) -> None:
        torch.manual_seed(3)
        self.strategy = strategy
        self.model = strategy.setup(
            ModelSource(make=lambda: make(hidden_size=16, intermediate_size=32))
        )
        norms = [p for p in self.model.parameters() if p.dim() == 1]
        rest = [p for p in self.model.parameters() if p.dim() != 1]
        groups = [{"params": norms, "weight_decay": 0.0}, {"params": rest}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        # As trainers do: it puts a step of its own on the optimizer.
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if hasattr(strategy, "adopt"):
            strategy.adopt(self.optimizer)
        shard = strategy.data_shard()
        self.loader = WindowLoader(
            tiny_dataset(40, sequence_length=12, ragged=True),
            batch_size=batch_size,
            accumulation=2,
            rank=shard.rank,
            world_size=shard.world_size,
        )
        self.loader.start_epoch(0)
        self.objective = Objective(self.model)

    def step(self, num_steps: int) -> list[tuple[float, float]]:
        strategy, curve = self.strategy, []
        for window in strategy.feed(self.loader):
            totals = window.totals or window
            loss = strategy.forward_backward(
                window, self.objective, totals.num_target_tokens, lambda event: None
            )
            norm = strategy.clip(MAX_NORM)
            strategy.apply(self.optimizer, loss, norm)
            self.scheduler.step()
            curve.append((strategy.reduce(loss, "sum").item(), norm.item()))
            if len(curve) == num_steps:
                break
        return curve

    def saved(self) -> dict[str, Any]:
        """What a checkpoint would hold, by name."""
        components = self.strategy.state_components()
        return {
            "model": {name: p.detach().clone() for name, p in self.model.named_parameters()},
            "optimizer": {
                name: {key: value.clone() for key, value in self.optimizer.state[p].items()}
                for name, p in self.model.named_parameters()
            },
            "position": self.loader.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "components": {c.key: c.stateful.state_dict() for c in components},
        }

    @torch.no_grad()
    def restore(self, saved: dict[str, Any]) -> None:
        components = self.strategy.state_components()
        for name, p in self.model.named_parameters():
            p.copy_(saved["model"][name])
            self.optimizer.state[p] = {k: v.clone() for k, v in saved["optimizer"][name].items()}
        self.loader.load_state_dict(saved["position"])
        self.scheduler.load_state_dict(saved["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, saved["rates"]):
            group["lr"] = rate
        for component in components:
            if component.key in saved["components"]:
                component.stateful.load_state_dict(saved["components"][component.key])


def make_strategy(
    stage: int, precision: str = "no", save_strategy: str = "no", **options: Any
) -> Strategy:
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState

    from headway.strategies import AccelerateStrategy

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = make_deepspeed_plugin(
        DeepSpeedConfig(zero_stage=stage, reduce_bucket_size=1000, **options),
        micro_batch_size=2,
        accumulation=2,
        mixed_precision=precision,
    )
    accelerator = Accelerator(
        deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    args = AccelTrainingArguments(save_strategy=save_strategy, gradient_accumulation_steps=2)
    return AccelerateStrategy(accelerator, args)


def _train_stages() -> dict[int, Any]:
    found = {}
    for stage in (0, 1, 2):
        run = Run(make_strategy(stage), batch_size=2)
        curve = run.step(SAVED_AT)
        saved = run.saved()
        curve += run.step(NUM_STEPS - SAVED_AT)
        run.restore(saved)  # a rollback of the running engine
        back = run.step(NUM_STEPS - SAVED_AT)
        run.strategy.teardown()
        run = Run(make_strategy(stage), batch_size=2)
        run.restore(saved)  # a new run that goes on
        again = run.step(NUM_STEPS - SAVED_AT)
        run.strategy.teardown()
        found[stage] = (curve, saved, back, again)
    return found


def test_stages_equal_one_process_and_save_by_name() -> None:
    single = Run(SingleDevice(torch.device("cpu")), batch_size=4)
    expected = single.step(SAVED_AT)
    state = single.saved()
    expected += single.step(NUM_STEPS - SAVED_AT)
    for rank in run_ranks(_train_stages, 2, timeout_s=110):
        for stage, (curve, saved, back, again) in rank.items():
            check_close(curve, expected, f"stage {stage}")
            for part in ("model", "optimizer"):
                check_close(saved[part], state[part], f"stage {stage}: {part}", 1e-5)
            assert back == again == curve[SAVED_AT:], f"stage {stage}: it does not go on bit by bit"


def _train_others() -> tuple[Any, Any, Any, list[str]]:
    """ZeRO-3, offloaded ZeRO-2, bf16 with a resume, and what is refused."""
    run = Run(make_strategy(3, stage3_param_persistence_threshold=0), 2, tiny_llama)
    sharded = run.step(NUM_STEPS)
    assert all(p.numel() == 0 for p in run.model.parameters())
    run.strategy.teardown()
    run = Run(make_strategy(2, offload_optimizer=True), 2, tiny_llama)
    offloaded = run.step(NUM_STEPS)
    run.strategy.teardown()
    run = Run(make_strategy(1, precision="bf16"), 2, tiny_llama)
    low = run.step(SAVED_AT)
    saved = run.saved()
    low += run.step(NUM_STEPS - SAVED_AT)
    run.strategy.teardown()
    run = Run(make_strategy(1, precision="bf16"), 2, tiny_llama)
    run.restore(saved)
    assert run.step(NUM_STEPS - SAVED_AT) == low[SAVED_AT:]
    assert next(run.model.parameters()).dtype == torch.bfloat16
    run.strategy.teardown()
    _check_withheld(2, tiny_decoder)
    _check_withheld(3, tiny_llama)
    refused = []
    for attempt in (
        lambda: Run(make_strategy(3), 2),
        lambda: make_strategy(0, precision="bf16"),
        lambda: make_strategy(3, save_strategy="steps"),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        refused.append(str(caught.value))
    return sharded, offloaded, low, refused


def _check_withheld(stage: int, make: Any) -> None:
    """What is not finite on one rank reaches no rank's weights."""
    from deepspeed.utils import safe_get_full_fp32_param

    run = Run(make_strategy(stage), 2, make)
    run.step(1)
    before = [safe_get_full_fp32_param(p).clone() for p in run.model.parameters()]
    sound = run.objective.loss
    broken = float("nan") if run.strategy.data_shard().rank else 1.0
    run.objective.loss = lambda *given: sound(*given) * broken  # type: ignore[method-assign]
    [(_, norm)] = run.step(1)
    assert norm == float("inf")
    after = [safe_get_full_fp32_param(p) for p in run.model.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after))
    run.objective.loss = sound  # type: ignore[method-assign]
    assert all(value < 10 for pair in run.step(2) for value in pair)
    run.strategy.teardown()


def test_sharded_offloaded_and_bf16() -> None:
    expected = Run(SingleDevice(torch.device("cpu")), 4, tiny_llama).step(NUM_STEPS)
    for sharded, offloaded, low, refused in run_ranks(_train_others, 2, timeout_s=110):
        check_close(sharded, expected, "stage 3")
        check_close(offloaded, expected, "offloaded")
        check_close(low, expected, "bf16", 0.05)
        assert "headway.models.Decoder" in refused[0]
        assert "use zero_stage 1" in refused[1]
        assert "FSDP2Trainer" in refused[2]


def _train_engine() -> list[float]:
    from headway.dist import init_distributed

    context = init_distributed(use_cpu=True)
    torch.manual_seed(3)
    model = tiny_decoder(hidden_size=16, intermediate_size=32)
    engine = wrap_model_distributed(
        model,
        strategy="deepspeed",
        ctx=context,
        deepspeed_config=DeepSpeedConfig(zero_stage=1),
        mixed_precision="fp32",
        micro_batch_size=2,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    )
    batch = torch.arange(32).reshape(4, 8).chunk(2)[context.rank]
    losses = []
    for _ in range(3):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_wrapped_engine_trains() -> None:
    torch.manual_seed(3)
    model = tiny_decoder(hidden_size=16, intermediate_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = torch.arange(32).reshape(4, 8)
    expected = []
    for _ in range(3):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    first, second = run_ranks(_train_engine, 2)
    check_close([(a + b) / 2 for a, b in zip(first, second)], expected, "mean of the ranks", 1e-5)


def check_close(found: Any, expected: Any, what: str, tolerance: float = 1e-6) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key, value in expected.items():
            check_close(found[key], value, f"{what}: {key}", tolerance)
        return
    torch.testing.assert_close(
        torch.as_tensor(found),
        torch.as_tensor(expected),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )
