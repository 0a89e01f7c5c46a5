"""JSON files of a checkpoint, read with limits.

Owns: that a JSON file which is too large, nested too deeply or not JSON at all ends in an error
that names it. Does not own: what the files mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 1 << 30


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file; anything that stands in the way is a `CheckpointError`."""
    try:
        with open(path, "rb") as file:
            text = file.read(max_bytes + 1)
        if len(text) > max_bytes:
            raise CheckpointError(f"{path} is larger than {max_bytes} bytes; it is not read")
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply to be read") from None


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The same for a file that must hold an object."""
    value = read_json(path, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
