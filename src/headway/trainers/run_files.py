"""Files that callbacks add to a checkpoint.

Owns: asking the callbacks and checking what they answer. Does not own: writing (checkpoint), what
the files hold (the callbacks).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headway.checkpoint.contents import RUN_CONFIG_NAME, RUN_FOLDER
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.storage import check_name
from headway.errors import ConfigError

logger = logging.getLogger(__name__)


def collect_run_files(callbacks: Mapping[str, Any], args: Any, state: Any) -> dict[str, bytes]:
    """What the callbacks' `checkpoint_files` give, by name inside the checkpoint.

    A callback that fails loses its files, not the checkpoint; a name that cannot be is an error.
    """
    files: dict[str, bytes] = {}
    for name, callback in callbacks.items():
        give = getattr(callback, "checkpoint_files", None)
        if not callable(give):
            continue
        try:
            given = {str(key): _encode(value) for key, value in (give(args, state) or {}).items()}
        except ConfigError:
            raise
        except Exception:
            logger.warning(
                "callback %r failed in checkpoint_files; the checkpoint is made without its files",
                name,
                exc_info=True,
            )
            continue
        for key, data in given.items():
            files[_place(name, key, files)] = data
    return files


def _encode(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise TypeError(f"the contents of a file are text or bytes, not {type(value).__name__}")


def _place(callback: str, name: str, taken: Mapping[str, bytes]) -> str:
    asked = f"callback {callback!r} asks for the file {name!r} in a checkpoint"
    try:
        check_name(name)
    except CheckpointError:
        raise ConfigError(f"{asked}; the name must stay inside its {RUN_FOLDER}/ folder") from None
    place = f"{RUN_FOLDER}/{name}"
    own = {RUN_CONFIG_NAME, *taken}
    # A file and a folder cannot have one name either.
    if any(f"{place}/".startswith(f"{one}/") or f"{one}/".startswith(f"{place}/") for one in own):
        raise ConfigError(f"{asked}, and {place} is there already; choose another name")
    return place
