"""Configuration: argument rules, durations, run files, components, the snapshot of a run.

Everything here answers without importing torch; the names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.config.batch import derive_accumulation
    from headway.config.components import check_component, instantiate
    from headway.config.duration import Duration
    from headway.config.load import load_run
    from headway.config.schema import Component, DataConfig, RunConfig
    from headway.config.snapshot import resolved_config, take_snapshot, write_snapshot

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "batch": ("derive_accumulation",),
        "components": ("check_component", "instantiate"),
        "duration": ("Duration",),
        "load": ("load_run",),
        "schema": ("Component", "DataConfig", "RunConfig"),
        "snapshot": ("resolved_config", "take_snapshot", "write_snapshot"),
    },
)
