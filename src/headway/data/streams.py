"""Data that comes as a stream: iterable datasets, and loaders that make batches themselves.

Owns: reading on, the state of a stream, skipping to a place where a stream has no state.
Does not own: map-style datasets (fetch) nor grouping into windows (loader).

A stream is read by one process: here, or in one worker that reads ahead. More workers would
change the order, and with it what a stored position means.
"""

from __future__ import annotations

import base64
import copy
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.data.counting import count_samples, count_targets, count_tokens
from headway.data.dealing import Deal
from headway.data.fetch import (
    Collator,
    iterate,
    keep,
    outlive_signals,
    preserve_global_randomness,
    seed_global_randomness,
)
from headway.data.jsonable import decode, encode
from headway.data.kinds import classify
from headway.errors import ConfigError

logger = logging.getLogger("headway")


class Part(NamedTuple):
    """One micro-batch of a stream."""

    batch: Any
    num_targets: int | torch.Tensor
    num_tokens: int
    num_samples: int


class Chunk(NamedTuple):
    """What was read at once: a part for each rank read for (None where it got no sample)."""

    parts: list[Part | None]
    num_global_samples: int
    state: Any
    is_last: bool = False


class _Reader(IterableDataset[Chunk]):
    """Reads samples from an iterable dataset and makes micro-batches of some ranks of them."""

    def __init__(
        self,
        dataset: Any,
        collate: Collator,
        deal: Deal,
        *,
        ranks: Sequence[int],
        num_skipped: int = 0,
        loads: bool = False,
        state: Any = None,
        with_state: bool = False,
        seeds: tuple[int, int] | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.deal = deal
        self.ranks = ranks
        self.num_skipped = num_skipped
        self.loads, self.state = loads, state
        self.with_state = with_state
        self.seeds = seeds

    def __iter__(self) -> Iterator[Chunk]:
        if self.loads:
            self.dataset.load_state_dict(decode(self.state))
        items = self._open() if self.seeds is None else self._open_seeded(*self.seeds)
        step = self.deal.batch_size * self.deal.world_size
        while chunk := list(islice(items, step)):
            is_last = len(chunk) < step
            if is_last and self.deal.drop_last:
                return
            yield self._make(chunk, is_last)

    def _open(self) -> Iterator[Any]:
        items: Iterator[Any] = iter(self.dataset)
        if self.num_skipped:
            next(islice(items, self.num_skipped - 1, None), None)
        return items

    def _open_seeded(self, seed: int, epoch: int) -> Iterator[Any]:
        """A dataset that draws its order from the global generator does so by its first sample;
        seeding that makes the order of an epoch repeatable, as reading it again needs."""
        with preserve_global_randomness():
            seed_global_randomness(seed, epoch)
            items = self._open()
            first = list(islice(items, 1))
        return chain(first, items)

    def _make(self, samples: list[Any], is_last: bool) -> Chunk:
        state = encode(self.dataset.state_dict()) if self.with_state else None
        base, extra = divmod(len(samples), self.deal.world_size)
        parts: list[Part | None] = []
        for rank in self.ranks:
            start = rank * base + min(rank, extra)
            own = samples[start : start + base + (rank < extra)]
            parts.append(make_part(self.collate(own), len(own)) if own else None)
        return Chunk(parts, len(samples), state, is_last)


def make_part(batch: Any, num_samples: int) -> Part:
    return Part(batch, count_targets(batch), count_tokens(batch), num_samples)


class SampleStream:
    """An iterable dataset of samples."""

    kind = "iterable"

    def __init__(
        self,
        dataset: Any,
        collate: Collator,
        deal: Deal,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.deal = deal
        self.ranks: Sequence[int] = (deal.rank,)
        """The ranks whose parts are made."""
        self.has_state = _has_state(dataset)
        self._collate = collate
        self._in_worker = num_workers > 0
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._position = 0
        self._epoch = 0
        self._first_state: Any = None
        self._is_first_known = self._has_loaded = False
        self._worker_state: Any = None
        self._ended = False
        self._chunks: Iterator[Chunk] | None = None

    @property
    def is_open(self) -> bool:
        return self._chunks is not None

    def open(self, state: dict[str, Any] | None = None, *, seed: int = 0, epoch: int = 0) -> None:
        """Begin to read: from the start, or from a stored state."""
        self.close()
        stored = (state or {}).get("dataset") if self.has_state else None
        self._position = (state or {}).get("position", 0)
        self._epoch = (state or {}).get("epoch", epoch)
        self._ended = (state or {}).get("ended", False)
        if self._ended:
            self._chunks = iter(())
            return
        if self.has_state and not self._is_first_known:  # before anything is read of it
            self._first_state, self._is_first_known = encode(self.dataset.state_dict()), True
        loaded, from_state = self._has_loaded, stored
        if stored is not None:
            self._has_loaded = True
        elif loaded:
            from_state = self._first_state  # else some begin where a state once put them
        self._worker_state = stored
        skipped = 0
        if stored is None and self._position:
            skipped = self._position
            _warn_replay(skipped, "samples")
        elif stored is not None:
            _warn_shuffle_buffer(self.dataset)
        reader = _Reader(
            self.dataset,
            self._collate,
            self.deal,
            ranks=self.ranks,
            num_skipped=skipped,
            loads=stored is not None or loaded,
            state=from_state,
            with_state=self.has_state and self._in_worker,
            seeds=None if self.has_state else (seed, self._epoch),
        )
        self._chunks = iterate(self._worker(reader) if self._in_worker else reader)

    def read(self) -> Chunk | None:
        """The next micro-batch of each rank, or None at the end."""
        assert self._chunks is not None
        chunk = next(self._chunks, None)
        if chunk is None or chunk.is_last:
            self._chunks, self._ended = None, True
        if chunk is not None:
            self._position += chunk.num_global_samples
            self._worker_state = chunk.state
        return chunk

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"position": self._position, "epoch": self._epoch}
        if self._ended:
            # A dataset's own state does not tell: many stand at their beginning again then.
            state["ended"] = True
        elif self.has_state and self._position:
            # What a worker has read ahead does not count, so its state comes with each batch.
            state["dataset"] = (
                self._worker_state if self._in_worker else encode(self.dataset.state_dict())
            )
        return state

    @contextmanager
    def returning(self) -> Iterator[None]:
        """Around a pass that may be cut short: the next one begins where this one did."""
        self._is_first_known = True  # of no use to a single pass
        given = self.dataset
        self.dataset, is_apart = _set_apart(given)
        begin = copy.deepcopy(given.state_dict()) if self.has_state and not is_apart else None
        try:
            yield
        finally:
            if begin is not None and self.is_open:
                given.load_state_dict(begin)
            self.dataset = given

    def prepare(self, state: dict[str, Any] | None) -> None:
        """Nothing of a stream of samples outlives its epoch."""

    def close(self) -> None:
        self._chunks = None

    def _worker(self, reader: _Reader) -> DataLoader[Chunk]:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return DataLoader(
            reader,
            batch_size=None,
            collate_fn=keep,
            num_workers=1,
            pin_memory=self._pin_memory,
            prefetch_factor=self._prefetch_factor,
            worker_init_fn=outlive_signals,
        )


class BatchStream:
    """A loader that makes its own batches; it is read as it is."""

    kind = "batches"

    ranks: Sequence[int] = ()
    """Batches are not divided: the loader deals them out as they are."""

    def __init__(self, loader: Any) -> None:
        self.dataset = loader
        self.has_state = _has_state(loader)
        self._num_batches = 0
        self._epoch = 0
        self._generators: list[str] = []
        self._batches: Iterator[Any] | None = None
        self._pending: list[Any] = []

    @property
    def is_open(self) -> bool:
        return self._batches is not None

    def open(self, state: dict[str, Any] | None = None, *, seed: int = 0, epoch: int = 0) -> None:
        """Begin to read: from the start, or from a stored state."""
        self.close()
        state = state or {}
        self._num_batches = state.get("num_batches", 0)
        self._epoch = state.get("epoch", epoch)
        self._set_generators(state.get("generators"))
        self._generators = self._get_generators()
        stored = state.get("loader") if self.has_state else None
        if stored is not None:
            _warn_shuffle_buffer(getattr(self.dataset, "dataset", None))
            self.dataset.load_state_dict(decode(stored))
            self._batches = iterate(self.dataset)
            return
        if self.has_state and not self._num_batches:
            self._batches = iter(self.dataset)
            return
        # A sampler without a generator of its own draws its order from the global one, at the
        # first batch; seeding it there makes the order of an epoch repeatable.
        with preserve_global_randomness():
            seed_global_randomness(seed, self._epoch)
            batches = iter(self.dataset)
            if self._num_batches:
                _warn_replay(self._num_batches, "batches")
                next(islice(batches, self._num_batches - 1, None), None)
            self._pending = [next(batches, None)]
        self._batches = batches

    def read(self) -> Chunk | None:
        """The next batch, or None at the end."""
        assert self._batches is not None
        batch = self._pending.pop() if self._pending else next(self._batches, None)
        if batch is None:
            self._batches = None
            return None
        self._num_batches += 1
        samples = count_samples(batch)
        return Chunk([make_part(batch, samples)], samples, None)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_batches": self._num_batches, "epoch": self._epoch}
        if self.has_state and self._num_batches:
            state["loader"] = encode(self.dataset.state_dict())
        if self._generators:
            state["generators"] = self._generators
            state["generators_now"] = self._get_generators()
        return state

    def close(self) -> None:
        self._batches = None
        self._pending = []

    def returning(self) -> AbstractContextManager[None]:
        """Loaders of batches begin anew with every pass."""
        return nullcontext()

    def prepare(self, state: dict[str, Any] | None) -> None:
        """Take over what outlives the epoch, in case the next one starts without reading on."""
        self._set_generators((state or {}).get("generators_now"))

    def _get_generators(self) -> list[str]:
        return [
            base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")
            for generator in self._find_generators()
        ]

    def _set_generators(self, states: list[str] | None) -> None:
        for generator, stored in zip(self._find_generators(), states or []):
            raw = bytearray(base64.b64decode(stored))
            generator.set_state(torch.frombuffer(raw, dtype=torch.uint8))

    def _find_generators(self) -> list[torch.Generator]:
        found: dict[int, torch.Generator] = {}
        batches = getattr(self.dataset, "batch_sampler", None)
        samplers = (
            getattr(self.dataset, "sampler", None),
            batches,
            getattr(batches, "sampler", None),
        )
        for owner in (self.dataset, *samplers):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
        return list(found.values())


def copy_for_evaluation(dataset: Any, option: str) -> Any:
    """What training reads too, as evaluations may: a stream with a state of its own as a copy."""
    if classify(dataset, option) == "map" or not _has_state(dataset):
        return dataset
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise ConfigError(
            f"{option}: it is the train_dataset too, a {type(dataset).__name__} that keeps its "
            f"place (state_dict) and cannot be copied ({error}); give an object of its own"
        ) from None


def _set_apart(dataset: Any) -> tuple[Any, bool]:
    """A copy of a Hugging Face stream, and whether it is one.

    Its state is that of the newest pass, also of one that was given up, and is shared with streams
    that were made from the same one (`take` and `skip`): training would be stored where an
    evaluation stands, and evaluations would go on where an earlier one was cut.
    """
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return dataset, False
    try:
        return copy.deepcopy(dataset), True
    except Exception:  # a source that cannot be copied has its state only
        return dataset, False


def _has_state(dataset: Any) -> bool:
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def _warn_replay(count: int, what: str) -> None:
    logger.warning(
        "the dataset has no state_dict: reading and dropping %d %s to get back to the stored place",
        count,
        what,
    )


def _warn_shuffle_buffer(dataset: Any) -> None:
    """Say that a Hugging Face stream shuffled through a buffer does not go on exactly."""
    pending = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        stage = pending.pop()
        if type(stage).__name__.startswith("BufferShuffled"):
            logger.warning(
                "the data resumes only approximately: a shuffle buffer of %s samples is not part "
                "of the dataset's state and is filled anew, so samples that waited in it are not "
                "seen, and the order is another one. A map-style dataset resumes exactly.",
                getattr(stage, "buffer_size", "unknown"),
            )
            return
        pending += getattr(stage, "ex_iterables", None) or []
        inner = getattr(stage, "ex_iterable", None)
        pending += [] if inner is None else [inner]
