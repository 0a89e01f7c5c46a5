"""The imports of a process that trains: a large part of the time until its first step.

Owns: that Python's garbage collector rests meanwhile, and that the compiler comes along with the
rest where it will be needed. Does not own: what else is imported (the modules themselves).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.args import TrainingArguments


@contextmanager
def resting_collector() -> Iterator[Callable[[], None]]:
    """Inside, no garbage is looked for until the function that this gives is called.

    Importing torch and its compiler makes a million objects that stay. The collector would go
    through them again and again, which takes a quarter of the whole. From then on they are left
    out of all collections. In a process that had torch before, nothing is changed: what else it
    had may become garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield lambda: None
        return

    is_resting = True

    def wake() -> None:
        nonlocal is_resting
        if is_resting:
            is_resting = False
            gc.freeze()
            gc.enable()

    gc.disable()
    try:
        yield wake
    finally:
        wake()


def import_compiler(args: TrainingArguments) -> None:
    """Import what `torch.compile` will need, if the run compiles."""
    if args.torch_compile and args.torch_compile_backend in (None, "inductor"):
        import torch._inductor.compile_fx  # noqa: F401
