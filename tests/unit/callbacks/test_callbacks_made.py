"""Making a callback checks its options and does nothing else: run files are checked that way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import inspect, os, sys, threading
import headway.callbacks as library

num_made = 0
for name in library.__all__:
    kind = getattr(library, name)
    if not inspect.isclass(kind):
        continue
    try:
        kind()
        num_made += 1
    except (TypeError, ValueError):  # it needs arguments, or a package
        pass
    assert "torch" not in sys.modules, name
    assert not os.listdir("."), name
    assert threading.active_count() == 1, name
assert num_made > 20, num_made
"""


def test_making_callbacks_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
