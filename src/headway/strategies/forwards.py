"""How modules are called in training, changed without a wrapper, and put back.

Owns: standing a function in for a module's `forward` or another method, so that names, hooks and
classes stay as they are; leaving a transformers model's key/value cache out of training. Does not
own: what stands in (recompute.py, compilation.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_MARK = "_stands_in_for"
_CACHE_HOOK = "_headway_cache_hook"

Forward = Callable[..., Any]


def forward_of(module: nn.Module) -> FunctionType:
    """The function that a call of the module runs, to be given the module as its first argument.

    Modules of one class have the same one, unless somebody gave an instance its own.
    """
    own = module.__dict__.get("forward")
    if own is None:
        own = MethodType(type(module).forward, module)
    if isinstance(own, MethodType) and isinstance(own.__func__, FunctionType):
        return own.__func__
    plain: Forward = own

    def forward(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    assert isinstance(forward, FunctionType)
    return forward


def stand_in(module: nn.Module, function: Forward, name: str = "forward") -> None:
    """Run `function(module, ...)` when the module is called; `put_back` ends it.

    A bound method: a deep copy of the module then runs it on the copy. `name`: of another method.
    """
    method = MethodType(function, module)
    # Beside the method and not on the function, which other modules of the class share.
    module.__dict__.setdefault(_MARK, {}).setdefault(name, module.__dict__.get(name))
    module.__dict__[name] = method


def mark_adds_nothing(function: Forward, plain: FunctionType, module: nn.Module) -> None:
    """Mark a function that only calls `plain`, the module's forward until now, if that is its
    class's own or such a function: what is known of the class still holds then."""
    if plain is type(module).forward or getattr(plain, "adds_nothing", None) is plain:
        function.__dict__["adds_nothing"] = function


def put_back(model: nn.Module) -> None:
    """Undo what this module did to a model: it may come from an earlier run."""
    for module in model.modules():
        for name, before in module.__dict__.pop(_MARK, {}).items():
            if before is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before
    hook = model.__dict__.pop(_CACHE_HOOK, None)
    if hook is not None:
        hook.remove()


def leave_out_cache(model: nn.Module) -> None:
    """Let a transformers model make no key/value cache unless a call asks for one.

    It would make one in every training step. A block that is run again for its backward would add
    to it twice, and a compiled one would be another for every layer.
    """
    takes = inspect.signature(model.forward).parameters
    if not hasattr(getattr(model, "config", None), "use_cache") or "use_cache" not in takes:
        return

    def without(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None:
            kwargs = {**kwargs, "use_cache": False}
        return args, kwargs

    if _CACHE_HOOK not in model.__dict__:
        model.__dict__[_CACHE_HOOK] = model.register_forward_pre_hook(without, with_kwargs=True)
