"""Which names stand for a secret, and which values are one.

Owns: the one answer to that question, and taking such values out of a text. Does not own: how
arguments and configurations are shown (arguments, snapshot).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_HIDDEN = "<redacted>"
# Shorter ones would be found in words that mean something else.
_SHORTEST = 6
_SECRET = re.compile(
    r"(?i)(^|[_.\-])(api_?)?(token|key|secret|password|passwd|credential)s?$"
    r"|api_?key|password|webhook|authorization"
)
_SPECIAL_TOKEN = re.compile(r"(?i)(bos|eos|pad|unk|sep|cls|mask|begin|end)_token$")


def names_secret(name: str) -> bool:
    """Whether an option, key or variable of this name holds a secret; a `pad_token` does not."""
    return bool(_SECRET.search(name)) and not _SPECIAL_TOKEN.search(name)


def find_secrets(value: Any, name: str = "") -> Iterator[str]:
    """Texts under names that stand for a secret, however deep."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from find_secrets(inner, name if names_secret(name) else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from find_secrets(inner, name)
    elif isinstance(value, str) and len(value) >= _SHORTEST and names_secret(name):
        yield value


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text without these values, wherever they stand."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text
