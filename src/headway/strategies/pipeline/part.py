"""The part of a model that one rank holds, as one module under the whole model's names.

Owns: `ModelPart`, which the optimizer, checkpoints and callbacks see. Does not own: running the
stages (running.py, relay.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn, Self

from torch import nn

from headway.models.hf import hf_config_of
from headway.models.operations import count_matmul_parameters
from headway.optim.kinds import Kinds
from headway.strategies.pipeline.placement import Tie


class _Branch(nn.Module):
    """A place in the tree of names."""


class ModelPart(_Branch):
    """This rank's stages in one tree. It cannot be called: no rank has the whole model.

    A tied weight whose stored name is on another rank has that name here too, so that optimizer
    groups and checkpoints take both copies for what they are.
    """

    def __init__(
        self, model: nn.Module, stages: Sequence[nn.Module], ties: Sequence[Tie], place: int
    ) -> None:
        super().__init__()
        self.config = getattr(model, "config", None)
        self.stands_for = type(model)
        """The class of the whole model."""
        self.trains_elsewhere = any(p.requires_grad for p in model.parameters())
        """Whether the whole model is trained, though all layers here may be frozen."""
        self.parameter_kinds: Kinds | None = None
        """Kinds of all parameters of the whole model, so that ranks treat a tied one alike."""
        self._hf_config = hf_config_of(model)
        self._num_matmul_parameters = count_matmul_parameters(model)
        self._tied_weights_keys = {
            name: tie.canonical for tie in ties for name in tie.places if name != tie.canonical
        }
        # Not children: their children are, under their own names.
        self.__dict__["stages"] = tuple(stages)
        self.__dict__["forward"] = _refuse_call(model)
        for stage in stages:
            _graft(self, stage)
        for tie in ties:
            names = tie.names_on(place)
            if names and names[0] != tie.canonical:
                owner, _, leaf = tie.canonical.rpartition(".")
                branch = _grow(self, owner.split(".") if owner else [])
                branch.register_parameter(leaf, self.get_parameter(names[0]))

    def hf_config(self) -> dict[str, Any] | None:
        """The config.json of the whole model."""
        return self._hf_config

    def tied_keys(self) -> dict[str, str]:
        """Names that are another name's weight in the whole model: alias -> stored name."""
        return dict(self._tied_weights_keys)

    def matmul_parameters(self) -> int:
        """Parameters of the whole model that take part in matrix products."""
        return self._num_matmul_parameters

    def get_input_embeddings(self) -> nn.Module | None:
        """The embedding, where its stage is here."""
        for stage in self.__dict__["stages"]:
            find = getattr(stage, "get_input_embeddings", None)
            found = find() if callable(find) else None
            if isinstance(found, nn.Module):
                return found
        return None

    def train(self, mode: bool = True) -> Self:
        for stage in self.__dict__["stages"]:
            stage.train(mode)
        return super().train(mode)


def _refuse_call(model: nn.Module) -> Any:
    """In the place of `forward`, with the signature of the whole model's."""

    def forward(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"this rank holds a part of {type(model).__name__} and cannot call it; use the "
            "trainer's methods, or generate() of its strategy on all ranks"
        )

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    return forward


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _graft(target: nn.Module, source: nn.Module) -> None:
    """Give `target` the tensors and children of `source` besides its own."""
    for name, parameter in source._parameters.items():
        target.register_parameter(name, parameter)
    for name, buffer in source._buffers.items():
        persistent = name not in source._non_persistent_buffers_set
        target.register_buffer(name, buffer, persistent=persistent)
    for name, child in source._modules.items():
        if child is None or not _has_state(child):
            continue
        mine = target._modules.get(name)
        if mine is None:
            target.add_module(name, child)
        elif mine is not child:
            _graft(_own(target, name), child)


def _own(target: nn.Module, name: str) -> nn.Module:
    """The child as a branch: what is grafted on it does not reach into a stage."""
    child = target._modules.get(name)
    if isinstance(child, _Branch):
        return child
    branch = _Branch()
    if child is not None:
        _graft(branch, child)
    target._modules[name] = branch
    return branch


def _grow(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The branch at `path`, first among its siblings: the first name of a tensor is its name."""
    for name in path:
        branch = _own(root, name)
        others = {key: value for key, value in root._modules.items() if key != name}
        root._modules.clear()
        root._modules.update({name: branch, **others})
        root = branch
    return root
