"""Changing small files of a committed checkpoint, by committing it anew.

Owns: `rewrite`, which keeps every other file (as a second name for it, not a copy), the order of
the checkpoints and its pin. Does not own: what is changed (modify.py, metrics.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import MANIFEST_NAME, read_manifest, refuse_link, verify
from headway.checkpoint.storage import Storage, is_plain_file, list_files


def rewrite(
    path: str | Path,
    changes: Mapping[str, bytes],
    *,
    fields: Mapping[str, Any] | None = None,
    backup: bool = False,
    storage: Storage | None = None,
) -> Path | None:
    """Replace or add files and manifest `fields`; returns the backup's directory if one is kept.

    The checkpoint is verified first. The old and the new one change places at one instant, as in
    a save of the same step.
    """
    directory = Path(path).absolute()
    refuse_link(directory)
    manifest = read_manifest(directory)
    problems = verify(directory)
    if problems:
        raise CheckpointError("\n".join(problems))
    spare = _free_backup(directory) if backup else None
    with Draft(directory, digest=manifest.digest_algorithm, storage=storage) as draft:
        for name in list_files(directory):
            if name == MANIFEST_NAME or name in changes:
                continue
            if not is_plain_file(directory, name):
                raise CheckpointError(f"{directory / name} is not a regular file")
            draft.take(directory / name, name, manifest.files.get(name))
        for name, data in changes.items():
            draft.write_bytes(name, data)
        listed = {n: r for n, r in draft.files.items() if n in manifest.files or n in changes}
        renewed = dataclasses.replace(manifest, files=listed, digest="", **dict(fields or {}))
        draft.commit(renewed, replace=True, backup=spare)
    return spare


def _free_backup(directory: Path) -> Path:
    number = 1
    while os.path.lexists(spare := directory.with_name(f"{directory.name}.backup-{number}")):
        number += 1
    return spare
