import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.datasets import PromptDataset, SyntheticDataset, TextDataset, TokenDataset
from headway.data.tokens import TokenFileWriter
from headway.errors import ConfigError


def write(path, documents):
    with TokenFileWriter(path) as writer:
        writer.add_documents(documents)
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a.hwt", [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]])


def lists(sample):
    return {key: value.tolist() for key, value in sample.items()}


def test_stream(path):
    data = TokenDataset(path, 4)
    assert len(data) == 3
    assert lists(data[0]) == {
        "input_ids": [10, 11, 12, 20],
        "labels": [-100, 11, 12, -100],
        "document_ids": [0, 0, 0, 1],
        "position_ids": [0, 1, 2, 0],
    }
    # The slice begins inside a document: its first token is no document's first.
    assert lists(data[1])["labels"] == [21, -100, 31, 32]
    assert lists(data[2]) == {
        "input_ids": [33, 34, 0, 0],
        "labels": [33, 34, -100, -100],
        "document_ids": [0, 0, -1, -1],
        "position_ids": [0, 1, 0, 0],
    }
    assert data[0]["input_ids"].dtype == data[0]["labels"].dtype == np.int64
    assert data[0]["document_ids"].dtype == np.int32


def test_stream_without_masks_or_remainder(path):
    data = TokenDataset(path, 4, mask_documents=False)
    assert lists(data[2])["attention_mask"] == [1, 1, 0, 0]
    assert "document_ids" not in data[0]
    data = TokenDataset(path, 4, mask_documents=False, drop_remainder=True)
    assert len(data) == 2
    assert set(data[0]) == {"input_ids", "labels"}
    with pytest.raises(ConfigError, match="drop_remainder"):
        TokenDataset(path, 11, drop_remainder=True)


def test_greedy(path):
    data = TokenDataset(path, 6, packing="greedy")
    assert len(data) == 2
    assert lists(data[0]) == {
        "input_ids": [10, 11, 12, 20, 21, 0],
        "labels": [-100, 11, 12, -100, 21, -100],
        "document_ids": [0, 0, 0, 1, 1, -1],
        "position_ids": [0, 1, 2, 0, 1, 0],
    }


def test_one_document_per_sample(path):
    data = TokenDataset(path, 4, packing="none")
    assert [lists(data[i])["input_ids"] for i in range(len(data))] == [
        [10, 11, 12],
        [20, 21],
        [30, 31, 32, 33],
        [34],
    ]
    assert set(data[0]) == {"input_ids", "labels"}


def test_several_files_and_ranges(tmp_path, path):
    second = write(tmp_path / "b.hwt", [[40, 41, 42, 43]])
    data = TokenDataset([path, second], 4, pad_token_id=9)
    assert len(data) == 4
    assert data[3]["input_ids"].tolist() == data[-1]["input_ids"].tolist() == [40, 41, 42, 43]
    assert data[2]["input_ids"].tolist() == [33, 34, 9, 9]
    assert data.vocab_size_needed == 44
    assert data.num_tokens == 14
    for bad in (4, -5):
        with pytest.raises(IndexError):
            data[bad]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    sequence_length=st.integers(2, 12),
    packing=st.sampled_from(["stream", "greedy", "best_fit"]),
)
def test_targets_never_cross_a_document(tmp_path_factory, lengths, sequence_length, packing):
    # Token = 100 * document + place in it, so that a pair of neighbours can be judged.
    documents = [[100 * d + i for i in range(n)] for d, n in enumerate(lengths)]
    file = write(tmp_path_factory.mktemp("data") / "a.hwt", documents)
    data = TokenDataset(file, sequence_length, packing=packing)
    seen = []
    for sample in data.__getitems__(range(len(data))):
        ids, labels, owner = sample["input_ids"], sample["labels"], sample["document_ids"]
        real = owner >= 0
        seen += ids[real].tolist()
        assert (labels[~real] == -100).all()
        for t in range(1, sequence_length):
            if not real[t]:
                continue
            follows = ids[t] == ids[t - 1] + 1 and ids[t] // 100 == ids[t - 1] // 100
            assert (labels[t] != -100) == follows == (owner[t] == owner[t - 1])
            assert sample["position_ids"][t] == (
                sample["position_ids"][t - 1] + 1 if follows else 0
            )
    assert sorted(seen) == sorted(t for d in documents for t in d)


@pytest.mark.parametrize("packing", ["stream", "best_fit", "none"])
def test_many_at_once_equal_one_by_one_and_survive_pickling(path, packing):
    data = TokenDataset(path, 4, packing=packing)
    copy = pickle.loads(pickle.dumps(data))
    many = copy.__getitems__(list(range(len(data))))
    assert [lists(sample) for sample in many] == [lists(data[i]) for i in range(len(data))]


def test_loss_mask_by_ids_and_by_function(path):
    assert lists(TokenDataset(path, 4, loss_mask=[11])[0])["labels"] == [-100, -100, 12, -100]
    even = TokenDataset(path, 4, loss_mask=lambda ids: ids % 2 == 0)
    assert lists(even[0])["labels"] == [-100, -100, 12, -100]


def test_text_dataset(tmp_path):
    data = TextDataset(["abc", "de"], "bytes", 4)
    assert lists(data[0])["input_ids"] == [97, 98, 99, 256]
    assert lists(data[1])["input_ids"] == [100, 101, 256, 257]
    assert (data.num_tokens, data.num_documents, data.vocab_size_needed) == (7, 2, 257)
    (tmp_path / "a.txt").write_text("xyz")
    assert lists(TextDataset(files=tmp_path, sequence_length=4)[0])["input_ids"] == [*b"xyz", 256]
    assert len(TextDataset(["a" * 5, "bb"], "bytes", 6, packing="best_fit", eos=False)) == 2
    for empty in ([], [""], None):
        with pytest.raises(ConfigError, match="empty"):
            TextDataset(empty, "bytes", 4)
    with pytest.raises(ConfigError, match="files="):
        TextDataset([tmp_path], "bytes", 4)


def test_prompts_have_no_loss(tmp_path):
    records = [{"prompt": "ab", "completion": "cd"}, {"prompt": "", "completion": "x"}]
    data = PromptDataset(records, "bytes")
    assert lists(data[0]) == {
        "input_ids": [97, 98, 99, 100, 256],
        "labels": [-100, -100, 99, 100, 256],
    }
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    assert lists(PromptDataset(path)[0]) == lists(data[0])
    assert lists(PromptDataset(records, max_length=3)[0])["input_ids"] == [97, 98, 99]
    with pytest.raises(ConfigError, match="record 0: nothing is left"):
        PromptDataset(records, max_length=2)
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: no text under 'answer'"):
        PromptDataset(path, completion_key="answer")
    with pytest.raises(ConfigError, match="empty"):
        PromptDataset([])


def test_synthetic_is_a_function_of_the_index():
    data = SyntheticDataset(10**12, 16, 50, seed=3)
    far = data[10**11]["input_ids"]
    assert far.tolist() == SyntheticDataset(10**12, 16, 50, seed=3)[10**11]["input_ids"].tolist()
    assert far.tolist() != data[10**11 + 1]["input_ids"].tolist()
    assert far.min() >= 0 and far.max() < 50 and len(data) == 10**12
    with pytest.raises(ConfigError, match="vocab_size"):
        SyntheticDataset(10, 16, 0)


def test_a_changed_token_is_refused_unless_it_is_not_looked_for(path, monkeypatch):
    raw = bytearray(path.read_bytes())
    raw[4096] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="digest of its tokens") as caught:
        TokenDataset(path, 4)
    assert str(path) in str(caught.value)
    assert len(TokenDataset(path, 4, verify=False)) == 3
    monkeypatch.setattr("headway.data.datasets._MOST_VERIFIED_BYTES", 8)
    assert len(TokenDataset(path, 4)) == 3  # too large to be read at every start
    with pytest.raises(ConfigError, match="digest of its tokens"):
        TokenDataset(path, 4, verify=True)
