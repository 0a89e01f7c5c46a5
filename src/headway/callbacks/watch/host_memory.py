"""Memory of this process as the operating system counts it."""

from __future__ import annotations

import sys

GIB = 1024**3


def peak_rss_bytes() -> int:
    """The most memory that this process had in use so far; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
