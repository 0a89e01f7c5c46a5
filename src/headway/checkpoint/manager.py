"""Saves, finds, loads and retires the checkpoints of one run directory.

Owns: the sequence of a save (temporary directory, manifest last, rename), the choice of what to
resume from, and carrying out retention. Does not own: the layout (writer.py), the meaning of
complete (manifest.py), when to save (the training loop).
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import headway
from headway.checkpoint import leftovers
from headway.checkpoint.contents import CheckpointContents
from headway.checkpoint.digest import DEFAULT_DIGEST, new_hasher
from headway.checkpoint.errors import CheckpointError, DamagedError
from headway.checkpoint.loading import Loading, load_contents, load_weights
from headway.checkpoint.manifest import (
    DIR_PREFIXES,
    CommittedCheckpoint,
    Manifest,
    committed,
    read_manifest,
    refuse_link,
    shard_names,
    torch_version,
    write_manifest,
)
from headway.checkpoint.nodes import find_common, require_same
from headway.checkpoint.owner import new_nonce
from headway.checkpoint.pins import Keepers, is_pinned
from headway.checkpoint.publication import inherit_lifetime, publish
from headway.checkpoint.ranks import Ranks, SoloRanks
from headway.checkpoint.replication import check_contents
from headway.checkpoint.retention import Entry, choose_deletions, entry_of, rank_by_metric
from headway.checkpoint.search import Search, find_newest_whole, read_resumable
from headway.checkpoint.staged import PendingSave
from headway.checkpoint.staging import Stager
from headway.checkpoint.storage import Storage, is_url, open_storage
from headway.checkpoint.tensors import MAX_SHARD_BYTES
from headway.checkpoint.writer import NUM_THREADS, ContentsWriter
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a load found."""

    path: Path
    step: int
    manifest: Manifest
    trainer_state: dict[str, Any]


def _lifetime(permanent: bool, ephemeral: bool) -> dict[str, Any]:
    if permanent and ephemeral:
        raise ConfigError("a checkpoint is permanent or ephemeral, not both")
    return {"permanent": True} if permanent else {"ephemeral": True} if ephemeral else {}


class CheckpointManager:
    """The checkpoints of one run directory, written and read by one process or by several ranks.

    With several, every rank has a manager of its own with its `ranks`, and all of them call `save`,
    `stage`, `write`, `resolve` and `load` together.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        save_total_limit: int | None = 2,
        preserve_n_best: int = 0,
        greater_is_better: bool = False,
        metric_name: str | None = None,
        keep_every_n_steps: int | None = None,
        retention: Mapping[str, Any] | None = None,
        digest: str = DEFAULT_DIGEST,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        topology: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        ranks: Ranks | None = None,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._retention: dict[str, Any] = {
            "limit": save_total_limit,
            "num_best": preserve_n_best,
            "greater_is_better": greater_is_better,
            "keep_every_n_steps": keep_every_n_steps,
            **(retention or {}),
        }
        choose_deletions([], **self._retention)  # checks the settings
        new_hasher(digest)
        if max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; allowed: at least 1")
        self.storage = storage or open_storage(output_dir)
        self.output_dir = self.storage.root if is_url(output_dir) else Path(output_dir).absolute()
        """The run directory; for an address, the local working directory of its storage."""
        self.pinned = Keepers()
        """Directory names that retention leaves alone for as long as this object lives; a pin
        that lasts is `pins.pin`."""
        self._greater_is_better, self._metric_name = greater_is_better, metric_name
        self._digest = digest
        self._max_shard_bytes = max_shard_bytes
        self._ranks = ranks or SoloRanks()
        if is_url(output_dir) and self._ranks.world_size > 1:
            raise ConfigError(
                f"{output_dir}: an address is written by one process, not by "
                f"{self._ranks.world_size} ranks; give a directory that all of them share"
            )
        self._topology = {**(topology or {"strategy": "single"}), **self._ranks.topology()}
        self._num_threads = num_threads
        self.stager = Stager(self._ranks)
        """Copies the state, and has the host memory for it."""
        self._last_counter = 0
        self._verified: dict[tuple[Path, str], set[str]] = {}
        self._damaged: set[str] = set()

    # -- saving -----------------------------------------------------------------------------

    def save(
        self,
        contents: CheckpointContents,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        metric: float | None = None,
        kind: str = "training",
        permanent: bool = False,
        ephemeral: bool = False,
        name: str | None = None,
        before_commit: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write one checkpoint and return its directory once it is complete on the disk.

        `metric` is the value that ranks it among the best; `metrics` (all evaluation results) go
        to `eval_metrics.json`. `before_commit` gets the directory before the manifest is written
        and may add files. A `permanent` checkpoint is never retired, an `ephemeral` one goes as
        soon as a newer one is there. `name` is the directory's, by default `checkpoint-<step>`. If
        anything fails, the error propagates, nothing half-written stays and earlier checkpoints
        are untouched.
        """
        pending = self.stage(
            contents,
            step,
            metrics=metrics,
            metric=metric,
            kind=kind,
            permanent=permanent,
            ephemeral=ephemeral,
            name=name,
            before_commit=before_commit,
        )
        return self.write(pending)

    def reserve(self, contents: CheckpointContents, *, ready: bool = True) -> None:
        """Allocate the host memory that saves of `contents` copy to, before the first of them."""
        self.stager.reserve(contents, ready=ready)

    def wait_before_update(self) -> None:
        """To be called before an optimizer step: on CUDA, the step waits for a copy under way."""
        self.stager.wait_before_update()

    def stage(
        self,
        contents: CheckpointContents,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        metric: float | None = None,
        kind: str = "training",
        permanent: bool = False,
        ephemeral: bool = False,
        name: str | None = None,
        before_commit: Callable[[Path], None] | None = None,
    ) -> PendingSave:
        """The first half of `save`: copy the state. The result goes to `write`, in any thread.

        The host memory of the copy is used again: write one before staging the next.
        """
        if kind not in DIR_PREFIXES:
            raise ConfigError(unknown("checkpoint kind", kind, DIR_PREFIXES))
        if step < 0:
            raise ConfigError(f"a checkpoint needs a step of 0 or more, not {step}")
        metadata = _lifetime(permanent, ephemeral)
        check_contents(self._ranks, contents)
        with self._ranks.together("copying the state"):
            staged = self.stager.stage(contents, metrics)
        return PendingSave(
            staged=staged,
            step=step,
            kind=kind,
            metrics=dict(metrics) if metrics is not None else None,
            metric=None if metric is None else float(metric),
            metadata=metadata,
            before_commit=before_commit,
            name=name or f"{DIR_PREFIXES[kind]}-{step}",
        )

    def write(self, pending: PendingSave) -> Path:
        """The second half of `save`: write, commit, retire; returns the directory."""
        ranks = self._ranks
        nonce = ranks.exchange(new_nonce() if ranks.leads else None)[ranks.leader]
        final = self.output_dir / pending.name
        temporary = final.with_name(f"{final.name}.tmp-{nonce}")
        try:
            with ranks.together("creating the directory"):
                if ranks.leads:
                    refuse_link(final)
                    self.storage.make_root()
                    self.storage.make_dir(temporary)
            writer = ContentsWriter(
                self.storage,
                temporary,
                digest=self._digest,
                max_shard_bytes=self._max_shard_bytes,
                ranks=ranks,
                num_threads=self._num_threads,
            )
            writer.write(pending.staged)
            if ranks.each_node:
                self._commit_on_each_node(pending, writer, temporary, final, nonce)
            else:
                with ranks.together("committing"):
                    if ranks.is_main:
                        self._finish(pending, writer, temporary)
                        manifest = self._describe(pending, writer, self._next_counter())
                        write_manifest(temporary, manifest, self.storage)
                        self._publish(manifest, temporary, final, nonce)
        except BaseException:
            if ranks.leads:
                self._discard(temporary)
            raise
        with ranks.together("retiring older checkpoints"):
            if ranks.leads:
                self._retire()
        return final

    def _commit_on_each_node(
        self, pending: PendingSave, writer: ContentsWriter, temporary: Path, final: Path, nonce: str
    ) -> None:
        """No node gives the directory its name before all of them could."""
        ranks = self._ranks
        with ranks.together("completing the copies of the nodes"):
            if ranks.leads:
                self._finish(pending, writer, temporary)
        counter = max(ranks.exchange(self._next_counter() if ranks.leads else 0))
        manifest = self._describe(pending, writer, counter)
        manifest.created, manifest.metrics, manifest.metric = ranks.share(
            [manifest.created, manifest.metrics, manifest.metric]
        )
        with ranks.together("preparing to commit"):
            if ranks.leads:
                write_manifest(temporary, manifest, self.storage)
        require_same(ranks, manifest.digest, f"what they wrote to {final}")
        with ranks.together("committing"):
            if ranks.leads:
                self._publish(manifest, temporary, final, nonce)

    def _finish(self, pending: PendingSave, writer: ContentsWriter, temporary: Path) -> None:
        if pending.before_commit is not None:
            pending.before_commit(temporary)
        writer.finish()

    def _describe(self, pending: PendingSave, writer: ContentsWriter, counter: int) -> Manifest:
        return Manifest(
            kind=pending.kind,
            step=pending.step,
            save_counter=counter,
            files=writer.files,
            components=writer.components,
            topology=self._topology,
            digest_algorithm=self._digest,
            config_digest=writer.config_digest,
            headway_version=headway.__version__,
            torch_version=torch_version(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            metrics=pending.metrics,
            metric=pending.metric,
            metadata=inherit_lifetime(pending.metadata, self.output_dir / pending.name),
        )

    def _publish(self, manifest: Manifest, temporary: Path, final: Path, nonce: str) -> None:
        publish(self.storage, temporary, final, nonce)
        self._last_counter = manifest.save_counter
        self._damaged.discard(final.name)

    def _next_counter(self) -> int:
        found = [checkpoint.save_counter for checkpoint in committed(self.output_dir)]
        return max([self._last_counter, *found]) + 1

    def _discard(self, temporary: Path) -> None:
        if not os.path.lexists(temporary):
            return
        try:
            self.storage.remove_tree(temporary)
        except Exception as error:
            # The failure of the save itself is the one to report.
            logger.warning("could not remove %s: %s", temporary, error)

    def _entries(self) -> list[Entry]:
        return [
            entry_of(
                checkpoint,
                pinned=checkpoint.path.name in self.pinned or is_pinned(checkpoint.path),
                metric_name=self._metric_name,
            )
            for checkpoint in self.list()
            if checkpoint.path.name not in self._damaged
        ]

    def _retire(self) -> None:
        for name in choose_deletions(self._entries(), **self._retention):
            self.storage.remove_tree(self.output_dir / name)

    def clean_leftovers(self) -> list[str]:
        """Clean up after saves and deletions of processes that are gone; call it at the start."""
        return leftovers.clean_leftovers(self.storage) if self._ranks.leads else []

    # -- finding ----------------------------------------------------------------------------

    def list(self) -> list[CommittedCheckpoint]:
        """The committed checkpoints, by save counter, oldest first."""
        self.storage.refresh()
        return committed(self.output_dir)

    def find_latest(self) -> Path | None:
        """The newest committed training checkpoint; its files are not read."""
        training = [c.path for c in self.list() if c.kind == "training"]
        return training[-1] if training else None

    def best(self) -> Path | None:
        """The training checkpoint with the best metric; of equals the earliest."""
        ranked = rank_by_metric(self._entries(), greater_is_better=self._greater_is_better)
        return self.output_dir / ranked[0].id if ranked else None

    def ranking(self) -> Sequence[tuple[Path, float]]:
        """The training checkpoints that `preserve_n_best` keeps, best first, with their metrics."""
        ranked = rank_by_metric(self._entries(), greater_is_better=self._greater_is_better)
        kept = ranked[: self._retention["num_best"]]
        return [(self.output_dir / e.id, e.metric) for e in kept if e.metric is not None]

    def resolve(self, resume: bool | str | Path, *, verify_tensors: bool = True) -> Path | None:
        """The checkpoint to resume from.

        True: the newest that verifies; damaged ones are reported by file and passed over; None if
        there is none. False: None. A path: that checkpoint, or a `ConfigError`; if it is damaged,
        a `CheckpointError` that names the files. `verify_tensors` as for `find_intact`.
        """
        if resume is False:
            return None
        if resume is not True:
            with self.storage.telling():
                return self._resolve_path(self.storage.path_of(resume), verify_tensors)
        path, damaged = self.find_intact(verify_tensors=verify_tensors)
        for problem in damaged:
            logger.warning("passing over a damaged checkpoint: %s", problem)
        return path

    def find_intact(self, *, verify_tensors: bool = True) -> tuple[Path | None, Sequence[str]]:
        """The newest training checkpoint that verifies, and what is wrong with newer ones.

        The second item has a line for every damaged file. None of these checkpoints counts for
        retention from then on: it can neither push out a good one nor be the best.
        With `verify_tensors=False` weights and optimizer are not read but for a checkpoint that a
        load found damaged: the next `load` verifies them, and may raise a `DamagedError`.
        """
        ranks, found = self._ranks, Search(None)
        suspects = None if verify_tensors else set(self._damaged)
        if ranks.each_node:
            found = find_common(ranks, self.storage, self.list(), suspects)
            path, problems, damaged = found.path, found.problems, found.damaged
        else:
            with ranks.together("looking for a checkpoint"):
                if ranks.is_main:
                    found = find_newest_whole(self.storage, self.list(), suspects)
            known = None if found.path is None else str(found.path)
            name, problems, damaged = ranks.share([known, found.problems, sorted(found.damaged)])
            path = None if name is None else Path(name)
        self._damaged |= set(damaged)
        if path is not None:
            all_read = ranks.share(suspects is None or path.name in suspects)
            self._remember(path, read_manifest(path), all_read=all_read)
        return path, problems

    def _remember(self, path: Path, manifest: Manifest, *, all_read: bool) -> None:
        """What was verified just now is not read again by the next load."""
        left = set() if all_read else shard_names(manifest)
        self._verified[path, manifest.digest] = set(manifest.files) - left

    def _resolve_path(self, given: Path, verify_tensors: bool) -> Path:
        path = given if given.is_absolute() or given.exists() else self.output_dir / given
        with self._ranks.together("looking for the checkpoint"):
            manifest = read_resumable(given, path, self.list)
            path = path.absolute()
            self.storage.fetch(path)
        unread = set() if verify_tensors else shard_names(manifest)
        names = set(manifest.files) - unread
        Loading(path, manifest, self._ranks).verify(names, unread=unread, whole=True)
        self._remember(path, manifest, all_read=verify_tensors)
        return path

    # -- loading ----------------------------------------------------------------------------

    def load(
        self,
        contents: CheckpointContents,
        path: str | Path | None = None,
        *,
        components: Collection[str] | None = None,
        verify: bool = True,
        verify_first: bool = False,
    ) -> LoadedCheckpoint:
        """Fill `contents` from a checkpoint, by default from the newest good one.

        `components` limits the load to the named ones (`model`, `optimizer`, component keys). A
        component that is required and missing, or that fails to load, is a `CheckpointError`.
        Weights and optimizer are verified while they are read. So if one of their files is
        damaged, which is a `DamagedError`, they have any values: go on from another checkpoint or
        not at all. With `verify_first` all is verified before anything is changed, which reads
        these files twice.
        """
        if path is not None:
            return self._load(contents, self._at_hand(path), components, verify, verify_first)
        told: set[str] = set()
        while True:
            directory, damaged = self.find_intact(verify_tensors=verify_first or not verify)
            for problem in (one for one in damaged if one not in told):
                logger.warning("passing over a damaged checkpoint: %s", problem)
            told.update(damaged)
            if directory is None:
                raise CheckpointError(f"{self.output_dir} holds no checkpoint that can be loaded")
            try:
                return self._load(contents, directory, components, verify, verify_first)
            except DamagedError:
                continue  # it is read, and passed over, from now on

    def _load(
        self,
        contents: CheckpointContents,
        directory: Path,
        components: Collection[str] | None,
        verify: bool,
        verify_first: bool,
    ) -> LoadedCheckpoint:
        with self.storage.telling(), self._ranks.together("reading the manifest"):
            manifest = read_manifest(directory)
        verified = self._verified.pop((directory, manifest.digest), None)
        verified = verified if verify else set(manifest.files)
        with self._reading(directory):
            trainer_state = load_contents(
                contents,
                directory,
                manifest,
                self._ranks,
                components=components,
                verified=verified,
                verify_first=verify_first,
            )
        return LoadedCheckpoint(directory, manifest.step, manifest, trainer_state)

    def load_model(self, model: nn.Module, path: str | Path) -> None:
        """Load only the weights of a checkpoint of any kind.

        Only their files are verified, before anything is changed.
        """
        with self.storage.telling(), self._ranks.together("reading the manifest"):
            directory = self._at_hand(path)
            manifest = read_manifest(directory)
        verified = self._verified.pop((directory, manifest.digest), set())
        with self._reading(directory):
            load_weights(model, directory, manifest, self._ranks, verified=verified)

    @contextmanager
    def _reading(self, directory: Path) -> Iterator[None]:
        """What is damaged counts no longer for retention, nor as the best."""
        try:
            with self.storage.telling():
                yield
        except DamagedError:
            if directory.parent == self.output_dir:
                self._damaged.add(directory.name)
            raise

    def _at_hand(self, path: str | Path) -> Path:
        directory = self.storage.path_of(path).absolute()
        self.storage.fetch(directory)
        return directory
