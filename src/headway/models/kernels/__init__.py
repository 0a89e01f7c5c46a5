"""GPU kernels of the reference decoder, for what torch's operations do in too many passes.

Each computes what a plain form elsewhere in `models` does; tests compare the two on a GPU, and in
Triton's interpreter on any machine.
They are operations of torch with a name and no gradient; what uses them brings its own.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

logger = logging.getLogger(__name__)

# Blocks are chosen for the warps of NVIDIA's GPUs.
HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None
"""Triton comes with torch where it knows the platform; without it the plain forms are used.

False also from when `triton_works` finds that it makes no kernels here: read it from this module.
"""


@functools.cache
def triton_works() -> bool:
    """Whether kernels can be made here: for that Triton needs a C compiler, among others."""
    global HAS_TRITON
    if not HAS_TRITON or not torch.cuda.is_available():
        return False
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def write_one(target):  # type: ignore[no-untyped-def]
        tl.store(target, 1.0)

    try:
        write_one[(1,)](torch.zeros(1, device="cuda"))
    except torch.OutOfMemoryError:
        raise  # says nothing about Triton, and must not be remembered
    except Exception as error:
        logger.warning("Triton cannot make kernels here, slower ones are used: %s", error)
        HAS_TRITON = False
        return False
    return True


_operations = torch.library.Library("headway", "FRAGMENT")


def define_operation(
    schema: str,
    fake: Callable[..., Any],
    *,
    dispatch_key: str = "CUDA",
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function an operation; `fake` gives what it returns, without values.

    `flops`: from the shapes of the arguments, how much work it is. An operation that does not tell
    costs nothing to whoever chooses what the backward pass makes again.
    """
    name = schema.partition("(")[0]
    _operations.define(schema)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _operations.impl(name, function, dispatch_key)
        torch.library.register_fake(f"headway::{name}", fake, lib=_operations)
        packet = getattr(torch.ops.headway, name)
        if flops is not None:
            register_flop_formula(packet)(flops)
        operation: Callable[..., Any] = packet.default
        return operation

    return register
