"""What a profiler leaves behind: a Chrome trace and tables of the costliest operations.

Owns: names and contents of these files. Does not own: when the profiler runs (profiler.py).
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
from pathlib import Path
from typing import Any

MOST_EVENTS = 500_000
"""Of which tables are made: that takes a tenth of a millisecond each, and training waits."""
_PYTHON = re.compile(r"<built-in |nn\.Module: |.*\.pyx?\(\d+\): ")


def write_trace(profiler: Any, folder: Path, rank: int, step: int, *, compress: bool) -> Path:
    """The trace as `rank-{rank}-step-{step}.chrome_trace.json`, never over an existing one.

    It gets its name when it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".chrome_trace.json" + ".gz" * compress
    path = _free_name(folder, f"rank-{rank}-step-{step}", suffix)
    # The exporter looks at the end of the name.
    plain = folder / f".{path.name.removesuffix('.gz').removesuffix('.json')}-{os.getpid()}.json"
    packed = plain.with_suffix(".gz")
    try:
        profiler.export_chrome_trace(str(plain))
        if compress:
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)
        os.replace(packed if compress else plain, path)
    finally:
        for left in (plain, packed):
            with contextlib.suppress(FileNotFoundError):
                left.unlink()
    return path


def make_tables(profiler: Any, *, has_cuda: bool, num_rows: int) -> str:
    """The operations that took longest, by their own time on the device and on the host.

    Lines of Python, which `with_stack` records, are left to the trace: they would fill the tables.
    """
    num_events = _count_events(profiler)
    if num_events > MOST_EVENTS:
        return (
            f"no tables: the trace holds {num_events:,} events and reading so many takes minutes; "
            f"up to {MOST_EVENTS:,} are read, so profile fewer steps, or without stacks\n"
        )
    averages = profiler.key_averages()
    averages[:] = [one for one in averages if not _PYTHON.match(one.key)]
    keys = [("host", "self_cpu_time_total")]
    if has_cuda:
        keys.insert(0, ("device", "self_device_time_total"))
    return "\n".join(
        f"own time on the {where}, the first {num_rows} operations\n"
        + averages.table(sort_by=key, row_limit=num_rows)
        for where, key in keys
    )


def _count_events(profiler: Any) -> int:
    results = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    return 0 if results is None else len(results.events())


def _free_name(folder: Path, stem: str, suffix: str) -> Path:
    path, number = folder / f"{stem}{suffix}", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}{suffix}"
    return path
