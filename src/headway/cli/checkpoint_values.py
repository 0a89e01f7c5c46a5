"""`headway checkpoint list`: what a checkpoint holds besides tensors, by name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.checkpoint import open_committed
from headway.cli.messages import print_json
from headway.errors import ConfigError, unknown

if TYPE_CHECKING:
    from headway.checkpoint import Manifest

# A history, or a generator's state, would hide the rest.
_MOST_ITEMS = 8


def run_list(options: argparse.Namespace) -> int:
    """Print the values of all parts, or of one."""
    from headway.checkpoint import read_manifest

    with open_committed(options.path) as directory:
        manifest = read_manifest(directory)
        found = _read(directory, manifest, options.component)
    if options.json:
        print_json(found)
        return 0
    for component, files in found.items():
        for file, value in files.items():
            print(f"{component} ({file})")
            for name, leaf in _flatten(value, whole=options.verbose):
                print(f"  {name} = {leaf}")
    return 0


def _read(directory: Path, manifest: Manifest, wanted: str | None) -> dict[str, dict[str, Any]]:
    from headway.checkpoint.contents import TRAINER_STATE_NAME
    from headway.checkpoint.export import require_whole
    from headway.checkpoint.jsonfile import read_json

    files = {"trainer": [TRAINER_STATE_NAME]} if TRAINER_STATE_NAME in manifest.files else {}
    for entry in manifest.components:
        names = [n for n in entry["files"] if n.startswith("state/") and n.endswith(".json")]
        names = [n for n in names if not n.endswith(".index.json")]
        if names:
            files[entry["key"]] = names
    if wanted is not None and wanted not in files:
        raise ConfigError(f"--component: {unknown('component with values', wanted, files)}")
    chosen = {key: names for key, names in files.items() if wanted in (None, key)}
    require_whole(directory, [name for names in chosen.values() for name in names])
    return {
        key: {name: _shown(key, read_json(directory / name)) for name in names}
        for key, names in chosen.items()
    }


def _shown(key: str, value: Any) -> Any:
    """An optimizer's groups alone: the rest of its file says which tensors there are."""
    if key == "optimizer" and isinstance(value, dict) and isinstance(value.get("rest"), dict):
        return {"class": value.get("class"), **value["rest"]}
    return value


def _flatten(value: Any, *, whole: bool, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and len(value) == 1 and next(iter(value)).startswith("$"):
        tag, payload = next(iter(value.items()))
        if tag in ("$tensor", "$array"):
            name = payload if isinstance(payload, str) else payload[0]
            if whole:
                yield prefix, f"(tensor {name})"
            return
        value = payload
    if isinstance(value, list) and len(value) > _MOST_ITEMS and not whole:
        yield prefix, f"({len(value)} items; -v shows them)"
    elif isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flatten(item, whole=whole, prefix=f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            inner = f"{prefix}[{number}]" if prefix == "param_groups" else f"{prefix}.{number}"
            yield from _flatten(item, whole=whole, prefix=inner)
    else:
        yield prefix, value
