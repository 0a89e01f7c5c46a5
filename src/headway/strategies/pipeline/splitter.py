"""Cutting a model built on the meta device into stages.

Owns: the contract of a splitter, the two built-in ones, the checks on what a splitter gives.
Does not own: the stages of known models (models/split.py), the arithmetic of the cut (balance.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch import distributed as dist
from torch import nn

from headway.errors import ConfigError
from headway.models.split import can_split, count_costs, cut_causal_lm
from headway.strategies.pipeline.balance import MOST_IMBALANCE, Cut, cut_layers

logger = logging.getLogger(__name__)


class ModelSplitter(Protocol):
    """Cuts a model, which is on the meta device and must stay whole, into stages in order.

    A stage is a module called as `stage(x, **inputs)`. x is `input_ids` for the first stage, and
    what the stage before gave, one tensor, for the others; inputs are the other tensors of the
    batch (attention_mask, position_ids, ...). The last stage also gets what the whole model would
    get for its loss, such as labels, and gives what the model gives. Names in a stage's state dict
    are those in the model's. Between stages pass hidden states [batch, length, hidden_size] in the
    dtype of the model's parameters; a stage that gives another shape has a method
    `output_shape(input_shape)`.
    """

    def __call__(self, model: nn.Module, num_stages: int) -> Sequence[nn.Module]: ...


def split_automatically(model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
    """Cut a known causal language model by what its layers and its head cost."""
    costs = count_costs(_known(model))
    _check_depth(len(costs.layers), num_stages)
    cut = cut_layers(costs.layers, num_stages, before=costs.embedding, after=costs.head)
    return _cut(model, cut)


def create_manual_causal_lm_splitter(
    num_layers: int | None = None, input_weight: float = 1, output_weight: float = 1
) -> ModelSplitter:
    """A splitter that counts layers: the embedding as `input_weight` of them, the head as
    `output_weight`. `num_layers` must be the model's own number, where it is given.
    """
    weights = {"input_weight": input_weight, "output_weight": output_weight}
    for name, weight in weights.items():
        if not weight >= 0:
            raise ConfigError(f"{name} must be 0 or more, got {weight!r}")

    def split(model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
        found: Any = _known(model)
        depth = len(found.model.layers)
        if num_layers is not None and num_layers != depth:
            raise ConfigError(f"num_layers={num_layers}: the model has {depth} layers")
        _check_depth(depth, num_stages)
        return _cut(
            model, cut_layers([1.0] * depth, num_stages, before=input_weight, after=output_weight)
        )

    return split


def _known(model: nn.Module) -> nn.Module:
    if can_split(model):
        return model
    raise ConfigError(
        f"model_splitter: {type(model).__name__} is not a model that can be split automatically "
        "(headway.models.Decoder and transformers' Llama, Mistral, Qwen2 and Qwen3 for causal "
        "language modelling are); give a model_splitter"
    )


def _check_depth(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        raise ConfigError(
            f"stages_per_rank, pipeline_size: {num_stages} stages are more than the model's "
            f"{num_layers} layers; use fewer ranks in a pipeline or fewer stages on each"
        )


def _cut(model: nn.Module, cut: Cut) -> Sequence[nn.Module]:
    told = dist.is_initialized() and dist.get_rank() > 0
    if cut.imbalance > MOST_IMBALANCE and not told:
        logger.warning(
            "the dearest pipeline stage costs %.2f times the mean, and no split of whole layers "
            "comes below that (%s); another number of stages may fit better",
            cut.imbalance,
            cut.describe(),
        )
    return cut_causal_lm(model, cut.spans)


def check_stages(stages: Sequence[Any], model: nn.Module, num_stages: int) -> None:
    """Refuse stages that are not the model: too few, a name on two of them or on none."""
    given = len(stages)
    if given != num_stages or not all(isinstance(stage, nn.Module) for stage in stages):
        raise ConfigError(
            f"model_splitter must give a list of {num_stages} modules, one for each stage; it gave "
            f"{given} of {', '.join(sorted({type(stage).__name__ for stage in stages})) or 'none'}"
        )
    names = Counter(name for stage in stages for name in stage.state_dict(keep_vars=True))
    wanted = set(model.state_dict(keep_vars=True))
    problems = [
        f"model_splitter: {name} is on {count} stages; each parameter belongs to one"
        for name, count in names.items()
        if count > 1
    ]
    problems += [f"model_splitter: no stage has {name}" for name in sorted(wanted - names.keys())]
    problems += [
        f"model_splitter: a stage has {name}, which the model does not have"
        for name in sorted(names.keys() - wanted)
    ]
    if problems:
        raise ConfigError(problems[:8])
