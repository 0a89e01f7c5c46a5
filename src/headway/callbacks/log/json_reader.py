"""Reads logs of JSON records: one object a line, or one array.

Owns: finding the records in a file that a kill may have torn. Does not own: writing
(json_lines.py), nor what the records mean.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read_json_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log in either form, in order.

    A torn end is left out without a word, as a kill may leave one; other places that cannot be
    read are left out with a warning.
    """
    data = Path(path).read_bytes()
    text = data.decode("utf-8", errors="replace")
    if text.lstrip("\ufeff \t\r\n\0").startswith("["):
        try:
            whole = json.loads(text)
        except ValueError:
            pass
        else:
            return [record for record in whole if isinstance(record, dict)]
    records, unread = [], 0
    for record in _find_records(text):
        if record is None:
            unread += 1
        else:
            records.append(record)
    if unread:
        logger.warning("%s: %d places cannot be read and are left out", path, unread)
    return records


def _find_records(text: str) -> Iterator[dict[str, Any] | None]:
    """Every object at the start of a line or after another; None for a place in between that
    cannot be read."""
    decoder = json.JSONDecoder()
    position, end = 0, len(text)
    while True:
        while position < end and text[position] in " \t\r\n,[]\ufeff\0":
            position += 1
        if position >= end:
            return
        try:
            record, position = decoder.raw_decode(text, position)
        except ValueError:
            following = text.find("\n", position)
            if following < 0:
                return
            if text[following:].strip(" \t\r\n,[]\0"):
                yield None
            position = following
            continue
        yield record if isinstance(record, dict) else None
