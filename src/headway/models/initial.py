"""Initial values of a model that no process holds whole.

Owns: streaming the values of a model built on the meta device, tensor by tensor: drawn as
`Decoder.init_weights` draws them, read from a Hugging Face folder, or, where neither is possible,
taken from a whole model built on the host. Does not own: which rank keeps what (strategies).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headway.errors import ConfigError, missing_extra
from headway.models.config import DecoderConfig, check_fields
from headway.models.decoder import Decoder
from headway.models.hf import read_hf_config, weight_files
from headway.models.hf_config import from_hf_config, is_supported_family
from headway.models.rope import RotaryTable

logger = logging.getLogger(__name__)

Part = tuple[slice, ...]


class Source(Protocol):
    """Where a model comes from, as far as its initial values are concerned."""

    @property
    def weights(self) -> Path | None:
        """The Hugging Face folder that holds its values, if it comes from one."""

    def build(self) -> nn.Module:
        """The whole model, with its values, on the host."""


def can_stream(source: Source, meta_model: nn.Module) -> bool:
    """Whether `initial_tensors` gets by without building the whole model."""
    if not all(p.is_meta for p in meta_model.parameters()):
        return False
    if source.weights is not None:
        return _is_stored(source.weights, meta_model)
    return isinstance(meta_model, Decoder) and meta_model.is_blank


@torch.no_grad()
def initial_tensors(
    source: Source,
    meta_model: nn.Module,
    names: Collection[str],
    parts: Mapping[str, Part] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Initial values of the named parameters and buffers of `meta_model`, on the host, unordered.

    A name in `parts` gives only that part of its tensor. Names of tied weights may be asked for,
    all or one. A process that asks for nothing still draws what the others do: the random
    generator is afterwards where the construction of the whole model would have left it.
    What was yielded is the caller's; nothing else is held, unless the model cannot be streamed
    (see `can_stream`): then the whole is on the host until the last value was taken.
    """
    parts = parts or {}
    if not can_stream(source, meta_model):
        values: Iterator[tuple[str, Tensor]] = _whole_values(source)
    elif source.weights is not None:
        values = _stored_values(source.weights, meta_model, names, parts)
    else:
        assert isinstance(meta_model, Decoder)
        values = _drawn_values(meta_model)
    aliases = _other_names(meta_model)
    missing = set(names)
    for name, value in values:
        for own in (name, *aliases.get(name, ())):
            if own in missing:
                missing.discard(own)
                part = parts.get(own)
                yield own, value if part is None or _is_cut(value, part) else value[part].clone()
        del value  # before the next one is made
    if missing:
        raise ConfigError(
            f"the model made anew lacks {', '.join(sorted(missing)[:8])}: model_init must make the "
            "same model each time"
        )


def _is_cut(value: Tensor, part: Part) -> bool:
    """Whether the part is all of the value: there is no more, or it was read as a part."""
    return tuple(value.shape) == tuple(one.stop - one.start for one in part)


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, under all of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _other_names(model: nn.Module) -> dict[str, list[str]]:
    """By name: the other names of the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in _named(model).items():
        groups.setdefault(id(tensor), []).append(name)
    return {
        name: [other for other in same if other != name]
        for same in groups.values()
        if len(same) > 1
        for name in same
    }


def _whole_values(source: Source) -> Iterator[tuple[str, Tensor]]:
    for name, value in _named(source.build()).items():
        yield name, value.detach()


def _drawn_values(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    for name, parameter, draw in model.initial_draws():
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        draw(value)
        yield name, value
        del value  # before the next one is made
    with torch.device("cpu"):
        table = RotaryTable(model.config)
    prefix = "model.rotary_emb"
    yield from ((f"{prefix}.{name}", buffer) for name, buffer in table.named_buffers())


# -- a Hugging Face folder ------------------------------------------------------------------


def blank_causal_lm(
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The model that `load_causal_lm` makes of a folder, on the meta device, without values."""
    config = read_hf_config(directory)
    if not is_supported_family(config):
        with torch.device("meta"):
            return _transformers_model(directory, dtype)
    values = from_hf_config(config).to_dict() | dict(config_overrides or {})
    check_fields(values)
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**values))
    stored = _stored_dtypes(Path(directory)) if dtype is None else {}
    for name, parameter in model.named_parameters():
        wanted = dtype or stored.get(name, parameter.dtype)
        if wanted != parameter.dtype:
            parameter.data = parameter.data.to(wanted)
    return model


def _transformers_model(directory: str | Path, dtype: torch.dtype | None) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise missing_extra("transformers", "transformers", f"loading {str(directory)!r}") from None
    config = AutoConfig.from_pretrained(str(directory))
    wanted = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=wanted)
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their buffers, but no memory for parameters."""
    plain: Callable[..., None] = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        plain(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def _open_files(folder: Path) -> Iterator[tuple[Path, Any]]:
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                yield path, file
        except SafetensorError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def _stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    from safetensors.torch import _getdtype

    return {
        name: _getdtype(file.get_slice(name).get_dtype())
        for _, file in _open_files(folder)
        for name in file.keys()  # noqa: SIM118 - safe_open has no __iter__
    }


def _is_stored(folder: Path, model: nn.Module) -> bool:
    """Whether the folder holds every tensor of the model's state under the name it has there."""
    found = {
        name: tuple(file.get_slice(name).get_shape())
        for _, file in _open_files(folder)
        for name in file.keys()  # noqa: SIM118
    }
    others = _other_names(model)
    lacking = [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not any(found.get(n) == tuple(tensor.shape) for n in (name, *others.get(name, ())))
    ]
    if lacking:
        logger.warning(
            "%s does not hold %s under that name and shape: every process builds the whole model",
            folder,
            lacking[0],
        )
    return not lacking


def _stored_values(
    folder: Path, model: nn.Module, names: Collection[str], parts: Mapping[str, Part]
) -> Iterator[tuple[str, Tensor]]:
    named, others = _named(model), _other_names(model)
    unstored = set(named) - set(model.state_dict())
    seen: set[str] = set()
    for _, file in _open_files(folder):
        for name in file.keys():  # noqa: SIM118
            same = (name, *others.get(name, ()))
            asked = [n for n in same if n in names]
            if not asked or name in unstored or seen.intersection(same):
                continue
            seen.update(same)
            part = parts.get(asked[0])
            if any(parts.get(other) != part for other in asked):
                part = None
            # A slice of a tensor without dimensions is not offered by the library.
            value = file.get_slice(name)[part] if part else file.get_tensor(name)
            yield name, value.to(named[name].dtype, copy=True)
    if unstored.intersection(names):
        yield from derived_buffers(folder, model)


def derived_buffers(folder: Path, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are in no state dict."""
    if isinstance(model, Decoder):
        with torch.device("cpu"):
            table = RotaryTable(model.config)
        for name, buffer in table.named_buffers():
            yield f"model.rotary_emb.{name}", buffer
        return
    with parameters_on_meta():
        skeleton = _transformers_model(folder, None)
    yield from skeleton.named_buffers()
