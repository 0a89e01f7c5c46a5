"""What a constructor takes, so that an unknown keyword can be told with the nearest name."""

from __future__ import annotations

import inspect


def parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    """The named parameters of a constructor, those it passes on to its bases included."""
    found: dict[str, inspect.Parameter] = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        init = owner.__init__  # type: ignore[misc]  # whatever kind of method it is
        own = list(inspect.signature(init).parameters.values())[1:]
        named = [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        found = {p.name: p for p in named} | found
        if len(named) == len(own):
            break
    return found
