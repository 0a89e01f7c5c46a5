"""The texts of a list of records that grows from save to save.

Owns: that a save encodes the records that are new or changed, and not a run's whole history, for
which training would wait longer and longer. Does not own: the file (jsonfile.py, writer.py).
"""

from __future__ import annotations

from typing import Any

from headway.checkpoint.jsonfile import EncodedList, encode_item
from headway.checkpoint.tree import split_tree
from headway.errors import ConfigError


class RecordTexts:
    """Remembers what it has encoded of one list; about a kilobyte for each record."""

    def __init__(self, what: str, key: str, file_name: str) -> None:
        self._what, self._key, self._file_name = what, key, file_name
        self._known: list[Any] = []
        """A copy of each record, or None of one that is to be encoded every time."""
        self._texts: list[str] = []

    def take(self, records: list[Any]) -> EncodedList:
        """The list as it is now; later changes of it are not seen."""
        known, texts = self._known, self._texts
        del known[len(records) :], texts[len(records) :]
        for number in self._find_changed(records):
            known[number], texts[number] = self._encode(number, records[number])
        for number in range(len(known), len(records)):
            one, text = self._encode(number, records[number])
            known.append(one)
            texts.append(text)
        return EncodedList(list(texts))

    def _find_changed(self, records: list[Any]) -> list[int]:
        try:
            pairs = enumerate(zip(self._known, records, strict=False))
            return [number for number, (one, record) in pairs if one != record]
        except (RuntimeError, ValueError):  # a tensor or array is neither equal nor not
            return list(range(len(self._known)))

    def _encode(self, number: int, record: Any) -> tuple[Any, str]:
        encoded, tensors = split_tree(record, what=self._what, path=(self._key, str(number)))
        refuse_tensors(tensors, self._what, self._file_name)
        # What is encoded as itself is a deep copy, so that a change of any depth will show.
        text = encode_item(encoded, self._file_name)
        return encoded if encoded == record else None, text


def refuse_tensors(tensors: dict[str, Any], what: str, file_name: str) -> None:
    """For files that have no tensor file beside them."""
    if tensors:
        raise ConfigError(
            f"{what}: {', '.join(tensors)} is a tensor or array; "
            f"{file_name} takes plain values only"
        )
