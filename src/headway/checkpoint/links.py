"""Links in a run directory that make it a model folder: its root shows the newest weights.

Owns: which files are linked and the order in which links change. Does not own: the choice of the
newest (discovery.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from headway.checkpoint.discovery import find_whole_checkpoint
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import MANIFEST_NAME, read_manifest
from headway.checkpoint.meta import SAFE_WEIGHTS_INDEX_NAME
from headway.checkpoint.owner import new_nonce

_NOT_OF_THE_MODEL = {MANIFEST_NAME, "trainer_state.json", "eval_metrics.json"}


def _model_files(checkpoint: Path) -> list[str]:
    names = [
        name
        for name in read_manifest(checkpoint).files
        if "/" not in name and name not in _NOT_OF_THE_MODEL and not name.startswith("optimizer")
    ]
    # The index last: while it is missing, the root is no model folder rather than a mixture.
    return sorted(names, key=lambda name: (name == SAFE_WEIGHTS_INDEX_NAME, name))


def create_pretrained_symlinks(
    model_dir: str | Path, force_overwrite: bool = False, dry_run: bool = False
) -> dict[str, str]:
    """Link the newest checkpoint's model files into the run directory, for `from_pretrained`.

    Returns `{link: target}`, targets relative. Links from earlier calls are replaced or removed. A
    real file in the way is a `FileExistsError`, unless `force_overwrite`.
    """
    root = Path(model_dir).absolute()
    found = find_whole_checkpoint(root)
    if found is None or Path(found) == root:
        raise CheckpointError(f"{root} holds no committed checkpoint to link to")
    checkpoint = Path(found)
    names = _model_files(checkpoint)
    in_the_way = [name for name in names if (root / name).exists() or (root / name).is_symlink()]
    real = [name for name in in_the_way if not (root / name).is_symlink()]
    if any((root / name).is_dir() for name in real) or (real and not force_overwrite):
        raise FileExistsError(
            f"{root / real[0]} is a file of its own, not a link; move it away or force its removal"
        )
    links = {name: os.path.join(checkpoint.name, name) for name in names}
    if dry_run:
        return links
    stale = [name for name in _own_links(root) if name not in links]
    for name in [SAFE_WEIGHTS_INDEX_NAME, *stale]:
        if (root / name).is_symlink():
            (root / name).unlink()
    for name, target in links.items():
        temporary = root / f".link-{new_nonce()}"
        os.symlink(target, temporary)
        os.replace(temporary, root / name)
    return links


def _own_links(root: Path) -> list[str]:
    """Links in the root that lead to a file right inside one of its directories."""
    names = []
    for entry in os.scandir(root):
        if entry.is_symlink():
            target = Path(os.readlink(entry.path))
            if not target.is_absolute() and len(target.parts) == 2 and target.name == entry.name:
                names.append(entry.name)
    return names
