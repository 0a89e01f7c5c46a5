"""What the server has on the disk: the state after each round, and the list of all rounds.

Owns: the commit of a round (a folder made by the checkpoint protocol, then a line of the ledger),
the start from what is there, and the replay that proves that both say the same.
Does not own: arithmetic (state.py), which submissions count (rounds.py).

A round is committed at the instant at which the folder of its state gets its name. The folder holds
the round's line of the ledger too, so that a start after a kill between the two adds it. What had
been sent for the round under way is gone then; the round keeps its id, and workers send it again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from headway.checkpoint.draft import Draft
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.leftovers import clean_leftovers
from headway.checkpoint.manifest import CommittedCheckpoint, committed, verify
from headway.checkpoint.owner import new_nonce
from headway.checkpoint.storage import Storage
from headway.checkpoint.tensors import index_text, read_tensor_file
from headway.diloco.outer import OuterOptimizer
from headway.diloco.specification import Specification, canonical_json
from headway.diloco.state import Body, State, apply_round, hash_fragment
from headway.errors import ConfigError
from headway.models.shards import index_name, shard_name

LEDGER_NAME = "ledger.jsonl"
STATE_NAME = "diloco.json"
FORMAT_VERSION = 1
_GROUPS = ("velocity", "buffer")
_NO_SETTINGS = ("kind", "commit", "state_hash", "chain")

logger = logging.getLogger(__name__)


class Ledger:
    """The folder of one server. `begin` or `resume`, then `commit` after every round."""

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_states: int = 2,
        keep_submissions: bool = False,
        storage: Storage | None = None,
    ) -> None:
        self.storage = storage or Storage(folder)
        self.folder = self.storage.root
        self.incoming = self.folder / "incoming"
        self.submissions = self.folder / "submissions"
        self._keep_states, self._keep_submissions = keep_states, keep_submissions
        self._chain = ""
        self._in_force: Mapping[str, Any] = {}
        """The settings that the last line about them says: those of the next round in a replay."""
        self._owed: Mapping[str, Any] | None = None
        """A line that could not be written; its round is committed, and none follows before it."""
        self._current: CommittedCheckpoint | None = None
        self._lock: int | None = None
        self.settings: dict[str, Any] = {}

    # -- life -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the folder for this process, and remove what a dead one left half done."""
        self.storage.make_root()
        lock = os.open(self.folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"output_dir={str(self.folder)!r}: another server works in this folder"
            ) from None
        self._lock = lock
        clean_leftovers(self.storage)
        shutil.rmtree(self.incoming, ignore_errors=True)
        self.incoming.mkdir()
        if self._keep_submissions:
            self.submissions.mkdir(exist_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def has_state(self) -> bool:
        """Whether a server has begun here; one of state and ledger alone is enough to say so, so
        that nothing begins anew over what is damaged."""
        return (self.folder / LEDGER_NAME).exists() or bool(self._states())

    def _states(self) -> list[CommittedCheckpoint]:
        found = [c for c in committed(self.folder) if (c.path / STATE_NAME).is_file()]
        return [c for c in found if c.path.name == f"export-{c.step}"]

    def begin(self, state: State, settings: Mapping[str, Any], book: Mapping[str, Any]) -> None:
        """Commit the state before the first round."""
        self.settings = dict(settings)
        record = {"kind": "begin", "commit": 0, "state_hash": state.hash, **self.settings}
        self._write_state(state, None, record, book)
        self._append(record)

    def resume(self) -> tuple[State, dict[str, Any]]:
        """The newest state that is whole, and what the book of rounds remembers with it."""
        records = self._read_lines()
        for found in reversed(self._states()):
            problems = verify(found.path)
            if not problems:
                break
            logger.error("passing over a damaged state: %s", "; ".join(problems))
        else:
            raise CheckpointError(
                f"{self.folder} holds no state that is whole, but a server has worked here: put "
                "its export-* folders back, or begin in another output_dir"
            )
        if not records and found.step > 0:  # the first state comes before the first line
            raise CheckpointError(
                f"{self.folder / LEDGER_NAME} is gone, but {found.path.name} is there: put it "
                f"back, or begin in another output_dir (with the model of {found.path})"
            )
        said = read_json_object(found.path / STATE_NAME)
        state = _read_state(found.path, said)
        self._current, self.settings = found, said["settings"]
        last = effective(records)[-1]["commit"] if records else -1
        if last == state.commit - 1:
            self._append(said["record"])
        elif last > state.commit:
            logger.error("going back from round %d to %d, the newest whole one", last, state.commit)
            self._append({"kind": "rollback", "commit": state.commit, "state_hash": state.hash})
        elif last < state.commit:
            raise CheckpointError(
                f"{self.folder / LEDGER_NAME} ends at round {last}, the state is of {state.commit}"
            )
        return state, dict(said["book"])

    def change_settings(self, settings: Mapping[str, Any]) -> None:
        """From now on rounds are made with other settings; what shapes the state stays."""
        for key in ("fingerprint", "mode", "accumulate", "num_fragments"):
            if self.settings[key] != settings[key]:
                raise ConfigError(
                    f"output_dir={str(self.folder)!r} holds a run with {key}="
                    f"{self.settings[key]!r}; {settings[key]!r} needs a folder of its own"
                )
        self.settings = dict(settings)
        # The state may be of rounds before the last such line: none came after it, or those that
        # did were gone back from.
        if self.settings != self._in_force:
            self._append({"kind": "settings", **self.settings})

    # -- the commit -----------------------------------------------------------------------------

    def commit(
        self,
        state: State,
        fragment: int,
        round_id: str,
        bodies: Sequence[tuple[Body, Mapping[str, Any]]],
        book: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Make a round permanent; returns its line of the ledger. After an error it is not."""
        if not (self.folder / LEDGER_NAME).exists():
            raise CheckpointError(
                f"{self.folder / LEDGER_NAME} is gone: without it nothing is committed any more"
            )
        self._pay()
        parts = []
        for body, said in bodies:
            part = {**said, "weight": body.weight, "is_local": body.is_local}
            if self._keep_submissions:
                part["file"] = self._keep(body.path, state.commit, str(said["worker"]))
            parts.append(part)
        record = {
            "kind": "round",
            "commit": state.commit,
            "round_id": round_id,
            "fragment": fragment,
            "number": state.numbers[fragment],
            "submissions": parts,
            "state_hash": state.hash,
        }
        self._write_state(state, fragment, record, book)
        try:
            self._append(record)
        except OSError as error:
            logger.error("%s cannot be written, it is tried again: %s", LEDGER_NAME, error)
            self._owed = record
        try:
            self._delete_old()
        except OSError as error:
            logger.warning("could not delete an old state: %s", error)
        return record

    def _pay(self) -> None:
        if self._owed is not None:
            self._append(self._owed)
            self._owed = None

    def _keep(self, path: str, commit: int, worker: str) -> str:
        kept = self.submissions / f"{commit:08d}-{worker}.hwdl"
        shutil.copyfile(path, kept)
        self.storage.sync_file(kept)
        return kept.name

    def _write_state(
        self,
        state: State,
        fragment: int | None,
        record: Mapping[str, Any],
        book: Mapping[str, Any],
    ) -> None:
        """A folder of weights that any tool reads, with the momentum and the book beside them."""
        count, weight_map = len(state.fragments), {}
        target = self.folder / f"export-{state.commit}"
        if os.path.lexists(target):
            # Damaged, or of an attempt that failed after its last rename: nobody was told of it.
            self.storage.rename(target, target.with_name(f"{target.name}.foreign-{new_nonce()}"))
        with Draft(target, storage=self.storage) as draft:
            for k, names in enumerate(state.fragments):
                model, outer = shard_name(k + 1, count), shard_name(k + 1, count, "outer")
                weight_map.update(dict.fromkeys(names, model))
                if fragment not in (None, k) and self._current is not None:
                    for name in (model, outer):
                        before = self._current.manifest.files[name]
                        draft.take(self._current.path / name, name, before)
                    continue
                draft.write_tensor_file(model, {n: state.parameters[n] for n in names})
                draft.write_tensor_file(
                    outer,
                    {
                        f"{group}.{n}": getattr(state, group)[n]
                        for group in _GROUPS
                        for n in names
                        if n in getattr(state, group)
                    },
                )
            total = sum(4 * t.numel() for t in state.parameters.values())
            draft.write_bytes(index_name(), index_text(weight_map, total, {}))
            said = {
                "format_version": FORMAT_VERSION,
                "layout": state.specification.layout,
                "fragments": state.fragments,
                "numbers": list(state.numbers),
                "hashes": list(state.hashes),
                "commit": state.commit,
                "settings": self.settings,
                "record": dict(record),
                "book": dict(book),
            }
            draft.write_json(STATE_NAME, said)
            draft.add_component("diloco", list(draft.files))
            manifest = draft.describe(
                kind="export", step=state.commit, save_counter=state.commit + 1
            )
            path = draft.commit(manifest)
        self._current = CommittedCheckpoint(
            path, state.commit, state.commit + 1, "export", manifest
        )

    def _delete_old(self) -> None:
        states = self._states()
        first = {0} if self._keep_submissions else set()
        for old in states[: -self._keep_states]:
            if old.step not in first:
                self.storage.remove_tree(old.path)

    # -- the list -------------------------------------------------------------------------------

    def _append(self, record: Mapping[str, Any]) -> None:
        """One more line, on the disk before this returns."""
        line = {**record, "chain": _link(self._chain, record)}
        path = self.folder / LEDGER_NAME
        is_new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        begin = os.fstat(descriptor).st_size
        try:
            data = memoryview(canonical_json(line) + b"\n")
            while data.nbytes:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, begin)
            raise
        finally:
            os.close(descriptor)
        if is_new:
            self.storage.sync_dir(self.folder)
        self._chain = line["chain"]
        self._in_force = _settings_in([record]) or self._in_force

    def _read_lines(self) -> list[dict[str, Any]]:
        path = self.folder / LEDGER_NAME
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            # A kill in the midst of a line; its round is in the state, which has it whole.
            os.truncate(path, len(whole))
            self.storage.sync_file(path)
        records = check_chain(whole.splitlines(), path)
        self._chain = records[-1]["chain"] if records else ""
        self._in_force = _settings_in(records)
        return records


def _link(chain: str, record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(chain.encode() + canonical_json(dict(record)))


def check_chain(lines: Sequence[bytes], path: Path) -> list[dict[str, Any]]:
    """The records of a ledger, each of which vouches for all before it."""
    records: list[dict[str, Any]] = []
    chain = ""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            told = record.pop("chain")
            chain = _link(chain, record)
        except (ValueError, KeyError, AttributeError, RecursionError):
            raise CheckpointError(f"{path}, line {number}: not a record") from None
        if told != chain:
            raise CheckpointError(f"{path}, line {number}: changed, or a line before it is")
        records.append({**record, "chain": told})
    return records


def effective(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The beginning and the rounds that count, without those that were gone back from."""
    kept: list[Mapping[str, Any]] = []
    for record in records:
        if record["kind"] == "rollback":
            kept = [one for one in kept if one["commit"] <= record["commit"]]
        elif record["kind"] in ("begin", "round"):
            kept.append(record)
    return kept


def _settings_in(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last settings that these records say, whatever was gone back from since."""
    for record in reversed(records):
        if record["kind"] in ("begin", "settings"):
            return {key: value for key, value in record.items() if key not in _NO_SETTINGS}
    return {}


def _read_state(path: Path, said: Mapping[str, Any]) -> State:
    if said.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path / STATE_NAME} is of format {said.get('format_version')!r}")
    fragments: list[list[str]] = said["fragments"]
    parameters: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
    for k in range(len(fragments)):
        parameters.update(read_tensor_file(path / shard_name(k + 1, len(fragments))))
        outer = read_tensor_file(path / shard_name(k + 1, len(fragments), "outer"))
        for key, tensor in outer.items():
            group, _, name = key.partition(".")
            groups[group][name] = tensor
    hashes = tuple(
        hash_fragment(names, parameters, groups["velocity"], groups["buffer"])
        for names in fragments
    )
    if hashes != tuple(said["hashes"]):
        raise CheckpointError(f"{path} does not hold the tensors that {STATE_NAME} says")
    return State(
        Specification.from_layout(said["layout"]),
        fragments,
        {n: parameters[n] for names in fragments for n in names},
        groups["velocity"],
        groups["buffer"],
        tuple(said["numbers"]),
        hashes,
        said["commit"],
    )


def optimizer_of(settings: Mapping[str, Any]) -> OuterOptimizer:
    """The outer optimizer that the settings in a ledger stand for."""
    names = ("lr", "momentum", "nesterov", "accumulate", "delay", "spread")
    return OuterOptimizer(**{name: settings[name] for name in names})


def replay(folder: str | Path) -> State:
    """Compute all rounds of a ledger anew from the bodies that were kept.

    `CheckpointError` for the first round whose result differs from what the ledger says; needs a
    server that ran with `keep_submissions`.
    """
    root = Path(folder).absolute()
    try:
        text = (root / LEDGER_NAME).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{root} is no server's folder: {error}") from None
    records = check_chain(text[: text.rfind(b"\n") + 1].splitlines(), root / LEDGER_NAME)
    first = root / "export-0"
    state = _read_state(first, read_json_object(first / STATE_NAME))
    kept = {id(record) for record in effective(records)}
    settings: Mapping[str, Any] = {}
    for record in records:
        settings = _settings_in([record]) or settings
        if record["kind"] != "round" or id(record) not in kept:
            continue
        bodies = []
        for part in record["submissions"]:
            if "file" not in part:
                raise ConfigError(f"{root}: the bodies were not kept; keep_submissions=True does")
            path = str(root / "submissions" / part["file"])
            bodies.append(Body(path, part["weight"], part["is_local"]))
        optimizer, mode = optimizer_of(settings), str(settings["mode"])
        state = apply_round(state, record["fragment"], bodies, optimizer, mode, verify=True)
        if state.hash != record["state_hash"]:
            raise CheckpointError(f"round {record['round_id']} does not lead to what it says")
    return state
