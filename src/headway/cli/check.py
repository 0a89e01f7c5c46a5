"""`headway check CONFIG`: everything about a run that can be known without training it.

Builds the model on the meta device, opens the data, tries one forward pass without values, asks
this machine for what the run needs (compiler, precision, losses, attention kernels), and prints
steps, tokens, parameters, memory, the size of a checkpoint and the first sample. Writes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.config.schema import RunConfig
    from headway.data.loader import WindowLoader
    from headway.trainers.plan import RunPlan

TAKES_OVERRIDES = True
_SHOWN_IDS = 16
_SHOWN_CHARACTERS = 240


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = "headway check CONFIG [--json] [--any.key=value ...]"
    parser.add_argument("config", metavar="CONFIG", help="a run file (YAML)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what the run will be."""
    from headway.cli.messages import print_json
    from headway.config.load import load_run, telling_where

    run_config = load_run(options.config, options.overrides)
    with telling_where(options.config, options.overrides):
        facts = examine(run_config)
    if options.json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def examine(run_config: RunConfig) -> dict[str, Any]:
    """All facts by name; raises ConfigError for what would stop the run before its first step."""
    from headway.data.loader import WindowLoader
    from headway.optim.build import build_scheduler
    from headway.trainers import from_config
    from headway.trainers.collation import choose_collator
    from headway.trainers.plan import accumulation_steps, has_length, plan_run, sample_length
    from headway.trainers.registration import TrialRegistration

    args = run_config.args
    from_config.check_output_dir(args.output_dir)
    tokenizer = from_config.build_tokenizer(run_config)
    train, held_out = from_config.build_datasets(run_config, tokenizer)
    TrialRegistration(
        args, processing_class=tokenizer, train_dataset=train, eval_dataset=held_out
    ).register(from_config.build_callbacks(run_config))
    given = from_config.build_collator(run_config, tokenizer)
    model, not_meta = from_config.build_model_to_look_at(run_config)
    collator = choose_collator(given, tokenizer, model)
    accumulation = accumulation_steps(args, 1, train)
    loader = WindowLoader(
        train,
        batch_size=args.per_device_train_batch_size,
        accumulation=accumulation,
        collate_fn=collator,
        seed=max(0, args.seed),
        drop_last=args.dataloader_drop_last,
        epoch_batches=None if has_length(train) else args.epoch_train_steps * accumulation,
    )
    first = next(WindowLoader(train, batch_size=1, collate_fn=collator, shuffle=False).batches())
    plan = plan_run(args, loader, 1)
    not_tried = _find_problems(
        run_config, model, loader, held_out, collator, plan, first, tokenizer
    )
    optimizer, scheduler = from_config.build_optimizer_and_scheduler(run_config, model)
    if scheduler is None:
        build_scheduler(
            optimizer,
            args,
            plan.expected_steps,
            total_tokens=plan.expected_tokens,
            tokens_per_step=plan.tokens_per_step,
        )
    batch = args.per_device_train_batch_size * accumulation
    length = sample_length(train)
    # Of data smaller than a batch, a step takes all.
    if loader.num_samples is not None:
        batch = min(batch, loader.num_samples)
    steps, tokens_per_step = plan.expected_steps, None if length is None else batch * length
    weights, state = _weight_bytes(model), _optimizer_bytes(optimizer)
    return {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "epochs": None if steps is None else steps / plan.steps_per_epoch,
        "train_samples": loader.num_samples,
        "eval_samples": len(held_out) if held_out is not None and has_length(held_out) else None,
        "samples_per_step": batch,
        "accumulation": accumulation,
        "sequence_length": length,
        "tokens_per_step": tokens_per_step,
        "tokens": plan.expected_tokens,
        "memory": _memory(run_config, model, weights, state, length, accumulation, train, batch),
        "checkpoint_bytes": None if state is None else weights + state,
        "optimizer": type(optimizer).__name__,
        "output_dir": args.output_dir,
        "first_sample": _first_sample(train, tokenizer, first),
        "not_built_on_meta": not_meta,
        "forward_not_tried": not_tried,
    }


def _find_problems(
    run_config: RunConfig,
    model: Any,
    loader: WindowLoader,
    held_out: Any,
    collator: Any,
    plan: RunPlan,
    batch: Any,
    tokenizer: Any,
) -> str | None:
    """Raise one ConfigError with all that training would refuse of model, data and machine.

    Returns why the forward pass was not tried. The model is changed as training would change it.
    """
    import torch

    from headway.data.loader import WindowLoader
    from headway.dist.env import detect_env
    from headway.errors import check_all
    from headway.trainers.from_config import build_model_init
    from headway.trainers.preflight import check_data_fits, check_fp8_tokens
    from headway.trainers.rehearsal import rehearse

    args, tried = run_config.args, []
    device = torch.device(detect_env(use_cpu=args.use_cpu, device=args.device).device)

    def check_eval_data() -> None:
        if held_out is not None:
            size = args.per_device_eval_batch_size
            held_out_loader = WindowLoader(held_out, batch_size=size, collate_fn=collator)
            check_data_fits(model, held_out_loader, "data.eval", tokenizer)

    def check_train_data() -> None:
        check_data_fits(model, loader, "data.train", tokenizer)
        tried.append(_try_forward(model, batch))  # which would fail of data that do not fit, too

    check_all(
        check_train_data,
        check_eval_data,
        lambda: check_fp8_tokens(args, loader, collator, plan, device),
        # After the forward pass, which changed layers do not make without values.
        lambda: rehearse(args, model, build_model_init(run_config), device),
    )
    return tried[0]


def _try_forward(model: Any, batch: Any) -> str | None:
    """Raise ConfigError if the model makes no loss of the batch; a reason if that is not known."""
    import torch

    from headway.data.counting import count_targets
    from headway.errors import ConfigError
    from headway.models import Decoder
    from headway.strategies.objective import Objective

    device = next((p.device for p in model.parameters()), torch.device("meta"))
    targets = max(1, int(count_targets(batch)))
    try:
        with torch.no_grad():
            Objective(model).loss(model, _move(batch, device), targets, targets)
    except ConfigError:
        raise
    except Exception as error:  # data-dependent code has no answer on the meta device
        # Our own decoder's loss needs autocast, which meta lacks; that it makes one is known.
        return None if isinstance(model, Decoder) else _one_line(error)
    return None


def _move(batch: Any, device: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: _move(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_move(value, device) for value in batch]
    return batch.to(device) if hasattr(batch, "to") else batch


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _weight_bytes(model: Any) -> int:
    unique = {id(t): t for t in (*model.parameters(), *model.state_dict(keep_vars=True).values())}
    return sum(t.numel() * t.element_size() for t in unique.values() if hasattr(t, "numel"))


def _optimizer_bytes(optimizer: Any) -> int | None:
    """Size of the optimizer's state after a step; None where it cannot step without memory."""
    import torch

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except Exception:
        return None
    finally:
        for parameter in parameters:
            parameter.grad = None
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(_num_bytes(value) for value in values if isinstance(value, torch.Tensor))


def _num_bytes(tensor: Any) -> int:
    """Bytes of a tensor; of one that is made of others (moments in few bits), theirs."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        inner, _ = tensor.__tensor_flatten__()
        return sum(_num_bytes(getattr(tensor, name)) for name in inner)
    return int(tensor.numel() * tensor.element_size())


def _memory(
    run_config: RunConfig,
    model: Any,
    weights: int,
    state: int | None,
    length: int | None,
    accumulation: int,
    dataset: Any,
    step_samples: int,
) -> dict[str, Any]:
    from headway.models import Decoder, estimate_training_memory
    from headway.strategies.compilation import CompileOptions
    from headway.trainers.preparation import takes_flex

    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    known: dict[str, Any] = {
        "weights_bytes": weights,
        "gradients_bytes": trained,
        "optimizer_bytes": state,
    }
    if not isinstance(model, Decoder) or length is None or state is None:
        total = None if state is None else weights + trained + state
        return {**known, "activations_bytes": None, "total_bytes": total}
    args, config = run_config.args, model.config
    if config.attention == "auto" and not takes_flex(args):
        config = replace(config, attention="sdpa")
    compiling = CompileOptions.from_args(args)
    parameters = sum(p.numel() for p in model.parameters())
    estimate = estimate_training_memory(
        config,
        batch_size=min(args.per_device_train_batch_size, step_samples),
        seq_len=length,
        dtype_bytes=next(model.parameters()).element_size(),
        optimizer_bytes_per_param=state / parameters,
        gradient_checkpointing=args.gradient_checkpointing,
        mixed_precision=args.mixed_precision,
        accumulation_steps=accumulation,
        document_mask=bool(getattr(dataset, "mask_documents", False)),
        compiled=compiling is not None and compiling.backend == "inductor",
    )
    return {
        **known,
        "activations_bytes": estimate.activations_bytes,
        "loss_bytes": estimate.loss_bytes,
        "fixed_bytes": estimate.fixed_bytes,
        "total_bytes": estimate.total_bytes,
    }


def _first_sample(dataset: Any, tokenizer: Any, batch: Any) -> dict[str, Any]:
    """The first sample in figures; `batch` is the collated one."""
    from headway.data.counting import count_targets

    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return {"keys": sorted(map(str, batch)) if isinstance(batch, Mapping) else None}
    ids = batch["input_ids"][0].tolist()
    coder = tokenizer if tokenizer is not None else getattr(dataset, "tokenizer", None)
    return {
        "keys": sorted(map(str, batch)),
        "num_tokens": len(ids),
        "num_targets": int(count_targets(batch)),
        "input_ids": ids[:_SHOWN_IDS],
        "text": None if coder is None else coder.decode(ids)[:_SHOWN_CHARACTERS],
    }


def _print(facts: dict[str, Any]) -> None:
    from headway.cli.messages import print_table, spell_bytes, spell_count

    memory, sample = facts["memory"], facts["first_sample"]
    steps = "as long as data and clock allow"
    if facts["steps"] is not None:
        steps = f"{facts['steps']:,} ({facts['epochs']:.2f} epochs of {facts['steps_per_epoch']:,})"
    parts = [
        (name, memory.get(f"{name}_bytes"))
        for name in ("weights", "gradients", "optimizer", "activations", "loss", "fixed")
    ]
    shown = ", ".join(f"{name} {spell_bytes(n)}" for name, n in parts if n is not None)
    total = "not known" if memory["total_bytes"] is None else spell_bytes(memory["total_bytes"])
    if memory["activations_bytes"] is None:
        shown += "; activations are not estimated for this model and data"
    elif sum(n for _, n in parts if n is not None) != memory["total_bytes"]:
        shown += "; the total is the peak of a step, when not all of them exist at once"
    batch = f"{facts['samples_per_step']:,} samples"
    if facts["tokens_per_step"] is not None:
        batch += f", {facts['tokens_per_step']:,} tokens"
    if facts["accumulation"] > 1:
        batch += f", in {facts['accumulation']} micro-batches"
    size = facts["checkpoint_bytes"]
    rows = [
        ("model", f"{facts['model']}, {spell_count(facts['parameters'])} parameters"),
        ("optimizer", facts["optimizer"]),
        ("steps", steps),
        ("a step", batch),
        ("tokens", "not known" if facts["tokens"] is None else spell_count(facts["tokens"])),
        ("memory", f"about {total}\n({shown})"),
        ("checkpoint", "not known" if size is None else f"about {spell_bytes(size)}"),
        ("output", facts["output_dir"]),
    ]
    if "input_ids" in sample:
        rows.append(("first sample", f"{sample['num_tokens']:,} tokens: {sample['input_ids']} ..."))
    if sample.get("text"):
        rows.append(("as text", repr(sample["text"])))
    if facts["not_built_on_meta"]:
        rows.append(("note", f"built on the CPU, not on meta: {facts['not_built_on_meta']}"))
    if facts["forward_not_tried"]:
        rows.append(("note", f"the forward pass was not tried: {facts['forward_not_tried']}"))
    print_table(rows)
    if facts["trained_parameters"] != facts["parameters"]:
        share = facts["trained_parameters"] / max(1, facts["parameters"])
        print(f"{facts['trained_parameters']:,} parameters ({share:.1%}) are trained")
