"""The callback library, each class loaded when it is first used. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.callbacks.log.info import InfoCallback
    from headway.callbacks.log.json_logger import JsonLogger
    from headway.callbacks.log.progress import ProgressCallback
    from headway.callbacks.watch.default_metrics import DefaultMetrics

__all__ = [
    "DefaultMetrics",
    "InfoCallback",
    "JsonLogger",
    "ProgressCallback",
    "default_callbacks",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "log.info": ("InfoCallback",),
        "log.json_logger": ("JsonLogger",),
        "log.progress": ("ProgressCallback",),
        "watch.default_metrics": ("DefaultMetrics",),
    },
)


def default_callbacks(args: Any) -> list[Any]:
    """What every run gets unless told otherwise."""
    from headway.callbacks.log.info import InfoCallback
    from headway.callbacks.log.json_logger import JsonLogger
    from headway.callbacks.log.progress import ProgressCallback
    from headway.callbacks.watch.default_metrics import DefaultMetrics

    return [DefaultMetrics(), ProgressCallback(), InfoCallback(), JsonLogger()]
