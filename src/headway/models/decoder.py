"""The reference decoder: Llama-family blocks under Hugging Face's parameter names.

Owns: `Decoder`, `DecoderOutput`, the blocks, weight initialisation, activation checkpointing.
Does not own: attention kernels (attention.py), the loss (loss.py), files (hf.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from headway.errors import ConfigError, unknown
from headway.models.attention import Attention, AttentionPlan, new_linear, plan_attention
from headway.models.cache import KVCache
from headway.models.config import DecoderConfig, check_fields
from headway.models.fp8_mlp import fits, fp8_gated_mlp, settings_of
from headway.models.kernels.swiglu import gated_down
from headway.models.loss import (
    chunked_cross_entropy,
    cross_entropy_sum,
    loss_divisor,
    shift_labels,
)
from headway.models.norm import RMSNorm, compute_dtype
from headway.models.projections import has_hooks, is_plain_linear, joins, project_joined
from headway.models.recomputed import recomputed
from headway.models.rope import RotaryTable

logger = logging.getLogger(__name__)

CHECKPOINTING_KEYS = ("context_fn", "determinism_check", "preserve_rng_state", "use_reentrant")


@dataclass
class DecoderOutput:
    """What a forward pass gives; also indexes like a tuple without the Nones, or by name."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def to_tuple(self) -> tuple[Tensor, ...]:
        return tuple(value for value in (self.loss, self.logits) if value is not None)

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            if key not in ("loss", "logits"):
                raise KeyError(key)
            return getattr(self, key)
        return self.to_tuple()[key]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.to_tuple())

    def __len__(self) -> int:
        return len(self.to_tuple())


# Sharding and data-parallel wrappers find the tensors of an output through pytree.
pytree.register_pytree_node(
    DecoderOutput,
    lambda output: ([output.loss, output.logits], None),
    lambda values, _: DecoderOutput(*values),
    serialized_type_name="headway.models.DecoderOutput",
)


class GatedMLP(nn.Module):
    """SwiGLU: silu(gate) * up, projected down."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = new_linear(config.hidden_size, config.ffn_size)
        self.up_proj = new_linear(config.hidden_size, config.ffn_size)
        self.down_proj = new_linear(config.ffn_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        if joins(x, *layers) and self.down_proj.bias is None:
            joined = project_joined(x, self.gate_proj, self.up_proj)
            return gated_down(joined, self.down_proj.weight)
        if fits(x, *layers):
            return fp8_gated_mlp(
                x,
                self.gate_proj.weight,
                self.up_proj.weight,
                self.down_proj.weight,
                settings_of(self.gate_proj),
            )
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """One block: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.dropout = config.dropout
        self.chained_forward: Any = None
        """What a call of it ran when it was chained, see `DecoderStack.chain_blocks`."""

    @property
    def is_chained(self) -> bool:
        """Whether `follow` may be run: a call of it would do nothing that `follow` does not."""
        own = self.__dict__.get("forward")
        return own is not None and own is self.chained_forward and not has_hooks(self)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        cache: KVCache | None = None,
    ) -> Tensor:
        x, more = self._halves(x, rope, plan, cache)
        return x + more

    def follow(
        self, x: Tensor, more: Tensor, rope: tuple[Tensor, Tensor], plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """The same behind another block, whose MLP's output `more` is still to be added to `x`.

        What this one's MLP adds is left to the next block in its turn.
        """
        return self._halves(x + more, rope, plan)

    def _halves(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        x = x + self._drop(self.self_attn(self.input_layernorm(x), rope, plan, cache))
        return x, self._drop(self.mlp(self.post_attention_layernorm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, training=self.training) if self.dropout else x


# Products of the decoder's own in fewer bits, by their class's name: torchao may not be there.
_PRODUCTS_IN_FEW_BITS = ("FakeQuantizedLinear", "Float8Linear")


def _never_draws(module: nn.Module) -> bool:
    """Whether it is known to use no random numbers of its own, `config.dropout` aside."""
    kind = type(module)
    own = (DecoderLayer, Attention, GatedMLP, RMSNorm, nn.Linear, nn.ModuleList)
    # Sharding makes a class of each, with hooks that gather weights.
    sharded = any(kind.__name__ == f"FSDP{one.__name__}" and one in kind.__bases__ for one in own)
    if not (kind in own or sharded or kind.__name__ in _PRODUCTS_IN_FEW_BITS):
        return False
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if not all(
        str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in hooks
    ):
        return False
    forward = module.__dict__.get("forward")
    function = getattr(forward, "__func__", None)
    # The mark is the function itself: whoever wraps it may take over its attributes.
    return forward is None or getattr(function, "adds_nothing", forward) is function


def draws_numbers(block: nn.Module) -> bool:
    """Whether a block may use random numbers; of what is not the decoder's own nobody knows."""
    if not isinstance(block, DecoderLayer) or block.dropout > 0:
        return True
    return not all(map(_never_draws, block.modules()))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tell_of_masks() -> None:
    logger.warning(
        "sdpa_backend='flash4': attention with a mask (of documents, padding or a sliding window), "
        "or not in half precision, goes by other kernels"
    )


class DecoderStack(nn.Module):
    """Everything between token ids and the head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing: dict[str, Any] | None = None
        self._draws = True
        self.prefers_flex = False
        """Set by whoever compiles the blocks, where flex attention goes with the rest."""
        self.flash4 = False
        """Set by whoever asks for it: plain causal attention goes by FlashAttention 4."""
        self._told_of_masks = False
        self._chained = False
        self.embed_tokens: nn.Embedding = nn.utils.skip_init(
            nn.Embedding,
            config.vocab_size,
            config.hidden_size,
            device=torch.get_default_device(),
        )
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryTable(config)

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        seq_len, past_len = input_ids.shape[1], cache.length if cache is not None else 0
        self._check(seq_len + past_len, input_ids.device)
        if cache is not None:
            cache.check_room(seq_len)
        x: Tensor = self.embed_tokens(input_ids)
        dtype = compute_dtype(x)
        plan = plan_attention(
            self.config,
            seq_len=seq_len,
            past_len=past_len,
            device=input_ids.device,
            dtype=dtype,
            document_ids=document_ids,
            attention_mask=attention_mask,
            cached=cache is not None,
            prefers_flex=self.prefers_flex,
            flash4=self.flash4,
        )
        if self.flash4 and self.training and not plan.flash4 and seq_len > 1:
            self._tell_of_masks()
        rope = self.rotary_emb(seq_len, past_len, position_ids, dtype)
        recompute = self.checkpointing is not None and self.training and torch.is_grad_enabled()
        options = self._recomputation() if recompute else {}
        if not recompute and cache is None and self._is_chained():
            x = self._run_chain(x, rope, plan)
        else:
            for layer in self.layers:
                if recompute:
                    x = recomputed(layer, x, rope, plan, **options)
                else:
                    x = layer(x, rope, plan, cache)
        if cache is not None:
            cache.advance(seq_len)
        out: Tensor = self.norm(x)
        return out

    def chain_blocks(self) -> None:
        """Run blocks by `follow` from now on; called when that has been compiled.

        A compiled block that adds its MLP's output itself writes the sum, which the next one reads
        again before it does anything; in one graph the two are one pass, and so are their
        gradients.
        """
        self._chained = True
        for layer in self.layers:
            cast(DecoderLayer, layer).chained_forward = layer.__dict__.get("forward")

    def _is_chained(self) -> bool:
        if not self._chained or torch.compiler.is_compiling() or _has_any_global_hook():
            return False
        # By their class: what is around a block may hand its attributes on.
        return all(isinstance(layer, DecoderLayer) and layer.is_chained for layer in self.layers)

    def _run_chain(self, x: Tensor, rope: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        # With nothing to add, or with what needs no gradient, the first would be another graph.
        more = torch.zeros_like(x, dtype=compute_dtype(x), requires_grad=x.requires_grad)
        for layer in self.layers:
            x, more = cast(DecoderLayer, layer).follow(x, more, rope, plan)
        return x + more

    def _tell_of_masks(self) -> None:
        if torch.compiler.is_compiling():
            _tell_of_masks()  # while the graph is made, not in it
        elif not self._told_of_masks:
            self._told_of_masks = True
            _tell_of_masks()

    def _recomputation(self) -> dict[str, Any]:
        """How blocks are recomputed: with the random state of their forward, where they draw.

        Saving that state costs a device round trip. Of what is not the decoder's own (an adapter,
        say) nobody knows whether it draws.
        """
        if not torch.compiler.is_compiling():  # adapters may have come since
            self.note_draws()
        return {"preserve_rng_state": self._draws, **(self.checkpointing or {})}

    def note_draws(self) -> None:
        """Find out whether blocks draw random numbers."""
        self._draws = any(map(draws_numbers, self.layers))

    def _check(self, length: int, device: torch.device) -> None:
        if length > self.config.max_seq_len:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than max_seq_len="
                f"{self.config.max_seq_len}; shorten the data's sequences or raise max_seq_len"
            )
        on_cpu = self.config.attention == "flex" and device.type == "cpu"
        if on_cpu and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise ConfigError(
                "attention='flex' cannot train on a CPU (it has no backward pass there); "
                "set attention='sdpa', or run the forward pass under torch.no_grad()"
            )


class Decoder(nn.Module):
    """A causal language model whose state dict is that of Hugging Face's Llama, Qwen3 or Mistral.

    Give it a `DecoderConfig`, or the fields of one.
    """

    def __init__(self, config: DecoderConfig | None = None, **fields: Any) -> None:
        super().__init__()
        if config is None:
            check_fields(fields)
            config = DecoderConfig(**fields)
        elif fields:
            raise ConfigError(f"give config or its fields, not both: {', '.join(sorted(fields))}")
        self.config = config
        self.model = DecoderStack(config)
        self.lm_head = new_linear(config.hidden_size, config.vocab_size)
        self._tied_weights_keys = self.tied_keys()
        self.tie_weights()
        self._blank: list[tuple[Tensor, torch.dtype, int]] = []
        if self.model.norm.weight.is_meta:
            self._blank = [(p, p.dtype, p._version) for p in self.parameters()]
        else:
            self.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        return_logits: bool = False,
        logits_to_keep: int = 0,
        cache: KVCache | None = None,
    ) -> DecoderOutput:
        """Loss (with labels) or logits (without, or with return_logits) of input_ids [B, S].

        labels: as long as input_ids, shifted inside, -100 ignored; the summed loss is divided by
        num_items_in_batch, or by the number of targets. document_ids [B, S]: a token sees only
        tokens of equal id. attention_mask [B, S]: 0 marks padding. logits_to_keep: only the logits
        of that many last positions, 0 for all.
        """
        hidden = self.model(
            input_ids,
            position_ids=position_ids,
            document_ids=document_ids,
            attention_mask=attention_mask,
            cache=cache,
        )
        output = DecoderOutput()
        if labels is not None:
            output.loss = self._loss(hidden, labels, num_items_in_batch)
        if labels is None or return_logits:
            output.logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        return output

    def _loss(self, hidden: Tensor, labels: Tensor, num_items: int | Tensor | None) -> Tensor:
        chunk_tokens = self.config.chunk_tokens
        if is_plain_linear(self.lm_head):
            return chunked_cross_entropy(
                hidden,
                self.lm_head.weight,
                shift_labels(labels),
                num_items=num_items,
                chunk_tokens=chunk_tokens,
                bias=self.lm_head.bias,
            )
        # Few bits, an adapter, a hook: what its weight alone gives would pass over that.
        total = cross_entropy_sum(self.lm_head(hidden), labels, chunk_tokens=chunk_tokens)
        return total / loss_divisor(num_items, shift_labels(labels))

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Continue the prompts; see `headway.models.generate` for the options."""
        from headway.models.generation import generate

        return generate(self, input_ids, **options)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew; needed after building on the meta device and `to_empty`."""
        self.tie_weights()
        self.reset_buffers()
        for _, weight, draw in self.initial_draws():
            draw(weight)

    def initial_draws(self) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Any]]]:
        """Name, parameter and what draws its initial value, in the order of the draws.

        Whoever draws them elsewhere in this order gets the values of `init_weights`.
        """
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                yield f"{name}.weight", module.weight, nn.init.ones_
            elif isinstance(module, nn.Embedding | nn.Linear):
                if not (name == "lm_head" and self.config.tie_embeddings):
                    yield f"{name}.weight", module.weight, self._draw_normal
                if isinstance(module, nn.Linear) and module.bias is not None:
                    yield f"{name}.bias", module.bias, nn.init.zeros_

    def _draw_normal(self, weight: Tensor) -> Tensor:
        return nn.init.normal_(weight, std=self.config.initializer_range)

    @property
    def is_blank(self) -> bool:
        """On the meta device and as the constructor left it: `init_weights` gives its values.

        False once a parameter was replaced, cast or written to: on the meta device that leaves no
        other trace.
        """
        return (
            type(self).init_weights is Decoder.init_weights
            and len(self._blank) == len(list(self.parameters())) > 0
            and all(
                p is then and p.is_meta and (p.dtype, p._version) == (dtype, version)
                for p, (then, dtype, version) in zip(self.parameters(), self._blank)
            )
        )

    def reset_buffers(self) -> None:
        """Recompute what is in no state dict: the rotary tables."""
        self.model.rotary_emb.reset()

    def tied_keys(self) -> dict[str, str]:
        """Names in the state dict that are another name's tensor: alias -> canonical name."""
        if not self.config.tie_embeddings:
            return {}
        return {"lm_head.weight": "model.embed_tokens.weight"}

    def tie_weights(self) -> None:
        """Make the head the embedding's own Parameter, where the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Leaving the meta device replaces every Parameter by itself, which would break the tie.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Keep only each block's input and recompute the block in backward."""
        given = dict(gradient_checkpointing_kwargs or {})
        problems = [
            unknown("gradient_checkpointing_kwargs key", key, CHECKPOINTING_KEYS)
            for key in given
            if key not in CHECKPOINTING_KEYS
        ]
        if problems:
            raise ConfigError(problems)
        self.model.checkpointing = {"use_reentrant": False, **given}
        self.model.note_draws()

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        self.model.checkpointing = None

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.checkpointing is not None

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def check_token_range(self, input_ids: Tensor) -> None:
        """Raise `ConfigError` for an id outside the vocabulary; reads the values (a host sync)."""
        if input_ids.numel() == 0:
            return
        low, high = int(input_ids.min()), int(input_ids.max())
        size = self.config.vocab_size
        if low < 0 or high >= size:
            raise ConfigError(
                f"token id {high if high >= size else low} in the data is outside the model's "
                f"vocabulary: 0 to {size - 1} (vocab_size={size})"
            )
