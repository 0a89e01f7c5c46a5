"""Fetching the samples of a micro-batch from a map-style dataset, here or in a worker.

Owns: how samples are asked for, the randomness inside a sample, worker processes.
Does not own: which samples (loader, order) nor how they become a batch (collate).
"""

from __future__ import annotations

import copy
import inspect
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from headway.data.collate import PadCollator
from headway.data.counting import count_targets, count_tokens
from headway.data.order import IndexArray, derive_key, sample_rng

Collator = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """One micro-batch to fetch."""

    seed: int
    epoch: int
    indices: IndexArray


class Loaded(NamedTuple):
    """One micro-batch with its counts."""

    batch: Any
    num_targets: int | torch.Tensor
    num_tokens: int


def uses_global_randomness(dataset: Any) -> bool:
    """Whether a sample might draw from the global generators of Python, numpy or torch."""
    declared = getattr(dataset, "is_deterministic", None)
    if declared is not None:
        return not declared
    if isinstance(dataset, (list, tuple, TensorDataset)):
        return False
    if isinstance(dataset, Subset):
        return uses_global_randomness(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(uses_global_randomness, dataset.datasets))
    if type(dataset).__module__.partition(".")[0] == "datasets":
        layout = getattr(dataset, "format", None)
        return not isinstance(layout, dict) or layout.get("type") == "custom"
    return True


def needs_seeding(dataset: Any) -> bool:
    """Whether the global generators are seeded for each sample, as this module asks for them.

    Not for one that is given a generator, unless it says that it is random besides.
    """
    told = getattr(dataset, "needs_seeding", None)
    if isinstance(told, bool):
        return told
    if getattr(dataset, "is_deterministic", None) is None and takes_rng(dataset):
        return False
    return uses_global_randomness(dataset)


def takes_rng(dataset: Any) -> bool:
    """Whether samples come by `get(index, rng)`: where it is defined, or the dataset tells."""
    told = getattr(dataset, "takes_rng", None)
    if isinstance(told, bool):
        return told
    get = getattr(dataset, "get", None)
    if not callable(get):
        return False
    try:
        return "rng" in inspect.signature(get).parameters
    except (TypeError, ValueError):
        return False


# Stands in for numpy's global generator while samples draw from it; making one costs 200 us.
_stand_in = np.random.MT19937(0)


@contextmanager
def preserve_global_randomness() -> Iterator[None]:
    """Whatever happens to the global generators inside is undone."""
    python_state = random.getstate()
    torch_state = torch.default_generator.get_state()
    # Swapping numpy's generator is 50 times cheaper than saving and restoring its state.
    numpy_generator = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_stand_in)
    try:
        yield
    finally:
        mtrand.set_bit_generator(numpy_generator)
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)


def seed_global_randomness(*parts: int) -> None:
    """Seed Python, numpy and torch (CPU) from integers."""
    key = derive_key(*parts)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key & (2**63 - 1))


class Fetcher:
    """Turns a request into a collated micro-batch. Travels to workers."""

    def __init__(self, dataset: Any, collate: Collator, *, set_epoch: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self._with_rng = takes_rng(dataset)
        self._seeds_samples = needs_seeding(dataset)
        inner = getattr(collate, "__wrapped__", collate)
        self._seeds_collate = not (isinstance(inner, PadCollator) or inner is default_collate)
        self._get_many = getattr(dataset, "__getitems__", None) is not None
        self._set_epoch = set_epoch and callable(getattr(dataset, "set_epoch", None))
        self._epoch: int | None = None

    def __getitem__(self, request: Request) -> Loaded:
        # The dataset's own, if it tells: an evaluation on the same one may have set another.
        own = getattr(self.dataset, "epoch", None)
        now = own if isinstance(own, int) else self._epoch
        if self._set_epoch and (self._epoch != request.epoch or now != request.epoch):
            self.dataset.set_epoch(request.epoch)
            self._epoch = request.epoch
        if self._seeds_samples or self._seeds_collate:
            with preserve_global_randomness():
                batch = self._load_seeded(request)
        else:
            batch = self.collate(self._fetch(request))
        return Loaded(batch, count_targets(batch), count_tokens(batch))

    def _load_seeded(self, request: Request) -> Any:
        items = self._fetch_seeded(request) if self._seeds_samples else self._fetch(request)
        if self._seeds_collate:
            seed_global_randomness(request.seed, request.epoch, int(request.indices[0]), 1)
        return self.collate(items)

    def _fetch(self, request: Request) -> list[Any]:
        dataset, indices = self.dataset, request.indices.tolist()
        if self._get_many and not self._with_rng:
            return list(dataset.__getitems__(indices))
        return [self._fetch_one(request, index) for index in indices]

    def _fetch_one(self, request: Request, index: int) -> Any:
        if self._with_rng:
            return self.dataset.get(index, sample_rng(request.seed, request.epoch, index))
        return self.dataset[index]

    def _fetch_seeded(self, request: Request) -> list[Any]:
        # One at a time even where the dataset could give many: a sample's randomness must not
        # depend on its neighbours in the batch.
        items = []
        for index in request.indices.tolist():
            seed_global_randomness(request.seed, request.epoch, index)
            items.append(self._fetch_one(request, index))
        return items


class _Requests:
    """The sampler of a DataLoader, refilled for every pass."""

    def __init__(self) -> None:
        self.pending: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)


class WorkerPool:
    """Worker processes that fetch requests ahead and return them in order."""

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        num_workers: int,
        pin_memory: bool,
        persistent_workers: bool,
        prefetch_factor: int | None,
    ) -> None:
        # Tokenizer threads do not survive the fork of a worker.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._requests = _Requests()
        self._loader: DataLoader[Any] = DataLoader(
            fetcher,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._requests,
            collate_fn=keep,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=outlive_signals,
        )

    def run(self, requests: Iterable[Request]) -> Iterator[Loaded]:
        """The micro-batches of the requests, in order."""
        self._requests.pending = requests
        return iterate(self._loader)


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """`iter` of a loader, for which a DataLoader draws a seed: training's generator stays as it is.

    Where a run resumes, a loader is opened once more than in a run that was never stopped.
    """
    state = torch.default_generator.get_state()
    try:
        return iter(loader)
    finally:
        torch.default_generator.set_state(state)


def outlive_signals(worker: int) -> None:
    """Make a worker leave signals to the whole process group to the training process.

    A terminal sends Ctrl-C, and a scheduler SIGTERM, to every process of a job. A worker that ended
    then would take the training down before it could save. The second SIGTERM does end it: torch
    and multiprocessing send one to a worker that does not stop by itself.
    """

    def on_first(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, on_first)
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def keep(value: Any) -> Any:
    """The value itself; a function because workers must be able to import it."""
    return value


def pin(batch: Any) -> Any:
    """Copy the tensors of a batch into page-locked memory, but those a collator put on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if isinstance(batch, dict):
        return {key: pin(value) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):  # as collators of transformers give them
        pinned = {key: pin(value) for key, value in batch.items()}
        own = copy.copy(batch)
        try:
            own.update(pinned)
        except (RuntimeError, TypeError):  # one that takes no changes
            return pinned
        return own
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pin, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(pin, batch))
    return batch
