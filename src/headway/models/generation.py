"""Continuing a prompt: sampling, stopping, and the fastest route each kind of model offers.

Owns: `generate`, the filters of the next-token distribution.
Does not own: tokenizers and printing (cli/, callbacks/), sharded models (strategies/).

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.models.cache import KVCache
from headway.models.decoder import Decoder

_COLDEST = 1e-30
"""Below it logits over the temperature would leave the range of float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    do_sample: bool = True

    def validate(self) -> None:
        problems = []
        if self.do_sample and not self.temperature > 0:
            problems.append(
                f"temperature={self.temperature}: a number above 0 is needed "
                "(for the likeliest token set do_sample=False)"
            )
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k}: 0 (off) or a number above 0 is needed")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}: a number above 0 and up to 1 is needed")
        if not self.repetition_penalty > 0:
            problems.append(f"repetition_penalty={self.repetition_penalty}: must be above 0")
        if problems:
            raise ConfigError(problems)

    @property
    def divisor(self) -> float:
        """The temperature, as far as logits can be divided by it."""
        return max(self.temperature, _COLDEST)

    def draw(
        self, logits_BV: Tensor, seen: Tensor, seen_mask: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """One id per row; `seen` are the ids so far, padding where `seen_mask` is 0."""
        scores = logits_BV.float()
        if self.repetition_penalty != 1.0:
            scores = _penalise(scores, seen, seen_mask, self.repetition_penalty)
        if not self.do_sample:
            return scores.argmax(-1)
        scores = _keep_likeliest(scores / self.divisor, self.top_k, self.top_p)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)


def _penalise(scores: Tensor, seen: Tensor, seen_mask: Tensor, penalty: float) -> Tensor:
    hits = torch.zeros_like(scores).scatter_add_(1, seen, seen_mask.to(scores.dtype))
    punished = torch.where(scores > 0, scores / penalty, scores * penalty)
    return torch.where(hits > 0, punished, scores)


def _keep_likeliest(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    if 0 < top_k < scores.shape[-1]:
        bar = scores.topk(top_k, -1).values[:, -1:]
        scores = scores.masked_fill(scores < bar, float("-inf"))
    if top_p < 1:
        ordered, order = scores.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        # A token is dropped when those before it already reach top_p, so one always remains.
        dropped = probs.cumsum(-1) - probs >= top_p
        scores = scores.masked_fill(dropped.scatter(1, order, dropped), float("-inf"))
    return scores


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    do_sample: bool = True,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Prompts [B, S] with up to `max_new_tokens` more tokens each.

    Shorter prompts are padded on the left, with 0 there in attention_mask. A row that reached
    eos_token_id is filled with pad_token_id (or its eos); all rows done ends early. The model's
    train or eval mode is as before afterwards.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        do_sample=do_sample,
    )
    check_request(input_ids, max_new_tokens, sampling, attention_mask)
    ends, pad = find_end(configs_of(model), eos_token_id, pad_token_id)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        if hasattr(model, "generation_config") and hasattr(model, "generate"):
            return _by_transformers(
                model, input_ids, max_new_tokens, sampling, ends, pad, attention_mask, generator
            )
        if isinstance(model, Decoder):
            step = _cached_step(model, input_ids, max_new_tokens, padded=attention_mask is not None)
        else:
            step = _full_step(model, attention_mask)
        return draw_tokens(
            step, input_ids, max_new_tokens, sampling, ends, pad, attention_mask, generator
        )
    finally:
        for module, training in modes.items():
            module.training = training


def check_request(
    input_ids: Tensor, max_new_tokens: int, sampling: Sampling, attention_mask: Tensor | None
) -> None:
    """Refuse what cannot be continued."""
    sampling.validate()
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: a number above 0 is needed")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ConfigError(
            f"generate() needs input_ids [batch, length] with at least one token, "
            f"got the shape {list(input_ids.shape)}"
        )
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask: the shape {list(attention_mask.shape)} given; allowed: that of "
            f"input_ids, {list(input_ids.shape)}"
        )
    if bool((attention_mask[:, -1] == 0).any()):
        raise ConfigError(
            "attention_mask: a prompt ends with padding, after which nothing sensible follows; pad "
            "shorter prompts on the left"
        )


def configs_of(model: Any) -> tuple[Any, ...]:
    """Where a model says which tokens end a text: transformers' models have a place of its own."""
    return getattr(model, "generation_config", None), getattr(model, "config", None)


def find_end(
    configs: Sequence[Any], eos_token_id: int | Sequence[int] | None, pad_token_id: int | None
) -> tuple[list[int], int]:
    """The ids that end a row, and the one that fills it: as given, else by the first that tells."""
    eos = _first(eos_token_id, configs, "eos_token_id")
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pad: int | None = _first(pad_token_id, configs, "pad_token_id")
    if pad is None:
        pad = ends[0] if ends else 0
    return ends, pad


def _first(given: Any, configs: Sequence[Any], name: str) -> Any:
    told = (given, *(getattr(config, name, None) for config in configs))
    return next((value for value in told if value is not None), None)


_Step = Callable[[Tensor, Tensor], Tensor]
"""All ids so far and their mask -> logits [B, V] of the next token."""


def draw_tokens(
    step: _Step,
    input_ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    ends: list[int],
    pad: int,
    attention_mask: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Prompts with what `sampling` draws from the logits of `step`, token by token."""
    batch, prompt_len = input_ids.shape
    ids = input_ids.new_full((batch, prompt_len + max_new_tokens), pad)
    ids[:, :prompt_len] = input_ids
    mask = torch.ones_like(ids)
    if attention_mask is not None:
        mask[:, :prompt_len] = attention_mask
    done = torch.zeros(batch, dtype=torch.bool, device=ids.device)
    end_ids = torch.tensor(ends, device=ids.device, dtype=ids.dtype)
    for length in range(prompt_len, prompt_len + max_new_tokens):
        seen, seen_mask = ids[:, :length], mask[:, :length]
        token = sampling.draw(step(seen, seen_mask), seen, seen_mask, generator).to(ids.dtype)
        if ends:
            ids[:, length] = token.masked_fill(done, pad)
            done |= torch.isin(token, end_ids)
            if bool(done.all()):
                return ids[:, : length + 1]
        else:
            ids[:, length] = token
    return ids


def _cached_step(model: Decoder, input_ids: Tensor, max_new_tokens: int, *, padded: bool) -> _Step:
    total = input_ids.shape[1] + max_new_tokens
    if total > model.config.max_seq_len:
        raise ConfigError(
            f"a prompt of {input_ids.shape[1]} tokens and max_new_tokens={max_new_tokens} make "
            f"{total}, more than the model's max_seq_len={model.config.max_seq_len}"
        )
    weight = model.model.embed_tokens.weight
    device_type = weight.device.type
    dtype = weight.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    cache = KVCache(
        model.config,
        batch_size=input_ids.shape[0],
        max_len=total,
        device=weight.device,
        dtype=dtype,
    )

    def step(ids: Tensor, mask: Tensor) -> Tensor:
        new = slice(cache.length, ids.shape[1])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, new] if padded else None
        out = model(
            ids[:, new],
            position_ids=positions,
            attention_mask=mask if padded else None,
            logits_to_keep=1,
            cache=cache,
        )
        logits: Tensor = out.logits
        return logits[:, -1]

    return step


def _full_step(model: nn.Module, attention_mask: Tensor | None) -> _Step:
    taken = inspect.signature(model.forward).parameters
    accepts_mask = "attention_mask" in taken
    if not accepts_mask and attention_mask is not None and bool((attention_mask == 0).any()):
        # A wrapper hands on what it is given.
        accepts_mask = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        if not accepts_mask:
            raise ConfigError(
                f"attention_mask: {type(model).__name__}.forward() takes none, so that it would "
                "read the padding as text; give prompts of one length, or one at a time"
            )

    def step(ids: Tensor, mask: Tensor) -> Tensor:
        out = model(ids, attention_mask=mask) if accepts_mask else model(ids)
        return find_logits(out, type(model).__name__)[:, -1]

    return step


def find_logits(out: Any, model_name: str) -> Tensor:
    """The logits in what a model gives."""
    if isinstance(out, dict):
        out = out.get("logits")
    elif hasattr(out, "logits"):
        out = out.logits
    elif isinstance(out, tuple | list):
        out = out[0]
    if not isinstance(out, Tensor) or out.dim() != 3:
        raise ConfigError(
            f"cannot generate with {model_name}: its forward(input_ids) must return logits "
            "[batch, length, vocabulary], alone, first in a tuple, or as .logits"
        )
    return out


def _by_transformers(
    model: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    ends: list[int],
    pad: int,
    attention_mask: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    options: dict[str, Any] = {"do_sample": sampling.do_sample}
    if sampling.do_sample:
        options |= {
            "temperature": sampling.divisor,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    mask = attention_mask if attention_mask is not None else torch.ones_like(input_ids)
    devices = [input_ids.device] if input_ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=generator is not None):
        if generator is not None:  # transformers draws from the global generators only
            draw = torch.randint(2**62, (1,), generator=generator, device=generator.device)
            torch.manual_seed(int(draw))
        out: Tensor = model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=ends or None,
            pad_token_id=pad,
            # Whatever the model's own generation config says of these.
            num_return_sequences=1,
            return_dict_in_generate=False,
            **options,
        )
    return out
