"""Collation: samples of any length become one batch of tensors.

Owns: padding values, the attention mask of padded batches, labels where a dataset has none.
Does not own: fetching samples (fetch) nor moving batches to a device (strategies).
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headway.errors import ConfigError

IGNORED_LABEL = -100
# Keys whose first dimension is the sequence: these are padded, everything else must agree.
_FILL = {
    "attention_mask": 0,
    "document_ids": -1,
    "position_ids": 0,
    "token_type_ids": 0,
    "loss_mask": 0,
}
# What an embedding or a loss takes as a number, or is padded with one that not every type holds.
_NUMBERS = (
    "input_ids",
    "labels",
    "label",
    "label_ids",
    "document_ids",
    "position_ids",
    "token_type_ids",
)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_LABELS = ("labels", "label", "label_ids")
_NARROW = (torch.uint8, torch.int8, torch.int16, *_UNSIGNED)


class PadCollator:
    """Pads token dicts of ragged lengths into one batch.

    `input_ids` is padded with `pad_token_id`, `labels` with `label_pad`, `attention_mask` with 0
    (made if padding was needed and none was given), `document_ids` with -1, `position_ids` with 0.
    Without `labels`, and with `causal_labels`, they are a copy of the ids, padding excepted; with
    `causal_labels` off they are what a sample has as `label` or `label_ids`. Where a `loss_mask` is
    0, labels become `label_pad`.
    Longer samples are cut to `max_length`.
    """

    def __init__(
        self,
        pad_token_id: int = 0,
        label_pad: int = IGNORED_LABEL,
        pad_to_multiple_of: int | None = None,
        max_length: int | None = None,
        causal_labels: bool = True,
    ) -> None:
        for name, value in (("pad_to_multiple_of", pad_to_multiple_of), ("max_length", max_length)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.pad_token_id = pad_token_id
        self.label_pad = label_pad
        self.pad_to_multiple_of = pad_to_multiple_of
        self.max_length = max_length
        self.causal_labels = causal_labels
        self._fill = {"input_ids": pad_token_id, "labels": label_pad, **_FILL}

    def __call__(self, items: Sequence[Any]) -> Any:
        return self.collate(items)

    def collate(self, items: Sequence[Any], taken: Container[str] | None = None) -> Any:
        """`taken`: the columns that the model takes, if not all of them. Of others, what makes no
        tensor stays a list."""
        if len(items) == 0:
            raise ConfigError("a batch cannot be made from no samples")
        first = items[0]
        if not isinstance(first, Mapping):
            return torch.utils.data.default_collate(list(items))
        keys = first.keys()
        if len(items) > 1:
            for item in items:
                if item.keys() != keys:
                    raise ConfigError(_describe_keys(items))
        if "input_ids" not in keys:
            batch = {
                key: self._stack(key, [_as_array(item[key]) for item in items], taken)
                for key in keys
            }
            return self._name_labels(batch)
        return self._collate_tokens(items, list(keys), taken)

    def _stack(self, key: str, values: list[Any], taken: Container[str] | None) -> Any:
        try:
            return _stack(key, values)
        except ConfigError:
            is_label = not self.causal_labels and key in ("label", "label_ids")
            if taken is None or key in taken or key in self._fill or is_label:
                raise
            return _as_list(values)

    def _name_labels(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Where inputs are no labels, those are what a sample has as `label` or `label_ids`."""
        named = next((key for key in ("label", "label_ids") if key in batch), None)
        if not self.causal_labels and named is not None and "labels" not in batch:
            batch["labels"] = batch.pop(named)
        return batch

    def _collate_tokens(
        self, items: Sequence[Mapping[str, Any]], keys: list[str], taken: Container[str] | None
    ) -> Any:
        rows = [_as_array(item["input_ids"]) for item in items]
        full_lengths = lengths = _lengths("input_ids", rows)
        if 0 in lengths:
            raise ConfigError("input_ids must be a non-empty sequence of token ids in every sample")
        width = max(lengths)
        if self.max_length is not None:
            width = min(width, self.max_length)
            lengths = [min(length, width) for length in lengths]
        if self.pad_to_multiple_of is not None:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        exact = all(length == width for length in full_lengths)
        ragged = any(length != width for length in lengths)
        batch: dict[str, Any] = {}
        for key in keys:
            values = rows if key == "input_ids" else [_as_array(item[key]) for item in items]
            fill = self._fill.get(key)
            if fill is None or _is_single(values[0]):
                batch[key] = self._stack(key, values, taken)
                continue
            own_lengths = full_lengths if values is rows else _lengths(key, values)
            if own_lengths == full_lengths:
                batch[key] = (
                    _stack(key, values) if exact else _pad(key, values, lengths, width, fill)
                )
            elif key == "labels":
                # Labels of their own length belong to an encoder-decoder model.
                batch[key] = _pad(key, values, own_lengths, max(own_lengths), fill)
            else:
                raise ConfigError(
                    f"{key!r} has {own_lengths[0]} entries where input_ids has {full_lengths[0]}"
                    if len(items) == 1
                    else f"{key!r} and input_ids have different lengths in a sample: "
                    f"{own_lengths[:4]} against {full_lengths[:4]}"
                )
        if ragged and "attention_mask" not in batch:
            batch["attention_mask"] = _length_mask(lengths, width)
        if self.causal_labels and "labels" not in batch:
            labels = batch["input_ids"].to(torch.int64, copy=True)
            if "attention_mask" in batch:
                labels[batch["attention_mask"] == 0] = self.label_pad
            documents = batch.get("document_ids")
            if documents is not None and documents.shape == labels.shape:
                # Nothing in its document comes before the first token of one.
                labels[documents < 0] = self.label_pad
                labels[:, 1:][documents[:, 1:] != documents[:, :-1]] = self.label_pad
            batch["labels"] = labels
        self._name_labels(batch)
        mask, labels = batch.get("loss_mask"), batch.get("labels")
        if mask is not None and labels is not None and mask.shape == labels.shape:
            batch["labels"] = labels.masked_fill(mask == 0, self.label_pad)
        return batch


default_collator = PadCollator()


def _as_array(value: Any) -> Any:
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value
    if isinstance(value, (str, bytes)) or value is None:
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        return value
    except (TypeError, RuntimeError):  # lists of tensors that numpy has no type or memory for
        return _as_tensor(value)
    if array.dtype == np.float64 and torch.get_default_dtype() != torch.float64:
        # Numbers of Python have no type of their own: torch's, as weights have, not numpy's.
        return array if _has_own_type(value) else array.astype(np.float32)
    return array


def _as_tensor(value: Any) -> Any:
    """One tensor of a list of them, also nested; the list where their shapes differ."""
    try:
        return torch.stack([torch.as_tensor(_as_tensor(one)) for one in value])
    except (TypeError, ValueError, RuntimeError):
        return value


def _has_own_type(value: Any) -> bool:
    """Whether numbers, in lists too, are numpy's or torch's, of which somebody chose the type."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (np.generic, np.ndarray, torch.Tensor))


def _is_single(value: Any) -> bool:
    return not isinstance(value, (list, tuple)) and np.ndim(value) == 0


def _lengths(key: str, values: list[Any]) -> list[int]:
    """How long the samples are: read once, as for tensors it takes longer than to stack them."""
    shapes: list[tuple[int, ...]] = [getattr(value, "shape", ()) for value in values]
    if not all(shapes):
        wrong = values[next(n for n, shape in enumerate(shapes) if not shape)]
        raise ConfigError(
            f"{key!r} must be a sequence, or rows of one length, in every sample: {wrong!r:.80}"
        )
    return [shape[0] for shape in shapes]


def _stack(key: str, values: list[Any]) -> Any:
    if not any(_is_numeric(value) for value in values):
        return _as_list(values)
    values = _alike(key, values)
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise ConfigError(_ragged(key, shapes))
    if isinstance(values[0], torch.Tensor):
        stacked_here = torch.stack(values)
        return stacked_here.to(_wide_torch(key, stacked_here.dtype))
    stacked = np.stack(values)
    return torch.from_numpy(stacked.astype(_wide(key, stacked.dtype), copy=False))


def _as_list(values: list[Any]) -> list[Any]:
    return [
        value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value
        for value in values
    ]


def _alike(key: str, values: list[Any]) -> list[Any]:
    """Numbers of one type: that of the fractions, where others are whole (1 beside 0.5)."""
    alike = len({getattr(value, "dtype", None) for value in values}) == 1
    alike = alike and _is_numeric(values[0])
    wrong = [] if alike else [value for value in values if not _is_numeric(value)]
    if wrong:
        raise ConfigError(f"{key!r} must be numbers in every sample of a batch: {wrong[0]!r:.80}")
    if key in _NUMBERS and not any(_has_elements(value) for value in values):
        return [torch.as_tensor(value).to(torch.int64) for value in values]
    if alike:
        return values
    if any(isinstance(value, torch.Tensor) for value in values):
        tensors = [value if torch.is_tensor(value) else torch.tensor(value) for value in values]
        # torch joins the wide ones of these with no other type.
        tensors = [one.to(torch.int64) if one.dtype in _UNSIGNED else one for one in tensors]
        typed = [tensor for tensor in tensors if tensor.numel()] or tensors
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in typed))
        if dtype.is_floating_point and dtype.itemsize < 4:
            _require_room(key, [one for one in typed if not one.is_floating_point()], dtype)
        return [tensor.to(dtype) for tensor in tensors]
    # Nothing (an empty list) is of no type, and numpy would say fractions.
    dtypes = {array.dtype for array in values if array.size} or {array.dtype for array in values}
    fractions = {dtype for dtype in dtypes if dtype.kind in "fc"}
    # numpy would make double precision of whole numbers beside single ones.
    common = np.result_type(*(fractions or dtypes))
    if not fractions and common.kind == "f":  # its way with uint64 beside int64
        common = np.dtype(np.int64)
    if common == np.float16:
        _require_room(key, [one for one in values if one.dtype.kind in "iu"], torch.float16)
    return [array.astype(common, copy=False) for array in values]


def _require_room(key: str, whole: list[Any], dtype: torch.dtype) -> None:
    """Refuse whole numbers that a narrow type of fractions, that of other samples, cannot hold."""
    most = torch.finfo(dtype).max
    wrong = next((n for one in whole for n in one.ravel().tolist() if abs(n) > most), None)
    if wrong is not None:
        raise ConfigError(
            f"{key!r} is {str(dtype).removeprefix('torch.')} in other samples of a batch, which "
            f"ends at {most:g}, and has {wrong} in one; make it of one type that holds both"
        )


def _is_numeric(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or getattr(value, "dtype", np.dtype("O")).kind in "biufc"


def _has_elements(value: Any) -> bool:
    return 0 not in value.shape


def _pad(key: str, values: list[Any], lengths: list[int], width: int, fill: int) -> torch.Tensor:
    values = _alike(key, values)
    first = values[0]
    if len({value.shape[1:] for value in values}) > 1:
        raise ConfigError(_ragged(key, {tuple(value.shape) for value in values}))
    shape = (len(values), width, *first.shape[1:])
    padded: Any
    if isinstance(first, torch.Tensor):
        padded = first.new_full(shape, fill, dtype=_wide_torch(key, first.dtype))
    else:
        padded = np.full(shape, fill, dtype=_wide(key, first.dtype))
    for row, (value, length) in enumerate(zip(values, lengths)):
        padded[row, :length] = value[:length]
    return padded if isinstance(padded, torch.Tensor) else torch.from_numpy(padded)


def _length_mask(lengths: list[int], width: int) -> torch.Tensor:
    mask = np.arange(width) < np.asarray(lengths)[:, None]
    return torch.from_numpy(mask.astype(np.int64))


def _wide(key: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Ids and labels from types that torch's embeddings and losses do not take become int64."""
    least = 8 if key in _LABELS else 4
    narrow = dtype.kind == "u" or (dtype.kind == "i" and dtype.itemsize < least)
    wide = narrow and (key in _NUMBERS or key in _FILL or dtype.itemsize > 1)
    wide |= dtype.kind == "b" and key in _NUMBERS
    return np.dtype(np.int64) if wide else dtype


def _wide_torch(key: str, dtype: torch.dtype) -> torch.dtype:
    """The same for tensors; of what is neither, somebody chose the type."""
    wide = dtype in _NARROW and (key in _NUMBERS or key in _FILL)
    wide |= dtype is torch.bool and key in _NUMBERS
    wide |= dtype is torch.int32 and key in _LABELS
    return torch.int64 if wide else dtype


def _ragged(key: str, shapes: set[tuple[int, ...]]) -> str:
    shown = ", ".join(map(str, sorted(shapes)[:4]))
    return (
        f"the samples of a batch disagree in the shape of {key!r} ({shown}); "
        "give a data_collator that pads it"
    )


def _describe_keys(items: Sequence[Mapping[str, Any]]) -> str:
    everything = set().union(*(item.keys() for item in items))
    partial = sorted(str(key) for key in everything if any(key not in item for item in items))
    return f"the samples of a batch have different keys: {', '.join(partial)} only in some of them"
