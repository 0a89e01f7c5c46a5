"""`headway finalize SRC DST`: a clean model folder of a checkpoint, whole or not at all."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.storage import is_url, join_location, split_location
from headway.cli.messages import print_json, print_table, spell_bytes, spell_count
from headway.errors import ConfigError, unknown
from headway.precision.recipes import RECIPES, find_recipe

if TYPE_CHECKING:
    from headway.checkpoint.export import Source
    from headway.checkpoint.quantized import QuantizationPlan


_OF_QUANTIZE = ("group_size", "exclude", "all_layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("source", metavar="SRC", help="a checkpoint, a run directory or a folder")
    parser.add_argument("target", metavar="DST", help="the folder to make; must not exist")
    parser.add_argument(
        "--dtype", help="float32, bfloat16, float16 or float64 (default: as stored)"
    )
    parser.add_argument("--keep-optimizer", action="store_true", help="take its state along")
    parser.add_argument(
        "--quantize", metavar="RECIPE", help=f"linear layers in few bits: {', '.join(RECIPES)}"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="weights that share a scale (default: as trained, else the recipe's)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        metavar="REGEX",
        help="linear layers that stay whole as well; may be repeated. Those that training left "
        "whole stay so anyway, or else the head",
    )
    parser.add_argument(
        "--all-layers",
        action="store_true",
        help="quantize also what stays whole by default; only --exclude counts",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")
    parser.add_argument("--json", action="store_true", help="print JSON")


@dataclass
class _Outcome:
    """What is told at the end."""

    facts: dict[str, Any]
    rows: list[tuple[str, str]] = field(default_factory=list)


def run(options: argparse.Namespace) -> int:
    """Write the folder."""
    from headway.checkpoint.convert import read_source
    from headway.checkpoint.export import export_folder, require_new, require_whole
    from headway.cli.checkpoint import open_checkpoint

    _check(options)
    target = Path(options.target)
    require_new(target)
    with open_checkpoint(options.source) as source:
        weights = read_source(source)
        if options.keep_optimizer:
            require_whole(source)
        outcome = _describe(options, source, target, weights)
        if options.quantize is not None:
            _quantize(options, source, target, weights, outcome)
        elif not options.dry_run:
            export_folder(
                weights,
                target,
                dtype=options.dtype,
                optimizer_of=source if options.keep_optimizer else None,
            )
    if options.json:
        print_json(outcome.facts)
    else:
        print_table(outcome.rows)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what the words alone show to be wrong."""
    from headway.checkpoint.export import DTYPES

    problems: list[str] = []
    if options.dtype is not None and options.dtype not in DTYPES:
        problems.append(f"--dtype: {unknown('dtype', options.dtype, DTYPES)}")
    if options.quantize is None:
        given = (o for o in _OF_QUANTIZE if getattr(options, o) not in (None, False))
        problems += [f"--{option.replace('_', '-')}: needs --quantize RECIPE" for option in given]
    else:
        try:
            find_recipe(options.quantize, "--quantize").resolve_group_size(options.group_size)
        except ConfigError as error:
            problems += error.problems
        if options.keep_optimizer:
            problems.append(
                "--keep-optimizer: the optimizer's state belongs to whole weights and is of no use "
                "to quantized ones; leave it out, or leave out --quantize"
            )
    if problems:
        raise ConfigError(problems)


def _place(given: str, source: Path) -> str:
    """Where a checkpoint is for people: files of an address are in a temporary folder here."""
    if not is_url(given):
        return str(source)
    parent, name = split_location(given)
    return join_location(parent if name == source.name else given, source.name)


def _describe(options: argparse.Namespace, source: Path, target: Path, weights: Source) -> _Outcome:
    weights.cast(options.dtype)
    num_parameters = sum(tensor.numel() for tensor in weights.tensors.values())
    num_bytes = _num_bytes(weights)
    told = _place(options.source, source)
    facts = {
        "source": told,
        "target": target,
        "step": weights.step,
        "num_parameters": num_parameters,
        "bytes": num_bytes,
        "files": sorted(weights.files),
        "dry_run": options.dry_run,
    }
    rows = [
        ("would be written" if options.dry_run else "model folder", str(target)),
        ("from", f"{told}, step {weights.step:,}"),
        ("weights", f"{spell_count(num_parameters)} parameters, {spell_bytes(num_bytes)}"),
        ("with", ", ".join(sorted(weights.files)) or "no other files"),
    ]
    return _Outcome(facts, rows)


def _num_bytes(weights: Source) -> int:
    return sum(t.numel() * t.element_size() for t in weights.tensors.values())


def _quantize(
    options: argparse.Namespace, source: Path, target: Path, weights: Source, outcome: _Outcome
) -> None:
    from headway.checkpoint.quantized import (
        check_dtype,
        count_bytes,
        export_quantized,
        plan_quantization,
        quantize_source,
        trained_as,
    )
    from headway.cli.model_folder import outline_model

    plan = plan_quantization(
        weights,
        outline_model(source),
        options.quantize,
        group_size=options.group_size,
        exclude=options.exclude or (),
        all_layers=options.all_layers,
        trained=trained_as(source),
    )
    dtype = check_dtype(plan.recipe, options.dtype)
    weights.cast(dtype)
    outcome.facts["quantized"] = _plan_facts(plan)
    outcome.rows.append(("quantized", _spell_plan(plan)))
    rest = plan.choice.describe_rest("--exclude or by default")
    if rest:
        outcome.rows.append(("left whole", rest))
    before = _num_bytes(weights)
    if options.dry_run:
        after = count_bytes(weights, plan)
    else:
        block = quantize_source(weights, plan)
        after = export_quantized(weights, block, target, dtype)
    outcome.facts["bytes"] = after
    outcome.rows[2] = (
        "weights",
        f"{spell_count(outcome.facts['num_parameters'])} parameters, {spell_bytes(after)} "
        f"({spell_bytes(before)} before)",
    )


def _plan_facts(plan: QuantizationPlan) -> dict[str, Any]:
    return {
        "recipe": plan.recipe.name,
        "group_size": plan.group_size,
        "layers": plan.choice.chosen,
        "excluded": plan.choice.excluded,
        "unfit": plan.choice.unfit,
        "trained_as": None if plan.trained_as is None else plan.trained_as.recipe,
    }


def _spell_plan(plan: QuantizationPlan) -> str:
    groups = f" in groups of {plan.group_size}" if plan.group_size else " by rows"
    return (
        f"{plan.recipe.name}: {len(plan.choice.chosen)}/{plan.choice.num_layers} linear layers, "
        f"weights {plan.recipe.weights}{groups}, activations {plan.recipe.activations}; "
        + ("trained for it" if _is_trained(plan) else "rounded after training")
    )


def _is_trained(plan: QuantizationPlan) -> bool:
    return plan.trained_as is not None and plan.trained_as.recipe == plan.recipe.name
