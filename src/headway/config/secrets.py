"""Which names stand for a secret.

Owns: the one answer to that question. Does not own: what is shown instead (arguments, snapshot).
"""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"(?i)(^|[_.\-])(api_?)?(token|key|secret|password|passwd|credential)s?$"
    r"|api_?key|password|webhook|authorization"
)
_SPECIAL_TOKEN = re.compile(r"(?i)(bos|eos|pad|unk|sep|cls|mask|begin|end)_token$")


def names_secret(name: str) -> bool:
    """Whether an option, key or variable of this name holds a secret; a `pad_token` does not."""
    return bool(_SECRET.search(name)) and not _SPECIAL_TOKEN.search(name)
