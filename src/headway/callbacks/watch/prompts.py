"""Prompts as a user gives them, as tokens that a model continues, and what it wrote as text.

Owns: reading a list or a file of prompts, padding on the left, taking the new tokens out of what
a model gave. Does not own: drawing tokens (models/generation.py), tokenizers (data/tokenizer.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.data.tokenizer import TransformersTokenizer, load_tokenizer
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_FILE_ENDINGS = (".yaml", ".yml", ".json")


def load_prompts(given: Any) -> list[str]:
    """Prompts of a list, of a YAML file that holds one (a path), or a single one (other text)."""
    where = "prompts"
    if isinstance(given, os.PathLike) or (
        isinstance(given, str) and given.lower().endswith(_FILE_ENDINGS)
    ):
        where = f"prompts: the file {os.fspath(given)}"
        given = _read(Path(given), where)
    elif isinstance(given, str):
        return [given]
    if not isinstance(given, list | tuple):
        raise ConfigError(
            f"{where} must be a list of texts, got {type(given).__name__} {_shorten(given)}"
        )
    if not given:
        raise ConfigError(f"{where} must be a list of texts; this one is empty")
    for number, prompt in enumerate(given, 1):
        if not isinstance(prompt, str):
            raise ConfigError(
                f"{where}: entry {number} must be a text, got {type(prompt).__name__} "
                f"{_shorten(prompt)}"
            )
    return list(given)


def _read(path: Path, where: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"{where} is not YAML: {told}") from error


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass(frozen=True)
class Batch:
    """Prompts of one length: shorter ones begin with padding, where `mask` is 0."""

    first: int
    """The number of its first prompt among all of them."""
    rows: list[list[int]]
    ids: Tensor
    mask: Tensor | None
    """None where nothing is padded."""


class Coder:
    """A tokenizer, as far as prompts need it."""

    def __init__(self, tokenizer: Any) -> None:
        # A processor of text and images holds its tokenizer.
        inner = getattr(tokenizer, "tokenizer", None)
        if inner is not None and not hasattr(tokenizer, "convert_tokens_to_ids"):
            tokenizer = inner
        self._face = load_tokenizer(tokenizer)
        # What a transformers tokenizer puts before a text belongs to the prompts of its models.
        # One that a run file names is ours, and has prepared the data without it.
        is_ours = tokenizer is self._face or not isinstance(self._face, TransformersTokenizer)
        self._core = None if is_ours else tokenizer
        self.eos_token_id = self._face.eos_token_id
        self.pad_token_id = self._face.pad_token_id
        self.bos_token_id: int | None = getattr(tokenizer, "bos_token_id", None)

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of each prompt, at least one; an empty one starts a text of its own."""
        if self._core is None:
            rows = self._face.encode_batch(list(prompts))
        else:
            rows = [list(row) for row in self._core(list(prompts))["input_ids"]]
        for number, row in enumerate(rows, 1):
            # After an end of text the model would begin another one.
            if len(row) > 1 and row[-1] == self.eos_token_id:
                row.pop()
            if not row:
                start = self.eos_token_id if self.bos_token_id is None else self.bos_token_id
                if start is None:
                    raise ConfigError(
                        f"prompts: entry {number} is empty, and the tokenizer has no token that "
                        "begins or ends a text"
                    )
                row.append(start)
        return rows

    def decode(self, row: Sequence[int], new: Sequence[int]) -> str:
        """What the new tokens add to the text of a prompt's tokens."""
        # Some tokenizers leave out a space at the start of a text: the difference counts.
        before, all_of_it = self._face.decode(row), self._face.decode([*row, *new])
        if all_of_it.startswith(before):
            return all_of_it[len(before) :]
        return self._face.decode(new)


def make_batches(rows: Sequence[list[int]], size: int, pad: int) -> list[Batch]:
    """Prompts in batches of up to `size`, padded on the left."""
    import torch

    batches = []
    for first in range(0, len(rows), size):
        part = list(rows[first : first + size])
        width = max(map(len, part))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in part])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part])
        batches.append(Batch(first, part, ids, None if bool(mask.all()) else mask))
    return batches


def new_tokens(row: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens before the first that ends a text; padding comes after it."""
    for place, token in enumerate(row):
        if token in ends:
            return list(row[:place])
    return list(row)
