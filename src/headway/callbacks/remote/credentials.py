"""Keys and switches that services read from the environment.

Owns: which variables and files count. Does not own: what is done without a key (tracker.py).
"""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

_TRUE = ("1", "true", "yes", "on")


def variable(*names: str) -> str | None:
    """The first of these environment variables that is set and not empty."""
    for name in names:
        value = os.environ.get(name, "").strip()
        if value:
            return value
    return None


def switched_on(name: str) -> bool:
    return (variable(name) or "").lower() in _TRUE


def preset(name: str, value: str) -> None:
    """Set an environment variable for the service's package, unless the user has set it."""
    os.environ.setdefault(name, value)


def drop_blank(name: str) -> None:
    """An environment variable that is set to nothing is not set, also for the service's package."""
    if not os.environ.get(name, "x").strip():
        del os.environ[name]


def netrc_password(url: str) -> str | None:
    """The password that the user's netrc file holds for the host of a URL."""
    host = urlsplit(url).hostname or ""
    named = variable("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            entry = netrc.netrc(path).hosts.get(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry is not None:
            return entry[2]
    return None
