"""Hugging Face model folders: writing a model as one and reading one.

Owns: `save_pretrained`, `load_pretrained`, `load_causal_lm`, putting named tensors into a module.
Does not own: training checkpoints (checkpoint/), configurations' spelling (hf_config.py), which
names are one tensor (ties.py), the split into files (shards.py).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ConfigError, missing_extra
from headway.models.config import DecoderConfig, check_fields
from headway.models.decoder import Decoder
from headway.models.hf_config import from_hf_config, is_supported_family, to_hf_config
from headway.models.shards import index_name, plan_shards, shard_name
from headway.models.ties import input_embedding_names, listed_ties, split_ties, tensor_identity
from headway.precision.quantized import (
    CONFIG_KEY,
    QuantizedFormError,
    check_versions,
    described,
    find_parts,
    is_quantized,
    move,
)

WEIGHTS_INDEX = index_name()
SINGLE_WEIGHTS = "model.safetensors"
DEFAULT_SHARD_BYTES = 5 * 1024**3
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


def hf_config_of(model: nn.Module) -> dict[str, Any] | None:
    """The config.json of a model, or None for a module Hugging Face has no name for.

    A part of a model may tell that of the whole by a method `hf_config`.
    """
    told = getattr(model, "hf_config", None)
    if callable(told):
        whole: dict[str, Any] | None = told()
        return whole
    if isinstance(model, Decoder):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        return to_hf_config(model.config, dtype=dtype)
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    # Asked of the class: a wrapper, such as PEFT's, has the configuration of the model inside, but
    # other names of tensors, with which `from_pretrained` would leave that one's weights random.
    if to_dict is None or not hasattr(type(model), "config_class"):
        return None
    config: dict[str, Any] = json.loads(json.dumps(to_dict(), default=str))
    # Sharding puts a class of torch's before the model's own.
    classes = (c for c in type(model).__mro__ if not c.__module__.startswith("torch."))
    config["architectures"] = [next(classes).__name__]
    config["dtype"] = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
    return config


def generation_config_of(model: nn.Module) -> dict[str, Any] | None:
    """The generation_config.json of a transformers model, as its `save_pretrained` writes it."""
    to_text = getattr(getattr(model, "generation_config", None), "to_json_string", None)
    if not callable(to_text):
        return None
    found: dict[str, Any] = json.loads(to_text())
    return found


def is_of_transformers(kind: type) -> bool:
    """Whether a class is one of transformers' models, or made of one."""
    return kind.__module__.startswith("transformers.") or any(
        base.__name__ == "PreTrainedModel" for base in kind.__mro__
    )


def names_taken(model: nn.Module) -> set[str] | None:
    """What a call of a model is given of a batch; None: everything.

    Many models of transformers take any name, and pass it on to where it is an error.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # What stands in for a model of another class, such as a part of it, says so.
    kind: type = getattr(model, "stands_for", type(model))
    return None if takes_all and not is_of_transformers(kind) else set(parameters)


def predicts_next_token(model: nn.Module) -> bool:
    """Whether the inputs of a model are its labels too; what does not tell is taken for such."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    if getattr(model, "loss_type", None) is None:
        # transformers knows no name for the loss: of its own models those that make one themselves
        # (tokens that were replaced, choices, next sentences) mean something else by labels.
        own = type(model).__module__.startswith("transformers.models.")
        return not own or _asks_for_its_loss(model)
    # Not by its type: models of pictures and text have one of their own, and the same function.
    return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def makes_causal_loss(model: nn.Module) -> bool:
    """Whether it is a model of transformers with the loss of its causal ones, which leaves out -100
    and no other label."""
    own = type(model).__module__.startswith("transformers.models.")
    name = getattr(getattr(model, "loss_function", None), "__name__", "") if own else ""
    return name == "ForCausalLMLoss" and _asks_for_its_loss(model)


def _asks_for_its_loss(model: nn.Module) -> bool:
    """Whether its forward calls transformers' `loss_function`, and does not make a loss itself."""
    return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


def other_loss_of(model: nn.Module) -> str | None:
    """The name of a transformers model's loss, where it is not that of causal language models."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "that of an encoder and a decoder"
    function = getattr(model, "loss_function", None)
    if function is None or not hasattr(model, "loss_type"):
        return None
    if not _asks_for_its_loss(model):
        return "one that its forward makes"
    name = getattr(function, "__name__", repr(function))
    return None if name == "ForCausalLMLoss" else str(name)


def state_for_export(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A module's tensors by name, sorted, each once, and the names that alias another's tensor."""
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the model's state {name!r} is a {type(value).__name__}; only tensors can be "
                "stored (return tensors from get_extra_state, or none)"
            )
        if is_quantized(value):
            raise ConfigError(
                f"the model's weight {name!r} is quantized; copy the folder that it came from, or "
                "make another with: headway finalize --quantize"
            )
    tensors, aliases = split_ties(state, input_embedding_names(model), listed_ties(model))
    return {name: tensor.detach() for name, tensor in tensors.items()}, aliases


def load_state(
    model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None
) -> None:
    """Put stored tensors into a module: copied in place, or adopted where it is on meta.

    Every name must be there (itself, by its alias, or by a name tied to it) and no other.
    """
    state = model.state_dict(keep_vars=True)
    aliases = dict(aliases or {})
    by_identity: dict[object, list[str]] = {}
    for name, value in state.items():
        by_identity.setdefault(tensor_identity(value), []).append(name)
    sources: dict[str, Tensor] = {}
    problems = []
    for names in by_identity.values():
        stored = [aliases.get(name, name) for name in names] + names
        found = next((tensors[name] for name in stored if name in tensors), None)
        if found is None:
            problems.append(f"the stored weights have no tensor {names[0]!r}")
        elif found.shape != state[names[0]].shape:
            problems.append(
                f"tensor {names[0]!r} is stored as {list(found.shape)}, "
                f"the model has {list(state[names[0]].shape)}"
            )
        else:
            sources |= dict.fromkeys(names, found)
    problems += [
        f"the stored weights hold {name!r}, which the model does not have"
        for name in tensors
        if name not in state and name not in aliases.values()
    ]
    if problems:
        raise ConfigError(_shorten(problems))
    _put(model, state, sources)


def _shorten(problems: list[str], most: int = 8) -> list[str]:
    extra = len(problems) - most
    return problems[:most] + ([f"... and {extra} more such problems"] if extra > 0 else [])


@torch.no_grad()
def _put(model: nn.Module, state: Mapping[str, Any], sources: Mapping[str, Tensor]) -> None:
    adopted: dict[int, Tensor] = {}
    for name, source in sources.items():
        target = state[name]
        if not target.is_meta:
            target.copy_(source)
            continue
        if id(target) not in adopted:
            new = source
            if isinstance(target, nn.Parameter):
                trains = target.requires_grad and not is_quantized(source)
                new = nn.Parameter(source, requires_grad=trains)
            adopted[id(target)] = new
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, adopted[id(target)])


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a folder that transformers' `from_pretrained` reads, tied weights stored once.

    A module without a Hugging Face configuration gets the weight files alone, a model of PEFT what
    PEFT writes of it: its adapters.
    """
    from safetensors.torch import save_file

    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes}: a number above 0 is needed")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    config = hf_config_of(model)
    if config is None and hasattr(model, "peft_config"):
        model.save_pretrained(str(folder))  # type: ignore[operator]
        return
    if config is not None:
        _write_json(folder / "config.json", config)
        own = generation_config_of(model)
        if own is None and not is_of_transformers(type(model)):  # one of theirs cannot generate
            own = generation_config(config)
        if own is not None:
            _write_json(folder / "generation_config.json", own)
    tensors, _ = state_for_export(model)
    shards = plan_shards({name: _num_bytes(t) for name, t in tensors.items()}, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = shard_name(number, len(shards))
        # Views of one storage must be stored apart; a file cannot express the overlap.
        content = {
            name: tensors[name].cpu().clone(memory_format=torch.contiguous_format) for name in names
        }
        save_file(content, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(_num_bytes(t) for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / WEIGHTS_INDEX, index)
    remove_stale_weights(folder, set(weight_map.values()))


def generation_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json that goes with a config.json."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    given = {name: hf_config[name] for name in names if hf_config.get(name) is not None}
    return {"_from_model_config": True, **given}


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def remove_stale_weights(folder: Path, written: Collection[str]) -> None:
    """Delete weights of an earlier model, which would be read in the place of those written."""
    for path in folder.glob("model*.safetensors"):
        if path.name not in written:
            path.unlink()


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of a model folder."""
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError(f"model folder {str(folder)!r} does not exist")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} is no Hugging Face model folder: no config.json in it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} must hold a JSON object")
    return content


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a model folder: those the index names, or the single one."""
    folder = Path(directory)
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = [folder / SINGLE_WEIGHTS]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{str(folder)!r} lacks the weight file {missing[0]!r}"
            + (
                ""
                if index.is_file()
                else f" (and has no {WEIGHTS_INDEX}); only safetensors are read"
            )
        )
    return files


def _read_weights(
    folder: Path, device: str | torch.device, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Weights by name, those that are stored in parts as one."""
    try:
        parts = find_parts(_read_metadata(folder), str(folder))
        tensors = _read_tensors(folder, device)
        for name, tensor in tensors if parts is None else parts.join_all(dict(tensors)):
            cast = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
            yield name, move(tensor, device, dtype) if cast else tensor
    except QuantizedFormError as error:
        raise ConfigError(str(error)) from error


def _read_tensors(folder: Path, device: str | torch.device) -> Iterator[tuple[str, Tensor]]:
    for file in _open_files(folder, device):
        for name in file.keys():  # noqa: SIM118 - safe_open has no __iter__
            yield name, file.get_tensor(name)


def _read_metadata(folder: Path) -> list[dict[str, str] | None]:
    """What each weight file says of itself."""
    return [file.metadata() for file in _open_files(folder, "cpu")]


def _open_files(folder: Path, device: str | torch.device) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                yield file
        except SafetensorError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def load_pretrained(
    directory: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> Decoder:
    """A `Decoder` from a Llama, Qwen3 or Mistral folder; `dtype=None` keeps the stored one.

    `config_overrides` replaces fields of the `DecoderConfig` (attention, dropout, ...).
    A folder of weights quantized by torchao gives a model to evaluate and sample from.
    """
    folder = Path(directory)
    hf_config = read_hf_config(folder)
    block = described(hf_config)
    if block is not None:
        check_versions(block, str(folder))
        del hf_config[CONFIG_KEY]
    values = from_hf_config(hf_config).to_dict() | dict(config_overrides or {})
    check_fields(values)
    config = DecoderConfig(**values)
    with torch.device("meta"):
        model = Decoder(config)
    tied = model.tied_keys()
    tensors = {
        name: tensor
        for name, tensor in _read_weights(folder, device, dtype)
        if name not in tied and not name.endswith(_DERIVED_SUFFIXES)
    }
    load_state(model, tensors, tied)
    model.model.rotary_emb.to_empty(device=device)
    return model


def load_causal_lm(
    directory: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A `Decoder` if the folder is of its families, else whatever transformers makes of it."""
    if is_supported_family(read_hf_config(directory)):
        return load_pretrained(
            directory, device=device, dtype=dtype, config_overrides=config_overrides
        )
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise missing_extra("transformers", "transformers", f"loading {str(directory)!r}") from None
    if config_overrides:
        raise ConfigError(
            f"config_overrides apply to the reference decoder only, not to {str(directory)!r}"
        )
    model: nn.Module = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype or "auto")
    return model.to(device)
