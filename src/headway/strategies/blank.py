"""A model with memory for its weights and no values in it: a checkpoint will bring them.

Owns: moving a model off the meta device without drawing its weights, and the few values that no
checkpoint holds. Does not own: when that is right (trainers/preparation.py), reading checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headway.checkpoint.rng import RNGState
from headway.models.decoder import Decoder
from headway.models.initial import derived_buffers, parameters_on_meta
from headway.strategies.source import ModelSource, construct

logger = logging.getLogger(__name__)


def build_blank(source: ModelSource) -> nn.Module | None:
    """The model on the meta device, if nothing but its state has to be brought; else None."""
    generators = RNGState()
    before = generators.state_dict()
    try:
        model = source.build_meta()
    except Exception as error:
        _fall_back(f"model_init does not run on the meta device ({type(error).__name__}: {error})")
        return None
    finally:
        generators.load_state_dict(before)
    stray = next(_strays(model), None)
    if stray is not None:
        _fall_back(f"{stray} is a tensor that no checkpoint holds")
        return None
    return model


def _fall_back(reason: str) -> None:
    logger.warning("construct_model_on='meta': %s; the model is built in the ordinary way", reason)


def _strays(model: nn.Module) -> Iterator[str]:
    """Attributes without values that are neither parameters nor buffers."""
    state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for prefix, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.is_meta and id(leaf) not in state:
                    yield f"{prefix}.{name}" if prefix else name


@torch.no_grad()
def materialise(model: nn.Module, source: ModelSource, device: torch.device) -> nn.Module:
    """Give a model that `build_blank` made memory on `device`; one tensor stays one tensor."""
    made: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    blank = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = move(tensor)  # type: ignore[assignment]
    fill_buffers(model, source, [name for name in unstored_buffers(model) if name in blank])
    return model


def unstored_buffers(model: nn.Module) -> list[str]:
    """The buffers that are in no state dict."""
    stored = set(model.state_dict())
    return [name for name, _ in model.named_buffers() if name not in stored]


@torch.no_grad()
def fill_buffers(model: nn.Module, source: ModelSource, names: list[str]) -> None:
    """Give buffers that no checkpoint holds the values that the constructor gives them."""
    if isinstance(model, Decoder):
        model.reset_buffers()
        return
    if not names:
        return
    targets, missing = dict(model.named_buffers()), set(names)
    for name, value in _constructed_buffers(source, model):
        if name in missing:
            missing.discard(name)
            targets[name].copy_(value)
    assert not missing, f"model_init makes another model each time: {sorted(missing)}"


def _constructed_buffers(source: ModelSource, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if source.weights is not None:
        yield from derived_buffers(source.weights, model)
        return
    assert source.make is not None, "it made the model"
    with parameters_on_meta():
        skeleton = construct(source.make, source.default_dtype)
    yield from skeleton.named_buffers()
