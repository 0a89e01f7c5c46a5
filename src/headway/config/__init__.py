"""Configuration: argument rules, durations, run files, components, the snapshot of a run.

Everything here answers without importing torch; the names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.config.batch import derive_accumulation
    from headway.config.components import check_component, instantiate
    from headway.config.duration import Duration
    from headway.config.load import load_run
    from headway.config.schema import Component, DataConfig, RunConfig
    from headway.config.snapshot import resolved_config, take_snapshot, write_snapshot

_HOMES = {
    "Component": "schema",
    "DataConfig": "schema",
    "Duration": "duration",
    "RunConfig": "schema",
    "check_component": "components",
    "derive_accumulation": "batch",
    "instantiate": "components",
    "load_run": "load",
    "resolved_config": "snapshot",
    "take_snapshot": "snapshot",
    "write_snapshot": "snapshot",
}

__all__ = [
    "Component",
    "DataConfig",
    "Duration",
    "RunConfig",
    "check_component",
    "derive_accumulation",
    "instantiate",
    "load_run",
    "resolved_config",
    "take_snapshot",
    "write_snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
