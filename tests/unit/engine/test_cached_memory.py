"""Giving cached device memory back: when it is worth it, and not over and over."""

from __future__ import annotations

import itertools

import torch

from headway.engine.cached_memory import CachedMemory


class Device(CachedMemory):
    """A device of 100 bytes, whose steps need `step` bytes for a while."""

    def __init__(self, threshold, allocated, step):
        self.now_s = 0.0
        super().__init__(torch.device("cuda", 1), threshold, clock=lambda: self.now_s)
        self.allocated, self.step = allocated, step
        self.reserved = allocated + step
        self.releases = []

    def _measure(self):
        return 100, self.allocated, self.reserved

    def _release(self):
        self.releases.append(self.now_s)
        self.reserved = self.allocated

    def run(self, num_steps, step_s=0.5):
        for _ in range(num_steps):
            self.now_s += step_s
            self.reserved = max(self.reserved, self.allocated + self.step)
            self.relieve()
        return self.releases


def test_it_takes_both_a_full_device_and_idle_memory():
    assert Device(0.5, allocated=60, step=20).run(1) == [0.5]
    assert Device(0.5, allocated=60, step=9).run(10) == []
    assert Device(0.5, allocated=50, step=40).run(10) == []
    assert Device(0.9, allocated=80, step=20).run(10) == []


def test_what_grows_back_is_given_back_ever_more_seldom():
    device = Device(0.5, allocated=60, step=20)
    releases = device.run(2000)
    pauses = [later - earlier for earlier, later in itertools.pairwise(releases)]
    assert pauses[:3] == [1, 2, 4]
    assert pauses == sorted(pauses) and pauses[-1] <= 300


def test_one_time_memory_does_not_make_it_rare():
    device = Device(0.5, allocated=60, step=5)
    for _ in range(5):
        device.reserved = 90 - device.now_s / 10  # an evaluation's, for example
        device.run(3)
    assert len(device.releases) == 5


def test_a_cpu_is_never_looked_at():
    class Blind(CachedMemory):
        def _measure(self):
            raise AssertionError

    assert Blind(torch.device("cpu"), 0.0).relieve() is False
