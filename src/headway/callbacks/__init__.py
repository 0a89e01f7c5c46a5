"""The callback library. Importing it does not import torch."""

from __future__ import annotations

from typing import Any

from headway.callbacks.log.info import InfoCallback
from headway.callbacks.log.json_logger import JsonLogger
from headway.callbacks.log.progress import ProgressCallback
from headway.callbacks.watch.default_metrics import DefaultMetrics

__all__ = ["DefaultMetrics", "InfoCallback", "JsonLogger", "ProgressCallback", "default_callbacks"]


def default_callbacks(args: Any) -> list[Any]:
    """What every run gets unless told otherwise."""
    return [DefaultMetrics(), ProgressCallback(), InfoCallback(), JsonLogger()]
