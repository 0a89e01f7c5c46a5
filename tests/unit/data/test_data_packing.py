import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.packing import build_packs, load_packs
from headway.data.tokens import TokenFile, TokenFileWriter
from headway.errors import ConfigError

MODES = ["greedy", "best_fit", "none"]


def offsets_of(lengths):
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    st.integers(2, 24),
    st.sampled_from(MODES),
    st.integers(1, 20),
)
def test_every_token_exactly_once_and_boundaries_kept(lengths, sequence_length, mode, buffer):
    offsets = offsets_of(lengths)
    index = build_packs(offsets, sequence_length, mode, buffer_documents=buffer)
    covered = np.zeros(offsets[-1], dtype=int)
    for pack in range(index.num_packs):
        starts, sizes = index.pieces(pack)
        assert 1 <= sizes.sum() <= sequence_length
        for start, size in zip(starts, sizes):
            covered[start : start + size] += 1
            # A piece never crosses a document, and only starts inside one that was too long.
            document = np.searchsorted(offsets, start, side="right") - 1
            assert start + size <= offsets[document + 1]
            assert (start - offsets[document]) % sequence_length == 0
    assert (covered == 1).all()
    fills = np.add.reduceat(index.piece_lengths, index.pack_offsets[:-1])
    assert index.has_padding == bool((fills < sequence_length).any())


def test_greedy_keeps_the_order():
    index = build_packs(offsets_of([3, 4, 5, 2, 9, 1]), 8, "greedy")
    assert [index.pieces(p)[1].tolist() for p in range(index.num_packs)] == [
        [3, 4],
        [5, 2],
        [8],
        [1, 1],
    ]
    assert (np.diff(index.piece_starts) > 0).all()


def test_best_fit_wastes_less():
    index = build_packs(offsets_of([5, 5, 5, 3, 3, 3]), 8, "best_fit")
    assert [index.pieces(p)[1].tolist() for p in range(index.num_packs)] == [[5, 3]] * 3
    assert not index.has_padding
    assert build_packs(offsets_of([5, 5, 5, 3, 3, 3]), 8, "greedy").num_packs == 4


def test_documents_cut_instead_of_split():
    index = build_packs(offsets_of([20, 3]), 8, "greedy", split_documents=False)
    assert index.piece_lengths.tolist() == [8, 3]
    assert index.piece_starts.tolist() == [0, 20]


@pytest.mark.parametrize("mode", ["greedy", "best_fit"])
def test_two_hundred_thousand_documents_are_quick(mode):
    lengths = np.random.default_rng(0).integers(1, 3000, 200_000)
    began = time.perf_counter()
    build_packs(offsets_of(lengths), 2048, mode)
    assert time.perf_counter() - began < 5


@pytest.fixture
def file(tmp_path):
    with TokenFileWriter(tmp_path / "a.hwt") as writer:
        writer.add_documents([[1] * 5, [2] * 3, [3] * 9])
    return TokenFile(tmp_path / "a.hwt")


def test_index_is_cached_beside_the_file(file, monkeypatch):
    first = load_packs(file, 8, "best_fit")
    (cached,) = file.path.parent.glob("*.hwp")
    monkeypatch.setattr("headway.data.packing.build_packs", None)
    again = load_packs(file, 8, "best_fit")
    assert again.piece_starts.tolist() == first.piece_starts.tolist()
    cached.write_bytes(cached.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="truncated"):
        load_packs(file, 8, "best_fit")


def test_flipped_bit_in_the_index(file):
    load_packs(file, 8, "greedy")
    (cached,) = file.path.parent.glob("*.hwp")
    raw = bytearray(cached.read_bytes())
    raw[-60] ^= 1
    cached.write_bytes(raw)
    with pytest.raises(ConfigError, match="delete it"):
        load_packs(file, 8, "greedy")


def test_other_parameters_and_other_data_get_other_indexes(file):
    for length, mode in ((8, "greedy"), (9, "greedy"), (8, "best_fit")):
        load_packs(file, length, mode)
    with TokenFileWriter(file.path) as writer:
        writer.add_document([7] * 4)
    assert load_packs(TokenFile(file.path), 8, "greedy").num_pieces == 1
    assert len(list(file.path.parent.glob("*.hwp"))) == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_points_to_index_dir(file, tmp_path):
    file.path.parent.chmod(0o555)
    try:
        with pytest.raises(ConfigError, match="index_dir"):
            load_packs(file, 8, "greedy")
    finally:
        file.path.parent.chmod(0o755)


def test_index_dir(file, tmp_path):
    load_packs(file, 8, "greedy", index_dir=tmp_path / "indexes")
    assert len(list((tmp_path / "indexes").glob("*.hwp"))) == 1
    (tmp_path / "blocked").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="index_dir"):
        load_packs(file, 8, "greedy", index_dir=tmp_path / "blocked")


def test_bad_parameters(file):
    with pytest.raises(ConfigError, match="did you mean 'best_fit'"):
        load_packs(file, 8, "bestfit")
    with pytest.raises(ConfigError, match="sequence_length"):
        load_packs(file, 1, "greedy")
    with pytest.raises(ConfigError, match="damaged"):
        build_packs(np.array([0, 5, 3]), 8, "greedy")
