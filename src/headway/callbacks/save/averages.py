"""Tensors kept beside a model's own: sums or averages of them, and the model with these in it.

Owns: which of a model's tensors move, this rank's part of each, arithmetic over many of them, and
the exchange of the model's values for others that is undone whatever happens. Does not own: when
any of it happens (the callbacks), nor the files (checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def moving_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes, by stored name: parameters that are trained and buffers.

    Of the buffers, those of floating point that are in the state dict. Tied tensors come once.
    """
    from torch import nn

    from headway.checkpoint.model import collect_model

    return {
        name: tensor
        for name, tensor in collect_model(model).stored.items()
        if tensor.is_floating_point()
        and (tensor.requires_grad or not isinstance(tensor, nn.Parameter))
    }


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of each, without those of which it holds nothing; not copies."""
    from headway.checkpoint.sharding import local_tensor

    parts = {name: local_tensor(tensor).detach() for name, tensor in tensors.items()}
    return {name: part for name, part in parts.items() if part.numel()}


class Watched:
    """The tensors of a model that are averaged, and the frozen ones that may join them."""

    def __init__(self, model: nn.Module, among: Mapping[str, Any] | None = None) -> None:
        """Those that move now or, if given, those `among` which they are."""
        from headway.checkpoint.model import collect_model

        stored = collect_model(model).stored
        moving = moving_tensors(model)
        self.tensors = moving if among is None else {n: t for n, t in stored.items() if n in among}
        self._frozen = {
            name: tensor
            for name, tensor in stored.items()
            if tensor.is_floating_point() and name not in self.tensors
        }

    def parts(self) -> dict[str, Tensor]:
        """What this rank holds of each, without those of which it holds nothing."""
        return local_parts(self.tensors)

    def take_thawed(self) -> dict[str, Tensor]:
        """This rank's parts of those that were frozen and are no more; they count from now on."""
        thawed = {name: t for name, t in self._frozen.items() if t.requires_grad}
        for name in thawed:
            self.tensors[name] = self._frozen.pop(name)
        return local_parts(thawed)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to average a tensor in: at least float32."""
    import torch

    return torch.promote_types(tensor.dtype, torch.float32)


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """A dtype in which a sum of equal values divided by their number gives the value again."""
    import torch

    return wide_dtype(tensor) if tensor.device.type == "mps" else torch.float64


def add_to(sums: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    """Add to each sum the part of the same name."""
    import torch

    names = [name for name in sums if name in parts]
    if names:
        with torch.no_grad():
            torch._foreach_add_([sums[n] for n in names], [parts[n] for n in names])


def move_towards(
    averages: Mapping[str, Tensor], parts: Mapping[str, Tensor], weight: float
) -> None:
    """Move each average by a fraction of its distance to the part of the same name."""
    import torch

    same = [n for n, a in averages.items() if n in parts and a.dtype == parts[n].dtype]
    with torch.no_grad():
        if same:
            torch._foreach_lerp_([averages[n] for n in same], [parts[n] for n in same], weight)
        for name in averages.keys() - set(same):
            if name in parts:  # one at a time: the wider copy is short-lived
                averages[name].lerp_(parts[name].to(averages[name].dtype), weight)


@contextmanager
def exchanged(
    trainer: Any, parts: Mapping[str, Tensor], values: Mapping[str, Tensor], divisor: int = 1
) -> Iterator[None]:
    """Inside, the model has `values` divided by `divisor`; afterwards its own, bit by bit.

    Where a value's memory can hold the model's own exactly, it does meanwhile, so that no second
    copy of the model is needed. The values are as they were afterwards, unless they are divided.
    """
    import torch

    before_update = trainer.strategy.before_apply
    if before_update is not None:  # a save may still be copying both
        before_update()
    kept: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for name, value in values.items():
                own = parts[name]
                new = value.to(own.device, copy=True)
                new = (new.div_(divisor) if divisor != 1 else new).to(own.dtype)
                if divisor != 1 or value.dtype == own.dtype:
                    value.copy_(own)
                    kept[name] = value
                else:
                    kept[name] = own.clone()
                own.copy_(new)
        yield
    finally:
        with torch.no_grad():
            for name, before in kept.items():
                own = parts[name]
                if before is values[name] and divisor == 1:
                    value = own.to(before.device, copy=True)
                    own.copy_(before)
                    before.copy_(value)
                else:
                    own.copy_(before)


def refuse_strategy(callback: str, trainer: Any) -> None:
    """`ConfigError` where a rank's model does not hold the weights that are trained."""
    local = getattr(trainer.args, "post_local_sgd", None)
    if local is not None and local.enabled:
        raise ConfigError(
            f"{callback}: with post_local_sgd.enabled each rank has weights of its own between "
            f"averagings, so there is no one state to average; set post_local_sgd.enabled=false"
        )
    accelerator = getattr(trainer.strategy, "accelerator", None)
    if accelerator is not None:
        from headway.strategies.accelerator import DEEPSPEED, distributed_type

        if distributed_type(accelerator) == DEEPSPEED:
            raise ConfigError(
                f"{callback}: DeepSpeed keeps the weights that it trains apart from the model; use "
                f"FSDP2Trainer, which shards in the same way"
            )


def refuse_shared_suffix(callback: Any, trainer: Any) -> None:
    """`ConfigError` where two callbacks would write their weights to one directory."""
    own = callback.written_suffix
    for other in trainer.callbacks.values():
        if own is None or other is callback or getattr(other, "written_suffix", None) != own:
            continue
        kind, kind_of_other = type(callback).__name__, type(other).__name__
        whom = "two of them" if kind == kind_of_other else f"it and to {kind_of_other}"
        raise ConfigError(
            f"{kind}: output_suffix: {own!r} given to {whom}; allowed: one of its own for each, as "
            "it names the directory"
        )
