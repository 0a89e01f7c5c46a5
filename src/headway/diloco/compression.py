"""What a pseudo-gradient looks like on the wire: float32, bfloat16, or int8 with error feedback.

Owns: rounding and its inverse, and what rounding has left over. Does not own: the format around it
(wire.py), nor where a worker keeps what is left over (worker.py).

bfloat16 is rounded to nearest, ties to even. int8 takes blocks of 4096 elements of the flattened
tensor: scale = largest magnitude / 127, value = round(element / scale), ties to even. What int8
loses is added to the next pseudo-gradient, so that nothing is lost for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from headway.diloco.wire import INT8_BLOCK, Payload
from headway.errors import ConfigError, unknown

COMMS = ("float32", "bf16", "int8")
DTYPE_OF = {"float32": "float32", "bf16": "bfloat16", "int8": "int8"}
"""The dtype on the wire of each way to communicate."""
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class Encoded(NamedTuple):
    """Tensors for the wire, and what is to be added to the next ones (int8 only, else empty)."""

    payloads: dict[str, Payload]
    residual: dict[str, Tensor]


def encode(
    tensors: Mapping[str, Tensor], comm: str, residual: Mapping[str, Tensor] | None = None
) -> Encoded:
    """Tensors as they travel; float32 shares their memory.

    Neither they nor `residual` are changed: keep the new residual when the server has taken the
    tensors, the old one if it has refused them.
    """
    if comm not in COMMS:
        raise ConfigError(unknown("communication", comm, COMMS))
    payloads: dict[str, Payload] = {}
    left: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().to("cpu", torch.float32).contiguous().reshape(-1)
        shape = tuple(tensor.shape)
        if comm == "int8":
            before = (residual or {}).get(name)
            total = flat if before is None else flat + before.reshape(-1)
            scales, values = _quantize(total)
            packed = torch.cat([scales.view(torch.uint8), values.view(torch.uint8)])
            payloads[name] = Payload("int8", shape, _bytes_of(packed))
            left[name] = (total - _restore(scales, values)).reshape(shape)
        else:
            dtype = DTYPE_OF[comm]
            payloads[name] = Payload(dtype, shape, _bytes_of(flat.to(_TORCH[dtype])))
    return Encoded(payloads, left)


def decode(payload: Payload) -> Tensor:
    """The float32 tensor that a payload stands for; a float32 one may share its memory."""
    num_elements = 1
    for size in payload.shape:
        num_elements *= size
    if num_elements == 0:
        return torch.zeros(payload.shape)
    data = payload.data
    if data.readonly or numpy.frombuffer(data, numpy.uint8).ctypes.data % 4:
        # A body in a file begins with a header of any length; numbers begin at whole places.
        data = memoryview(bytearray(data))
    if payload.dtype != "int8":
        flat = torch.frombuffer(data, dtype=_TORCH[payload.dtype])
        return flat.to(torch.float32).reshape(payload.shape)
    num_blocks = -(-num_elements // INT8_BLOCK)
    scales = torch.frombuffer(data[: 4 * num_blocks], dtype=torch.float32)
    values = torch.frombuffer(data[4 * num_blocks :], dtype=torch.int8)
    return _restore(scales, values).reshape(payload.shape)


def _quantize(flat: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks = -(-flat.numel() // INT8_BLOCK)
    padded = flat.new_zeros(num_blocks * INT8_BLOCK)
    padded[: flat.numel()] = flat
    blocks = padded.reshape(num_blocks, INT8_BLOCK)
    scales = blocks.abs().amax(dim=1) / 127 if num_blocks else flat.new_zeros(0)
    # A scale that has become zero (all zeros, or less than a float can say) makes values zero.
    divisors = torch.where(scales > 0, scales, torch.inf)[:, None]
    values = torch.round(blocks / divisors).clamp(-127, 127)
    # What is not finite has no int8; its scale is not finite either, and the server refuses that.
    values = torch.nan_to_num(values, nan=0.0).to(torch.int8)
    return scales, values.reshape(-1)[: flat.numel()].contiguous()


def _restore(scales: Tensor, values: Tensor) -> Tensor:
    num_blocks = scales.numel()
    padded = torch.zeros(num_blocks * INT8_BLOCK)
    padded[: values.numel()] = values
    return (padded.reshape(num_blocks, INT8_BLOCK) * scales[:, None]).reshape(-1)[: values.numel()]


def _bytes_of(tensor: Tensor) -> memoryview:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return raw.numpy().data.cast("B") if raw.numel() else memoryview(b"")
