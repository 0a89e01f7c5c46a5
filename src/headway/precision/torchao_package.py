"""torchao, imported late and quietly.

Owns: the error where it is absent, and its noise at import. Does not own: what it is used for.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from headway.errors import ConfigError, missing_extra

# Kernels for hardware that this machine does not have are reported by the first, how torchao
# registers its own classes by the second; neither says anything about the work at hand.
_NOISY = ("torchao", "torch.utils._pytree")


def load_torchao(purpose: str, module: str = "torchao") -> ModuleType:
    """torchao, or a module of it; where it is missing, an error that names the extra."""
    try:
        with quietly():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] != "torchao":
            raise
        if error.name not in (None, "torchao"):
            raise ConfigError(
                f"{purpose} needs another torchao than {torchao_version()}, which has no "
                f"{error.name}: pip install -U 'headway[quant]'"
            ) from None
        raise missing_extra("torchao", "quant", purpose) from None


def torchao_version() -> str:
    """The installed version, without a local part."""
    version: str = load_torchao("quantized weights").__version__
    return version.partition("+")[0]


@contextmanager
def quietly() -> Iterator[None]:
    """While torchao imports more of itself."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
