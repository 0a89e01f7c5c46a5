import numpy as np
import pytest
import torch

from headway.data.collate import PadCollator, default_collator
from headway.data.counting import count_samples, count_targets, count_tokens
from headway.errors import ConfigError


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_ragged_token_dicts(kind):
    batch = default_collator([{"input_ids": kind([1, 2, 3])}, {"input_ids": kind([4])}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert (count_targets(batch), count_tokens(batch), count_samples(batch)) == (2, 4, 2)


def test_every_known_key_has_its_padding():
    rows = [
        {
            "input_ids": np.arange(n, dtype=np.uint16),
            "labels": np.arange(n, dtype=np.uint8),
            "document_ids": np.zeros(n, dtype=np.int32),
            "position_ids": np.arange(n),
            "weight": 0.5,
        }
        for n in (3, 2)
    ]
    batch = PadCollator(pad_token_id=9)(rows)
    assert batch["input_ids"].tolist() == [[0, 1, 2], [0, 1, 9]]
    assert batch["labels"].tolist() == [[0, 1, 2], [0, 1, -100]]
    assert batch["document_ids"].tolist() == [[0, 0, 0], [0, 0, -1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch["weight"].tolist() == [0.5, 0.5]
    assert batch["input_ids"].dtype == torch.int64
    assert batch["document_ids"].dtype == torch.int32


def test_floats_of_python_are_of_torchs_default_type():
    rows = [{"x": [0.5, float(n)], "deep": [[0.5], [1.5]], "labels": 0.5 * n} for n in range(2)]
    batch = default_collator(rows)
    assert {value.dtype for value in batch.values()} == {torch.float32}
    assert batch["labels"].tolist() == [0.0, 0.5]
    beside_ids = default_collator([{"input_ids": [1, 2], "labels": [0.0, 1.0]}] * 2)
    assert beside_ids["labels"].dtype == torch.float32
    own = default_collator([{"x": np.array([0.5]), "y": np.float64(0.5)}] * 2)
    assert {value.dtype for value in own.values()} == {torch.float64}  # somebody chose it
    for number in (np.float64(0.5), np.array([0.5]), torch.tensor([0.5], dtype=torch.float64)):
        assert default_collator([{"x": [number, number]}] * 2)["x"].dtype == torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        assert default_collator(rows)["x"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_whole_numbers_beside_fractions_are_numbers_of_one_kind(kind):
    single = default_collator([{"y": 1}, {"y": 0.5}])["y"]
    assert (single.dtype, single.tolist()) == (torch.float32, [1.0, 0.5])
    for others in ([0.5, 0.25], [0.5]):  # of one length, and padded
        rows = [{"input_ids": [1, 2], "labels": kind([1, 0])}]
        rows.append({"input_ids": [1] * len(others), "labels": kind(others)})
        labels = default_collator(rows)["labels"]
        assert labels.tolist() == [[1.0, 0.0], [*others, -100.0][:2]]
        assert labels.dtype == torch.float32 or kind is np.array  # whose float64 somebody chose


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_an_empty_list_makes_no_fractions_of_whole_numbers(kind):
    """As an encoder-decoder has labels, where a text has no answer."""
    rows = [{"input_ids": [1], "labels": kind(labels)} for labels in ([5, 6], [])]
    for given in (rows, rows[::-1]):
        labels = default_collator(given)["labels"]
        assert labels.dtype == torch.int64 and sorted(labels.tolist())[1] == [5, 6]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "bool"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_padding_is_what_it_says_whatever_the_type_of_labels(kind, dtype):
    """-100 is 156 in eight bits without a sign, and True among booleans: a label like others."""
    rows = []
    for values in ([0, 1, 0], [1]):
        array = np.array(values, dtype=dtype)
        own = torch.from_numpy(array) if kind == "torch" else array
        rows.append({"input_ids": own, "labels": own, "document_ids": own, "attention_mask": own})
    batch = default_collator(rows)
    assert batch["labels"].tolist() == [[0, 1, 0], [1, -100, -100]]
    assert batch["document_ids"].tolist() == [[0, 1, 0], [1, -1, -1]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[0, 1, 0], [1, 0, 0]]
    assert (batch["attention_mask"].dtype == torch.bool) == (dtype == "bool")
    del rows[0]["labels"], rows[1]["labels"]
    assert default_collator(rows)["labels"].tolist()[1] == [1, -100, -100]
    classes = [{"x": 0.5, "label": np.array(n, dtype=dtype)} for n in (0, 1)]
    single = PadCollator(causal_labels=False)(classes)
    assert (single["labels"].dtype, single["labels"].tolist()) == (torch.int64, [0, 1])


def test_tensors_and_arrays_make_one_batch_in_any_order():
    bits = [torch.tensor(0.5, dtype=torch.bfloat16), 0.25]
    ids = [torch.tensor([1, 2]), np.array([3], dtype=np.uint16)]
    whole = [np.array([1, 2], dtype=np.uint64), np.array([3])]
    for step in (1, -1):
        made = default_collator([{"x": x} for x in bits[::step]])["x"]
        assert (made.dtype, sorted(made.tolist())) == (torch.float32, [0.25, 0.5])
        for rows in (ids, whole):
            made = default_collator([{"input_ids": row} for row in rows[::step]])["input_ids"]
            assert (made.dtype, sorted(made.tolist())) == (torch.int64, [[1, 2], [3, 0]])


def test_labels_of_which_there_are_none_are_no_fractions():
    """Else a batch of them counts as many targets as it has samples."""
    batch = default_collator([{"input_ids": [1, 2], "labels": []}])
    assert batch["labels"].dtype == torch.int64 and count_targets(batch) == 0


def test_samples_without_token_ids_have_labels_too():
    rows = [{"pixel_values": [0.5, 1.0], "label": n} for n in range(2)]
    assert PadCollator(causal_labels=False)(rows)["labels"].tolist() == [0, 1]
    assert "labels" not in default_collator(rows)


def test_equal_lengths_need_no_mask():
    batch = default_collator([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])
    assert set(batch) == {"input_ids", "labels"}
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()
    assert set(PadCollator(causal_labels=False)([{"input_ids": [1]}])) == {"input_ids"}


def test_given_mask_decides_labels():
    batch = default_collator([{"input_ids": [5, 6], "attention_mask": [0, 1]}])
    assert batch["labels"].tolist() == [[-100, 6]]


def test_multiple_and_cut():
    batch = PadCollator(pad_to_multiple_of=4)([{"input_ids": [1, 2, 3]}, {"input_ids": [1] * 5}])
    assert batch["input_ids"].shape == (2, 8)
    batch = PadCollator(max_length=2)([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2]]
    assert "attention_mask" not in batch


@pytest.mark.parametrize("lengths", [(3, 3), (3, 1)], ids=["equal", "ragged"])
def test_samples_of_any_kind_make_the_same_batch(lengths):
    def collate(kind):
        rows = [list(range(1, length + 1)) for length in lengths]
        items = [{"input_ids": kind(row), "labels": kind(row[::-1])} for row in rows]
        return {key: value.tolist() for key, value in default_collator(items).items()}

    assert collate(list) == collate(np.array) == collate(torch.tensor)


def test_labels_of_their_own_shape():
    scalar = default_collator([{"input_ids": [1, 2], "labels": 1}, {"input_ids": [3], "labels": 0}])
    assert scalar["labels"].tolist() == [1, 0]
    other = default_collator(
        [{"input_ids": [1, 2], "labels": [7]}, {"input_ids": [3], "labels": [8, 9]}]
    )
    assert other["labels"].tolist() == [[7, -100], [8, 9]]


def test_other_items():
    assert default_collator([torch.zeros(2), torch.ones(2)]).shape == (2, 2)
    pair = default_collator([(torch.zeros(2), 1), (torch.ones(2), 0)])
    assert pair[1].tolist() == [1, 0]
    plain = default_collator([{"x": [1.0, 2.0], "name": "a"}, {"x": [3.0, 4.0], "name": "b"}])
    assert plain["x"].shape == (2, 2)
    assert plain["name"] == ["a", "b"]
    assert (count_targets(plain), count_tokens(plain)) == (2, 2)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no samples"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], "different keys: labels"),
        ([{"x": [1]}, {"x": [1, 2]}], "shape of 'x'"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "'attention_mask' has 1 entries"),
        ([{"input_ids": []}], "non-empty"),
        ([{"x": 1}, {"x": None}], "'x' must be numbers .*None"),
        ([{"x": None}, {"x": 1}], "'x' must be numbers .*None"),
        ([{"x": torch.tensor(1)}, {"x": "a"}], "'x' must be numbers .*'a'"),
        ([{"x": "a"}, {"x": torch.tensor(1)}], "'x' must be numbers .*'a'"),
        ([{"input_ids": [[1, 2], [3, 4]]}, {"input_ids": [[1, 2, 3]]}], "shape of 'input_ids'"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, None]}], "'input_ids' must .*None"),
        ([{"input_ids": 5}], "'input_ids' .*5"),
        ([{"input_ids": [1]}, {"input_ids": torch.tensor(3)}], "'input_ids' .* tensor"),
        ([{"input_ids": [[1, 2], [3]]}], "'input_ids' .* \\[\\[1, 2\\], \\[3\\]\\]"),
        ([{"input_ids": [1, 2], "labels": [[1], [2, 3]]}], "'labels' .* \\[\\[1\\], \\[2, 3\\]\\]"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [2], "labels": 3}], "'labels' .*3"),
    ],
)
def test_mistakes(items, message):
    with pytest.raises(ConfigError, match=message):
        default_collator(items)


def test_counts_follow_documents_and_shifted_labels():
    batch = {
        "input_ids": torch.zeros(1, 4, dtype=torch.long),
        "labels": torch.tensor([[5, -100, 6, -100]]),
        "document_ids": torch.tensor([[0, 0, 0, -1]]),
    }
    assert (count_targets(batch), count_tokens(batch)) == (1, 3)


@pytest.mark.parametrize("labels", [[[5]], [[5, -100, -100]], [[5, -100], [6, -100]]])
def test_the_first_token_of_a_text_is_nobodys_target(labels):
    """However few there are in a batch: else the loss would depend on how a step is cut."""
    labels = torch.tensor(labels)
    assert count_targets({"input_ids": torch.ones_like(labels), "labels": labels}) == 0


def test_counting_on_a_device_does_not_sync():
    batch = {"labels": torch.zeros(2, 3, dtype=torch.int64, device="meta")}
    assert isinstance(count_targets(batch), torch.Tensor)


def test_labels_of_a_decoder_with_inputs_of_its_own_all_count():
    labels = torch.tensor([[5, 6, 7, -100], [5, -100, -100, -100]])
    batch = {"input_ids": torch.ones(2, 9), "labels": labels}
    assert count_targets(batch) == 2
    assert count_targets({**batch, "decoder_input_ids": labels.roll(1)}) == 4


@pytest.mark.parametrize("other", [70_000, [70_000], torch.tensor([-70_000])])
@pytest.mark.parametrize("half", [torch.float16, np.float16])
def test_a_number_beyond_the_type_of_other_samples_is_told(half, other):
    fraction = torch.tensor([1.5], dtype=half) if half is torch.float16 else np.ones(1, half)
    one = fraction[0] if isinstance(other, int) else fraction
    with pytest.raises(ConfigError, match=r"'x' is float16 in other samples .* -?70000 in one"):
        default_collator([{"x": one}, {"x": other}])
    held = default_collator([{"x": fraction}, {"x": [60_000]}])["x"]
    assert held.dtype == torch.float16 and held[1] == 60_000


def test_lists_of_tensors_that_numpy_does_not_know_are_tensors():
    pair = [torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)]
    found = default_collator([{"x": pair}, {"x": [pair[1], pair[1]]}])["x"]
    assert found.dtype == torch.bfloat16 and found.tolist() == [[[1, 1], [0, 0]], [[0, 0]] * 2]
    learned = [torch.ones(2, requires_grad=True)] * 2
    assert default_collator([{"x": learned}])["x"].shape == (1, 2, 2)
    ragged = [torch.ones(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)]
    assert default_collator([{"x": ragged}])["x"] == [ragged]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("lengths", [(3, 3), (3, 1)])
def test_labels_have_the_type_that_losses_take(kind, lengths):
    arrays = [np.arange(length, dtype=np.int32) for length in lengths]
    ids = [torch.from_numpy(array) if kind == "torch" else array for array in arrays]
    given = default_collator([{"input_ids": one, "labels": one} for one in ids])
    made = default_collator([{"input_ids": one} for one in ids])
    for batch in (given, made):
        logits = torch.zeros(*batch["labels"].shape, 4)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert given["input_ids"].dtype == torch.int32
    classes = [{"x": torch.zeros(2), "label": np.int32(n)} for n in range(2)]
    assert default_collator(classes)["label"].dtype == torch.int64
