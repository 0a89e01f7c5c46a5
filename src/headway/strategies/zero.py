"""A DeepSpeed engine under an Accelerator, driven step by step.

Owns: bringing model and optimizer into an engine, its backward, norm and step, and its state by
parameter name, so that a checkpoint of ZeRO is like any other. Does not own: DeepSpeed's
configuration (deepspeed.py), the window (accelerate.py).

The trainer's optimizer stays outside: DeepSpeed flattens parameters and gives each rank a slice,
so a twin goes into the engine. The original holds the settings, which schedulers change, and at a
save the state, gathered under the parameters' own names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from headway.checkpoint.component import SharingPattern, StateComponent
from headway.errors import ConfigError
from headway.models.decoder import Decoder

if TYPE_CHECKING:
    from accelerate import Accelerator

_MASTER = "fp32_master"


def check_zero(accelerator: Accelerator, args: Any) -> None:
    """Refuse what cannot be trained or saved, before anything is built."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    problems = [
        f"the DeepSpeed configuration names a {part}, which is the trainer's; remove it there"
        for part in ("optimizer", "scheduler")
        if part in config
    ]
    stage = config.get("zero_optimization", {}).get("stage", 0)
    half = any(config.get(kind, {}).get("enabled") is True for kind in ("fp16", "bf16"))
    if stage == 0 and half:
        problems.append("zero_stage 0 with fp16 or bf16 is not supported; use zero_stage 1")
    if stage == 3 and (args.save_strategy != "no" or args.save_every is not None):
        problems.append(
            "zero_stage 3 leaves no rank a whole parameter to save; set save_strategy='no', or use "
            "FSDP2Trainer, which shards in the same way and saves"
        )
    if problems:
        raise ConfigError([f"accelerator: {problem}" for problem in problems])


class ZeroEngine:
    """Model and optimizer in a DeepSpeed engine, which is made when the first window comes.

    Until then a checkpoint may be loaded into both.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator, self._model = accelerator, model
        self.stage = int(accelerator.deepspeed_plugin.zero_stage)
        if self.stage == 3 and isinstance(model, Decoder):
            # Its loss reads the head's weight without calling the head, which gathers nothing.
            raise ConfigError(
                "accelerator: zero_stage 3 cannot train headway.models.Decoder; use zero_stage 2, "
                "FSDP2Trainer, or a transformers model"
            )
        self.engine: Any = None
        self._optimizer: Optimizer | None = None
        self._twin: Optimizer | None = None
        self._outdated = False

    def adopt(self, optimizer: Optimizer) -> None:
        """Take note of the trainer's optimizer."""
        self._optimizer = optimizer

    def ready(self) -> nn.Module:
        """The engine, holding what was loaded last; it is called like the model."""
        if self._optimizer is None:
            raise RuntimeError("adopt(optimizer) comes before the first window")
        if self.engine is None:
            given = self._optimizer if self.stage == 0 else _make_twin(self._optimizer)
            self._twin = given
            self.engine, _ = self._accelerator.prepare(self._model, given)
            self._outdated = bool(self._optimizer.state)
        if self._outdated and self.stage:
            self._push()
        self._outdated = False
        engine: nn.Module = self.engine
        return engine

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-batch; the last one of a window reduces over ranks."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        # The share is normalised already.
        self.engine.backward(loss, scale_wrt_gas=False)

    def norm(self, max_norm: float | None) -> Tensor:
        """The total norm of the reduced gradients; the step will clip them to `max_norm`."""
        inner = self.engine.optimizer
        inner.clip_grad = float(max_norm or 0.0)
        if self.stage < 3:
            norms = [inner.scaled_global_norm()]
        else:
            norms = inner._get_norm_groups()
        joined = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
        # DeepSpeed writes -1 for a norm that is not finite.
        norm: Tensor = torch.linalg.vector_norm(torch.where(joined < 0, torch.inf, joined))
        return norm / float(inner.loss_scale)

    def step(self) -> None:
        """Clip and step with the trainer's present settings, unless the norm is not finite."""
        assert self._optimizer is not None and self._twin is not None
        for group, twin in zip(self._optimizer.param_groups, self._twin.param_groups, strict=True):
            twin.update((key, value) for key, value in group.items() if key != "params")
        # What a save has gathered is of the last step.
        self._optimizer.state.clear()
        self.engine.step()
        # torch's schedulers look for it, to warn of a step of theirs that came too early.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def close(self) -> None:
        """Let go of the engine."""
        if self.engine is not None:
            self.engine.destroy()
        self._accelerator.deepspeed_engine_wrapped = None
        self.engine = self._twin = self._optimizer = None

    # -- state by name ----------------------------------------------------------------------

    def components(self) -> list[StateComponent]:
        """What a checkpoint holds; every rank calls this when it gathers what to save or load."""
        if self.engine is not None and self.stage in (1, 2) and not self._outdated:
            self._pull()
        return [StateComponent("zero", self, SharingPattern.REPLICATED, required=False)]

    def state_dict(self) -> dict[str, Any]:
        scale = self.engine.optimizer.loss_scale if self.engine is not None and self.stage else 1.0
        return {"stage": self.stage, "loss_scale": float(scale)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Other values have come into model and optimizer; the engine takes them over later."""
        self._outdated = True

    def _slices(self) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
        """This rank's slice of each group of parameters, and the whole group."""
        assert self._optimizer is not None
        slices = self.engine.optimizer.single_partition_of_fp32_groups
        for part, group in zip(slices, self._optimizer.param_groups, strict=True):
            yield part, [p for p in group["params"] if p.requires_grad]

    @torch.no_grad()
    def _pull(self) -> None:
        """Gather the engine's state into the trainer's optimizer, one tensor at a time."""
        assert self._optimizer is not None and self._twin is not None
        from deepspeed.utils import safe_get_full_fp32_param

        for part, members in self._slices():
            held = self._twin.state.get(part, {})
            for param in members:
                state = self._optimizer.state[param] = {}
                for key, value in held.items():
                    if isinstance(value, Tensor) and value.shape == part.shape:
                        state[key] = _gather_slices(value, param)
                    else:
                        state[key] = value.clone() if isinstance(value, Tensor) else value
                if param.dtype != torch.float32 and held:
                    state[_MASTER] = safe_get_full_fp32_param(param)
        if not any(self._optimizer.state.values()):
            self._optimizer.state.clear()

    @torch.no_grad()
    def _push(self) -> None:
        """Cut the trainer's state, and the model's values, into the engine's slices."""
        assert self._optimizer is not None and self._twin is not None
        if self.stage == 3:
            if self._optimizer.state:
                raise ConfigError("zero_stage 3 cannot go on from a saved optimizer")
            return
        from deepspeed.utils import safe_set_full_fp32_param

        self.engine.optimizer.refresh_fp32_params()
        for part, members in self._slices():
            held = self._twin.state[part]
            for param in members:
                given = dict(self._optimizer.state.get(param, {}))
                master = given.pop(_MASTER, None)
                if master is not None:
                    safe_set_full_fp32_param(param, master.to(part.device))
                for key, value in given.items():
                    if isinstance(value, Tensor) and value.shape == param.shape:
                        whole = held.setdefault(key, torch.zeros_like(part))
                        _fill_slice(whole, param, value)
                    else:
                        held[key] = value.clone() if isinstance(value, Tensor) else value
        self._optimizer.state.clear()


def _gather_slices(slice_: Tensor, param: nn.Parameter) -> Tensor:
    """A parameter's state, whole, from the flat slices of all ranks."""
    # DeepSpeed's own function finds no state but that of the first parameter group.
    whole = torch.zeros(param.numel(), dtype=slice_.dtype, device=slice_.device)
    mapping = param._hp_mapping  # type: ignore[attr-defined]
    if mapping is not None:
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        source = slice_.narrow(0, here.start, here.numel)
        whole.narrow(0, there.start, there.numel).copy_(source)
    dist.all_reduce(whole)
    return whole.view(param.shape)


def _fill_slice(whole: Tensor, param: nn.Parameter, value: Tensor) -> None:
    """Copy what this rank holds of a parameter's state to its place in the flat slice."""
    mapping = param._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return
    there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
    source = value.flatten().narrow(0, here.start, here.numel)
    whole.narrow(0, there.start, there.numel).copy_(source)


def _make_twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class, groups and settings, without state."""
    twin: Optimizer = object.__new__(type(optimizer))
    # A scheduler puts a step of its own on the instance; the twin steps for itself.
    twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    twin.param_groups = [
        {**group, "params": list(group["params"])} for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    return twin
