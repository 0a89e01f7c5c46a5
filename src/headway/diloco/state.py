"""The server's tensors, and how a round changes them.

Owns: `State` (parameters, momentum, counters), its hash, and the application of a round's bodies.
Does not own: the rule of one tensor (outer.py), files (ledger.py), who took part (rounds.py).
A state is never changed: a round makes a new one, which shares what has stayed the same. So readers
of the old one are served without a lock.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from headway.diloco.compression import decode
from headway.diloco.outer import OuterOptimizer, Share
from headway.diloco.specification import Specification, canonical_json
from headway.diloco.wire import Header, Payload, slice_body

# Private pages that may be written to, which torch asks for.
_PRIVATE = mmap.PROT_READ | mmap.PROT_WRITE


class Body(NamedTuple):
    """A submission on the disk, and what it counts for."""

    path: str
    weight: float
    is_local: bool


@dataclass(frozen=True)
class State:
    """All that a round changes."""

    specification: Specification
    fragments: list[list[str]]
    parameters: dict[str, Tensor] = field(repr=False)
    velocity: dict[str, Tensor] = field(repr=False)
    buffer: dict[str, Tensor] = field(repr=False)
    """Asynchronous mode: pseudo-gradients since the momentum was last renewed."""
    numbers: tuple[int, ...]
    """Rounds that each fragment has behind it."""
    hashes: tuple[str, ...]
    """Of each fragment's tensors."""
    commit: int = 0
    """Rounds of all fragments together."""

    @cached_property
    def hash(self) -> str:
        """The same for two states if and only if their tensors are, bit for bit."""
        said = {"commit": self.commit, "numbers": self.numbers, "fragments": self.hashes}
        return xxhash.xxh3_128_hexdigest(canonical_json(said))


def make_state(
    specification: Specification,
    fragments: list[list[str]],
    parameters: Mapping[str, Tensor],
    optimizer: OuterOptimizer,
    mode: str,
) -> State:
    """The state before the first round."""
    own = {
        name: parameters[name].detach().to("cpu", torch.float32).reshape(shape).clone()
        for name, shape in specification.shapes.items()
    }
    zeros = {n: torch.zeros(s, dtype=optimizer.dtype) for n, s in specification.shapes.items()}
    buffer = {n: torch.zeros_like(z) for n, z in zeros.items()} if mode == "async" else {}
    numbers = (0,) * len(fragments)
    hashes = tuple(hash_fragment(names, own, zeros, buffer) for names in fragments)
    return State(specification, fragments, own, zeros, buffer, numbers, hashes)


def hash_fragment(names: Sequence[str], *groups: Mapping[str, Tensor]) -> str:
    """Of the values of one fragment in each group of tensors."""
    hasher = xxhash.xxh3_128()
    for group in groups:
        for name in names:
            if name in group and group[name].numel():
                hasher.update(group[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class OpenBody:
    """The tensors of a body in a file, read where they lie; a context manager."""

    def __init__(
        self, path: str, shapes: Mapping[str, tuple[int, ...]], *, verify: bool = False
    ) -> None:
        self._path, self._shapes, self._verify = path, shapes, verify
        self.header: Header | None = None
        self.payloads: dict[str, Payload] = {}

    def __enter__(self) -> OpenBody:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=_PRIVATE)
        finally:
            os.close(descriptor)
        view = memoryview(mapped)
        self.header, self.payloads = slice_body(view, self._shapes, verify=self._verify)
        return self

    def __exit__(self, *_: object) -> None:
        # The mapping ends with the last view of it.
        self.payloads = {}


def measure(
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, Tensor] | None = None,
) -> float:
    """The norm of a body's pseudo-gradient; not finite if any value is not.

    With `parameters` the body holds a worker's own ones, and the difference is what is looked at.
    """
    total = 0.0
    with OpenBody(path, shapes) as body:
        for name, payload in body.payloads.items():
            wide = decode(payload).double()
            if parameters is not None:
                wide = parameters[name].double() - wide
            # No square of a float32 overflows here: the sum is finite if all values are.
            total += float(wide.square().sum())
    return math.sqrt(total)


def apply_round(
    state: State,
    fragment: int,
    bodies: Sequence[Body],
    optimizer: OuterOptimizer,
    mode: str,
    *,
    verify: bool = False,
) -> State:
    """The state after a round of one fragment, with bodies added up in their order."""
    names = state.fragments[fragment]
    shapes = state.specification.select(names)
    opened = [OpenBody(body.path, shapes, verify=verify).__enter__() for body in bodies]
    new: dict[str, dict[str, Any]] = {"parameters": {}, "velocity": {}, "buffer": {}}
    number = state.numbers[fragment] + 1
    for name in names:
        shares = (
            Share(decode(one.payloads[name]), body.weight, body.is_local)
            for one, body in zip(opened, bodies, strict=True)
        )
        old, velocity = state.parameters[name], state.velocity[name]
        mean = optimizer.mean(old, shares)
        if mode == "async":
            moved, velocity, buffer = optimizer.step_delayed(
                old, velocity, state.buffer[name], mean, number
            )
            new["buffer"][name] = buffer
        else:
            moved, velocity = optimizer.step(old, velocity, mean)
        new["parameters"][name], new["velocity"][name] = moved, velocity
    for one in opened:
        one.__exit__()
    numbers = (*state.numbers[:fragment], number, *state.numbers[fragment + 1 :])
    fresh = hash_fragment(names, new["parameters"], new["velocity"], new["buffer"])
    hashes = (*state.hashes[:fragment], fresh, *state.hashes[fragment + 1 :])
    return replace(
        state,
        parameters={**state.parameters, **new["parameters"]},
        velocity={**state.velocity, **new["velocity"]},
        buffer={**state.buffer, **new["buffer"]},
        numbers=numbers,
        hashes=hashes,
        commit=state.commit + 1,
    )


def is_finite(state: State, fragment: int) -> bool:
    """Whether a fragment's parameters, and what later rounds add to them, are numbers."""
    return all(
        bool(torch.isfinite(group[name]).all())
        for group in (state.parameters, state.velocity, state.buffer)
        for name in state.fragments[fragment]
        if name in group
    )


def norm_of(state: State, fragment: int) -> float:
    """Of a fragment's parameters."""
    names = state.fragments[fragment]
    return math.sqrt(sum(float(state.parameters[n].double().square().sum()) for n in names))


def drift_of(old: State, new: State, fragment: int) -> float:
    """How far a round has moved the parameters of a fragment."""
    total = 0.0
    for name in new.fragments[fragment]:
        moved = new.parameters[name].double() - old.parameters[name].double()
        total += float(moved.square().sum())
    return math.sqrt(total)
