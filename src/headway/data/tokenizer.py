"""Tokenizers: the built-in byte tokenizer, and one face for those of other libraries.

Owns: `ByteTokenizer`, `load_tokenizer` and the adapters it returns.
Does not own: training a vocabulary, nor where ids are stored (tokens).
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from headway.errors import ConfigError, missing_extra, unknown

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


@runtime_checkable
class Tokenizer(Protocol):
    """What Headway needs of a tokenizer."""

    name: str
    vocab_size: int
    eos_token_id: int | None
    pad_token_id: int | None

    @property
    def digest(self) -> str: ...
    def encode(self, text: str, add_eos: bool = False) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], add_eos: bool = False) -> list[list[int]]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def save_pretrained(self, directory: str | os.PathLike[str]) -> None: ...


class ByteTokenizer:
    """Every byte is its own token: ids 0..255 are bytes, 256 ends a text, 257 pads."""

    name = "bytes"
    eos_token_id: int | None = 256
    pad_token_id: int | None = 257
    vocab_size = 258

    @property
    def digest(self) -> str:
        return _digest(_byte_level_model())

    def encode(self, text: str | bytes, add_eos: bool = False) -> list[int]:
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return [*raw, 256] if add_eos else list(raw)

    def encode_batch(self, texts: Sequence[str | bytes], add_eos: bool = False) -> list[list[int]]:
        return [self.encode(text, add_eos) for text in texts]

    def encode_array(self, text: str | bytes, add_eos: bool = False) -> npt.NDArray[np.uint16]:
        """The same ids as an array, without a Python object for every byte."""
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        ids = np.empty(len(raw) + add_eos, dtype=np.uint16)
        ids[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
        ids[len(raw) :] = 256
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; end-of-text, padding and unused ids are left out."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", "replace")

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer files that `transformers` and `tokenizers` load too."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": PADDING,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
            "model_max_length": 1_000_000_000,
        }
        for name, content in (
            ("tokenizer.json", _byte_level_model()),
            ("tokenizer_config.json", settings),
        ):
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")

    def __len__(self) -> int:
        return self.vocab_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteTokenizer)

    def __hash__(self) -> int:
        return hash(ByteTokenizer)

    def __repr__(self) -> str:
        return "ByteTokenizer()"


class FastTokenizer:
    """A `tokenizers.Tokenizer` behind the common face."""

    def __init__(
        self,
        core: Any,
        *,
        name: str = "tokenizer",
        eos_token: str | None = None,
        pad_token: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """`files` are those that lay beside its tokenizer.json, and are to lie beside it again."""
        # A file may ask for texts to be cut and padded: meant for batches of a model, not for data.
        core = type(core).from_str(core.to_str())
        core.no_truncation()
        core.no_padding()
        self._core, self._files = core, dict(files or {})
        self.name = name
        self.vocab_size = int(core.get_vocab_size(with_added_tokens=True))
        self.digest = _digest(json.loads(core.to_str()))
        self._eos_token = eos_token if eos_token is not None else self._find(_END_NAMES)
        self._pad_token = pad_token if pad_token is not None else self._find(_PAD_NAMES)
        self.eos_token_id: int | None = self._id_of(self._eos_token)
        self.pad_token_id: int | None = self._id_of(self._pad_token)

    def _find(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if self._core.token_to_id(name) is not None), None)

    def _id_of(self, token: str | None) -> int | None:
        found = None if token is None else self._core.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, add_eos: bool = False) -> list[int]:
        return self.encode_batch([text], add_eos)[0]

    def encode_batch(self, texts: Sequence[str], add_eos: bool = False) -> list[list[int]]:
        encoded = self._core.encode_batch(list(texts), add_special_tokens=False)
        return _finish([list(item.ids) for item in encoded], self, add_eos)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._core.decode([int(i) for i in ids], skip_special_tokens=True))

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._core.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._eos_token,
            "pad_token": self._pad_token,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps({k: v for k, v in settings.items() if v is not None}, indent=2)
        for name, data in {_SETTINGS: (text + "\n").encode(), **self._files}.items():
            (folder / name).write_bytes(data)

    def __len__(self) -> int:
        return self.vocab_size


class TransformersTokenizer:
    """A `transformers` tokenizer behind the common face."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.name = str(core.name_or_path or type(core).__name__)
        self.vocab_size = len(core)
        self.eos_token_id: int | None = core.eos_token_id
        self.pad_token_id: int | None = core.pad_token_id
        backend = getattr(core, "backend_tokenizer", None)
        self.digest = _digest(
            json.loads(backend.to_str())
            if backend is not None
            else {"class": type(core).__name__, "vocabulary": core.get_vocab()}
        )

    def encode(self, text: str, add_eos: bool = False) -> list[int]:
        return self.encode_batch([text], add_eos)[0]

    def encode_batch(self, texts: Sequence[str], add_eos: bool = False) -> list[list[int]]:
        encoded = self.core(list(texts), add_special_tokens=False, verbose=False)
        return _finish([list(ids) for ids in encoded["input_ids"]], self, add_eos)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.core.decode([int(i) for i in ids], skip_special_tokens=True))

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        self.core.save_pretrained(str(directory))

    def __len__(self) -> int:
        return self.vocab_size


_SETTINGS = "tokenizer_config.json"
_BESIDE = (_SETTINGS, "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_END_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
_PAD_NAMES = (PADDING, "<pad>", "[PAD]")


def load_tokenizer(spec: Any) -> Tokenizer:
    """A tokenizer from "bytes", a folder, a tokenizer.json, or an object of another library."""
    if isinstance(spec, (ByteTokenizer, FastTokenizer, TransformersTokenizer)):
        return spec
    if isinstance(spec, str) and spec in ("bytes", "byte"):
        return ByteTokenizer()
    if isinstance(spec, (str, os.PathLike)):
        return _load_path(Path(spec))
    module = type(spec).__module__.partition(".")[0]
    if module == "tokenizers":
        return FastTokenizer(spec)
    if hasattr(spec, "convert_tokens_to_ids") and hasattr(spec, "save_pretrained"):
        return TransformersTokenizer(spec)
    if isinstance(spec, Tokenizer):
        return spec
    raise ConfigError(
        f"tokenizer {spec!r} is not understood; allowed: 'bytes', a folder with tokenizer.json, "
        "a tokenizer.json file, a tokenizers.Tokenizer or a transformers tokenizer"
    )


def _load_path(path: Path) -> Tokenizer:
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not path.exists():
        raise ConfigError(
            f"{unknown('tokenizer', str(path), ['bytes'])}, a folder or a tokenizer.json file "
            "(there is no such path)"
        )
    if not file.is_file():
        if path.is_dir() and (path / "tokenizer_config.json").is_file():
            return _load_with_transformers(path)
        raise ConfigError(f"tokenizer folder {path} holds no tokenizer.json")
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenizer file {file} is not JSON: {error}") from None
    if _is_byte_level(model):
        return ByteTokenizer()
    if importlib.util.find_spec("tokenizers") is None:
        raise missing_extra("tokenizers", "tokenizers", f"the tokenizer file {file}")
    from tokenizers import Tokenizer as Core

    try:
        core = Core.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"tokenizer file {file} cannot be loaded: {error}") from None
    settings = _read_settings(folder)
    return FastTokenizer(
        core,
        name=folder.resolve().name,
        eos_token=_token_text(settings.get("eos_token")),
        pad_token=_token_text(settings.get("pad_token")),
        files={p.name: p.read_bytes() for p in map(folder.joinpath, _BESIDE) if p.is_file()},
    )


def _load_with_transformers(path: Path) -> Tokenizer:
    if importlib.util.find_spec("transformers") is None:
        raise missing_extra("transformers", "transformers", f"the slow tokenizer in {path}")
    from transformers import AutoTokenizer

    try:
        return TransformersTokenizer(AutoTokenizer.from_pretrained(str(path)))
    except Exception as error:
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from None


def _read_settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenizer settings {file} are not JSON: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _finish(batch: list[list[int]], tokenizer: Tokenizer, add_eos: bool) -> list[list[int]]:
    if add_eos:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name!r} has no end-of-text token; "
                "set eos_token in its tokenizer_config.json or prepare without one"
            )
        for ids in batch:
            ids.append(tokenizer.eos_token_id)
    return batch


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode("ascii"))


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in the byte-level alphabet of GPT-2.

    Printable Latin-1 characters stand for themselves, the others for code points from 256 up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _is_byte_level(model: Any) -> bool:
    """Whether a tokenizer.json encodes as ByteTokenizer does, whoever wrote the file."""
    if not isinstance(model, dict):
        return False
    ours = _byte_level_model()

    def facts(content: dict[str, Any]) -> tuple[Any, ...]:
        core, splitter = content.get("model") or {}, content.get("pre_tokenizer") or {}
        return (
            [(token["id"], token["content"]) for token in content.get("added_tokens") or []],
            (core.get("type"), core.get("vocab"), core.get("merges")),
            [splitter.get(key) for key in ("type", "add_prefix_space", "use_regex")],
            content.get("normalizer"),
        )

    return facts(model) == facts(ours)


def _byte_level_model() -> dict[str, Any]:
    def special(number: int, text: str) -> dict[str, Any]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"id": number, "content": text, **flags, "special": True}

    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_alphabet())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special(256, END_OF_TEXT), special(257, PADDING)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
