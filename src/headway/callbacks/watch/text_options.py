"""How a model is asked for text: the user's generation config with the tokenizer's ids.

Owns: which keys a kind of model takes, and lending a transformers model those that only it knows.
Does not own: what the keys do (models/generation.py, transformers).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headway.callbacks.watch.prompts import Coder
from headway.errors import ConfigError, unknown

DEFAULT_CONFIG = {
    "do_sample": True,
    "top_k": 20,
    "temperature": 0.7,
    "repetition_penalty": 1.15,
}
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# One sample for each prompt, as tokens, of max_new_tokens: what would give something else.
_REFUSED = {
    "num_return_sequences": "each prompt is continued once; give it several times instead",
    "stop_strings": "it is not supported",
    "max_length": "it counts the prompt, which differs; give max_new_tokens",
}


@dataclass(frozen=True)
class TextOptions:
    """What every call of the strategy's `generate` is given."""

    max_new_tokens: int
    sampling: dict[str, Any]
    ends: list[int]
    pad: int
    bos: int | None
    extra: dict[str, Any]
    """For transformers alone."""

    @classmethod
    def of(
        cls, config: Mapping[str, Any], max_new_tokens: int, coder: Coder, model: Any, whole: bool
    ) -> TextOptions:
        """Put together for a model, which is `whole` unless a pipeline holds its parts.

        What the user's config says comes first, then the tokenizer's ids, then the model's.
        """
        from headway.models.generation import Sampling, configs_of, find_end

        rest = {k: v for k, v in config.items() if v is not None}
        max_new_tokens = rest.pop("max_new_tokens", max_new_tokens)
        rest.pop("return_dict_in_generate", None)
        bos = rest.pop("bos_token_id", coder.bos_token_id)
        ends, pad = find_end(
            configs_of(model),
            rest.pop("eos_token_id", coder.eos_token_id),
            rest.pop("pad_token_id", coder.pad_token_id),
        )
        sampling = {name: rest.pop(name) for name in _SAMPLING if name in rest}
        _check_rest(rest, is_transformers(model) and whole)
        try:
            Sampling(**sampling).validate()
        except TypeError as error:
            raise ConfigError(f"generation_config: {error}; got {sampling}") from error
        except ConfigError as error:
            raise ConfigError([f"generation_config: {told}" for told in error.problems]) from error
        return cls(max_new_tokens, sampling, ends, pad, bos, rest)


def is_transformers(model: Any) -> bool:
    """Whether a model brings its own `generate` of transformers."""
    return hasattr(model, "generation_config") and hasattr(model, "generate")


def _check_rest(rest: Mapping[str, Any], is_foreign: bool) -> None:
    known: list[str] = [*_SAMPLING, *_IDS, "max_new_tokens"]
    if is_foreign:
        from transformers import GenerationConfig

        known += [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    problems = []
    for name in rest:
        if name in _REFUSED:
            problems.append(f"generation_config: {name}: {_REFUSED[name]}")
        elif name not in known:
            problems.append("generation_config: " + unknown("key", name, sorted(set(known))))
    if problems:
        raise ConfigError(problems)


@contextmanager
def lent_config(model: Any, options: TextOptions) -> Iterator[None]:
    """While it lasts, a transformers model has the user's generation config and no other."""
    if not is_transformers(model):
        yield
        return
    from transformers import GenerationConfig

    own = model.generation_config
    fields = {"bos_token_id": options.bos, "use_cache": True, **options.extra}
    model.generation_config = GenerationConfig(**fields)
    try:
        yield
    finally:
        model.generation_config = own


def takes_mask(model: Any) -> bool:
    """Whether a model can be told what is padding."""
    return is_transformers(model) or "attention_mask" in inspect.signature(model.forward).parameters


def position_limit(model: Any) -> int | None:
    """How many tokens a model can see at once, if it says so."""
    config = getattr(model, "config", None)
    for name in ("max_seq_len", "max_position_embeddings"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 1:
            return limit
    return None
