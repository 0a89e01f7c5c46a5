"""A causal language model cut into stages that keep its parameter names.

Owns: which models can be cut, what their parts cost, `CausalLMStage`.
Does not own: where to cut (strategies/pipeline/balance.py), values and devices (strategies).

A stage is the model's own class without the layers that other stages have, so attention, masks,
the loss and activation checkpointing are the model's own code.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self

from torch import Tensor, nn

from headway.models.decoder import Decoder, DecoderOutput
from headway.models.loss import cross_entropy_sum

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_MASKS = ("attention_mask", "document_ids", "position_ids")


def can_split(model: nn.Module) -> bool:
    """Whether this is a model that `cut_causal_lm` knows."""
    if isinstance(model, Decoder):
        return True
    names = {f"{family}ForCausalLM" for family in _FAMILIES}
    ours = any(
        base.__name__ in names and base.__module__.startswith("transformers.")
        for base in type(model).__mro__
    )
    inner = getattr(model, "model", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    return ours and hasattr(model, "lm_head") and all(hasattr(inner, part) for part in parts)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Multiplications per token in one forward pass."""

    embedding: float
    layers: tuple[float, ...]
    head: float


def count_costs(model: nn.Module) -> Costs:
    """What the parts of a model cost, by the matrices they multiply with; a look-up is free."""
    causal_lm: Any = model
    layers = tuple(float(_count_matrices(layer)) for layer in causal_lm.model.layers)
    return Costs(0.0, layers, float(causal_lm.lm_head.weight.numel()))


def _count_matrices(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def cut_causal_lm(model: nn.Module, spans: Sequence[range]) -> list[CausalLMStage]:
    """Stages with the layers of `spans`; the first has the embedding, the last norm and head.

    The model itself stays whole. Layers are shared with it, not copied.
    """
    last = len(spans) - 1
    return [
        CausalLMStage(model, span, first=number == 0, last=number == last)
        for number, span in enumerate(spans)
    ]


class LayerSpan(nn.ModuleList):
    """Some layers of a model under the numbers that they have in it."""

    def __init__(self, layers: Iterable[nn.Module], span: range) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            if number in span:
                self.add_module(str(number), layer)

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]


class CausalLMStage(nn.Module):
    """One stage; its state dict has the names of the whole model's.

    Takes ids (the first stage) or hidden states, and gives hidden states or (the last one) what
    the model gives.
    """

    plain_loss: bool = False
    """Whether the last stage makes logits and then the loss, and not both in one chunk by chunk.

    A backward in two parts, inputs before weights, would make the latter twice."""

    def __init__(self, model: nn.Module, span: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        part = _cut(model, span, first, last)
        # Not a child: the children are its children, under their own names.
        object.__setattr__(self, "part", part)
        self.__dict__["_modules"] = part._modules
        self.config = part.config
        self.is_own = isinstance(part, Decoder)

    def forward(self, x: Tensor, **inputs: Any) -> Any:
        part: Any = self.__dict__["part"]
        if not self.last:
            masks = {name: inputs[name] for name in _MASKS if name in inputs}
            if self.is_own:
                return part.model(x, **masks)
            masks.pop("document_ids", None)
            given = {"input_ids" if self.first else "inputs_embeds": x}
            return part.model(**given, use_cache=False, **masks).last_hidden_state
        if not self.is_own:
            return part(inputs_embeds=x, use_cache=False, **inputs)
        if not self.plain_loss or inputs.get("labels") is None:
            return part(x, **inputs)
        return self._run_plainly(part, x, **inputs)

    def _run_plainly(
        self, part: Decoder, x: Tensor, *, labels: Tensor, **inputs: Any
    ) -> DecoderOutput:
        num_items = inputs.pop("num_items_in_batch", None)
        output: DecoderOutput = part(x, **inputs)
        assert output.logits is not None, "without labels it gives logits"
        if num_items is None:
            num_items = (labels[..., 1:] != -100).sum().clamp(min=1)
        output.loss = cross_entropy_sum(output.logits, labels) / num_items
        return output

    def get_input_embeddings(self) -> nn.Module | None:
        part: Any = self.__dict__["part"]
        return part.model.embed_tokens if self.first else None

    def get_output_embeddings(self) -> nn.Module | None:
        part: Any = self.__dict__["part"]
        return part.lm_head if self.last else None

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Keep only each block's input and recompute the block in backward."""
        self.__dict__["part"].gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        self.__dict__["part"].gradient_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        return bool(self.__dict__["part"].is_gradient_checkpointing)

    def train(self, mode: bool = True) -> Self:
        self.__dict__["part"].training = mode
        return super().train(mode)


def _shell(module: nn.Module) -> Any:
    """The module again, with the same children, to have some of them replaced."""
    copied = type(module).__new__(type(module))
    # Hooks and children are dicts of their own; the rest is shared.
    copied.__dict__.update(
        {
            name: copy.copy(value) if isinstance(value, dict) else value
            for name, value in module.__dict__.items()
        }
    )
    return copied


def _cut(model: nn.Module, span: range, first: bool, last: bool) -> Any:
    part, stack = _shell(model), _shell(model.model)  # type: ignore[arg-type]
    part.model = stack
    own = isinstance(model, Decoder)
    stack.layers = LayerSpan(stack.layers, span)
    if not first:
        stack.embed_tokens = nn.Identity()  # hidden states are their own embedding
    if not last:
        stack.norm = nn.Identity()
        part.lm_head = None
    config: Any = part.config
    if own:
        # The two weights may be on different ranks; whoever has both makes them one.
        part.config = dataclasses.replace(config, tie_embeddings=False)
        part._tied_weights_keys, part._blank = {}, []
    else:
        part.config = copy.deepcopy(config)
        part.config.num_hidden_layers = len(span)
        if getattr(config, "layer_types", None) is not None:
            part.config.layer_types = [config.layer_types[number] for number in span]
    stack.config = part.config
    return part
