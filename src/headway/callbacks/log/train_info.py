"""What is about to be trained, with what and where, as a mapping and as text.

Owns: the facts told when a run begins, and how a mapping is written out. Does not own: where they
are shown (info.py and other logs).
"""

from __future__ import annotations

import os
import platform
import pprint
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.snapshot import git_state, redact, versions

_LINE_WIDTH = 80


def format_train_info(
    args: Any,
    state: Any,
    *,
    model: Any = None,
    trainer: Any = None,
    train_dataloader: Any = None,
    eval_dataloader: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    processing_class: Any = None,
    with_extra: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of a run that begins, and (empty unless `with_extra`) all it is made of in full."""
    info = {
        **_describe_model(model),
        **_describe_batches(args, state, train_dataloader),
        "max_steps": state.max_steps or "as long as data and clock allow",
        "start_step": state.global_step,
        "seed": state.seed,
        "precision": _describe_precision(args, model),
        "parallel_layout": _describe_layout(args, trainer, train_dataloader),
        "hardware": _describe_hardware(trainer),
        "versions": ", ".join(f"{name} {found}" for name, found in versions().items() if found),
        "git_commit": _describe_commit(),
        "run_id": getattr(trainer, "run_id", None),
        "output_dir": str(args.output_dir),
    }
    if not with_extra:
        return info, {}
    to_dict = getattr(args, "to_dict", None)
    extra = {
        "args": redact(to_dict()) if callable(to_dict) else args,
        "state": _describe_state(state),
        "processing_class": processing_class,
        "optimizer": optimizer,
        "lr_scheduler": alt_repr(lr_scheduler),
        "train_dataloader": alt_repr(train_dataloader),
        "eval_dataloader": alt_repr(eval_dataloader),
        "model": model,
    }
    return info, extra


def format_mapping(mapping: Mapping[str, Any]) -> str:
    """One `key: value` a line; what does not fit on one stands below its key, indented."""
    lines = []
    for key, value in mapping.items():
        if isinstance(value, bool) or value is None:
            text = str(value)
        elif isinstance(value, int):
            text = f"{value:,}"
        elif isinstance(value, float):
            text = f"{value:.4g}"
        else:
            text = value if isinstance(value, str) else _pretty(value)
        if len(text) > _LINE_WIDTH or "\n" in text:
            text = "\n" + "\n".join(f"    {line}" for line in text.splitlines())
            lines.append(f"{key}:{text}")
        else:
            lines.append(f"{key}: {text}")
    return "\n".join(lines)


def alt_repr(value: Any) -> Any:
    """A value; or, if its class has no text of its own, its plain public attributes.

    Only what is stored is shown: asking properties could do work.
    """
    own_text: Any = type(value).__repr__
    if value is None or own_text is not object.__repr__:
        return value
    plain = (bool, int, float, str, type(None))
    fields = {
        name: item
        for name, item in getattr(value, "__dict__", {}).items()
        if not name.startswith("_") and isinstance(item, plain)
    }
    return {"class": type(value).__name__, **fields}


def _pretty(value: Any) -> str:
    try:
        return pprint.pformat(value, width=_LINE_WIDTH, sort_dicts=False)
    except Exception as error:
        return f"<{type(value).__name__}: {error}>"


def _describe_state(state: Any) -> dict[str, Any]:
    told = state.to_dict() if callable(getattr(state, "to_dict", None)) else dict(vars(state))
    history = told.pop("log_history", [])
    return {**told, "log_history": f"{len(history)} records"}


def _describe_model(model: Any) -> dict[str, Any]:
    if model is None:
        return {}
    # Sharding renames the class; a rank of a pipeline knows of its own part only.
    name = type(model).__name__.removeprefix("FSDP")
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    embedding = _embedding_weight(model, "get_input_embeddings")
    head = _embedding_weight(model, "get_output_embeddings")
    num_embedding = embedding.numel() if embedding is not None else 0
    return {
        "model": "this rank's part of the model" if name == "ModelPart" else name,
        "total_parameters": total,
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "embedding_parameters": num_embedding,
        "non_embedding_parameters": total - num_embedding,
        "tied_embeddings": embedding is not None and head is embedding,
    }


def _embedding_weight(model: Any, method: str) -> Any:
    try:
        return getattr(getattr(model, method)(), "weight", None)
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _describe_batches(args: Any, state: Any, loader: Any) -> dict[str, Any]:
    deal = getattr(loader, "deal", None)
    per_device = getattr(args, "per_device_train_batch_size", None)
    if deal is None:
        return {"per_device_train_batch_size": per_device}
    total = deal.window_samples
    try:
        num_examples: Any = len(loader.dataset)
    except (TypeError, AttributeError):
        num_examples = "not known: the data has no length"
    return {
        "total_examples": num_examples,
        "total_train_samples": total * state.max_steps if state.max_steps else "not known",
        "per_device_train_batch_size": per_device,
        "actual_per_device_batch_size": deal.batch_size,
        "gradient_accumulation_steps": deal.accumulation,
        "total_train_batch_size": total,
    }


def _describe_precision(args: Any, model: Any) -> str:
    parts = []
    if model is not None:
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        parts.append("parameters " + ", ".join(dtypes))
    for option in ("mixed_precision", "fp8_recipe", "qat_recipe", "float32_matmul_precision"):
        value = getattr(args, option, None)
        if value not in (None, "no"):
            parts.append(f"{option} {value}")
    sharding = getattr(args, "fsdp2", None)
    for option in ("param_dtype", "reduce_dtype"):
        if getattr(sharding, option, None) is not None:
            parts.append(f"{option} {getattr(sharding, option)}")
    return ", ".join(parts)


def _describe_layout(args: Any, trainer: Any, loader: Any) -> str:
    strategy = getattr(trainer, "strategy", None)
    name = getattr(strategy, "name", None) or getattr(args, "strategy_name", "single")
    world_size = getattr(args, "world_size", 1)
    if world_size == 1:
        return f"{name}, 1 process"
    shares = getattr(getattr(loader, "deal", None), "world_size", world_size)
    text = f"{name}, {world_size} ranks, {shares} of them with data of their own"
    if shares == world_size:
        text = f"{name}, {world_size} ranks"
    for holder, option in ((args, "pipeline_size"), (getattr(args, "fsdp2", None), "shard_size")):
        if getattr(holder, option, None) is not None:
            text += f", {option} {getattr(holder, option)}"
    return text


def _describe_hardware(trainer: Any) -> str:
    device = getattr(getattr(trainer, "strategy", None), "device", None)
    host = f"{platform.machine()}, {os.cpu_count()} CPUs"
    if device is None:
        return host
    if device.type == "cuda":
        import torch

        facts = torch.cuda.get_device_properties(device)
        return f"{device}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB; {host}"
    return f"{device}; {host}"


def _describe_commit() -> str | None:
    found = git_state(Path.cwd())
    if found is None:
        return None
    return f"{found['commit']}{' with changes' if found['dirty'] else ''}"
