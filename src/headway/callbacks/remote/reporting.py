"""From `report_to` to trackers.

Owns: which name stands for which callback, and what `all` and `none` mean. Does not own: the check
of the names (config), nor a tracker's parameters.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from headway.errors import ConfigError, unknown

# Name -> the package that must be there, the module and the class of its callback.
_TRACKERS = {
    "comet_ml": ("comet_ml", "remote.comet_tracker", "CometCallback"),
    "mlflow": ("mlflow", "remote.mlflow_tracker", "MLflowCallback"),
    "tensorboard": ("tensorboard", "log.tb_logger", "TBLogger"),
    "trackio": ("trackio", "remote.trackio_tracker", "TrackioCallback"),
    "wandb": ("wandb", "remote.wandb_tracker", "WandBCallback"),
}


def make_trackers(report_to: str | Sequence[str] | None) -> list[Any]:
    """A callback for each name; `none` is nothing, `all` whatever is installed."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    for name in names:
        if name not in (*_TRACKERS, "all", "none"):
            raise ConfigError("report_to: " + unknown("tracker", name, (*_TRACKERS, "all", "none")))
    if "all" in names:
        names = [n for n, (package, *_) in _TRACKERS.items() if importlib.util.find_spec(package)]
    trackers = []
    for name in dict.fromkeys(names):
        if name != "none":
            _, module, kind = _TRACKERS[name]
            home = importlib.import_module(f"headway.callbacks.{module}")
            trackers.append(getattr(home, kind)())
    return trackers
