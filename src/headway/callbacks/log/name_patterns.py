"""Choosing metrics by patterns of their names.

Owns: what `*` and `?` match. Does not own: which names there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from headway.errors import ConfigError


class NamePatterns:
    """Names that match any of the patterns; `*` and `?` are wild, all else is itself.

    Metric names have brackets in them, so those are no character classes here.
    """

    def __init__(self, option: str, patterns: Collection[str]) -> None:
        is_list = isinstance(patterns, Collection) and not isinstance(patterns, str)
        if not is_list or not all(isinstance(one, str) for one in patterns):
            raise ConfigError(f"{option} must be a list of patterns, got {patterns!r}")
        parts = ("".join(map(_translate, one)) for one in patterns)
        self._expression = re.compile("|".join(f"(?:{part})" for part in parts) or r"(?!)")

    def match(self, name: str) -> bool:
        return self._expression.fullmatch(name) is not None


def _translate(character: str) -> str:
    return {"*": ".*", "?": "."}.get(character) or re.escape(character)
