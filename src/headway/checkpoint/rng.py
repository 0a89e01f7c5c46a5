"""The random number generators of this process as one stateful object.

Owns: torch's CPU generator, every CUDA device's, Python's `random` and numpy's global generator.
Does not own: seeding, nor generators that belong to a data loader.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


class RNGState:
    """Saves and restores all global generators of the process."""

    def state_dict(self) -> dict[str, Any]:
        """The generators as they are now."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "torch": torch.get_rng_state(),
            "cuda": cuda,
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put every generator back; CUDA devices that only one side has are reported."""
        cuda: list[torch.Tensor] = state_dict["cuda"]
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if len(cuda) != num_devices:
            logger.warning(
                "the checkpoint has the generators of %d CUDA devices, this process sees %d; "
                "the first %d are restored",
                len(cuda),
                num_devices,
                min(len(cuda), num_devices),
            )
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        for device, state in zip(range(num_devices), cuda):
            torch.cuda.set_rng_state(state, device)
