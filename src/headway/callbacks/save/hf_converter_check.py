"""Whether a converted model computes what the checkpoint's does.

Owns: the comparison and its tolerance. Does not own: the conversion (hf_converter_folder.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import missing_extra

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""The largest difference of two logits, relative to the largest logit, or to 1 if that is more.

Both models compute in float32 (in float64 for a float64 folder), with weights rounded to the
folder's dtype, so that nothing but the order of sums is left to differ."""
_MODULE = "headway.callbacks.save.hf_converter_check"
_NUM_ROWS, _NUM_TOKENS = 2, 32


class ConversionError(RuntimeError):
    """The folder is not the model of the checkpoint."""


def validate_folder(
    checkpoint: Path, folder: Path, dtype: str | None, *, device: str, debug: bool = False
) -> float:
    """Compare logits of random tokens; returns the largest relative difference.

    With `debug`, the differences after every layer are logged, also where all is well.
    """
    import torch

    from headway.models.hf import load_causal_lm

    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise missing_extra(
            "transformers", "transformers", "HFConverterCallback: validate"
        ) from None
    compute = torch.float64 if dtype == "float64" else torch.float32
    ids = _draw_tokens(folder).to(device)
    original = load_causal_lm(checkpoint, device=device).to(compute).eval()
    exact = _logits(original, ids)
    if dtype is not None:
        _round(original, getattr(torch, dtype))
    with _outputs(original, debug) as ours:
        expected = _logits(original, ids)
    del original
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(str(folder), dtype=compute)
    converted = loaded.to(device).eval()
    with _outputs(converted, debug) as theirs:
        found = _logits(converted, ids)
    difference = _distance(found, expected)
    for name in ours:
        if name in theirs and ours[name].shape == theirs[name].shape:
            apart = _distance(theirs[name], ours[name])
            logger.info("HFConverterCallback: %s differs by %.2e", name, apart)
    if not difference <= TOLERANCE:
        raise ConversionError(
            f"HFConverterCallback: the converted model is not that of {checkpoint}: their logits "
            f"differ by {difference:.2e} of the largest one, allowed: {TOLERANCE:.0e}"
            + ("" if debug else " (debug=True logs where)")
        )
    logger.info(
        "HFConverterCallback: logits agree to %.1e; rounding to %s changes them by %.1e",
        difference,
        dtype or "the stored dtype",
        _distance(expected, exact),
    )
    return difference


def validate_apart(
    checkpoint: Path, folder: Path, dtype: str | None, *, device: str, debug: bool = False
) -> None:
    """The same in a process of its own.

    Loading a model changes settings and draws numbers that belong to the whole process, and
    training goes on in this one.
    """
    command = [sys.executable, "-m", _MODULE, str(checkpoint), str(folder), "--device", device]
    command += ["--dtype", dtype] if dtype is not None else []
    command += ["--debug"] if debug else []
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in of_ranks}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    told = [line for line in ended.stderr.splitlines() if line.startswith("HFConverterCallback")]
    for line in told[:-1] if ended.returncode else told:
        logger.info("%s", line)
    if ended.returncode:
        lines = told or ended.stderr.splitlines() or [f"exit code {ended.returncode}"]
        raise ConversionError(lines[-1])


def _draw_tokens(folder: Path) -> Tensor:
    import torch

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    longest = int(config.get("max_position_embeddings") or _NUM_TOKENS)
    shape = (_NUM_ROWS, min(_NUM_TOKENS, longest))
    return torch.randint(config["vocab_size"], shape, generator=torch.Generator().manual_seed(0))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    import torch

    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found.detach()


def _round(model: nn.Module, dtype: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def _distance(one: Tensor, other: Tensor) -> float:
    scale = max(1.0, float(other.abs().max()))
    return float((one - other).abs().max()) / scale


@contextmanager
def _outputs(model: nn.Module, wanted: bool) -> Iterator[dict[str, Tensor]]:
    """What the larger parts of a model put out, by their names, while this is open."""
    import torch

    found: dict[str, Tensor] = {}
    hooks = []

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                found[name] = first.detach()

        return hook

    if wanted:
        for name, module in model.named_modules():
            if name and name.count(".") <= 2:
                hooks.append(module.register_forward_hook(keep(name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def main(given: list[str] | None = None) -> int:
    """Compare two folders; what is found goes to stderr, line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--debug", action="store_true")
    options = parser.parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        validate_folder(
            options.checkpoint,
            options.folder,
            options.dtype,
            device=options.device,
            debug=options.debug,
        )
    except Exception as error:
        text = str(error) if isinstance(error, ConversionError) else f"{error!r}"
        print(f"HFConverterCallback: {text.removeprefix('HFConverterCallback: ')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
