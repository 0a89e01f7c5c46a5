"""Tiny models and data: made from a seed, and there is something to learn in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.testing import tiny_dataset, tiny_decoder, tiny_llama, tiny_text_files


def test_samples_depend_on_the_seed_alone() -> None:
    assert tiny_dataset() == tiny_dataset()
    assert tiny_dataset(seed=1) != tiny_dataset(seed=2)


def test_shape_and_vocabulary() -> None:
    samples = tiny_dataset(num_samples=5, sequence_length=12, vocab_size=7)
    assert len(samples) == 5
    assert {len(sample["input_ids"]) for sample in samples} == {12}
    assert all(0 <= token < 7 for sample in samples for token in sample["input_ids"])
    assert all(sample["labels"] == sample["input_ids"] for sample in samples)


def test_ragged_lengths_vary_within_the_limit() -> None:
    lengths = {len(s["input_ids"]) for s in tiny_dataset(ragged=True, sequence_length=16)}
    assert len(lengths) > 3
    assert min(lengths) >= 2 and max(lengths) <= 16


def test_each_token_decides_the_next() -> None:
    follower: dict[int, int] = {}
    for sample in tiny_dataset():
        for token, after in zip(sample["input_ids"], sample["input_ids"][1:]):
            assert follower.setdefault(token, after) == after


def test_a_llama_learns_the_samples() -> None:
    torch.manual_seed(0)
    model = tiny_llama()
    ids = torch.tensor([sample["input_ids"] for sample in tiny_dataset()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 5
    assert losses[-1] < 2.5


@pytest.mark.parametrize("make", [tiny_decoder, tiny_llama])
def test_models_are_tiny_and_take_overrides(make: type) -> None:
    model = make(vocab_size=40)
    assert sum(parameter.numel() for parameter in model.parameters()) < 50_000
    assert 40 in {parameter.shape[0] for parameter in model.parameters()}


def test_text_files(tmp_path: Path) -> None:
    paths = tiny_text_files(tmp_path / "new", num_files=2)
    assert [path.name for path in paths] == ["text-0.txt", "text-1.txt"]
    assert all(len(path.read_text().splitlines()) == 40 for path in paths)
    assert paths[0].read_text() != paths[1].read_text()
    assert tiny_text_files(tmp_path / "again")[0].read_text() == paths[0].read_text()
