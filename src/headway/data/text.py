"""From text files and JSONL to token files, and a look at what a token file holds.

Owns: finding and reading documents, tokenising them into a file, summarising a token file.
Does not own: the file format (tokens) nor tokenizers (tokenizer).
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from headway.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from headway.data.tokens import MAGIC, TokenFile, TokenFileWriter
from headway.errors import ConfigError, not_there, unknown

logger = logging.getLogger(__name__)

FORMATS = ("text", "lines", "jsonl")
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
DAMAGED = "%d files are not text in UTF-8 throughout, what is not was replaced: %s"
_DOCUMENTS_PER_CHUNK = 256
_BINARY_PROBE_BYTES = 8192
_UNREADABLE = (OSError, EOFError, zlib.error)

Document = str | bytes
Encoded = list[int] | npt.NDArray[Any]
PathLike = str | os.PathLike[str]


@dataclass
class DocumentReader:
    """Yields the documents of files and folders, in a fixed order, and counts what it met.

    What is no text in UTF-8 is replaced where `as_text` asks for texts; else bytes stay as they
    are.
    """

    inputs: Sequence[PathLike]
    format: str | None = None
    text_key: str = "text"
    include: str | Sequence[str] | None = None
    as_text: bool = False
    option: str = "inputs"
    """What the user calls `inputs`."""
    num_files: int = 0
    num_bytes: int = 0
    skipped_files: list[str] = field(default_factory=list)
    """In folders: those that look binary, and pipes, sockets and devices."""
    damaged_files: list[str] = field(default_factory=list)
    """Those in which something was replaced."""

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(unknown("format", self.format, FORMATS))
        # An empty name is the current folder to a Path, and nobody means that by it.
        if not self.inputs or any(str(path) == "" for path in self.inputs):
            raise ConfigError(f"{self.option}: no file or folder was given")
        missing = [str(path) for path in self.inputs if not Path(path).exists()]
        if missing:
            raise ConfigError([f"{self.option}: {not_there(path)}" for path in missing])

    def __iter__(self) -> Iterator[Document]:
        for path in self._files():
            self.num_files += 1
            try:
                yield from self._read(path)
            except _UNREADABLE as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error

    def _read(self, path: Path) -> Iterator[Document]:
        kind = self.format or ("jsonl" if path.name.endswith(_JSONL_SUFFIXES) else "text")
        if kind == "jsonl":
            yield from self._read_jsonl(path)
        elif kind == "lines":
            yield from self._read_lines(path)
        else:
            with _open(path) as file:
                raw = file.read()
            if raw.startswith(MAGIC):
                raise ConfigError(
                    f"{self.option}: {path} is a token file, not a text; TokenDataset(paths=...) "
                    "reads it"
                )
            self.num_bytes += len(raw)
            yield self._decoded(raw, path)

    def _decoded(self, raw: bytes, path: Path) -> Document:
        if not self.as_text:
            return raw
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._note_damage(path)
            return raw.decode(errors="replace")

    def _note_damage(self, path: Path) -> None:
        if str(path) not in self.damaged_files[-1:]:  # files are read one after the other
            self.damaged_files.append(str(path))

    def _files(self) -> Iterator[Path]:
        found = False
        for given in self.inputs:
            path = Path(given)
            for file in sorted(_walk(path)) if path.is_dir() else [path]:
                if path.is_dir() and not self._wanted(file, path):
                    continue
                found = True
                yield file
        if not found:
            pattern = "" if self.include is None else f" matching {self.include!r}"
            raise ConfigError(
                f"{self.option}: no readable text file{pattern} in {_join(self.inputs)}"
            )

    def _wanted(self, file: Path, root: Path) -> bool:
        if self.include is not None:
            patterns = [self.include] if isinstance(self.include, str) else self.include
            relative = file.relative_to(root).as_posix()
            if not any(
                fnmatch.fnmatch(file.name, pattern) or fnmatch.fnmatch(relative, pattern)
                for pattern in patterns
            ):
                return False
        # A folder may hold anything; a file named by the user is taken at their word.
        if file.exists() and not file.is_file():  # a pipe would be waited for without end
            self.skipped_files.append(str(file))
            return False
        try:
            with _open(file) as probe:
                looks_binary = b"\0" in probe.read(_BINARY_PROBE_BYTES)
        except _UNREADABLE as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        if looks_binary:
            self.skipped_files.append(str(file))
        return not looks_binary

    def _read_lines(self, path: Path) -> Iterator[Document]:
        with _open(path) as file:
            for line in file:
                self.num_bytes += len(line)
                stripped = line.rstrip(b"\r\n")
                if stripped:
                    yield self._decoded(stripped, path)

    def _read_jsonl(self, path: Path) -> Iterator[str]:
        for number, record in read_jsonl(path):
            text = record.get(self.text_key)
            if not isinstance(text, str):
                raise ConfigError(
                    f"{path}:{number}: text_key {self.text_key!r} is "
                    + (
                        f"{type(text).__name__}, not a string"
                        if self.text_key in record
                        else "missing"
                    )
                    + f"; this record has: {', '.join(sorted(record)) or 'no keys'}"
                )
            whole = repair_text(text)
            if whole is not text:
                self._note_damage(path)
            self.num_bytes += len(whole.encode())
            yield whole


def repair_text(text: str) -> str:
    """The text itself, or where JSON's escapes left halves of characters, one with these replaced.

    No tokenizer takes them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def list_some(files: Sequence[str], most: int = 5) -> str:
    """The first of many names."""
    return ", ".join(files[:most]) + ", ..." * (len(files) > most)


def read_jsonl(path: PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line number and the object of every non-blank line of a (gzipped) JSONL file."""
    with _open(Path(path)) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # the latter of lists in lists in lists
                raise ConfigError(f"{path}:{number}: not valid JSON ({error})") from None
            if not isinstance(record, dict):
                raise ConfigError(
                    f"{path}:{number}: a JSON object is needed, found {type(record).__name__}"
                )
            yield number, record


def prepare_tokens(
    inputs: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    tokenizer: Any = "bytes",
    format: str | None = None,
    text_key: str = "text",
    include: str | Sequence[str] | None = None,
    eos: bool = True,
    num_workers: int = 1,
) -> dict[str, Any]:
    """Tokenise text files, folders and JSONL into one token file; returns what was counted.

    A text file is one document (`format="lines"`: every line is one); a JSONL record is one.
    Nothing is written under `output` unless everything succeeded.
    """
    began = time.monotonic()
    if num_workers < 1:
        raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
    coder = load_tokenizer(tokenizer)
    if eos and coder.eos_token_id is None:
        raise ConfigError(f"eos: tokenizer {coder.name!r} has no end-of-text token; use eos=False")
    paths = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    reader = DocumentReader(
        paths,
        format=format,
        text_key=text_key,
        include=include,
        as_text=not isinstance(coder, ByteTokenizer),
    )
    with TokenFileWriter(output, tokenizer=coder) as writer:
        for encoded in _encode_all(coder, reader, eos, num_workers):
            writer.add_documents(encoded)
    return {
        "output": str(output),
        "num_files": reader.num_files,
        "num_documents": writer.num_documents,
        "num_tokens": writer.num_tokens,
        "num_text_bytes": reader.num_bytes,
        "file_bytes": Path(output).stat().st_size,
        "dtype": writer.dtype,
        "tokenizer": coder.name,
        "skipped_files": reader.skipped_files,
        "damaged_files": reader.damaged_files,
        "elapsed_s": time.monotonic() - began,
    }


def encode_documents(coder: Tokenizer, documents: Sequence[Document], eos: bool) -> list[Encoded]:
    """Token ids of documents; bytes that are not UTF-8 reach only the byte tokenizer unchanged."""
    given = [document for document in documents if document]
    whole = [repair_text(one) if isinstance(one, str) else one for one in given]
    num_repaired = sum(one is not other for one, other in zip(given, whole))
    if num_repaired:
        logger.warning("%d texts hold halves of characters, which were replaced", num_repaired)
    if isinstance(coder, ByteTokenizer):
        return [coder.encode_array(document, eos) for document in whole]
    texts = [
        document.decode("utf-8", "replace") if isinstance(document, bytes) else document
        for document in whole
    ]
    return list(coder.encode_batch(texts, add_eos=eos))


def inspect_tokens(path: PathLike, tokenizer: Any = None, num_samples: int = 1) -> dict[str, Any]:
    """What a token file holds: counts, id range, document lengths, its first documents."""
    file = TokenFile(path)
    lengths = np.diff(file.document_offsets)
    described = file.header.get("tokenizer")
    if tokenizer is None and described and described.get("name") == "bytes":
        tokenizer = "bytes"
    coder = None if tokenizer is None else load_tokenizer(tokenizer)
    samples = []
    for number in range(min(num_samples, file.num_documents)):
        ids = file.document(number)[:256].tolist()
        samples.append({"ids": ids[:32], "text": None if coder is None else coder.decode(ids)})
    quantiles = np.quantile(lengths, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
    return {
        "path": str(file.path),
        "file_bytes": file.path.stat().st_size,
        "dtype": file.header["dtype"],
        "num_tokens": file.num_tokens,
        "num_documents": file.num_documents,
        "min_token_id": int(file.tokens.min()),
        "max_token_id": file.max_token_id,
        "tokenizer": described,
        "tokenizer_matches": (
            None if coder is None or not described else coder.digest == described.get("digest")
        ),
        "eos_token_id": file.header.get("eos_token_id"),
        "created_by": file.header.get("created_by"),
        "document_tokens": {
            "mean": float(lengths.mean()),
            **dict(zip(("min", "p5", "p25", "p50", "p75", "p95", "max"), map(float, quantiles))),
        },
        "samples": samples,
    }


def _walk(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield Path(directory, name)


def _open(path: Path) -> IO[bytes]:
    try:
        return cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else open(path, "rb"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _join(paths: Iterable[PathLike]) -> str:
    return ", ".join(map(str, paths))


def _encode_all(
    coder: Tokenizer, documents: Iterable[Document], eos: bool, num_workers: int
) -> Iterator[list[Encoded]]:
    chunks = iter(documents)
    if num_workers == 1:
        while chunk := list(islice(chunks, _DOCUMENTS_PER_CHUNK)):
            yield encode_documents(coder, chunk, eos)
        return
    import multiprocessing
    from concurrent.futures import Future, ProcessPoolExecutor

    # Forking a process that runs tokenizer threads can deadlock its children.
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[list[Encoded]]] = deque()
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        while chunk := list(islice(chunks, _DOCUMENTS_PER_CHUNK)):
            pending.append(pool.submit(encode_documents, coder, chunk, eos))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
