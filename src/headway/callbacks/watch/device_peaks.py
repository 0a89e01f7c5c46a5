"""How many operations a second a device can do at most, found by its name.

Owns: the table of makers' figures for dense matrix products, and the names under which drivers list
the devices. Does not own: what a run achieved (default_metrics.py, speed_monitor.py).

Makers often print the figure with structured sparsity, twice as large; it is not used here. Cards
for games and their relatives have two figures for 16 bits: the one with float32 sums counts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch
    from torch import nn

_DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "fp8": "fp8",
    "tf32": "tf32",
    "float32": "fp32",
    "fp32": "fp32",
}

# TFLOP/s in bf16, fp16, fp8, tf32, fp32; 0 where the device has no such unit.
# The first pattern that is found in the name decides, so the more special ones come first.
_PEAKS: tuple[tuple[str, tuple[float, float, float, float, float]], ...] = (
    (r"gb[23]00", (2500, 2500, 5000, 1250, 80)),
    (r"\bb[23]00", (2250, 2250, 4500, 1125, 75)),
    (r"h[12]00 nvl", (835.5, 835.5, 1671, 417.5, 60)),
    (r"h[18]00 pcie", (756, 756, 1513, 378, 51)),
    (r"\bg?h[128]00(?!\d)", (989, 989, 1979, 494.5, 67)),
    (r"\bh20\b", (148, 148, 296, 74, 44)),
    (r"\ba[18]00(?!\d)", (312, 312, 0, 156, 19.5)),
    (r"\ba30\b", (165, 165, 0, 82, 10.3)),
    (r"\ba40\b", (149.7, 149.7, 0, 74.8, 37.4)),
    (r"\ba10g", (70, 70, 0, 35, 35)),
    (r"\ba10\b", (125, 125, 0, 62.5, 31.2)),
    (r"\bl40s", (362, 362, 733, 183, 91.6)),
    (r"\bl40\b", (181, 181, 362, 90.5, 90.5)),
    (r"\bl4\b", (121, 121, 242, 60, 30.3)),
    (r"rtx 6000 ada", (364.2, 364.2, 728.5, 182.1, 91.1)),
    (r"rtx a6000", (154.8, 154.8, 0, 77.4, 38.7)),
    (r"rtx 5090(?! laptop)", (209.5, 209.5, 419, 104.8, 104.8)),
    (r"rtx 4090(?! laptop)", (165.2, 165.2, 330.3, 82.6, 82.6)),
    (r"rtx 3090 ti", (80, 80, 0, 40, 40)),
    (r"rtx 3090", (71.2, 71.2, 0, 35.6, 35.6)),
    (r"v100.*pcie", (0, 112, 0, 0, 14)),
    (r"v100", (0, 125, 0, 0, 15.7)),
    (r"\bt4\b", (0, 65, 0, 0, 8.1)),
    (r"mi355x", (2516.6, 2516.6, 5033.2, 0, 157.3)),
    (r"mi350x", (2306.9, 2306.9, 4613.7, 0, 144.2)),
    (r"mi3(00x|25x)", (1307.4, 1307.4, 2614.9, 653.7, 163.4)),
    # Each of the two dies of a card is a device of its own.
    (r"mi250x", (191.5, 191.5, 0, 0, 47.9)),
    (r"mi250", (181.05, 181.05, 0, 0, 45.3)),
)
_COLUMNS = ("bf16", "fp16", "fp8", "tf32", "fp32")


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Dense peak of one device in operations a second; None where it is not known.

    `device_name` is what the driver says ('NVIDIA H100 80GB HBM3'); `dtype` is one of bfloat16,
    float16, float8, tf32, float32.
    """
    if dtype not in _DTYPES:
        raise ConfigError(unknown("dtype", dtype, _DTYPES))
    column = _COLUMNS.index(_DTYPES[dtype])
    # Drivers write 'H100-PCIE', 'A100-SXM4-80GB', 'H100 PCIe', 'NVIDIA H200'.
    name = re.sub(r"[\s\-_]+", " ", device_name.lower())
    if " mig " in name:  # a slice of a card
        return None
    for pattern, peaks in _PEAKS:
        if re.search(pattern, name):
            return peaks[column] * 1e12 or None
    return None


def working_dtype(args: Any, model: nn.Module | None) -> str:
    """The kind of numbers that most matrix products of a run multiply.

    FP8 runs count as bfloat16: part of their products stay in it, and figures of runs with and
    without FP8 can be compared.
    """
    import torch

    mixed = getattr(args, "mixed_precision", None)
    if mixed == "fp16":
        return "float16"
    if mixed == "bf16" or getattr(args, "fp8_recipe", None) or model is None:
        return "bfloat16"
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if dtype in (torch.bfloat16, torch.float16):
        return str(dtype).removeprefix("torch.")
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def device_name(device: torch.device) -> str | None:
    """What the driver calls a device; None for a CPU and other devices without such a name."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
