"""Token files (`.hwt`): token ids on disk, memory-mapped, with their document boundaries.

Owns: the format (docs/data.md has it byte for byte), its writer, its reader and their checks.
Does not own: how text becomes ids (text, tokenizer) nor how ids become samples (packing, datasets).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import headway
from headway.data.arrayfile import AtomicFile, MappedFile, align, encode_header
from headway.errors import ConfigError, unknown

MAGIC = b"HWTOKENS"
FORMAT_VERSION = 1
SUFFIX = ".hwt"
DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4}
_RESERVED_BYTES = 4096
_DIGEST_CHUNK_TOKENS = 1 << 22

TokenArray = npt.NDArray[Any]


def dtype_for(vocab_size: int) -> str:
    """The smallest token type that holds ids below `vocab_size`."""
    for name, width in DTYPES.items():
        if vocab_size <= 1 << (8 * width):
            return name
    raise ConfigError(f"vocab_size {vocab_size} does not fit a token file (at most 2**32)")


class TokenFileWriter:
    """Writes a token file document by document; the file appears only when it is complete.

    Use it as a context manager: an exception inside leaves nothing behind.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        tokenizer: Any = None,
        eos_token_id: int | None = None,
    ) -> None:
        _refuse_other_file(Path(path))
        described = describe_tokenizer(tokenizer)
        if dtype is None:
            dtype = dtype_for(described["vocab_size"]) if described else "uint32"
        if dtype not in DTYPES:
            raise ConfigError(unknown("dtype", dtype, DTYPES))
        if eos_token_id is None:
            eos_token_id = getattr(tokenizer, "eos_token_id", None)
        self.dtype = dtype
        self.eos_token_id = eos_token_id
        self.num_tokens = 0
        self._tokenizer = described
        self._limit = 1 << (8 * DTYPES[dtype])
        self._max_token_id = -1
        self._offsets = array("q", [0])
        self._digest = xxhash.xxh3_128()
        self._output: AtomicFile | None = AtomicFile(path)
        self._output.file.write(b"\0" * _RESERVED_BYTES)

    @property
    def num_documents(self) -> int:
        return len(self._offsets) - 1

    def add_document(self, ids: Sequence[int] | TokenArray) -> None:
        """Append one document; an empty one is skipped."""
        if self._output is None:
            raise ConfigError("this token file is already closed")
        tokens = np.asarray(ids)
        if tokens.size == 0:
            return
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ConfigError(
                f"a document must be a flat sequence of integer ids, got {tokens.dtype} "
                f"of shape {tokens.shape}"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._limit:
            bad = low if low < 0 else high
            raise ConfigError(
                f"token id {bad} in document {self.num_documents} does not fit {self.dtype} "
                f"(0..{self._limit - 1})"
            )
        raw = tokens.astype(f"<u{DTYPES[self.dtype]}").tobytes()
        self._output.file.write(raw)
        self._digest.update(raw)
        self._max_token_id = max(self._max_token_id, high)
        self.num_tokens += tokens.size
        self._offsets.append(self.num_tokens)

    def add_documents(self, documents: Iterable[Sequence[int] | TokenArray]) -> None:
        """Append several documents."""
        for ids in documents:
            self.add_document(ids)

    def close(self) -> None:
        """Finish the file and give it its name. Without a single token it is refused."""
        if self._output is None:
            return
        try:
            self._finish(self._output)
        except BaseException:
            self.discard()
            raise
        self._output = None

    def discard(self) -> None:
        """Give up: nothing is left behind."""
        if self._output is not None:
            self._output.discard()
            self._output = None

    def _finish(self, output: AtomicFile) -> None:
        if self.num_tokens == 0:
            raise ConfigError(f"no tokens to write to {output.path}: the input is empty")
        offsets = np.frombuffer(self._offsets, dtype=np.int64).astype("<i8").tobytes()
        header = {
            "dtype": self.dtype,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "max_token_id": self._max_token_id,
            "tokenizer": self._tokenizer,
            "eos_token_id": self.eos_token_id,
            "created_by": f"headway {headway.__version__}",
            "digests": {
                "algorithm": "xxh3_128",
                "tokens": self._digest.hexdigest(),
                "document_offsets": xxhash.xxh3_128_hexdigest(offsets),
            },
        }
        prefix = encode_header(MAGIC, FORMAT_VERSION, header, reserved_bytes=_RESERVED_BYTES)
        if len(prefix) > _RESERVED_BYTES:
            raise ConfigError(f"the tokenizer's description is too long for {output.path}")
        end = output.file.tell()
        output.file.write(b"\0" * (align(end) - end))
        output.file.write(offsets)
        output.file.seek(0)
        output.file.write(prefix)
        output.commit()

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _refuse_other_file(path: Path) -> None:
    """A name that was mistyped may be that of a text which is about to be read."""
    if not path.exists() or path.is_dir():
        return
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) in (MAGIC, b""):
                return
    raise ConfigError(f"{path} exists and is no token file; it is kept, choose another name")


class TokenFile:
    """A token file opened for reading; its arrays are views of the memory mapping.

    Opening checks the structure only, whatever the size; `verify` reads everything.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open()

    def _open(self) -> None:
        mapped = MappedFile(self.path, magic=MAGIC, version=FORMAT_VERSION, kind="token file")
        dtype = mapped.field("dtype", str)
        if dtype not in DTYPES:
            raise mapped.problem(unknown("dtype", dtype, DTYPES))
        self.num_tokens: int = mapped.field("num_tokens", int)
        self.num_documents: int = mapped.field("num_documents", int)
        mapped.field("digests", dict)
        if self.num_tokens < 1 or self.num_documents < 1:
            raise mapped.problem("it holds no tokens")
        tokens_end = mapped.data_start + self.num_tokens * DTYPES[dtype]
        offsets_start = align(tokens_end)
        mapped.check_size(offsets_start + 8 * (self.num_documents + 1))
        self.header: dict[str, Any] = mapped.header
        self.tokens: TokenArray = mapped.array(
            f"<u{DTYPES[dtype]}", mapped.data_start, self.num_tokens
        )
        self.document_offsets: npt.NDArray[np.int64] = mapped.array(
            "<i8", offsets_start, self.num_documents + 1
        )
        first, last = int(self.document_offsets[0]), int(self.document_offsets[-1])
        if first != 0 or last != self.num_tokens:
            raise mapped.problem(
                f"its document offsets run from {first} to {last}, not from 0 to {self.num_tokens}"
            )
        self._mapped = mapped

    @property
    def num_bytes(self) -> int:
        """The size of tokens and document offsets."""
        return int(self.tokens.nbytes + self.document_offsets.nbytes)

    @property
    def digest(self) -> str:
        """Identifies tokens and document boundaries, from the header alone."""
        digests = self.header["digests"]
        joined = f"{digests.get('tokens')}:{digests.get('document_offsets')}"
        return xxhash.xxh3_128_hexdigest(joined.encode())

    @property
    def max_token_id(self) -> int:
        """The largest id in the file."""
        stored = self.header.get("max_token_id")
        return stored if isinstance(stored, int) else int(self.tokens.max())

    def document(self, number: int) -> TokenArray:
        """The ids of one document."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} is outside 0..{self.num_documents - 1}")
        start, end = self.document_offsets[number : number + 2]
        return self.tokens[start:end]

    def verify(self) -> None:
        """Read everything and compare with the digests; raises ConfigError on any difference."""
        digest = xxhash.xxh3_128()
        for start in range(0, self.num_tokens, _DIGEST_CHUNK_TOKENS):
            digest.update(self.tokens[start : start + _DIGEST_CHUNK_TOKENS].tobytes())
        found = {
            "tokens": digest.hexdigest(),
            "document_offsets": xxhash.xxh3_128_hexdigest(self.document_offsets.tobytes()),
        }
        for name, value in found.items():
            stored = self.header["digests"].get(name)
            if stored != value:
                raise self._mapped.problem(
                    f"the digest of its {name} is {value}, its header says {stored}"
                )
        if np.any(np.diff(self.document_offsets) <= 0):
            raise self._mapped.problem("its document offsets do not increase")
        if int(self.tokens.max()) != self.max_token_id:
            raise self._mapped.problem("its largest token id is not the one in its header")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._open()
        if self.digest != state["digest"]:
            raise self._mapped.problem("it was replaced by another file while in use")

    def __repr__(self) -> str:
        return (
            f"TokenFile({str(self.path)!r}, num_tokens={self.num_tokens}, "
            f"num_documents={self.num_documents}, dtype={self.header['dtype']!r})"
        )


def describe_tokenizer(tokenizer: Any) -> dict[str, Any] | None:
    """What a token file remembers of its tokenizer: name, vocabulary size, digest."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, dict):
        missing = {"name", "vocab_size", "digest"} - tokenizer.keys()
        if missing:
            raise ConfigError(f"the tokenizer's description lacks {', '.join(sorted(missing))}")
        return {key: tokenizer[key] for key in ("name", "vocab_size", "digest")}
    return {
        "name": str(tokenizer.name),
        "vocab_size": int(tokenizer.vocab_size),
        "digest": str(tokenizer.digest),
    }
