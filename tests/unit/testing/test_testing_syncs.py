"""Host syncs: each way of reading a tensor counts once, and device-side work not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.testing import count_host_syncs

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if x[0] else 0,
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "range": lambda x: range(x[1].int()),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "torch.nonzero": lambda x: torch.nonzero(x),
    "mask": lambda x: x[x > 1],
    "masked_select": lambda x: x.masked_select(x > 1),
    "masked assignment": lambda x: x.clone().__setitem__(x > 1, torch.ones(1, 1, 2)[0, 0]),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "where": lambda x: torch.where(x > 1),
    "repeat": lambda x: torch.repeat_interleave(x, x.int()),
    "bincount": lambda x: torch.bincount(x.int()),
}


@pytest.mark.parametrize("name", READS)
def test_each_read_counts_once_with_its_call_site(name: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    with count_host_syncs(device_type="cpu") as syncs:
        READS[name](x)
    assert syncs.count == 1, syncs.report()
    assert syncs.records[0].file == __file__
    assert syncs.records[0].function == "<lambda>"


def test_a_training_step_without_reads_counts_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.arange(8)
    total = torch.zeros(2)
    with count_host_syncs(device_type="cpu") as syncs:
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(tokens.to("cpu")), tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            total[total > 100] = 0.0
    assert syncs.count == 0, syncs.report()


def test_reads_inside_backward_hooks_are_seen() -> None:
    weight = torch.ones(3, requires_grad=True)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.tolist()))
    with count_host_syncs(device_type="cpu") as syncs:
        (weight * 2).sum().backward()
    assert [record.operation for record in syncs.records] == ["tolist"]
    assert seen == [[2.0, 2.0, 2.0]]


def test_counting_starts_anew_after_a_reset_and_ends_with_the_block() -> None:
    x = torch.ones(())
    with count_host_syncs(device_type="cpu") as syncs:
        x.item()
        syncs.reset()
        float(x)
    x.item()
    assert [record.operation for record in syncs.records] == ["__float__"]
    assert __file__ in syncs.report()


def test_the_tensor_class_is_left_as_it_was() -> None:
    before = dict(vars(torch.Tensor))
    with count_host_syncs(device_type="cpu"):
        assert dict(vars(torch.Tensor)) != before
    assert dict(vars(torch.Tensor)) == before


def test_code_without_a_file_counts_too() -> None:
    with count_host_syncs(device_type="cpu") as syncs:
        exec(compile("x.item()", "<stdin>", "exec"), {"x": torch.ones(())})
    assert [record.file for record in syncs.records] == ["<stdin>"]


def test_ignored_call_sites_do_not_count() -> None:
    with count_host_syncs(device_type="cpu", ignore=["test_testing_syncs"]) as syncs:
        torch.ones(()).item()
    assert syncs.count == 0


@pytest.mark.gpu
def test_cuda_reports_its_own_syncs() -> None:
    x = torch.ones(4, device="cuda")
    with count_host_syncs() as syncs:
        y = (x * 2).sum()
        assert syncs.count == 0, syncs.report()
        y.item()
        y.cpu()
        x.nonzero()
    assert syncs.count >= 3, syncs.report()
    assert {record.file for record in syncs.records} == {__file__}
    assert torch.cuda.get_sync_debug_mode() == 0
