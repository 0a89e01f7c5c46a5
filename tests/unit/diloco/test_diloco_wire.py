"""Tensors on the wire: what is written is read, and everything else is refused before memory."""

from __future__ import annotations

import json
import random
import struct

import pytest
import torch
import xxhash

from headway.diloco.compression import decode, encode
from headway.diloco.specification import Entry, Specification, canonical_json
from headway.diloco.wire import (
    MAGIC,
    VERSION,
    Message,
    Payload,
    Reader,
    WireError,
    compose,
    slice_body,
)
from headway.errors import ConfigError
from headway.testing import assert_no_import

SHAPES = {"a.weight": (3, 5), "b": (), "none": (0, 4), "c": (7,)}


def make(comm: str = "float32", meta: dict | None = None) -> tuple[dict, Message]:
    generator = torch.Generator().manual_seed(1)
    tensors = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    return tensors, compose(meta or {"round": "r-1"}, encode(tensors, comm).payloads)


def body_of(message: Message) -> bytes:
    return b"".join(bytes(chunk) for chunk in message.chunks())


def read(body: bytes, size: int = 1 << 20, **options) -> Reader:
    reader = Reader(SHAPES, **options)
    for begin in range(0, len(body), size):
        reader.feed(body[begin : begin + size])
    reader.finish()
    return reader


def rewrite(change) -> bytes:
    """A body whose header was changed by `change` and digested anew."""
    _, message = make()
    body = body_of(message)
    (length,) = struct.unpack_from("<I", body, 6)
    header = json.loads(body[10 : 10 + length])
    del header["digest"]
    change(header)
    header["digest"] = xxhash.xxh3_128_hexdigest(canonical_json(header))
    text = canonical_json(header)
    return struct.pack("<4sHI", MAGIC, VERSION, len(text)) + text + body[10 + length :]


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("comm", ["float32", "bf16", "int8"])
def test_what_is_written_is_read_whatever_the_chunks(size: int, comm: str) -> None:
    tensors, message = make(comm)
    body = body_of(message)
    assert len(body) == message.num_bytes
    reader = read(body, size)
    assert reader.header.meta == {"round": "r-1"} and reader.header.digest == message.digest
    assert list(reader.payloads) == list(SHAPES)
    wanted = encode(tensors, comm).payloads
    for name, payload in reader.payloads.items():
        assert torch.equal(decode(payload), decode(wanted[name]))
        assert comm != "float32" or torch.equal(decode(payload), tensors[name])


def test_the_bytes_are_those_of_the_documentation() -> None:
    message = compose({"k": 1}, encode({"w": torch.tensor([1.0, -2.0])}, "float32").payloads)
    body = body_of(message)
    assert body[:4] == b"HWDL" and body[4:6] == b"\x01\x00"
    length = int.from_bytes(body[6:10], "little")
    header = json.loads(body[10 : 10 + length])
    raw = bytes.fromhex("0000803f000000c0")
    assert body[10 + length :] == raw
    tensor = {"name": "w", "dtype": "float32", "shape": [2], "length": 8}
    tensor["digest"] = xxhash.xxh3_128_hexdigest(raw)
    assert header["meta"] == {"k": 1} and header["tensors"] == [tensor]
    del header["digest"]
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert message.digest == xxhash.xxh3_128_hexdigest(text)


def first(header):
    return header["tensors"][0]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda h: first(h).update(name="x"), 422, "'a.weight' is due"),
        (lambda h: first(h).update(name=7), 422, "is due"),
        (lambda h: first(h).update(shape=[5, 3]), 422, "its shape"),
        (lambda h: first(h).update(shape=[15]), 422, "its shape"),
        (lambda h: first(h).update(shape=[3.0, 5]), 422, "its shape"),
        (lambda h: first(h).update(dtype="float64"), 422, "its dtype"),
        (lambda h: first(h).update(dtype=None), 422, "its dtype"),
        (lambda h: first(h).update(dtype="bfloat16"), 422, "30 bytes"),
        (lambda h: first(h).update(length=61), 422, "60 bytes"),
        (lambda h: first(h).update(length=True), 422, "60 bytes"),
        (lambda h: first(h).update(length=1 << 60), 422, "60 bytes"),
        (lambda h: first(h).update(digest="0" * 32), 400, "digest says"),
        (lambda h: first(h).update(digest=3), 400, "32 hexadecimal"),
        (lambda h: first(h).update(more=1), 400, "keys"),
        (lambda h: first(h).pop("digest"), 400, "keys"),
        (lambda h: h["tensors"].pop(), 422, "4 tensors are due"),
        (lambda h: h["tensors"].append(first(h)), 422, "4 tensors are due"),
        (lambda h: h["tensors"].reverse(), 422, "is due"),
        (lambda h: h.update(tensors={}), 400, "a list"),
        (lambda h: h.update(tensors=[1, 2, 3, 4]), 400, "keys"),
        (lambda h: h.update(more=1), 400, "meta, tensors and digest"),
        (lambda h: h.update(meta=[]), 400, "meta is an object"),
        (lambda h: h.update(meta={"k": []}), 400, "short texts"),
        (lambda h: h.update(meta={"k": "x" * 2000}), 400, "short texts"),
        (lambda h: h.update(meta={str(i): i for i in range(99)}), 400, "at most 32"),
        (lambda h: h.update(meta={"k": [[]] * 900}), 400, "more lists"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change, status: int, words: str) -> None:
    with pytest.raises(WireError) as caught:
        read(rewrite(change))
    assert (caught.value.status, words in caught.value.reason) == (status, True), caught.value


def test_nothing_is_taken_of_what_does_not_fit() -> None:
    taken = []
    for change in (
        lambda h: h["tensors"][3].update(shape=[8]),
        lambda h: h["tensors"][3].update(length=1 << 40),
    ):
        with pytest.raises(WireError):
            read(rewrite(change), sink=taken.append)
    with pytest.raises(WireError):
        read(struct.pack("<4sHI", MAGIC, VERSION, 1 << 31), sink=taken.append)
    assert not taken


@pytest.mark.parametrize("size", [3, 1000])
def test_a_sink_gets_the_whole_body_which_can_be_sliced_in_place(size: int) -> None:
    tensors, message = make("bf16")
    body = body_of(message)
    taken: list[bytes] = []
    reader = read(body, size, sink=lambda data: taken.append(bytes(data)))
    assert b"".join(taken) == body and not reader.payloads
    for whole in (memoryview(body), memoryview(bytearray(body))):
        header, payloads = slice_body(whole, SHAPES, verify=True)
        assert header == reader.header
        for name, tensor in tensors.items():
            assert torch.equal(decode(payloads[name]), tensor.bfloat16().float())
    for wrong in (body[:-1], body + b"x", body[:9], b""):
        with pytest.raises(WireError):
            slice_body(memoryview(wrong), SHAPES)
    damaged = bytearray(body)
    damaged[-1] ^= 1
    with pytest.raises(WireError, match="digest"):
        slice_body(memoryview(damaged), SHAPES, verify=True)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"GET / HTTP", 400),
        (b"HW", 400),
        (b"", 400),
        (struct.pack("<4sHI", MAGIC, 2, 10), 426),
        (struct.pack("<4sHI", MAGIC, 1, 0xFFFFFFFF), 413),
        (struct.pack("<4sHI", MAGIC, 1, 4) + b"null", 400),
        (struct.pack("<4sHI", MAGIC, 1, 4) + b"\xff\xff\xff\xff", 400),
        (struct.pack("<4sHI", MAGIC, 1, 200) + b"[" * 200, 400),
        (struct.pack("<4sHI", MAGIC, 1, 10) + b'{"a": NaN}', 400),
    ],
)
def test_what_is_no_body_at_all_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(WireError) as caught:
        read(body)
    assert caught.value.status == status


def test_truncated_and_longer_bodies_are_refused() -> None:
    body = body_of(make()[1])
    for length in range(len(body)):
        with pytest.raises(WireError, match=r"begins|ends|digest"):
            read(body[:length])
    with pytest.raises(WireError, match="goes on"):
        read(body + b"\0")


def test_every_changed_byte_is_noticed() -> None:
    body = bytearray(body_of(make()[1]))
    chance = random.Random(1)
    for place in range(len(body)):
        changed = bytearray(body)
        changed[place] ^= 1 << chance.randrange(8)
        with pytest.raises(WireError):
            read(bytes(changed))


def test_two_spellings_of_one_header_are_not_both_taken() -> None:
    body = body_of(make()[1])
    (length,) = struct.unpack_from("<I", body, 6)
    header = json.loads(body[10 : 10 + length])
    text = json.dumps(header).encode()
    with pytest.raises(WireError, match="canonical"):
        read(struct.pack("<4sHI", MAGIC, VERSION, len(text)) + text + body[10 + length :])
    twice = body[10 : 10 + length].replace(b'{"digest"', b'{"digest":"x","digest"', 1)
    with pytest.raises(WireError, match="canonical"):
        read(struct.pack("<4sHI", MAGIC, VERSION, len(twice)) + twice + body[10 + length :])


def test_the_receiver_chooses_dtypes_and_may_refuse_by_the_header() -> None:
    body = body_of(make("bf16")[1])
    with pytest.raises(WireError, match="must be float32"):
        read(body, dtypes=("float32",))

    def refuse(header) -> None:
        raise WireError(410, header.meta["round"])

    with pytest.raises(WireError, match="r-1"):
        read(body, on_header=refuse)


def test_a_specification_survives_json_and_knows_what_differs() -> None:
    one = Specification.of({n: torch.zeros(s) for n, s in SHAPES.items()}, frozen=["c"])
    again = Specification.from_layout(json.loads(json.dumps(one.layout)))
    assert again.fingerprint == one.fingerprint and list(again.shapes) == ["a.weight", "b", "none"]
    entries = {**one.entries, "a.weight": Entry((3, 6)), "b": Entry((), "bfloat16")}
    other = Specification({**entries, "new": Entry((1,))})
    assert other.fingerprint != one.fingerprint
    assert one.differences(other) == [
        "a.weight is float32 [3, 6] instead of float32 [3, 5]",
        "b is bfloat16 [] instead of float32 []",
        "new is not part of it",
    ]
    turned = Specification(dict(reversed(one.entries.items())))
    assert turned.fingerprint != one.fingerprint
    assert one.differences(turned) == ["the parameters come in another order"]


@pytest.mark.parametrize(
    "layout",
    [
        None,
        [],
        {},
        [["a"]],
        [["", [], "float32", True]],
        [["a", [-1], "float32", True]],
        [["a", [True], "float32", True]],
        [["a", [1 << 40, 1 << 40], "float32", True]],
        [["a", [1], "object", True]],
        [["a", [1], "float32", 1]],
        [["a", [1], "float32", False]],
        [["a\n", [1], "float32", True]],
        [["a", [1], "float32", True]] * 2,
    ],
)
def test_what_is_no_layout_is_refused(layout) -> None:
    with pytest.raises(ConfigError):
        Specification.from_layout(layout)


def test_fragments_are_contiguous_whole_layers_of_about_one_size() -> None:
    names = ["embed", *(f"layers.{n}.{part}" for n in range(6) for part in "ab"), "head"]
    spec = Specification({n: Entry((10,)) for n in names})
    assert spec.num_layers == 6
    for num in range(1, 7):
        fragments = spec.cut(num)
        assert len(fragments) == num and all(fragments)
        assert [n for names in fragments for n in names] == names
        for n in range(6):
            assert sum(f"layers.{n}.a" in f or f"layers.{n}.b" in f for f in fragments) == 1
    assert [len(f) for f in spec.cut(2)] == [7, 7]
    for num in (0, -1, 7):
        with pytest.raises(ConfigError, match="1 to 6"):
            spec.cut(num)
    plain = Specification({"x": Entry((1000,)), "y": Entry((1,)), "z": Entry((1,))})
    assert plain.cut(3) == [["x"], ["y"], ["z"]]
    assert plain.cut(2) == [["x"], ["y", "z"]]


def test_the_wire_needs_no_torch() -> None:
    assert_no_import("import headway.diloco.wire")


def test_a_payload_has_the_length_of_its_shape() -> None:
    with pytest.raises(AssertionError):
        Payload("float32", (2,), memoryview(b"1234"))


def test_a_model_of_too_many_tensors_is_a_mistake_and_no_crash() -> None:
    nothing = Payload("float32", (0,), memoryview(b""))
    with pytest.raises(ConfigError, match="60000 tensors need a header of"):
        compose({}, {f"layers.{n}.{'w' * 64}": nothing for n in range(60_000)})
