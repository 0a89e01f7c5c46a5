import json
import pickle
import struct

import numpy as np
import pytest

from headway.data.tokenizer import ByteTokenizer
from headway.data.tokens import TokenFile, TokenFileWriter, dtype_for
from headway.errors import ConfigError

DOCUMENTS = [[1, 2, 3], [4], [256, 5, 6, 7, 8]]
TOKENS = [1, 2, 3, 4, 256, 5, 6, 7, 8]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.hwt"
    with TokenFileWriter(path, tokenizer=ByteTokenizer()) as writer:
        writer.add_documents(DOCUMENTS)
        writer.add_document([])
    return path


def test_round_trip(path):
    file = TokenFile(path)
    assert file.tokens.tolist() == TOKENS
    assert file.document_offsets.tolist() == [0, 3, 4, 9]
    assert [file.document(i).tolist() for i in range(3)] == DOCUMENTS
    assert (file.num_tokens, file.num_documents, file.max_token_id) == (9, 3, 256)
    assert file.header["dtype"] == "uint16"
    assert file.header["tokenizer"]["vocab_size"] == 258
    assert file.header["eos_token_id"] == 256
    file.verify()


def test_documented_layout_byte_for_byte(path):
    raw = path.read_bytes()
    magic, version, header_bytes = struct.unpack_from("<8sII", raw)
    assert (magic, version) == (b"HWTOKENS", 1)
    header = json.loads(raw[16 : 16 + header_bytes])
    start = -(-(16 + header_bytes) // 64) * 64
    end = start + 2 * header["num_tokens"]
    assert np.frombuffer(raw, "<u2", 9, start).tolist() == TOKENS
    offsets_start = -(-end // 64) * 64
    assert np.frombuffer(raw, "<i8", 4, offsets_start).tolist() == [0, 3, 4, 9]
    assert len(raw) == offsets_start + 8 * 4


def damage(path, change):
    raw = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(raw)))
    return path


def set_header(raw, **changes):
    length = struct.unpack_from("<I", raw, 12)[0]
    header = json.loads(raw[16 : 16 + length]) | changes
    raw[16 : 16 + length] = json.dumps(header).encode().ljust(length)
    return raw


def put(raw, at, new):
    raw[at : at + len(new)] = new
    return raw


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "empty"),
        (lambda raw: raw[:10], "truncated"),
        (lambda raw: raw[:100], "truncated inside the header"),
        (lambda raw: raw[:-1], "truncated"),
        (lambda raw: raw[:4100], "truncated"),
        (lambda raw: raw + b"x", "size mismatch"),
        (lambda raw: put(raw, 0, b"NOTTOKEN"), "wrong magic"),
        (lambda raw: put(raw, 8, struct.pack("<I", 9)), "format version 9"),
        (lambda raw: put(raw, 12, struct.pack("<I", 2**31)), "damaged header"),
        (lambda raw: put(raw, 16, b"!!!!"), "not JSON"),
        (lambda raw: set_header(raw, num_tokens=8), "its document offsets|truncated|size"),
        (lambda raw: set_header(raw, num_tokens=10**12), "truncated"),
        (lambda raw: set_header(raw, num_tokens="9"), "'num_tokens'"),
        (lambda raw: set_header(raw, num_tokens=0), "no tokens"),
        (lambda raw: set_header(raw, dtype="int7"), "dtype"),
        (lambda raw: put(raw, len(raw) - 8, struct.pack("<q", 77)), "document offsets"),
    ],
)
def test_damaged_files_are_named_and_explained(path, change, message):
    damage(path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        TokenFile(path)
    assert str(path) in str(caught.value)


def test_verify_finds_a_flipped_bit(path):
    damage(path, lambda raw: put(raw, 4096, bytes([raw[4096] ^ 1])))
    file = TokenFile(path)
    with pytest.raises(ConfigError, match="digest of its tokens"):
        file.verify()


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        TokenFile(tmp_path / "no.hwt")


def test_an_error_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), TokenFileWriter(tmp_path / "a.hwt") as writer:
        writer.add_document([1, 2])
        raise RuntimeError
    with pytest.raises(ConfigError, match="empty"), TokenFileWriter(tmp_path / "b.hwt"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_error_keeps_the_old_file(path):
    before = path.read_bytes()
    with (
        pytest.raises(ConfigError, match="does not fit"),
        TokenFileWriter(path, dtype="uint8") as w,
    ):
        w.add_document([300])
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.hwt"]


@pytest.mark.parametrize("ids", [[-1], [70000], [1.5], [[1, 2]]])
def test_bad_ids(tmp_path, ids):
    with pytest.raises(ConfigError), TokenFileWriter(tmp_path / "a.hwt", dtype="uint16") as writer:
        writer.add_document(ids)


def test_pickle_maps_again_and_notices_a_replaced_file(path):
    file = TokenFile(path)
    raw = pickle.dumps(file)
    assert len(raw) < 1000
    assert pickle.loads(raw).tokens.tolist() == file.tokens.tolist()
    with TokenFileWriter(path) as writer:
        writer.add_document([9, 9])
    with pytest.raises(ConfigError, match="replaced"):
        pickle.loads(raw)


def test_dtype_for():
    assert [dtype_for(n) for n in (256, 257, 65536, 65537)] == [
        "uint8",
        "uint16",
        "uint16",
        "uint32",
    ]
