"""What the comparison of replicas costs on a CUDA device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from headway.callbacks import ReplicaCheckCallback
from headway.callbacks.guard.checksums import find_held, group_shared
from headway.callbacks.guard.replica_check import _Sums
from headway.models import Decoder, DecoderConfig
from headway.testing import count_host_syncs

pytestmark = pytest.mark.gpu


def seconds_of(act: Any, times: int) -> float:
    act()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(times):
        act()
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / times


def test_a_check_costs_at_most_a_thousandth_and_sees_one_bit(capsys: Any) -> None:
    config = DecoderConfig(
        vocab_size=32000, hidden_size=768, num_layers=12, num_heads=12, max_seq_len=1024
    )
    model = Decoder(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 32000, (32, 1024), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step_s = seconds_of(step, 10)
    held = find_held(model)
    keys = [one.key for one in held]
    groups = group_shared(held, [keys, keys])
    check_s = seconds_of(lambda: _Sums(1, groups).folded(), 20)
    share = check_s / (ReplicaCheckCallback().interval * step_s)
    with capsys.disabled():
        print(f"\nstep {1e3 * step_s:.2f} ms, check {1e3 * check_s:.2f} ms, share {share:.5%}")
    assert share < 0.001
    with count_host_syncs() as syncs:
        sums = _Sums(1, groups)
    assert syncs.count == 0, syncs.report()
    before = sums.folded()
    words = list(model.parameters())[7].detach().view(torch.int32).view(-1)
    words[11] ^= 1
    assert _Sums(1, groups).folded() != before
    words[11] ^= 1
    assert _Sums(1, groups).folded() == before
