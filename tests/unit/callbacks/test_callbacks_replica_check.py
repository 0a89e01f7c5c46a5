"""Checksums change with every bit; differences are told with ranks and tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway import ConfigError, TrainerCallback
from headway.callbacks import ReplicaCheckCallback
from headway.callbacks.guard import checksums
from headway.callbacks.guard.checksums import (
    Held,
    add_up,
    add_up_each,
    find_held,
    fold,
    group_shared,
)
from headway.callbacks.guard.replica_check import describe, find_different
from headway.checkpoint import committed
from headway.testing import tiny_decoder, tiny_trainer

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool,
          torch.complex64, torch.float8_e4m3fn)  # fmt: skip


class Back(TrainerCallback):
    """Asks for a rollback after a step, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: Any, control: Any) -> None:
        if state.global_step == self.step:
            self.step, control.rollback = -1, True


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((3,), (4, 5), (2, 3, 4), (100,), ())
    made = [(torch.randn(shape) * 9).to(dtype) for dtype in DTYPES for shape in shapes]
    return [*made, torch.randn(6, 8).t(), torch.randn(10, 4)[:, 1:3]]


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    part = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = part.view(kinds[part.element_size()])
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), words.shape))
    width = 8 * part.element_size()
    number = (int(words[where]) ^ (1 << bit)) % (1 << width)
    if words.dtype != torch.uint8 and number >= 1 << (width - 1):
        number -= 1 << width
    words[where] = number


def test_every_single_bit_changes_the_sum_of_its_tensor_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksums, "_SMALL_NUMBERS", 64)
    made = tensors()
    held = [Held(str(n), str(n), lambda own=tensor: own) for n, tensor in enumerate(made)]
    before, folded = add_up_each(held), fold(add_up(held).tolist())
    for number, tensor in enumerate(made):
        numel = tensor.numel() * (2 if tensor.is_complex() else 1)
        width = 32 if tensor.is_complex() else 8 * tensor.element_size()
        bits = (0,) if tensor.dtype == torch.bool else (0, width // 2, width - 1)
        for index in {0, numel - 1}:
            for bit in bits:
                flip(tensor, index, bit)
                changed = torch.nonzero(add_up_each(held) != before).flatten().tolist()
                assert changed == [number]
                now = fold(add_up(held).tolist())
                assert sum(one != two for one, two in zip(now, folded, strict=True)) == 1
                flip(tensor, index, bit)
    assert torch.equal(add_up_each(held), before)


def test_a_tensor_that_was_put_elsewhere_is_followed() -> None:
    place = {"w": torch.ones(8)}
    (held,) = [Held("w", "w", lambda: place["w"])]
    before = add_up([held]).tolist()
    place["w"] = torch.full((8,), 2.0)
    assert add_up([held]).tolist() != before


def test_folding_loses_no_change_of_one_sum() -> None:
    sums = [(n * 7919) ** 3 % (1 << 63) for n in range(100)]
    plain = fold(sums)
    assert len(plain) <= 16
    for number in range(100):
        for bit in range(64):
            other = list(sums)
            other[number] ^= 1 << bit
            assert fold(other) != plain


def test_what_ranks_share_is_found_by_name_type_and_place() -> None:
    model = tiny_decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    names = [held.name for held in find_held(model, optimizer)]
    assert names == [name for name, _ in model.named_parameters()], "no state before a step"
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    own = find_held(model, optimizer)
    assert len(own) >= 3 * len(names) and any(held.name.endswith("exp_avg") for held in own)
    keys = [held.key for held in own]
    groups = group_shared(own, [keys, keys[:2], ["other"], keys])
    assert set(groups) == {"0,1,3", "0,3"}
    assert len(groups["0,1,3"].members) == 2
    assert group_shared(own, [keys, ["other"]]) == {}
    half = [held.key for held in find_held(tiny_decoder().bfloat16())]
    assert not {*half} & {*keys}


def test_the_odd_ranks_are_named_where_there_is_a_majority() -> None:
    def say(*values: int) -> list[dict[str, dict[str, int]]]:
        return [{"g": {"w": value, "b": 1}} for value in values]

    (one,) = find_different(say(5, 5, 4, 5))
    assert (one.name, one.odd_ranks, one.best_rank) == ("w", [2], 0)
    assert describe([one]) == "rank 2 of 4 holds other values than most, in w"
    (one,) = find_different(say(4, 5, 5))
    assert (one.odd_ranks, one.best_rank) == ([0], 1)
    (one,) = find_different(say(4, 5))
    assert one.odd_ranks == [] and one.best_rank == 0
    assert "which are right cannot be told" in describe([one])
    assert find_different(say(5, 5)) == []


def test_one_process_has_nothing_to_compare_and_is_told(tmp_path: Path, caplog: Any) -> None:
    tiny_trainer(tmp_path, [ReplicaCheckCallback(1)], max_steps=2).train()
    assert caplog.text.count("nothing is compared") == 1


def test_local_sgd_is_refused() -> None:
    args = SimpleNamespace(post_local_sgd=SimpleNamespace(enabled=True))
    with pytest.raises(ConfigError, match="post_local_sgd"):
        ReplicaCheckCallback().on_train_begin(args, SimpleNamespace(), None)  # type: ignore[arg-type]


def test_where_nothing_is_compared_it_keeps_no_checkpoint(tmp_path: Path) -> None:
    def run(*callbacks: Any, **arguments: Any) -> list[int]:
        tiny_trainer(
            tmp_path, [ReplicaCheckCallback(), *callbacks], num_samples=64, save_strategy="steps",
            save_steps=2, save_total_limit=1, save_async=False, **arguments,
        ).train()  # fmt: skip
        return sorted(found.step for found in committed(tmp_path / "out"))

    assert run(max_steps=2) == [2]
    assert run(max_steps=8) == [8], "that of the resume was kept for good"
    assert run(Back(11), max_steps=16) == [16], "that of the rollback was kept for good"
