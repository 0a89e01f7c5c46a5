"""How samples become batches when a dataset has more columns than the model takes, or no labels.

Owns: which collator a run has, and what one of transformers is handed. Does not own: padding
(data/collate), checks of batches (preflight).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from headway.data.collate import PadCollator
from headway.errors import ConfigError
from headway.models.hf import names_taken, predicts_next_token

logger = logging.getLogger(__name__)

Collator = Callable[[list[Any]], Any]

# What transformers' collators use of a sample beside what the model takes.
_FOR_COLLATORS = {"label", "label_ids", "labels", "offset_mapping", "special_tokens_mask"}


def choose_collator(given: Collator | None, processing_class: Any, model: nn.Module) -> Collator:
    """The collator that was given, or one that pads."""
    if given is not None:
        return given
    pad = getattr(processing_class, "pad_token_id", None)
    return PadCollator(
        pad_token_id=pad if isinstance(pad, int) else 0, causal_labels=predicts_next_token(model)
    )


def fit_collator(collate: Collator, model: nn.Module) -> Collator:
    """One that pads is told what the model takes: all else is left out of its inputs anyway, and
    need not make tensors."""
    if type(collate) is not PadCollator:
        return collate
    taken = names_taken(model)
    return collate if taken is None else functools.partial(collate.collate, taken=taken)


class ColumnChoice:
    """Takes from samples what the model does not take, before a collator of transformers makes
    tensors of everything there is, texts included. One of the user's own gets all."""

    def __init__(self, collate: Collator, model: nn.Module, option: str) -> None:
        self._taken = set(inspect.signature(model.forward).parameters)
        self._drops = type(collate).__module__.startswith("transformers.")
        self._looks = "input_ids" in self._taken and (
            self._drops or isinstance(collate, PadCollator)
        )
        self._model_name, self._option = type(model).__name__, option
        self._told = False

    def _refuse_bare(self, sample: Any) -> None:
        """Texts and lists of token ids, which are no samples of a model that takes input_ids."""
        is_text = isinstance(sample, str)
        if is_text or (isinstance(sample, list) and sample and isinstance(sample[0], int)):
            raise ConfigError(
                f"{self._option}: a sample is {'a text' if is_text else 'a list of numbers'}, but "
                f"{self._model_name} takes input_ids; allowed: mappings such as "
                "{'input_ids': [1, 2, 3]}"
                + (", which TextDataset(texts, tokenizer=...) makes" if is_text else "")
            )

    def __call__(self, items: list[Any]) -> list[Any]:
        if not self._looks or not items:
            return items
        if not isinstance(items[0], Mapping):
            if not self._drops:  # some of transformers' take lists of ids
                self._refuse_bare(items[0])
            return items
        names = [str(name) for name in items[0]]
        if not self._taken.intersection(names):
            raise ConfigError(
                f"{self._option}: the samples have {', '.join(names)}, of which {self._model_name} "
                f"takes nothing; texts have to become input_ids first, by the tokenizer"
            )
        left_out = [name for name in names if name not in self._taken | _FOR_COLLATORS]
        if not self._drops or not left_out:
            return items
        if not self._told:
            self._told = True
            logger.warning(
                "%s: %s takes no %s: these columns are left out",
                self._option,
                self._model_name,
                ", ".join(left_out),
            )
        return [{k: v for k, v in item.items() if k not in left_out} for item in items]
