"""The loader: windows of micro-batches, in a fixed order, from any kind of dataset.

Owns: the epoch and the position in it, grouping into windows, the state that resumes both.
Does not own: the order itself (order), fetching (fetch), streams (streams), device moves.

The position counts samples handed out over all ranks, so another batch size, world size or number
of workers goes on exactly where the last one stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headway.data.collate import default_collator
from headway.data.counting import count_targets, count_tokens
from headway.data.dealing import Deal, check_numbers
from headway.data.fetch import Collator, Fetcher, Loaded, Request, WorkerPool, pin
from headway.data.kinds import classify, is_sharded
from headway.data.order import IndexArray, SampleOrder
from headway.data.streams import BatchStream, Chunk, SampleStream
from headway.data.windows import Window, WindowTotals, join_parts
from headway.errors import ConfigError

__all__ = ["Window", "WindowLoader", "WindowTotals", "classify", "count_targets", "count_tokens"]

logger = logging.getLogger("headway")

_STATE_VERSION = 1
_BLOCK_SAMPLES = 4096


@dataclass(slots=True)
class _Plan:
    """One window before it is fetched: the samples of each micro-batch on this rank."""

    indices: IndexArray
    sizes: list[int]
    num_global_samples: int
    """Samples of the window on all ranks."""

    def requests(self, seed: int, epoch: int) -> Iterator[Request]:
        start = 0
        for size in self.sizes:
            yield Request(seed, epoch, self.indices[start : start + size])
            start += size


class WindowLoader:
    """Hands out windows of micro-batches and knows where it stands.

    Takes a map-style dataset (also lists and Hugging Face datasets), an iterable dataset, or a
    ready-made loader of batches, which is read as it is (`batch_size` then has no effect).
    `epoch_batches` is the length of an epoch, in micro-batches, of a stream that has no length:
    the stream goes on across such epochs and starts again only when it ends.

    A stream, or a loader of batches, is dealt out to the ranks like any other data; where
    `is_sharded` finds that it gives each rank its own share, this rank reads it whole.

    `option` is what the user calls the dataset, for errors.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        accumulation: int = 1,
        collate_fn: Collator | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        set_epoch: bool = True,
        epoch_batches: int | None = None,
        option: str | None = None,
    ) -> None:
        check_numbers(batch_size, accumulation, num_workers, rank, world_size, epoch_batches)
        self.dataset = dataset
        self._option = "" if option is None else f"{option}: "
        self.seed = int(seed)
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self.deal = Deal(batch_size, accumulation, rank, world_size, drop_last)
        self._collate: Collator = collate_fn if collate_fn is not None else default_collator
        self._calls_set_epoch = set_epoch
        self._epoch_batches = epoch_batches
        self._batches_done = 0
        self._num_workers = num_workers
        self.pins_memory = pin_memory and torch.cuda.is_available()
        self._persistent_workers = persistent_workers and num_workers > 0
        self._prefetch_factor = prefetch_factor if num_workers > 0 else None
        self._pools: dict[str, WorkerPool] = {}
        self._is_regrouped = False
        self._stored_stream: dict[str, Any] | None = None
        self._stream: SampleStream | BatchStream | None = None
        self._stream_ended = False
        self.kind = classify(dataset, option)
        self.is_sharded = self.kind != "map" and world_size > 1 and is_sharded(dataset)
        self._stream_deal = (
            replace(self.deal, rank=0, world_size=1) if self.is_sharded else self.deal
        )
        self.num_samples: int | None = None
        if self.kind == "map":
            self.num_samples = len(dataset)
            self._check_size(self.num_samples)
            self._fetcher = Fetcher(dataset, self._collate, set_epoch=set_epoch)
        else:
            self._stream = self._make_stream()

    # ---- how long an epoch is

    def __len__(self) -> int:
        if self.num_samples is not None:
            return self.deal.num_batches(self.num_samples)
        length = self._stream_length()
        if length is None:
            raise TypeError(f"a {type(self.dataset).__name__} has no length; set epoch_batches")
        return length

    @property
    def num_windows(self) -> int | None:
        """Optimizer steps of one epoch; None if that cannot be known."""
        if self.num_samples is not None:
            return self.deal.num_windows(self.num_samples)
        length = self._stream_length()
        return None if length is None else -(-length // self.deal.accumulation)

    @property
    def at_end(self) -> bool:
        """Whether this epoch has been handed out to its end."""
        if self.num_samples is not None:
            # By what is left: a batch size that was changed may leave another rest to drop.
            return self.deal.usable(self.num_samples - self.position) <= 0
        return self._stream_ended or self._batches_done == self._epoch_batches

    @property
    def epoch_fraction(self) -> float | None:
        """How much of the epoch has been handed out; None if steps of one size tell that."""
        if self.num_samples is not None:
            share = self.position / max(1, self.deal.usable(self.num_samples))
            return 1.0 if self.at_end else min(1.0, share)
        length = self._stream_length() if self._is_regrouped else None
        return None if length is None else min(1.0, self._batches_done / length)

    def _stream_length(self) -> int | None:
        if self._epoch_batches is not None:
            return self._epoch_batches
        try:
            length = len(self.dataset)
        except (TypeError, NotImplementedError, AttributeError):
            return None
        # The same on every rank: the first one has at least as much as any other.
        deal = replace(self._stream_deal, rank=0)
        return -(-length // deal.world_size) if self.kind == "batches" else deal.num_batches(length)

    # ---- reading

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch = epoch
        self.position = 0
        self._batches_done = 0
        if self._stream is not None and (self._epoch_batches is None or self._stream_ended):
            self._stored_stream = None
            self._stream.close()
        self._stream_ended = False
        self._tell_epoch()

    def group(self, deal: Deal) -> None:
        """From the next window on, make them of another number of samples.

        Between windows only, and on all ranks alike. What workers have read ahead for windows of
        the old size is read again. A stream keeps its micro-batches, which it is cut into.
        """
        if deal == self.deal:
            return
        fixed = ("rank", "world_size", "drop_last") + ("batch_size",) * (self.kind != "map")
        changed = [name for name in fixed if getattr(deal, name) != getattr(self.deal, name)]
        if changed:
            raise ConfigError(f"{', '.join(changed)} of a {self.kind} loader cannot be changed")
        self.deal, self._is_regrouped = deal, True

    def windows(self) -> Iterator[Window]:
        """From the current position to the end of the epoch.

        The position advances as a window is handed out. The last window may be smaller.
        """
        for (window,) in self.rounds((self.deal.rank,)):
            yield window

    def batches(self) -> Iterator[Any]:
        """Every micro-batch of one pass on this rank, for evaluation; moves no position."""
        for (window,) in self.evaluation_rounds((self.deal.rank,)):
            yield from window.micro_batches

    def rounds(self, ranks: Sequence[int]) -> Iterator[list[Window]]:
        """Like `windows`, but of several ranks at once, in the order of `ranks`."""
        if self.num_samples is None:
            yield from self._stream_rounds(self._own_share(ranks))
            return
        deal = None
        while deal is not self.deal:  # anew from here where the batch was changed meanwhile
            deal = self.deal
            for count, windows in self._map_rounds(ranks, deal, self.position, "windows"):
                self.position += count
                yield windows
                if deal is not self.deal:
                    break

    def evaluation_rounds(self, ranks: Sequence[int]) -> Iterator[list[Window]]:
        """Like `batches`, but of several ranks at once: windows of at most one micro-batch."""
        if self.num_samples is not None:
            deal = replace(self.deal, accumulation=1)
            for _, windows in self._map_rounds(ranks, deal, 0, "batches"):
                yield windows
            return
        ranks = self._own_share(ranks)
        stream = self._make_stream()
        stream.ranks = ranks
        with stream.returning():
            stream.open(seed=self.seed, epoch=self.epoch)
            while stream.is_open and (chunks := _read(stream, self._chunks_for(1))):
                yield self._share_out(chunks, ranks)

    def read_one(self) -> Any:
        """A batch of one sample from the beginning of the data; None where there is none."""
        if self.num_samples is not None:
            first = SampleOrder(self.num_samples, self.seed, self.shuffle).indices(self.epoch, 0, 1)
            return self._fetcher[Request(self.seed, self.epoch, first)].batch
        stream = self._make_stream(Deal(1))
        stream.open(seed=self.seed, epoch=self.epoch)
        chunk = stream.read()
        stream.close()
        return None if chunk is None or chunk.parts[0] is None else chunk.parts[0].batch

    def _own_share(self, ranks: Sequence[int]) -> Sequence[int]:
        """Whose parts to make of a stream: one that is sharded has no other ranks' parts."""
        assert not self.is_sharded or len(ranks) == 1, "nobody can read a sharded stream for all"
        return (0,) if self.is_sharded else ranks

    def _map_rounds(
        self, ranks: Sequence[int], deal: Deal, position: int, purpose: str
    ) -> Iterator[tuple[int, list[Window]]]:
        """The windows of `ranks`, each time with the number of samples on all ranks."""
        seed, epoch = self.seed, self.epoch

        def plan() -> Iterator[tuple[_Plan, ...]]:
            return zip(*(self._plan(epoch, position, replace(deal, rank=rank)) for rank in ranks))

        loaded: Iterator[Loaded] = iter(())
        if self._num_workers:
            # The same plans twice: workers run ahead in these, windows are grouped by the others.
            requests = (
                request for plans in plan() for p in plans for request in p.requests(seed, epoch)
            )
            loaded = self._load(requests, purpose)
        for plans in plan():
            windows = []
            for own in plans:
                if not self._num_workers:
                    loaded = self._load(own.requests(seed, epoch), purpose)
                windows.append(join_parts([next(loaded) for _ in own.sizes], own.indices))
            yield plans[0].num_global_samples, windows

    def _plan(self, epoch: int, position: int, deal: Deal) -> Iterator[_Plan]:
        assert self.num_samples is not None
        order = SampleOrder(self.num_samples, self.seed, self.shuffle)
        end = position + deal.usable(self.num_samples - position)
        offset, sizes = deal.split(deal.window_samples)
        width = deal.rank_samples
        while end - position >= deal.window_samples:
            count = min((end - position) // deal.window_samples, max(1, _BLOCK_SAMPLES // width))
            begins = position + offset + deal.window_samples * np.arange(count, dtype=np.int64)
            places = begins[:, None] + np.arange(width, dtype=np.int64)
            for row in order.at(epoch, places.reshape(-1)).reshape(count, width):
                yield _Plan(row, sizes, deal.window_samples)
            position += count * deal.window_samples
        if end > position:
            offset, sizes = deal.split(end - position)
            indices = order.indices(epoch, position + offset, sum(sizes))
            yield _Plan(indices, sizes, end - position)

    def _load(self, requests: Iterable[Request], purpose: str) -> Iterator[Loaded]:
        if self._num_workers == 0:
            loaded = map(self._fetcher.__getitem__, requests)
            return map(pin, loaded) if self.pins_memory else loaded
        pool = self._pools.get(purpose)
        if pool is None:
            pool = WorkerPool(
                self._fetcher,
                num_workers=self._num_workers,
                pin_memory=self.pins_memory,
                persistent_workers=self._persistent_workers,
                prefetch_factor=self._prefetch_factor,
            )
            if self._persistent_workers:
                self._pools[purpose] = pool
        return pool.run(requests)

    def _stream_rounds(self, ranks: Sequence[int]) -> Iterator[list[Window]]:
        stream = self._stream
        assert stream is not None
        if stream.is_open and stream.ranks != ranks:
            self._stored_stream = stream.state_dict()
            stream.close()
        stream.ranks = ranks
        while not self._stream_ended:
            limit = self.deal.accumulation
            if self._epoch_batches is not None:
                limit = min(limit, self._epoch_batches - self._batches_done)
            chunks = self._read_stream(stream, self._chunks_for(limit))
            if not chunks:
                return
            self._batches_done += -(-len(chunks) // self._chunks_for(1))
            self.position += sum(chunk.num_global_samples for chunk in chunks)
            yield self._share_out(chunks, ranks)

    def _chunks_for(self, num_batches: int) -> int:
        """How many chunks give each rank so many micro-batches."""
        return num_batches * (self._stream_deal.world_size if self.kind == "batches" else 1)

    def _share_out(self, chunks: list[Chunk], ranks: Sequence[int]) -> list[Window]:
        """The window of each rank from what was read."""
        windows = []
        for number, rank in enumerate(ranks):
            if self.kind == "batches":
                # Whole batches are dealt like samples are: each rank a contiguous part.
                world_size = self._stream_deal.world_size
                offset, sizes = Deal(1, len(chunks), rank, world_size).split(len(chunks))
                parts = [chunk.parts[0] for chunk in chunks[offset : offset + sum(sizes)]]
            else:
                parts = [chunk.parts[number] for chunk in chunks]
            kept = [part for part in parts if part is not None]
            windows.append(
                Window(
                    [pin(part.batch) if self.pins_memory else part.batch for part in kept],
                    sum(part.num_targets for part in kept),
                    sum(part.num_tokens for part in kept),
                    sum(part.num_samples for part in kept),
                )
            )
        return windows

    def _read_stream(self, stream: SampleStream | BatchStream, limit: int) -> list[Chunk]:
        if limit == 0:
            return []
        from_start = not stream.is_open and self._stored_stream is None
        if not stream.is_open:
            if self._stored_stream is not None:
                # That in which it was opened: Hugging Face's pass over a state of another epoch.
                self._tell_epoch(self._stored_stream.get("epoch"))
            stream.open(self._stored_stream, seed=self.seed, epoch=self.epoch)
            self._stored_stream = None
        chunks = _read(stream, limit)
        if not chunks and self._batches_done == 0:
            if from_start:
                again = " (a generator can be read only once)" if self.epoch else ""
                raise ConfigError(
                    f"{self._option}the dataset is empty: it gave no sample in epoch "
                    f"{self.epoch}{again}"
                )
            # The stream ended exactly where the last epoch was cut; this is a pass of this one.
            self._tell_epoch()
            return self._read_stream(stream, limit)
        self._stream_ended = not stream.is_open
        return chunks

    # ---- state

    @property
    def place(self) -> tuple[int, int, bool]:
        """Position, micro-batches done and whether a stream has ended."""
        return self.position, self._batches_done, self._stream_ended

    def move_to(self, position: int, num_batches: int, ended: bool) -> None:
        """Stand where the ranks have agreed to stand in this epoch."""
        self.position, self._batches_done, self._stream_ended = position, num_batches, ended

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain JSON values."""
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "kind": self.kind,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
        }
        if self._stream is not None:
            state["num_batches"] = self._batches_done
            state["ended"] = self._stream_ended
            stored = self._stored_stream
            state["stream"] = self._stream.state_dict() if stored is None else stored
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a stored place; the next window is the one that would have come there."""
        if state.get("version") != _STATE_VERSION or state.get("kind") != self.kind:
            raise ConfigError(
                f"the stored data position is of kind {state.get('kind')!r} version "
                f"{state.get('version')!r}; this dataset needs {self.kind!r} version "
                f"{_STATE_VERSION}"
            )
        if state["seed"] != self.seed:
            logger.info("data order: the stored seed %d replaces %d", state["seed"], self.seed)
        stored_samples = state.get("num_samples")
        if self.num_samples is not None and stored_samples != self.num_samples:
            if state["position"] > self.num_samples:
                raise ConfigError(
                    f"the stored data position {state['position']} is beyond the dataset, which "
                    f"has {self.num_samples} samples (it had {stored_samples}); to begin it anew, "
                    "leave 'dataset' out of load_components"
                )
            logger.warning(
                "the dataset has %d samples, it had %d when the position was stored: the order of "
                "samples is another one",
                self.num_samples,
                stored_samples,
            )
        if state.get("shuffle") != self.shuffle:
            logger.warning("shuffle is %s, it was %s", self.shuffle, state.get("shuffle"))
        self.seed = int(state["seed"])
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._batches_done = int(state.get("num_batches", 0))
        if self._stream is not None:
            self._stream.close()
            self._stored_stream = state.get("stream")
            self._stream.prepare(self._stored_stream)
            self._stream_ended = bool(state.get("ended"))
        self._tell_epoch()

    def close(self) -> None:
        """End worker processes."""
        self._pools.clear()
        if self._stream is not None and self._stream.is_open:
            self._stored_stream = self._stream.state_dict()
            self._stream.close()

    # ---- set-up

    def _tell_epoch(self, epoch: int | None = None) -> None:
        if not self._calls_set_epoch:
            return
        for owner in (
            self.dataset,
            getattr(self.dataset, "sampler", None),
            getattr(self.dataset, "batch_sampler", None),
        ):
            notify = getattr(owner, "set_epoch", None)
            if callable(notify):
                notify(self.epoch if epoch is None else epoch)

    def _make_stream(self, deal: Deal | None = None) -> SampleStream | BatchStream:
        if self.kind == "batches":
            return BatchStream(self.dataset)
        return SampleStream(
            self.dataset,
            self._collate,
            deal or self._stream_deal,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
        )

    def _check_size(self, num_samples: int) -> None:
        if num_samples == 0:
            raise ConfigError(
                f"{self._option}the dataset is empty ({type(self.dataset).__name__} of length 0)"
            )
        if self.deal.usable(num_samples) == 0:
            raise ConfigError(
                f"{self._option}drop_last leaves nothing: the dataset has {num_samples} samples, "
                f"less than batch_size {self.deal.batch_size} on {self.deal.world_size} rank(s)"
            )


def _read(stream: SampleStream | BatchStream, limit: int) -> list[Chunk]:
    """Up to `limit` chunks; fewer only at the end, where the stream closes."""
    chunks: list[Chunk] = []
    while len(chunks) < limit and stream.is_open and (chunk := stream.read()) is not None:
        chunks.append(chunk)
    return chunks
