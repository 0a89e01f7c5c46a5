"""The callback library, each class loaded when it is first used. Importing it imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.callbacks.log.info import InfoCallback
    from headway.callbacks.log.json_logger import JsonLogger
    from headway.callbacks.log.progress import ProgressCallback
    from headway.callbacks.watch.default_metrics import DefaultMetrics

_HOME = {
    "DefaultMetrics": "watch.default_metrics",
    "InfoCallback": "log.info",
    "JsonLogger": "log.json_logger",
    "ProgressCallback": "log.progress",
}

__all__ = [
    "DefaultMetrics",
    "InfoCallback",
    "JsonLogger",
    "ProgressCallback",
    "default_callbacks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def default_callbacks(args: Any) -> list[Any]:
    """What every run gets unless told otherwise."""
    from headway.callbacks.log.info import InfoCallback
    from headway.callbacks.log.json_logger import JsonLogger
    from headway.callbacks.log.progress import ProgressCallback
    from headway.callbacks.watch.default_metrics import DefaultMetrics

    return [DefaultMetrics(), ProgressCallback(), InfoCallback(), JsonLogger()]
