"""Tensors on the wire: a checked header, then raw bytes. Nothing is ever unpickled.

Owns: the format of a body (docs/diloco-protocol.md has it byte for byte), writing it in chunks, and
reading it in chunks with every check made before memory is taken. Does not own: what dtypes mean
(compression.py), who may send it (server.py). It needs no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from headway.diloco.specification import MOST_TENSORS, canonical_json
from headway.errors import ConfigError

MAGIC = b"HWDL"
VERSION = 1
CONTENT_TYPE = "application/x-headway-tensors"
INT8_BLOCK = 4096
"""Elements that share one scale."""
MOST_HEADER_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
_PREFIX = struct.Struct("<4sHI")
_MOST_META_KEYS = 32
_MOST_META_CHARACTERS = 1024


class WireError(Exception):
    """A body that cannot be taken: an HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def count_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor on the wire."""
    num_elements = math.prod(shape)
    if dtype == "int8":
        return num_elements + 4 * -(-num_elements // INT8_BLOCK)
    return num_elements * {"float32": 4, "bfloat16": 2}[dtype]


WIRE_DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class Payload:
    """A tensor's bytes, little-endian. int8: the float32 scales of its blocks, then its values."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        assert self.data.nbytes == count_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Message:
    """A body, ready to be sent any number of times."""

    head: bytes = field(repr=False)
    """Everything before the first tensor's bytes."""
    digest: str
    """Of the header, which has the digests of all tensors: the identity of the whole body."""
    payloads: tuple[Payload, ...] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(payload.data.nbytes for payload in self.payloads)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The body, in pieces of at most `CHUNK_BYTES` after the first."""
        yield self.head
        for payload in self.payloads:
            view = payload.data.cast("B") if payload.data.nbytes else payload.data
            for begin in range(0, payload.data.nbytes, CHUNK_BYTES):
                yield view[begin : begin + CHUNK_BYTES]


def compose(meta: Mapping[str, Any], payloads: Mapping[str, Payload]) -> Message:
    """A body with these tensors, in their order."""
    header: dict[str, Any] = {
        "meta": dict(meta),
        "tensors": [
            {
                "name": name,
                "dtype": payload.dtype,
                "shape": list(payload.shape),
                "length": payload.data.nbytes,
                "digest": xxhash.xxh3_128_hexdigest(payload.data),
            }
            for name, payload in payloads.items()
        ],
    }
    _check_meta(header["meta"])
    header["digest"] = xxhash.xxh3_128_hexdigest(canonical_json(header))
    text = canonical_json(header)
    if len(text) > MOST_HEADER_BYTES or len(payloads) > MOST_TENSORS:
        raise ConfigError(
            f"{len(payloads)} tensors need a header of {len(text)} bytes; allowed: {MOST_TENSORS} "
            f"tensors in {MOST_HEADER_BYTES} bytes (more fragments have fewer each)"
        )
    head = _PREFIX.pack(MAGIC, VERSION, len(text)) + text
    return Message(head, header["digest"], tuple(payloads.values()))


@dataclass(frozen=True)
class Header:
    """What a body says of itself, checked against what was expected."""

    meta: dict[str, Any]
    digest: str
    tensors: dict[str, tuple[str, tuple[int, ...], int, str]]
    """dtype, shape, length in bytes and digest by name, in order."""

    @property
    def num_bytes(self) -> int:
        """Bytes that follow the header."""
        return sum(length for _, _, length, _ in self.tensors.values())


class Reader:
    """Takes a body in chunks as they come; `finish` when there are no more.

    It has to hold exactly the tensors of `shapes`, in that order, all in one of `dtypes`. Once the
    header is whole and right, `on_header` is called, which may still refuse; then memory is taken
    for the first tensor, and so on. With a `sink` none is taken: it gets every byte of the body,
    from the first one on, and `payloads` stays empty.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtypes: Sequence[str] = WIRE_DTYPES,
        on_header: Callable[[Header], None] | None = None,
        sink: Callable[[bytes | memoryview], object] | None = None,
    ) -> None:
        self._shapes, self._dtypes = shapes, tuple(dtypes)
        self._on_header, self._sink = on_header, sink
        names = sum(len(name.encode()) for name in shapes)
        # No honest header is longer: a name takes at most 6 bytes for each of its own.
        self._most_header = min(MOST_HEADER_BYTES, (64 << 10) + 6 * names + 640 * len(shapes))
        self._begun = bytearray()
        self.header: Header | None = None
        self._left: list[str] = []
        self._view: memoryview | None = None
        self._length = self._filled = 0
        self._hasher = xxhash.xxh3_128()
        self.payloads: dict[str, Payload] = {}

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the body."""
        if self.header is None:
            # As much as the header can still need is looked at; the rest stays where it is.
            taken = min(len(data), _PREFIX.size + self._most_header - len(self._begun))
            self._begun += data[:taken]
            end = self._find_header_end()
            if end is None:
                return
            rest = bytes(self._begun[end:])
            self._read_header(bytes(self._begun[_PREFIX.size : end]))
            if self._sink is not None:
                self._sink(bytes(self._begun[:end]))
            self._begun = bytearray()
            self._fill(memoryview(rest))
            data = data[taken:]
        self._fill(memoryview(data))

    def finish(self) -> Header:
        """The header, once every tensor has come and is what its digest says."""
        if self.header is None:
            raise WireError(400, "the body ends inside its header")
        if self._left:
            raise WireError(400, f"the body ends before all of {self._left[-1]!r} has come")
        return self.header

    # -- header ---------------------------------------------------------------------------------

    def _find_header_end(self) -> int | None:
        begun = self._begun
        if begun[:4] != MAGIC[: len(begun)]:
            raise WireError(400, f"a body begins with {MAGIC!r}")
        if len(begun) < _PREFIX.size:
            return None
        _, version, length = _PREFIX.unpack_from(begun)
        if version != VERSION:
            raise WireError(426, f"the body has version {version}; this end reads {VERSION}")
        if length > self._most_header:
            raise WireError(413, f"the header has {length} bytes; at most {self._most_header}")
        end = _PREFIX.size + int(length)
        return end if len(begun) >= end else None

    def _read_header(self, text: bytes) -> None:
        if text.count(b"{") + text.count(b"[") > 4 * len(self._shapes) + 256:
            raise WireError(400, "the header holds more lists and objects than it can need")
        try:
            said = json.loads(text.decode("ascii"), parse_constant=_refuse_constant)
            whole = canonical_json(said) == text
        except (ValueError, RecursionError):
            raise WireError(400, "the header is not JSON") from None
        if not whole:
            raise WireError(400, "the header is not in its canonical form")
        if not isinstance(said, dict) or set(said) != {"meta", "tensors", "digest"}:
            raise WireError(400, "a header has the keys meta, tensors and digest")
        digest = said.pop("digest")
        if digest != xxhash.xxh3_128_hexdigest(canonical_json(said)):
            raise WireError(400, "the header is not what its digest says")
        _check_meta(said["meta"])
        header = Header(said["meta"], digest, self._check_tensors(said["tensors"]))
        if self._on_header is not None:
            self._on_header(header)
        self.header, self._left = header, list(reversed(header.tensors))
        self._begin_tensor()

    def _check_tensors(self, said: Any) -> dict[str, tuple[str, tuple[int, ...], int, str]]:
        if not isinstance(said, list) or len(said) > MOST_TENSORS:
            raise WireError(400, f"tensors is a list of at most {MOST_TENSORS}")
        found: dict[str, tuple[str, tuple[int, ...], int, str]] = {}
        for item, wanted in zip(said, self._shapes):
            if not isinstance(item, dict) or set(item) != _TENSOR_KEYS:
                raise WireError(400, f"a tensor has the keys {', '.join(sorted(_TENSOR_KEYS))}")
            if item["name"] != wanted:
                raise WireError(422, f"{wanted!r} is due, not {str(item['name'])[:80]!r}")
            shape, dtype = self._shapes[wanted], item["dtype"]
            if item["shape"] != list(shape) or any(type(n) is not int for n in item["shape"]):
                raise WireError(422, f"{wanted}: its shape is {list(shape)}, not what was sent")
            if dtype not in self._dtypes:
                raise WireError(422, f"{wanted}: its dtype must be {' or '.join(self._dtypes)}")
            length = count_bytes(dtype, shape)
            if type(item["length"]) is not int or item["length"] != length:
                raise WireError(422, f"{wanted}: {dtype} of that shape has {length} bytes")
            if not isinstance(item["digest"], str) or len(item["digest"]) != 32:
                raise WireError(400, f"{wanted}: its digest has 32 hexadecimal digits")
            found[wanted] = (dtype, shape, length, item["digest"])
        if len(said) != len(self._shapes):
            raise WireError(422, f"{len(self._shapes)} tensors are due, not {len(said)}")
        return found

    # -- tensors --------------------------------------------------------------------------------

    def _begin_tensor(self) -> None:
        assert self.header is not None
        while self._left:
            name = self._left[-1]
            dtype, shape, self._length, _ = self.header.tensors[name]
            if self._sink is None:
                self._view = memoryview(bytearray(self._length))
                self.payloads[name] = Payload(dtype, shape, self._view)
            self._filled = 0
            self._hasher.reset()
            if self._length:
                return
            self._end_tensor()

    def _fill(self, data: memoryview) -> None:
        while data.nbytes:
            if not self._left:
                raise WireError(400, "the body goes on after its last tensor")
            part = data[: self._length - self._filled]
            if self._sink is not None:
                self._sink(part)
            elif self._view is not None:
                self._view[self._filled : self._filled + part.nbytes] = part
            self._hasher.update(part)
            self._filled += part.nbytes
            data = data[part.nbytes :]
            if self._filled == self._length:
                self._end_tensor()
                self._begin_tensor()

    def _end_tensor(self) -> None:
        assert self.header is not None
        name = self._left.pop()
        if self._hasher.hexdigest() != self.header.tensors[name][3]:
            raise WireError(400, f"{name}: its bytes are not what its digest says")


def slice_body(
    body: memoryview, shapes: Mapping[str, tuple[int, ...]], *, verify: bool = False
) -> tuple[Header, dict[str, Payload]]:
    """Header and tensors of a whole body, which keep its memory; `verify` looks at the digests."""
    reader = Reader(shapes)
    if body.nbytes < _PREFIX.size:
        raise WireError(400, "the body ends inside its header")
    begin = _PREFIX.size + _PREFIX.unpack_from(body)[2]
    reader.feed(body[:begin])
    if reader.header is None or begin + reader.header.num_bytes != body.nbytes:
        raise WireError(400, "the body has not the length that its header says")
    payloads: dict[str, Payload] = {}
    for name, (dtype, shape, length, digest) in reader.header.tensors.items():
        payloads[name] = Payload(dtype, shape, body[begin : begin + length])
        if verify and xxhash.xxh3_128_hexdigest(payloads[name].data) != digest:
            raise WireError(400, f"{name}: its bytes are not what its digest says")
        begin += length
    return reader.header, payloads


_TENSOR_KEYS = {"name", "dtype", "shape", "length", "digest"}


def _check_meta(meta: Any) -> None:
    if not isinstance(meta, dict) or len(meta) > _MOST_META_KEYS:
        raise WireError(400, f"meta is an object of at most {_MOST_META_KEYS} keys")
    for key, value in meta.items():
        simple = value is None or isinstance(value, str | int | float)
        if not simple or len(key) > 64 or len(str(value)) > _MOST_META_CHARACTERS:
            raise WireError(400, f"meta holds short texts and numbers; {key[:64]!r} is neither")


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
