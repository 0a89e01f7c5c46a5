"""Sequences that grow as a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from schedule_loops import (
    RATE,
    Samples,
    assert_close,
    assert_same_bits,
    make_trainer,
    read_samples,
    resume_at,
    train_by_hand,
    weights_of,
)

from headway import ConfigError
from headway.callbacks import SequenceLengthSchedulerCallback
from headway.callbacks.schedule.cutting import cut_batch, cut_window
from headway.data import TokenDataset
from headway.data.collate import PadCollator
from headway.data.tokens import TokenFileWriter
from headway.data.windows import Window
from headway.testing import tiny_dataset

WARMUP, STEPS = 6, 8
LENGTHS = {True: [4, 6, 8, 10, 12, 16, 16, 16], False: [4, 8, 8, 16, 16, 16, 16, 16]}


def callback(truncate: bool, **options: Any) -> SequenceLengthSchedulerCallback:
    return SequenceLengthSchedulerCallback(
        **{
            "min_sequence_length": 2,
            "warmup_steps": WARMUP,
            "truncate": truncate,
            "keep_multiple_of": 2,
            "max_sequence_length": 16,
            **options,
        }
    )


def maker(truncate: bool) -> Any:
    def make(folder: Path, **args: Any) -> Any:
        return make_trainer(folder, [callback(truncate)], **{"max_steps": STEPS, **args})

    return make


@pytest.mark.parametrize("truncate", [False, True])
def test_losses_and_tokens_are_those_of_a_loop_by_hand(truncate: bool, tmp_path: Path) -> None:
    trainer, curve = maker(truncate)(tmp_path)
    trainer.train()
    batches = []
    for step, length in enumerate(LENGTHS[truncate]):
        samples = read_samples(2 * step, 2)
        pieces = samples[:, :length] if truncate else samples.reshape(-1, length)
        batches.append(pieces)
    rates = [RATE * (1 - n / STEPS) for n in range(STEPS)]
    losses, weights = train_by_hand(batches, rates)
    assert curve.losses == pytest.approx(losses, rel=1e-6)
    assert_close(weights_of(trainer), weights)
    assert curve.of("train/sequence length") == LENGTHS[truncate]
    per_step = [batch.numel() for batch in batches]
    assert curve.tokens == list(np.cumsum(per_step))
    assert truncate or curve.tokens[-1] == STEPS * 32


@pytest.mark.parametrize(("truncate", "step"), [(False, 1), (True, 4)])
def test_a_resume_has_the_same_bits(truncate: bool, step: int, tmp_path: Path) -> None:
    make = maker(truncate)
    whole, curve = make(tmp_path / "whole")
    whole.train()
    resumed, (before, after) = resume_at(tmp_path / "two", step, make, STEPS)
    assert before.losses + after.losses == curve.losses
    assert before.tokens + after.tokens == curve.tokens
    assert_same_bits(weights_of(resumed), weights_of(whole))


def test_lengths_rise_stay_in_range_and_change_seldom() -> None:
    for truncate in (False, True):
        made = SequenceLengthSchedulerCallback(
            128, 1000, truncate, keep_multiple_of=128, max_sequence_length=4096
        )
        lengths = [made.length_at(step) for step in range(1, 1100)]
        assert lengths == sorted(lengths)
        assert lengths[0] == 128 and lengths[998] <= lengths[999] == lengths[-1] == 4096
        assert len(set(lengths)) == (32 if truncate else 6)
        assert all(length % 128 == 0 for length in lengths)
        # Never further from the line than the rule says.
        for step in range(1, 1000):
            line = 128 + (4096 - 128) * step / 1000
            if truncate:
                assert lengths[step - 1] <= line < lengths[step - 1] + 128 or line < 256
            else:
                assert 2**-0.5 <= lengths[step - 1] / line <= 2**0.5 + 1e-9
    # The full length comes well before the last step of the warm-up.
    split = SequenceLengthSchedulerCallback(128, 1000, max_sequence_length=4096)
    assert split.length_at(705) == 4096


def test_micro_batches_keep_their_tokens_where_samples_are_split(tmp_path: Path) -> None:
    shapes: list[Any] = []

    class Watch(SequenceLengthSchedulerCallback):
        def on_forward_backward_begin(self) -> None:
            shapes.append(self._window_shapes.pop(0))

        def on_window(self, args, state, control, window, trainer):  # type: ignore[no-untyped-def]
            super().on_window(args, state, control, window, trainer)
            self._window_shapes = [tuple(b["input_ids"].shape) for b in window.micro_batches]

    watch = Watch(2, WARMUP, max_sequence_length=16)
    trainer, _ = make_trainer(tmp_path, [watch], max_steps=3, gradient_accumulation_steps=2)
    trainer.train()
    assert shapes == [(8, 4)] * 2 + [(4, 8)] * 4
    assert {rows * width for rows, width in shapes} == {2 * 16}


# Fields of a batch


def token_files(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 200, size) for size in (5, 23, 1, 40, 9, 16, 3, 31)]
    path = folder / "tokens.hwt"
    with TokenFileWriter(path) as writer:
        writer.add_documents(documents)
    return path


def test_pieces_of_packed_samples_are_packed_samples_of_that_length(tmp_path: Path) -> None:
    """Tokens, targets, documents and positions are those that the shorter packing makes."""
    path = token_files(tmp_path)
    long = TokenDataset(path, 32, drop_remainder=True)
    collate = PadCollator()
    batch = collate([long[n] for n in range(len(long))])
    for length in (16, 8, 4):
        short = TokenDataset(path, length, drop_remainder=True)
        num_pieces = len(long) * 32 // length
        expected = collate([short[n] for n in range(num_pieces)])
        cut = cut_batch(batch, length, split=True)
        assert cut.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(cut[name], value), (name, length)
    assert batch["input_ids"].shape == (len(long), 32), "the batch itself was changed"


def test_padding_splits_with_its_tokens_and_no_row_attends_to_nothing() -> None:
    lengths = [8, 5, 2]
    rows = [{"input_ids": list(range(1, n + 1))} for n in lengths]
    batch = PadCollator()(rows)
    batch["weight"] = torch.tensor([1.0, 2.0, 3.0])
    window = Window([batch], 12, 15, 3)
    assert cut_window(window, 4, split=True)
    (cut,) = window.micro_batches
    assert cut["input_ids"].tolist()[:4] == [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [5, 0, 0, 0]]
    assert cut["weight"].tolist() == [1, 1, 2, 2, 3, 3]
    assert window.num_tokens == 15
    # One target less for each piece that begins inside a document: 4+4, 4+1, 2+0 tokens.
    assert window.num_target_tokens == 3 + 3 + 3 + 0 + 1 + 0
    assert cut["attention_mask"].tolist()[-1] == [1, 0, 0, 0]
    assert cut["labels"].tolist()[-1] == [-100] * 4
    off = Window([batch], 12, 15, 3)
    assert cut_window(off, 4, split=False)
    assert off.num_tokens == 4 + 4 + 2 and off.num_target_tokens == 3 + 3 + 1
    assert off.micro_batches[0]["weight"].tolist() == [1, 2, 3]
    assert not cut_window(off, 4, split=False)


def test_fillers_are_cut_and_not_counted() -> None:
    batch = PadCollator()([{"input_ids": list(range(8))}])
    window = Window([batch, batch], 7, 8, 1, num_fillers=1)
    cut_window(window, 2, split=True)
    assert window.num_tokens == 8 and window.num_target_tokens == 4
    assert [b["input_ids"].shape for b in window.micro_batches] == [(4, 2), (4, 2)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_seqlens", torch.tensor([0, 8])),
        ("doc_lens", torch.zeros(2, 3, dtype=torch.int64)),
        ("attention_mask", torch.ones(2, 1, 8, 8)),
        ("attention_mask", torch.ones(2, 8, 8)),
        ("labels", torch.zeros(2, 5, dtype=torch.int64)),
        ("max_doc_lens", [3, 4]),
    ],
)
def test_fields_that_cannot_be_cut_are_refused_by_name(name: str, value: Any) -> None:
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), name: value}
    if name == "max_doc_lens":
        batch[name] = {"all": value}
    with pytest.raises(ConfigError, match=name):
        cut_batch(batch, 4, split=True)


# What is refused before the first step


def refuse(folder: Path, made: Any, told: str, dataset: Any = None, **args: Any) -> None:
    trainer, curve = make_trainer(folder, [made], dataset, **{"max_steps": 2, **args})
    with pytest.raises(ConfigError, match=told):
        trainer.train()
    assert curve.tokens == []


def test_what_does_not_fit_the_data_is_refused_before_the_first_step(tmp_path: Path) -> None:
    path = token_files(tmp_path)
    packed = TokenDataset(path, 12, drop_remainder=True)
    refuse(tmp_path, SequenceLengthSchedulerCallback(4), "12 tokens.*power of two.*6, 3", packed)
    refuse(tmp_path, SequenceLengthSchedulerCallback(12), "less than the data's 12", packed)
    refuse(tmp_path, callback(True), "16 given.*12 tokens", packed)
    refuse(tmp_path, callback(False, max_sequence_length=None), "max_sequence_length.*list")
    ragged = tiny_dataset(8, sequence_length=16, ragged=True)
    refuse(tmp_path, callback(False), "different lengths", ragged)
    refuse(
        tmp_path,
        callback(True),
        "lr_scheduler_unit",
        max_steps=-1,
        train_for="500 tokens",
        dataset=Samples(),
    )
    # The check for powers of two is for splitting alone.
    trainer, curve = make_trainer(
        tmp_path / "cut", [callback(True, max_sequence_length=None)], packed, max_steps=6
    )
    trainer.train()
    assert curve.of("train/sequence length") == [2, 4, 6, 8, 10, 12]


def test_truncation_takes_samples_of_any_length(tmp_path: Path) -> None:
    ragged = tiny_dataset(32, sequence_length=16, ragged=True)
    trainer, curve = make_trainer(tmp_path, [callback(True)], ragged, max_steps=6)
    trainer.train()
    assert all(np.diff(curve.tokens) > 0) and curve.tokens[0] <= 2 * 4


def test_compiled_without_dynamic_shapes_there_are_few_lengths(tmp_path: Path) -> None:
    made = SequenceLengthSchedulerCallback(
        128, 1000, True, keep_multiple_of=16, max_sequence_length=4096
    )

    class Compiled:
        torch_compile, torch_compile_dynamic, dynamo_recompile_limit = True, False, None

    made._limit_lengths(Compiled, 4096)
    lengths = {made.length_at(step) for step in range(1, 1001)}
    assert 3 < len(lengths) <= 6
    Compiled.torch_compile_dynamic = True
    made._limit_lengths(Compiled, 4096)
    assert len({made.length_at(step) for step in range(1, 1001)}) > 200
    Compiled.torch_compile_dynamic = False
    split = SequenceLengthSchedulerCallback(32, 1000, max_sequence_length=4096)
    with pytest.raises(ConfigError, match="dynamo_recompile_limit"):
        split._limit_lengths(Compiled, 4096)


def test_disabled_it_changes_nothing(tmp_path: Path) -> None:
    trainer, curve = make_trainer(tmp_path, [callback(True, enabled=False)], max_steps=2)
    trainer.train()
    assert curve.tokens == [32, 64] and curve.of("train/sequence length") == []


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once_for_each_length(tmp_path: Path) -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graphs))
        return graph.forward

    torch._dynamo.register_backend(backend, name="counting")
    made = callback(True, warmup_steps=12)
    trainer, curve = make_trainer(
        tmp_path,
        [made],
        max_steps=14,
        torch_compile=True,
        torch_compile_backend="counting",
        torch_compile_dynamic=False,
    )
    trainer.train()
    lengths = curve.of("train/sequence length")
    assert len(set(lengths)) == 5 and lengths == sorted(lengths)
    assert len(graphs) == 5
