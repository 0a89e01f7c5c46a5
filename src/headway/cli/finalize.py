"""`headway finalize SRC DST`: a clean model folder of a checkpoint, whole or not at all."""

from __future__ import annotations

import argparse
from pathlib import Path

from headway.cli.messages import print_json, print_table, spell_bytes, spell_count
from headway.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("source", metavar="SRC", help="a checkpoint, a run directory or a folder")
    parser.add_argument("target", metavar="DST", help="the folder to make; must not exist")
    parser.add_argument(
        "--dtype", help="float32, bfloat16, float16 or float64 (default: as stored)"
    )
    parser.add_argument("--keep-optimizer", action="store_true", help="take its state along")
    parser.add_argument("--quantize", metavar="RECIPE", help="not available yet")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Write the folder."""
    from headway.checkpoint.convert import read_source
    from headway.checkpoint.export import export_folder, require_new, require_whole
    from headway.cli.checkpoint import open_checkpoint

    if options.quantize is not None:
        raise ConfigError(
            f"--quantize {options.quantize}: not available yet (it comes with precision and "
            "compilation); leave it out and quantize the folder with the tool that serves it"
        )
    target = Path(options.target)
    require_new(target)
    with open_checkpoint(options.source) as source:
        weights = read_source(source)
        if options.keep_optimizer:
            require_whole(source)
        export_folder(
            weights,
            target,
            dtype=options.dtype,
            optimizer_of=source if options.keep_optimizer else None,
        )
    num_parameters = sum(tensor.numel() for tensor in weights.tensors.values())
    num_bytes = sum(t.numel() * t.element_size() for t in weights.tensors.values())
    facts = {
        "source": source,
        "target": target,
        "step": weights.step,
        "num_parameters": num_parameters,
        "bytes": num_bytes,
        "files": sorted(weights.files),
    }
    if options.json:
        print_json(facts)
        return 0
    rows = [
        ("model folder", str(target)),
        ("from", f"{source}, step {weights.step:,}"),
        ("weights", f"{spell_count(num_parameters)} parameters, {spell_bytes(num_bytes)}"),
        ("with", ", ".join(sorted(weights.files)) or "no other files"),
    ]
    print_table(rows)
    return 0
