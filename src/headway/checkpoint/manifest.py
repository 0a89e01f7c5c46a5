"""The manifest: the one file that declares a checkpoint complete.

Owns: `checkpoint_manifest.json` (its fields, its own digest, writing it last), the list of
committed checkpoints of a run directory, and verification of a checkpoint against its manifest.
Does not own: the files it lists (writer.py) or which checkpoint is chosen (manager.py).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.checkpoint.digest import DEFAULT_DIGEST, digest_bytes, digest_files
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import read_json
from headway.checkpoint.owner import NONCE_PATTERN
from headway.checkpoint.storage import FileRecord, Storage, check_name, is_plain_file, list_files
from headway.errors import ConfigError

MANIFEST_NAME = "checkpoint_manifest.json"
FORMAT_VERSION = 1
DIR_PREFIXES = {"training": "checkpoint", "merged": "merged", "export": "export"}
# Room for 300,000 files of 200 bytes each, 3 lists and objects to a file.
_MAX_MANIFEST_BYTES = 1 << 26
_MAX_MANIFEST_CONTAINERS = 1_000_000
LINK_REASON = "is a symbolic link; a checkpoint is a directory of its own"
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth")
# `.old-`: a checkpoint moved aside while its successor of the same step takes its name. It counts,
# so that a crash between the two renames loses nothing.
_DIR_NAME = re.compile(
    rf"(?:{'|'.join(DIR_PREFIXES.values())})-\d+(?:\.old-{NONCE_PATTERN})?", re.ASCII
)
# Weights that belong to a step beside its own, such as an average. A training checkpoint of such a
# name is a copy that somebody has put there.
_SIDE_NAME = re.compile(rf"checkpoint-\d+-[A-Za-z]\w*(?:\.old-{NONCE_PATTERN})?", re.ASCII)


@dataclass
class Manifest:
    """Everything the manifest records."""

    kind: str
    """training, merged or export; only training resumes."""
    step: int
    save_counter: int
    """Grows with every save into one run directory; the order of checkpoints."""
    files: dict[str, FileRecord]
    """Every file but the manifest itself, by its name relative to the checkpoint."""
    components: list[dict[str, Any]] = field(default_factory=list)
    """One `{key, sharing_pattern, files, metadata}` per component, model and optimizer included."""
    topology: dict[str, Any] = field(default_factory=dict)
    digest_algorithm: str = DEFAULT_DIGEST
    config_digest: str | None = None
    """Digest of the run configuration."""
    headway_version: str = ""
    torch_version: str = ""
    created: str = ""
    """Time of the save, for people; nothing is ordered by it."""
    metrics: dict[str, Any] | None = None
    metric: float | None = None
    """The value that ranks this checkpoint among the best."""
    metadata: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    digest: str = ""
    """Digest of all the other fields; filled by `write_manifest`."""

    def component(self, key: str) -> dict[str, Any] | None:
        """The entry of one component, or None."""
        return next((entry for entry in self.components if entry["key"] == key), None)


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A directory with a valid manifest."""

    path: Path
    step: int
    save_counter: int
    kind: str
    manifest: Manifest


def finite_or_text(value: Any) -> Any:
    """A metric as valid JSON: NaN and the infinities become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _to_json(manifest: Manifest) -> dict[str, Any]:
    fields = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    del fields["digest"]
    fields["files"] = {
        name: {"size": record.size, "digest": record.digest}
        for name, record in sorted(manifest.files.items())
    }
    fields["metric"] = finite_or_text(manifest.metric)
    if manifest.metrics is not None:
        fields["metrics"] = {k: finite_or_text(v) for k, v in manifest.metrics.items()}
    return fields


def _text(fields: dict[str, Any], digest: str) -> bytes:
    return json.dumps({**fields, "digest": digest}, indent=1, allow_nan=False).encode()


@functools.cache
def torch_version() -> str:
    """The installed torch; asked once, since the answer is read from a long file."""
    return importlib.metadata.version("torch")


def write_manifest(directory: Path, manifest: Manifest, storage: Storage) -> None:
    """Commit: write the manifest, synced, into a directory whose files are all on the disk."""
    fields = _to_json(manifest)
    manifest.digest = digest_bytes(_canonical(fields), manifest.digest_algorithm)
    text = _text(fields, manifest.digest)
    storage.write_bytes(directory / MANIFEST_NAME, text, digest=manifest.digest_algorithm)
    storage.sync_dir(directory)


_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "format_version": int,
    "kind": str,
    "step": int,
    "save_counter": int,
    "files": dict,
    "components": list,
    "topology": dict,
    "digest_algorithm": str,
    "config_digest": (str, type(None)),
    "headway_version": str,
    "torch_version": str,
    "created": str,
    "metrics": (dict, type(None)),
    "metric": (int, float, str, type(None)),
    "metadata": dict,
    "digest": str,
}


def _check_structure(fields: Any, path: Path) -> None:
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    version = fields.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this Headway reads up to {FORMAT_VERSION}"
        )
    if set(fields) != set(_FIELD_TYPES):
        odd = sorted(set(fields) ^ set(_FIELD_TYPES))
        raise CheckpointError(f"{path} has missing or unknown fields: {', '.join(odd)}")
    for name, kind in _FIELD_TYPES.items():
        if not isinstance(fields[name], kind):
            raise CheckpointError(f"{path}: {name} is a {type(fields[name]).__name__}")
    if fields["kind"] not in DIR_PREFIXES:
        raise CheckpointError(f"{path}: unknown kind {fields['kind']!r}")


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a checkpoint directory; `CheckpointError` naming the file if it is not valid.

    Checks version, structure and the manifest's own digest; `verify` checks the other files.
    """
    directory = Path(path)
    file = directory / MANIFEST_NAME
    if not is_plain_file(directory, MANIFEST_NAME):
        raise CheckpointError(f"{file} does not exist: {directory} is not a committed checkpoint")
    fields = read_json(file, max_bytes=_MAX_MANIFEST_BYTES, max_containers=_MAX_MANIFEST_CONTAINERS)
    _check_structure(fields, file)
    own_digest = fields.pop("digest")
    try:
        found = digest_bytes(_canonical(fields), fields["digest_algorithm"])
        files = {
            check_name(name): FileRecord(int(entry["size"]), str(entry["digest"]))
            for name, entry in fields["files"].items()
        }
        for entry in fields["components"]:
            if not {"key", "sharing_pattern", "files"} <= set(entry):
                raise ValueError(f"component entry {entry}")
    except (CheckpointError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is not a valid manifest: {error!r}") from error
    # The digest is of the values; a changed byte can leave these as they were (the last digit of
    # a number that is longer than it need be).
    if found != own_digest or file.read_bytes() != _text(fields, own_digest):
        raise CheckpointError(f"{file} is damaged: its content does not match its digest")
    if fields["metric"] is not None:
        fields["metric"] = float(fields["metric"])
    return Manifest(**{**fields, "files": files, "digest": own_digest})


def committed(output_dir: str | Path) -> list[CommittedCheckpoint]:
    """The committed checkpoints of a run directory, by save counter, oldest first."""
    found = []
    for path in _candidates(output_dir, (_DIR_NAME, _SIDE_NAME)):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if manifest.kind == "training" and _SIDE_NAME.fullmatch(path.name):
            continue
        found.append(
            CommittedCheckpoint(path, manifest.step, manifest.save_counter, manifest.kind, manifest)
        )
    return sorted(found, key=save_order)


def save_order(checkpoint: CommittedCheckpoint) -> tuple[int, int, bool, str]:
    """The order of checkpoints: by save counter; an edited one after what it replaces."""
    name = checkpoint.path.name
    return (checkpoint.save_counter, checkpoint.step, ".old-" not in name, name)


def is_committed(path: str | Path) -> bool:
    """Whether a directory holds a valid manifest."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def damaged_manifests(output_dir: str | Path) -> dict[Path, str]:
    """Checkpoint directories whose manifest is not valid, or has gone missing, with the reason.

    A link in the place of a directory counts among them: what it leads to is not of this run, and
    may change or vanish without it.
    """
    found = {path: f"{path} {LINK_REASON}" for path in linked_checkpoints(output_dir)}
    for path in _candidates(output_dir):
        # A save gives a directory its name once it has a manifest; other tools' have no state.
        if not os.path.lexists(path / MANIFEST_NAME) and not (path / "state").is_dir():
            continue
        try:
            read_manifest(path)
        except CheckpointError as error:
            found[path] = str(error)
    return found


def linked_checkpoints(output_dir: str | Path) -> list[Path]:
    """Symbolic links with the name of a checkpoint; they are neither used nor changed."""
    try:
        with os.scandir(output_dir) as entries:
            links = [e.name for e in entries if e.is_symlink() and _DIR_NAME.fullmatch(e.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [Path(output_dir).absolute() / name for name in sorted(links)]


def refuse_link(path: Path) -> None:
    """Refuse to write where a symbolic link is."""
    if path.is_symlink():
        raise CheckpointError(f"{path} {LINK_REASON}; remove it, or choose another name")


def shard_names(manifest: Manifest, keys: Collection[str] = ("model", "optimizer")) -> set[str]:
    """The tensor files of weights and optimizer, which are almost all of a checkpoint's bytes."""
    entries = filter(None, map(manifest.component, keys))
    return {
        name
        for entry in entries
        for name in entry["files"]
        if name.endswith(".safetensors") and "/" not in name and name in manifest.files
    }


def look_at_sizes(
    path: str | Path, manifest: Manifest, names: Collection[str] | None = None
) -> list[str]:
    """What is wrong with the files of a checkpoint, as far as can be seen without reading them."""
    directory = Path(path)
    wanted = {n: r for n, r in manifest.files.items() if names is None or n in names}
    checked = (_check_entry(directory, name, record) for name, record in wanted.items())
    return [problem for problem in checked if problem]


def _candidates(
    output_dir: str | Path, patterns: Collection[re.Pattern[str]] = (_DIR_NAME,)
) -> list[Path]:
    storage = Storage(output_dir)
    names = storage.list_dirs()
    return [storage.root / name for name in names if any(p.fullmatch(name) for p in patterns)]


def verify(
    path: str | Path,
    *,
    names: Collection[str] | None = None,
    unread: Collection[str] = (),
    num_threads: int | None = None,
) -> list[str]:
    """What is wrong with a checkpoint, one line per file; empty if all is well.

    Every listed file (or only `names`) must be there with its size and digest, and no weight file
    may lie beside them that the manifest does not list. Of the `unread` only the size is looked
    at unless something is wrong already. Files are read by `num_threads` threads, by default as
    many as the machine has cores, up to a limit.
    """
    directory = Path(path)
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return [str(error)]
    read = {name for name in manifest.files if names is None or name in names} - set(unread)
    problems = check_files(directory, manifest, read, num_threads=num_threads)
    problems += look_at_sizes(directory, manifest, unread)
    problems += find_unlisted(directory, manifest) if names is None else []
    if problems and unread:
        # It is of no use any more; then all that is damaged is to be named.
        problems += check_files(directory, manifest, unread, num_threads=num_threads)
    return list(dict.fromkeys(problems))


def check_files(
    directory: Path,
    manifest: Manifest,
    names: Collection[str],
    *,
    num_threads: int | None = None,
) -> list[str]:
    """What is wrong with files of a checkpoint, each of which is read."""
    wanted = {n: r for n, r in manifest.files.items() if n in names}
    found = {name: _check_entry(directory, name, record) for name, record in wanted.items()}
    whole = [name for name, problem in found.items() if problem is None]
    algorithm = manifest.digest_algorithm
    digests = digest_files([directory / n for n in whole], algorithm, num_threads=num_threads)
    for name, digest in zip(whole, digests):
        found[name] = compare_digest(directory / name, digest, wanted[name], algorithm)
    return [problem for problem in found.values() if problem]


def compare_digest(
    file: Path, found: str | OSError, record: FileRecord, algorithm: str
) -> str | None:
    """What is wrong with a file by its digest, or by the error that kept it from being read."""
    if isinstance(found, OSError):
        return f"{file} cannot be read: {found}"
    if found != record.digest:
        return f"{file} is damaged: its content does not match its {algorithm} digest"
    return None


def find_unlisted(directory: Path, manifest: Manifest) -> list[str]:
    """Weight files that lie in a checkpoint without belonging to it, a line for each."""
    return [
        f"{directory / name} is not listed in the manifest"
        for name in list_files(directory)
        if name.endswith(_WEIGHT_ENDINGS) and name not in manifest.files
    ]


def _check_entry(directory: Path, name: str, record: FileRecord) -> str | None:
    """What is wrong with a file, as far as can be seen without reading it."""
    file = directory / name
    if not os.path.lexists(file):
        return f"{file} is missing"
    if not is_plain_file(directory, name):
        return f"{file} is not a regular file"
    try:
        size = os.stat(file).st_size
    except OSError as error:
        return f"{file} cannot be read: {error}"
    return f"{file} has {size} bytes instead of {record.size}" if size != record.size else None
