"""What tells one dataset from another without reading it all.

Owns: the fingerprint of a dataset: its kind and size, the digests of its token files, a digest of
a few samples. Does not own: what is done when two differ (trainers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from headway.data.fetch import preserve_global_randomness, seed_global_randomness, takes_rng
from headway.data.loader import WindowLoader
from headway.data.order import sample_rng
from headway.data.tokens import TokenFile


def fingerprint_data(loader: WindowLoader) -> dict[str, Any]:
    """Kind, number of samples, token files and three samples; a stream is not read."""
    found: dict[str, Any] = {"kind": loader.kind, "num_samples": loader.num_samples}
    digests = [file.digest for file in _token_files(loader.dataset)]
    if digests:
        found["token_files"] = digests
    if loader.num_samples:
        last = loader.num_samples - 1
        found["samples"] = _digest_samples(loader, sorted({0, last // 2, last}))
    return found


def _token_files(dataset: Any) -> Iterator[TokenFile]:
    files = getattr(dataset, "files", None)
    yield from (
        (file for file in files if isinstance(file, TokenFile)) if isinstance(files, list) else ()
    )
    for name in ("sources", "datasets", "dataset"):  # mixtures, ConcatDataset, Subset
        inner = getattr(dataset, name, None)
        for part in inner if isinstance(inner, list) else [inner]:
            if part is not None and part is not dataset:
                yield from _token_files(part)


def _digest_samples(loader: WindowLoader, indices: list[int]) -> str | None:
    """None for data whose samples cannot be looked at one by one."""
    dataset = loader.dataset
    hasher = xxhash.xxh3_128()
    with preserve_global_randomness():
        for index in indices:
            seed_global_randomness(loader.seed, 0, index)
            try:
                if takes_rng(dataset):
                    sample = dataset.get(index, sample_rng(loader.seed, 0, index))
                else:
                    sample = dataset[index]
            except Exception:
                # Training reports a sample that cannot be read, if it ever asks for this one.
                return None
            _feed(hasher, sample)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            hasher.update(f"{key}:".encode())
            _feed(hasher, value[key])
    elif isinstance(value, np.ndarray) and value.dtype != object:
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple):
        hasher.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, bool | int | float | str | bytes | None | np.generic):
        hasher.update(f"{value!r};".encode())
    else:
        hasher.update(type(value).__qualname__.encode())
