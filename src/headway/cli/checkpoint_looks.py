"""Commands that look at checkpoints: ls, inspect, components, verify, diff. None changes a file.

`list`, which looks at the values inside, is in checkpoint_values.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.checkpoint import open_checkpoint, open_committed, require_folder
from headway.cli.messages import print_json, print_table, spell_bytes, spell_count
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.checkpoint import CommittedCheckpoint, Manifest
    from headway.checkpoint.compare import Comparison

_MOST_SHOWN = 20


def _num_bytes(manifest: Manifest) -> int:
    return sum(record.size for record in manifest.files.values())


def _describe(found: CommittedCheckpoint, where: str) -> dict[str, Any]:
    from headway.checkpoint import is_pinned

    metadata = found.manifest.metadata
    flags = [name for name in ("permanent", "ephemeral") if metadata.get(name)]
    return {
        "path": where,
        "name": found.path.name,
        "step": found.step,
        "save_counter": found.save_counter,
        "kind": found.kind,
        "bytes": _num_bytes(found.manifest),
        "metric": found.manifest.metric,
        "created": found.manifest.created,
        "flags": [*flags, *(["pinned"] if is_pinned(found.path) else [])],
    }


def run_ls(options: argparse.Namespace) -> int:
    """List the checkpoints of a directory."""
    from headway.checkpoint.discovery import committed_in
    from headway.checkpoint.manifest import damaged_manifests
    from headway.checkpoint.storage import open_storage

    require_folder(options.path)
    storage = open_storage(options.path)
    found = [_describe(c, storage.locate(c.path)) for c in committed_in(storage)]
    damaged = damaged_manifests(storage.root)
    if options.json:
        print_json({"checkpoints": found, "damaged": [str(path) for path in damaged]})
        return 0
    for reason in damaged.values():
        print(f"damaged: {reason}", file=sys.stderr)
    if not found:
        print(f"no committed checkpoint in {options.path}")
    width = max((len(entry["name"]) for entry in found), default=0)
    for entry in found:
        metric = "" if entry["metric"] is None else f"  metric {entry['metric']:g}"
        flags = f"  [{', '.join(entry['flags'])}]" if entry["flags"] else ""
        print(
            f"{entry['name']:<{width}}  {entry['kind']:<8}  step {entry['step']:,}  "
            f"save {entry['save_counter']}  {spell_bytes(entry['bytes'])}  {entry['created']}"
            f"{metric}{flags}"
        )
    return 0


def run_inspect(options: argparse.Namespace) -> int:
    """Say what a checkpoint is."""
    from headway.checkpoint import is_pinned, read_manifest, verify

    with open_committed(options.path) as directory:
        manifest = read_manifest(directory)
        facts = _facts(directory, manifest)
        facts["pinned"] = is_pinned(directory)
        if options.validate:
            facts["problems"] = verify(directory, num_threads=os.cpu_count() or 1)
    code = 1 if facts.get("problems") else 0
    if options.verbose:
        facts["files"] = {
            n: {"bytes": r.size, "digest": r.digest} for n, r in manifest.files.items()
        }
    if options.json:
        print_json(facts)
        return code
    made_by = f"headway {manifest.headway_version}, torch {manifest.torch_version}"
    rows = [
        ("checkpoint", facts["path"]),
        ("kind", f"{manifest.kind} ({'resumes' if facts['resumes'] else 'does not resume'})"),
        ("step", f"{manifest.step:,}, save {manifest.save_counter}"),
        ("made", f"{manifest.created} by {made_by}"),
        ("size", f"{spell_bytes(facts['bytes'])} in {len(manifest.files)} files"),
        ("parameters", spell_count(facts["num_parameters"]) if facts["num_parameters"] else "none"),
        ("topology", ", ".join(f"{k} {v}" for k, v in manifest.topology.items())),
        ("Hugging Face", facts["hugging_face"]),
        ("digests", manifest.digest_algorithm),
    ]
    rows += [(c["key"], spell_bytes(c["bytes"])) for c in facts["components"]]
    if manifest.metrics:
        rows.append(("metrics", ", ".join(f"{k} {v}" for k, v in manifest.metrics.items())))
    if facts["pinned"]:
        rows.append(("pinned", "yes"))
    if options.validate:
        rows.append(("files", "\n".join(facts["problems"]) or "all as they were written"))
    print_table(rows)
    for name, record in manifest.files.items() if options.verbose else ():
        print(f"{record.digest}  {spell_bytes(record.size):>10}  {name}")
    return code


def _facts(directory: Path, manifest: Manifest) -> dict[str, Any]:
    names = set(manifest.files)
    has_weights = "model.safetensors.index.json" in names or "model.safetensors" in names
    if has_weights and "config.json" in names:
        readable = "from_pretrained reads it"
    elif has_weights:
        readable = "shards and index only: the model has no config.json"
    else:
        readable = "not readable: no safetensors weights"
    return {
        "path": str(directory),
        "kind": manifest.kind,
        "resumes": manifest.kind == "training",
        "format_version": manifest.format_version,
        "step": manifest.step,
        "save_counter": manifest.save_counter,
        "created": manifest.created,
        "headway_version": manifest.headway_version,
        "torch_version": manifest.torch_version,
        "bytes": _num_bytes(manifest),
        "num_files": len(manifest.files),
        "num_parameters": _count_parameters(directory, manifest),
        "topology": manifest.topology,
        "hugging_face": readable,
        "hugging_face_readable": has_weights and "config.json" in names,
        "digest_algorithm": manifest.digest_algorithm,
        "config_digest": manifest.config_digest,
        "metrics": manifest.metrics,
        "metric": manifest.metric,
        "metadata": manifest.metadata,
        "components": _components(manifest),
    }


def _count_parameters(directory: Path, manifest: Manifest) -> int:
    """Values of the weights; one of few bits counts as what it stands for, not as its parts."""
    import math

    from headway.checkpoint import CheckpointError
    from headway.checkpoint.tensors import open_tensor_file
    from headway.precision.quantized import QuantizedFormError, find_parts

    stored: dict[str, list[int]] = {}
    metadata = []
    for name in manifest.files:
        if name.startswith("model") and name.endswith(".safetensors"):
            with open_tensor_file(directory / name) as file:
                stored |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
                metadata.append(file.metadata())
    try:
        parts = find_parts(metadata, str(directory))
        if parts is None:
            return sum(map(math.prod, stored.values()))
        return sum(math.prod(parts.shape_of(name, stored)) for name in parts.real_names(stored))
    except QuantizedFormError as error:
        raise CheckpointError(str(error)) from error


def _components(manifest: Manifest) -> list[dict[str, Any]]:
    sizes = {name: record.size for name, record in manifest.files.items()}
    return [
        {
            "key": entry["key"],
            "sharing_pattern": entry["sharing_pattern"],
            "files": entry["files"],
            "bytes": sum(sizes.get(name, 0) for name in entry["files"]),
            "metadata": entry.get("metadata", {}),
        }
        for entry in manifest.components
    ]


def run_components(options: argparse.Namespace) -> int:
    """List the parts of a checkpoint."""
    from headway.checkpoint import read_manifest

    with open_committed(options.path) as directory:
        parts = _components(read_manifest(directory))
    if options.json:
        print_json(parts)
        return 0
    for part in parts:
        files = part["files"]
        most = len(files) if options.verbose else 4
        more = f" and {len(files) - most} more" if len(files) > most else ""
        shown = ", ".join(files[:most]) + more
        print(
            f"{part['key']:<12}  {part['sharing_pattern']:<10}  "
            f"{spell_bytes(part['bytes']):>10}  {shown}"
        )
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Compare every file with its digest, on all cores."""
    results: dict[str, list[str]] = {}
    for given in options.path:
        results.update(_verify_all(given))
    damaged = {path: problems for path, problems in results.items() if problems}
    if options.json:
        print_json({"checkpoints": results, "ok": not damaged})
        return 1 if damaged else 0
    for path, problems in results.items():
        print(f"{path}: {'damaged' if problems else 'ok'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


def _verify_all(given: str) -> dict[str, list[str]]:
    from headway.checkpoint import verify
    from headway.checkpoint.discovery import committed_in
    from headway.checkpoint.manifest import damaged_manifests
    from headway.checkpoint.storage import open_storage

    require_folder(given)
    num_threads = os.cpu_count() or 1
    storage = open_storage(given)
    found = committed_in(storage)
    broken = damaged_manifests(storage.root)
    if not found and not broken:
        with open_committed(given) as directory:
            return {given: verify(directory, num_threads=num_threads)}
    results = {str(path): [reason] for path, reason in broken.items()}
    for checkpoint in found:
        storage.fetch(checkpoint.path)
        problems = verify(checkpoint.path, num_threads=num_threads)
        results[storage.locate(checkpoint.path)] = problems
    return results


def run_diff(options: argparse.Namespace) -> int:
    """Compare two checkpoints; 1 if they differ."""
    from headway.checkpoint.compare import compare_checkpoints

    with open_checkpoint(options.first) as first, open_checkpoint(options.second) as second:
        if first.resolve() == second.resolve():
            raise ConfigError(f"{options.first} and {options.second} are the same directory")
        found = compare_checkpoints(first, second)
    if options.json:
        print_json({**vars(found), "equal": found.equal})
    else:
        _print_comparison(found)
    return 0 if found.equal else 1


def _print_comparison(found: Comparison) -> None:
    for title in ("manifest", "config", "counters", "state"):
        pairs: dict[str, tuple[Any, Any]] = getattr(found, title)
        for key, (a, b) in list(pairs.items())[:_MOST_SHOWN]:
            print(f"{title}: {key}: {a} -> {b}")
        if len(pairs) > _MOST_SHOWN:
            print(f"{title}: and {len(pairs) - _MOST_SHOWN} more")
    for title, names in (("only first", found.only_first), ("only second", found.only_second)):
        for name in names[:_MOST_SHOWN]:
            print(f"{title}: {name}")
    for name, difference in list(found.different_tensors.items())[:_MOST_SHOWN]:
        print(f"tensor: {name}: {difference}")
    missing = len(found.only_first) + len(found.only_second)
    print(
        f"tensors: {found.num_equal_tensors} equal, {len(found.different_tensors)} different "
        f"(max abs difference {found.max_abs_difference:.6g}), {missing} missing on one side"
    )
    if found.equal:
        print("the checkpoints are equal")
