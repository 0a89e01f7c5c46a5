"""GPU kernels of the reference decoder, for what torch's operations do in too many passes.

Each computes what a plain form elsewhere in `models` does, and tests on a GPU compare the two.
"""

from __future__ import annotations

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Triton comes with torch where it knows the platform; without it the plain forms are used."""
