"""A checkpoint, verified, into live objects: what is read when, and by which rank.

Owns: that every file is verified before what it holds is relied on, that tensor files are read
once where one pass can do both, and that all ranks come to the same verdict. Does not own: which
checkpoint it is and what a damaged one leads to (manager.py), what goes where (reader.py).

Everything small is verified before anything is changed. A rank that wants a tensor file, or so
much of it that reading all of it is no more work than reading a share of the files first, digests
it on the way into its tensors. What no rank reads in this way is verified first, each rank taking
a share.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from headway.checkpoint.contents import CheckpointContents
from headway.checkpoint.errors import CheckpointError, DamagedError
from headway.checkpoint.header import Header
from headway.checkpoint.jobs import num_readers
from headway.checkpoint.manifest import (
    Manifest,
    check_files,
    find_unlisted,
    look_at_sizes,
    shard_names,
)
from headway.checkpoint.nodes import require_same
from headway.checkpoint.one_pass import WholeFile, Wishes, fill_and_verify
from headway.checkpoint.ranks import Ranks
from headway.checkpoint.reader import LoadPlan, held_elsewhere, plan_contents, plan_weights

# What a disk delivers while the plan of a load is made, about.
_READ_AHEAD_BYTES = 256 << 20


def load_contents(
    contents: CheckpointContents,
    directory: Path,
    manifest: Manifest,
    ranks: Ranks,
    *,
    components: Collection[str] | None,
    verified: Collection[str] | None,
    verify_first: bool,
) -> dict[str, Any]:
    """Fill `contents`, or only the named `components`; returns the saved trainer state.

    `verified` are files that need not be verified any more; None: nothing was looked at yet.
    """
    if ranks.each_node:
        require_same(ranks, manifest.digest, f"their copies of {directory}")
    unverified = set(manifest.files) - set(verified or ())
    keys = {"model", "optimizer"} if components is None else set(components)
    in_passing = set() if verify_first else unverified & shard_names(manifest, keys)
    _read_ahead([directory / name for name in sorted(in_passing)])
    loading, elsewhere = Loading(directory, manifest, ranks), held_elsewhere(contents.model, ranks)
    loading.verify(unverified - in_passing, unread=in_passing, whole=verified is None)

    def make_plan() -> LoadPlan:
        return plan_contents(
            contents, directory, manifest, components=components, ranks=ranks, elsewhere=elsewhere
        )

    with _no_collection():
        return loading.carry_out(make_plan, in_passing).trainer_state


def _read_ahead(paths: list[Path]) -> None:
    """Have the system begin to read, so that the disk works while the plan is made."""

    def advise() -> None:
        left = _READ_AHEAD_BYTES
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError:
                continue  # whoever reads it says so
            try:
                size = min(left, os.fstat(descriptor).st_size)
                os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_WILLNEED)
                left -= size
            finally:
                os.close(descriptor)
            if not left:
                return

    if hasattr(os, "posix_fadvise"):
        # The call may wait for the disk.
        threading.Thread(target=advise, name="headway-read-ahead", daemon=True).start()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A plan is many small objects, none of them garbage: looking for some is a tenth of a load."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_weights(
    model: nn.Module,
    directory: Path,
    manifest: Manifest,
    ranks: Ranks,
    *,
    verified: Collection[str] = (),
) -> None:
    """Load the weights, verified before anything is changed, and the modules' extra state."""
    elsewhere = held_elsewhere(model, ranks)
    entry = manifest.component("model")
    if entry is None:
        raise CheckpointError(f"{directory} holds no model")
    loading = Loading(directory, manifest, ranks)
    loading.verify(set(entry["files"]) - set(verified))
    loading.carry_out(
        lambda: plan_weights(model, directory, manifest, ranks=ranks, elsewhere=elsewhere), ()
    )


class Loading:
    """One load of a checkpoint; every rank makes one and calls the same methods."""

    def __init__(self, directory: Path, manifest: Manifest, ranks: Ranks) -> None:
        self._directory, self._manifest, self._ranks = directory, manifest, ranks
        self._num_threads = num_readers(ranks.num_on_node)

    def verify(
        self, names: Collection[str], *, unread: Collection[str] = (), whole: bool = False
    ) -> None:
        """Verify files together; of the `unread` only the sizes, unless others are damaged.

        `whole`: no weight file may lie beside those of the manifest.
        """

        def look() -> list[str]:
            problems = look_at_sizes(self._directory, self._manifest, unread)
            if whole and self._ranks.leads:
                problems += find_unlisted(self._directory, self._manifest)
            return self._check_share(names) + problems

        problems = self._gather("verifying the checkpoint", look)
        if problems and unread:
            # It is of no use any more; then all that is damaged is to be named.
            problems += self._gather("verifying the checkpoint", lambda: self._check_share(unread))
        self._refuse(problems)

    def carry_out(self, make_plan: Callable[[], LoadPlan], unverified: Collection[str]) -> LoadPlan:
        """Make a plan and fill its tensors, verifying tensor files on the way; returns the plan.

        A `DamagedError` may leave the tensors with any values, and has changed nothing else.
        """
        plan = self._make(make_plan, unverified)
        wishes = Wishes(plan.destinations)
        own = self._choose_files(wishes, plan, unverified)
        somewhere = {name for names in self._ranks.exchange(sorted(own)) for name in names}
        self.verify([name for name in unverified if name not in somewhere])
        files = [WholeFile(plan.headers[name], self._manifest.files[name]) for name in own]
        algorithm = self._manifest.digest_algorithm
        self._refuse(
            self._gather(
                "loading the checkpoint",
                lambda: fill_and_verify(wishes, files, algorithm, self._num_threads),
            )
        )
        with self._ranks.together("loading the checkpoint"):
            for step in plan.steps:
                step()
        return plan

    def _make(self, make_plan: Callable[[], LoadPlan], unverified: Collection[str]) -> LoadPlan:
        plans: list[LoadPlan] = []

        def make() -> list[str]:
            try:
                plans.append(make_plan())
            except Exception:
                # A damaged header reads like that of a checkpoint which does not fit.
                problems = self._check(unverified)
                if not problems:
                    raise
                return problems
            return []

        self._refuse(self._gather("loading the checkpoint", make))
        return plans[0]

    def _choose_files(
        self, wishes: Wishes, plan: LoadPlan, unverified: Collection[str]
    ) -> list[str]:
        """Tensor files that this rank had better read from end to end."""
        _, num_sharing = self._ranks.share_of_files

        def is_worth_it(header: Header, size: int) -> bool:
            wanted = wishes.count_bytes(header.path)
            return wanted > 0 and wanted + len(header.text) >= size * (1 - 1 / num_sharing)

        return [
            name
            for name in unverified
            if name in plan.headers
            and is_worth_it(plan.headers[name], self._manifest.files[name].size)
        ]

    def _check_share(self, names: Collection[str]) -> list[str]:
        first, count = self._ranks.share_of_files
        return self._check(sorted(names)[first::count])

    def _check(self, names: Collection[str]) -> list[str]:
        return check_files(self._directory, self._manifest, names, num_threads=self._num_threads)

    def _gather(self, what: str, look: Callable[[], list[str]]) -> list[str]:
        """The problems that all ranks find; an error of any of them is raised on all."""
        with self._ranks.together(what):
            own = look()
        if self._ranks.each_node:
            own = [f"node {self._ranks.node}: {line}" for line in own]
        told = self._ranks.exchange(own)
        return list(dict.fromkeys(line for lines in told for line in lines))

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            raise DamagedError(list(dict.fromkeys(problems)))
