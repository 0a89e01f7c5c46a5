"""Tools for tests of training code, Headway's own and its users'.

Owns: real ranks in real processes, tiny models and data, counting host syncs, import guards,
faults of the disk and proofs that checkpoints survive them.
Does not own: anything that training itself needs; no other room imports this one.

Names are exported lazily, so that importing the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "faults": (
            "Died",
            "Fault",
            "FaultyStorage",
            "Journal",
            "Operation",
            "crash_states",
            "enumerate_operations",
        ),
        "forkserver": ("ForkServer",),
        "imports": ("assert_no_import",),
        "ranks": ("RankFailure", "RankTimeout", "run_ranks"),
        "syncs": ("HostSync", "HostSyncs", "count_host_syncs"),
        "tiny": ("tiny_dataset", "tiny_decoder", "tiny_llama", "tiny_text_files"),
        "trainer": ("tiny_trainer",),
    },
)
