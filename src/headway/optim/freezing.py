"""Parameters that an optimizer has and that stand still for a time.

Owns: the mark of those who hold one, and what follows from it. Does not own: when a parameter is
held and let go (callbacks/schedule/freeze.py).
"""

from __future__ import annotations

from torch import nn

_HOLDERS = "_frozen_by"
"""On a parameter: who holds it. Several may, and the last one lets it go."""


def hold(parameter: nn.Parameter, holder: object) -> None:
    """Have a parameter stand still for `holder`."""
    setattr(parameter, _HOLDERS, {*getattr(parameter, _HOLDERS, ()), id(holder)})


def let_go(parameter: nn.Parameter, holder: object) -> bool:
    """Whether nobody else holds it, so that it moves again."""
    holders: set[int] = getattr(parameter, _HOLDERS, set()) - {id(holder)}
    if holders:
        setattr(parameter, _HOLDERS, holders)
        return False
    parameter.__dict__.pop(_HOLDERS, None)
    return True


def is_trained(parameter: nn.Parameter) -> bool:
    """Whether a run trains a parameter, also if somebody holds it just now."""
    return parameter.requires_grad or hasattr(parameter, _HOLDERS)
