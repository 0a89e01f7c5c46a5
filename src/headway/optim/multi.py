"""Several optimizers as one, each with its own parameters.

Owns: `JoinedOptimizer`, which schedulers, checkpoints and strategies take for a single optimizer.
Does not own: which parameters go to which (build.py, muon.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from headway.errors import ConfigError
from headway.optim.adamw_step import step

GROUP_CLASS = "optimizer_class"
"""The key of a param group that says by which class its parameters are updated."""


class JoinedOptimizer(Optimizer):
    """Optimizers that step together.

    Its param groups are those of the parts, the same dicts, in the order of `order` (param groups,
    if it is not that of the parts), and all parts keep their state in its `state`. So whatever
    changes a setting or a state here changes it in the part.
    """

    def __init__(
        self, parts: Sequence[Optimizer], order: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self.parts: list[Optimizer] = []
        for part in parts:
            self.parts += part.parts if isinstance(part, JoinedOptimizer) else [part]
        held = [(group, n) for n, part in enumerate(self.parts) for group in part.param_groups]
        place = {id(group): number for number, group in enumerate(order or ())}
        held.sort(key=lambda pair: place.get(id(pair[0]), len(place)))
        self._owners = [owner for _, owner in held]
        self._complete = False
        super().__init__([group for group, _ in held], {})
        self._complete = True
        for group, owner in held:
            group[GROUP_CLASS] = type(self.parts[owner]).__name__
        self._step_supports_amp_scaling = all(
            getattr(part, "_step_supports_amp_scaling", False) for part in self.parts
        )
        self._link()

    def _link(self) -> None:
        """Let the parts work on the groups and the state that this object has now."""
        for number, part in enumerate(self.parts):
            part.param_groups = [
                group
                for group, owner in zip(self.param_groups, self._owners, strict=True)
                if owner == number
            ]
            part.state = self.state

    def part_of(self, group: int) -> Optimizer:
        """The optimizer of one of the param groups."""
        return self.parts[self._owners[group]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of every part."""
        if closure is not None:
            raise ConfigError("a joined optimizer takes no closure; call backward before step()")
        for part in self.parts:
            if part.state is not self.state:
                raise ConfigError(
                    "a joined optimizer works on its own parameters only; what copies or flattens "
                    "them, such as DeepSpeed, needs a single optimizer"
                )
            # Of this step only: whoever set them takes them away afterwards.
            for flag in ("found_inf", "grad_scale"):
                setattr(part, flag, getattr(self, flag, None))
            if getattr(self, "grad_scale", None) is None:
                step(part, getattr(self, "found_inf", None))
            else:
                part.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the parts are joined: nothing says whose the group would be."""
        if self._complete:
            raise ConfigError("a joined optimizer takes no further param groups")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        own = ("parts", "_owners", "_complete", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Also called by `load_state_dict`, with new groups and a new state.
        super().__setstate__(state)
        self._link()
