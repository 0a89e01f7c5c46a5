"""Tools for tests of training code, Headway's own and its users'.

Owns: real ranks in real processes, tiny models and data, counting host syncs, import guards,
faults of the disk and proofs that checkpoints survive them.
Does not own: anything that training itself needs; no other room imports this one.

Names are exported lazily, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.testing.faults import (
        Died,
        Fault,
        FaultyStorage,
        Journal,
        Operation,
        crash_states,
        enumerate_operations,
    )
    from headway.testing.forkserver import ForkServer
    from headway.testing.imports import assert_no_import
    from headway.testing.ranks import RankFailure, RankTimeout, run_ranks
    from headway.testing.syncs import HostSync, HostSyncs, count_host_syncs
    from headway.testing.tiny import tiny_dataset, tiny_decoder, tiny_llama, tiny_text_files
    from headway.testing.trainer import tiny_trainer

_HOMES = {
    "Died": "faults",
    "Fault": "faults",
    "FaultyStorage": "faults",
    "ForkServer": "forkserver",
    "HostSync": "syncs",
    "HostSyncs": "syncs",
    "Journal": "faults",
    "Operation": "faults",
    "RankFailure": "ranks",
    "RankTimeout": "ranks",
    "assert_no_import": "imports",
    "count_host_syncs": "syncs",
    "crash_states": "faults",
    "enumerate_operations": "faults",
    "run_ranks": "ranks",
    "tiny_dataset": "tiny",
    "tiny_decoder": "tiny",
    "tiny_llama": "tiny",
    "tiny_text_files": "tiny",
    "tiny_trainer": "trainer",
}

__all__ = [
    "Died",
    "Fault",
    "FaultyStorage",
    "ForkServer",
    "HostSync",
    "HostSyncs",
    "Journal",
    "Operation",
    "RankFailure",
    "RankTimeout",
    "assert_no_import",
    "count_host_syncs",
    "crash_states",
    "enumerate_operations",
    "run_ranks",
    "tiny_dataset",
    "tiny_decoder",
    "tiny_llama",
    "tiny_text_files",
    "tiny_trainer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
