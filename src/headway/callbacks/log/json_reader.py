"""Reads logs of JSON records: one object a line, or one array.

Owns: reading a whole file that a kill may have torn. Does not own: writing (json_lines.py), nor
what the records mean (control/run_log.py).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from headway.control.run_log import find_records

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
    for record in find_records(text):
        if record is None:
            unread += 1
        else:
            records.append(record)
    if unread:
        logger.warning("%s: %d places cannot be read and are left out", path, unread)
    return records
