"""Text that is on every machine with Python: the standard library's own source files.

Owns: which files are taken, which of them are held out, and a dataset of them for run files.
Does not own: token files and datasets in general (data).
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.data.datasets import TextDataset

# Tests repeat themselves, and what is installed beside the library differs from machine to machine.
_LEFT_OUT = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
_HELD_OUT_ONE_IN = 50


def find_sources(root: Path | None = None) -> tuple[list[Path], list[Path]]:
    """(files to train on, held-out files), in a fixed order; the name decides the side."""
    folder = root or Path(sysconfig.get_path("stdlib"))
    if not folder.is_dir():
        raise ConfigError(f"the standard library's folder {folder} does not exist")
    sides: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if _LEFT_OUT.isdisjoint(name.parts[:-1]) and path.stat().st_size:
            sides[is_held_out(name.as_posix())].append(path)
    if not all(sides):
        raise ConfigError(
            f"the standard library in {folder} has no source files to train on (this Python may "
            f"keep it in an archive); train on text of your own with: headway train"
        )
    return sides


def is_held_out(name: str) -> bool:
    """Whether a file, named relative to the library, is kept for evaluation."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def standard_library(
    sequence_length: int = 256, held_out: bool = False, tokenizer: Any = "bytes"
) -> TextDataset:
    """The source files (or the held-out ones) as a dataset; a run file names it by class_path."""
    from headway.data.datasets import TextDataset

    files = find_sources()[held_out]
    return TextDataset(None, tokenizer, sequence_length, files=files, mask_documents=False)
