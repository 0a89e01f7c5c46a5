"""For files that test_kernels_cpu.py runs in a process of their own: kernels without a GPU.

To be imported before the modules of the kernels: their operations then take tensors of the CPU.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType

import headway.models.kernels as kernels

kernels.define_operation = functools.partial(kernels.define_operation, dispatch_key="CPU")


def open_kernels(module: ModuleType) -> None:
    """Let the interpreter find what kernels call: it sees the globals of a module alone."""
    for kernel in module._kernels() if hasattr(module, "_kernels") else [module._kernel()]:
        assert "Interpreted" in type(kernel).__name__, "TRITON_INTERPRET was set after the import"
        vars(module).update(inspect.getclosurevars(kernel.fn).nonlocals)
