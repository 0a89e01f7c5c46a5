"""Seeding every generator that training draws from.

Owns: one seed into Python, NumPy and torch; drawing a fresh seed.
Does not own: the order of samples, which derives from (seed, epoch, index) in data/.
"""

from __future__ import annotations

import hashlib
import random
import secrets

from headway.errors import ConfigError

# Beyond 64 bits torch refuses the seed; below 0 it would wrap silently.
MAX_SEED = 2**63 - 1


def draw_seed() -> int:
    """A fresh seed from the operating system; the global generators are not touched.

    31 bits, so that it fits every consumer, NumPy's legacy generator included.
    """
    return secrets.randbelow(2**31)


def derive_seed(seed: int, rank: int) -> int:
    """A seed of a rank's own, far from those of the other ranks and of other runs."""
    digest = hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch (CPU, and CUDA or MPS where there is one) alike."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed: {seed} is not in the range 0 to {MAX_SEED}")
    import numpy as np
    import torch

    random.seed(seed)
    # NumPy's legacy generator takes 32 bits; folding keeps the high bits significant.
    np.random.seed((seed ^ (seed >> 32)) & 0xFFFFFFFF)
    # Seeds CUDA and MPS as well, deferred until the device is first used.
    torch.manual_seed(seed)
