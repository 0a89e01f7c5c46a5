"""How a stage is called: what goes in, what comes out, and of which shapes.

Owns: choosing the inputs a stage takes, the last stage in the place of the whole model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.strategies.pipeline.pieces import Piece

_NOT_FOR_STAGES = frozenset({"input_ids", "labels"})


class StageCall:
    """One of the stages of a model with what is known about calling it."""

    def __init__(self, stages: Sequence[nn.Module], number: int, model: nn.Module) -> None:
        self.stage = stages[number]
        self.is_first, self.is_last = number == 0, number == len(stages) - 1
        self._before = None if self.is_first else stages[number - 1]
        parameters = inspect.signature(self.stage.forward).parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._accepts = frozenset(parameters)
        self.dtype = next(
            (p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32
        )
        self._width: int | None = getattr(getattr(model, "config", None), "hidden_size", None)

    def run(self, x: Tensor, piece: Piece) -> Tensor:
        """Hidden states after this stage, which is not the last."""
        inputs = {
            name: value
            for name, value in piece.items()
            if name not in _NOT_FOR_STAGES and (self._takes_all or name in self._accepts)
        }
        out: Tensor = self.stage(x, **inputs)
        return out.to(self.dtype).contiguous()  # as the next rank expects it

    def as_model(self, hidden: Tensor) -> Callable[..., Any]:
        """The last stage, on what the stages before it gave, as if it were the whole model."""

        def call(input_ids: Tensor, **inputs: Any) -> Any:
            return self.stage(hidden, **inputs)

        return call

    def _shape_after(self, stage: nn.Module, input_shape: torch.Size) -> torch.Size:
        tell = getattr(stage, "output_shape", None)
        if callable(tell):
            return torch.Size(tell(input_shape))
        if self._width is None:
            raise ConfigError(
                f"model_splitter: {type(stage).__name__} needs a method output_shape(input_shape), "
                "since the model has no config.hidden_size that tells what it gives"
            )
        return torch.Size((*input_shape, self._width))

    def input_shape(self, ids_shape: torch.Size) -> torch.Size:
        """The shape of what reaches the stage for ids of `ids_shape`."""
        if self._before is None:
            return ids_shape
        return self._shape_after(self._before, ids_shape)

    def like_input(self, ids_shape: torch.Size) -> Tensor:
        """A tensor without memory like what reaches the stage."""
        shape = self.input_shape(ids_shape)
        if self.is_first:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def like_loss(self) -> Tensor:
        """A tensor without memory like the loss that the last stage gives."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.empty(1, dtype=dtype, device="meta", requires_grad=True)

    def like_output(self, ids_shape: torch.Size) -> Tensor:
        """A tensor without memory like what leaves the stage, which is not the last."""
        shape = self._shape_after(self.stage, ids_shape)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
