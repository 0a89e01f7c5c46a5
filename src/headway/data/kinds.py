"""What sort of thing a dataset is: how it is read, and whether ranks share it already.

Owns: telling kinds apart by what an object offers. Does not own: reading (loader, streams).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from headway.errors import ConfigError


def classify(dataset: Any, option: str | None = None) -> str:
    """How a dataset is read: "map" by index, "iterable" sample by sample, "batches" as it is.

    `option` is what the user calls it, for errors.
    """
    named = "" if option is None else f"{option}: "
    if isinstance(dataset, DataLoader) or _makes_batches(dataset):
        return "batches"
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"{named}a dataset is needed, got a {type(dataset).__name__} with the keys "
            f"{', '.join(map(str, dataset))}; choose one of them"
        )
    if isinstance(dataset, IterableDataset):
        return "iterable"
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if not isinstance(dataset, (str, bytes)):
            return "map"
    elif hasattr(dataset, "__iter__"):
        return "iterable"
    raise ConfigError(
        f"{named}a {type(dataset).__name__} is no dataset; allowed: objects with __getitem__ and "
        "__len__, iterables of samples, and loaders of batches"
    )


def _makes_batches(dataset: Any) -> bool:
    if not hasattr(dataset, "__iter__"):
        return False
    if any(kind.__module__.startswith("torchdata.") for kind in type(dataset).__mro__):
        return True
    return not hasattr(dataset, "__getitem__") and (
        hasattr(dataset, "batch_size") or hasattr(dataset, "batch_sampler")
    )


def is_sharded(dataset: Any) -> bool:
    """Whether a stream or a loader gives each rank samples of its own.

    It says so itself by `is_sharded`, or has a sampler for several replicas (torch's
    DistributedSampler), or is a Hugging Face stream split by node. Any other is taken to give
    every rank the same, which is then dealt out.
    """
    for owner in _owners(dataset):
        declared = getattr(owner, "is_sharded", None)
        if isinstance(declared, bool):
            return declared
        if int(getattr(owner, "num_replicas", 1) or 1) > 1:
            return True
        split = getattr(owner, "_distributed", None)
        if int(getattr(split, "world_size", 1) or 1) > 1:
            return True
    return False


def _owners(dataset: Any) -> Iterator[Any]:
    batches = getattr(dataset, "batch_sampler", None)
    yield dataset
    yield getattr(dataset, "sampler", None)
    yield batches
    yield getattr(batches, "sampler", None)
    yield getattr(dataset, "dataset", None)
