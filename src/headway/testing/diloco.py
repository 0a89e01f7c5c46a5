"""Workers without a trainer: a few numbers, moved by a rule that anybody can compute again.

Owns: `ToyWorker`, whose steps are the same on every machine and with every version of torch, and
running several of them against a server. Does not own: the server, the worker under test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.checkpoint.ranks import SoloRanks
from headway.diloco.client import DiLoCoClient
from headway.diloco.options import WorkerOptions
from headway.diloco.parameters import ParameterView
from headway.diloco.server import DiLoCoServer
from headway.diloco.worker import DiLoCoWorker

Values = dict[str, Tensor]


def toy_model(num_layers: int = 3, width: int = 3) -> nn.Module:
    """Numbered layers of a few parameters, the same every time."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
    model.norm = nn.Linear(width, 1, bias=False)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(toy_numbers(parameter.shape, 7, number))
    return model


def toy_numbers(shape: Sequence[int], *key: int) -> Tensor:
    """Numbers between -1 and 1 that follow from the key alone."""
    state = 12345
    for part in key:
        state = (state * 6364136223846793005 + 2 * part + 1) % (1 << 64)
    values = []
    for _ in range(torch.Size(shape).numel()):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        values.append((state >> 40) / (1 << 23) - 1)
    return torch.tensor(values, dtype=torch.float32).reshape(tuple(shape))


def toy_step(parameters: Mapping[str, Tensor], worker: int, step: int) -> None:
    """One local step: towards zero, and in a direction of its own."""
    with torch.no_grad():
        for number, parameter in enumerate(parameters.values()):
            parameter.sub_(parameter * 0.0625)
            parameter.add_(toy_numbers(parameter.shape, worker, step, number) * 0.125)


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class ToyWorker:
    """One worker, its model, and what the model was after every step."""

    def __init__(
        self,
        address: str,
        number: int = 0,
        *,
        step_s: float = 1.0,
        model: nn.Module | None = None,
        token: str | None = None,
        session_file: Path | None = None,
        should_end: Callable[[], bool] = bool,
        first_pause_s: float = 0.01,
        connect_timeout_s: float = 10.0,
        **options: Any,
    ) -> None:
        self.number, self.step_s = number, step_s
        self.model = toy_model() if model is None else model
        self.view = ParameterView(self.model, SoloRanks())
        self.clock, self.step = Clock(), 0
        settings = {"comm": "float32", "sync_every": 4, "timeout": 30.0, **options}
        self.worker = DiLoCoWorker(
            self.view,
            DiLoCoClient(
                address,
                token,
                timeout_s=settings["timeout"],
                connect_s=connect_timeout_s,
                bf16_fetch=bool(settings.get("bf16_fetch")),
            ),
            WorkerOptions(**settings),
            worker_id=f"worker-{number}",
            first_pause_s=first_pause_s,
            session_file=session_file,
            should_end=should_end,
            clock=self.clock,
        )
        self.history: list[Values] = []

    @property
    def values(self) -> Values:
        return self.view.copies()

    def start(self, state: Mapping[str, Any] | None = None) -> ToyWorker:
        self.worker.start(state, self.step)
        return self

    def train(self, num_steps: int, *, last: bool = False) -> ToyWorker:
        """So many steps, with the exchanges that are due; `last`: nothing is left under way."""
        for left in range(num_steps - 1, -1, -1):
            toy_step(self.view.parts(), self.number, self.step)
            self.step += 1
            self.clock.now_s += self.step_s
            self.worker.after_step(self.step, last=last and left == 0)
            self.history.append(self.values)
        return self

    # -- checkpoints ------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """What a checkpoint of a trainer would hold."""
        slots = self.worker.parameter_state()
        return {
            "step": self.step,
            "weights": self.values,
            "state": self.worker.state_dict(),
            "slots": {s: {n: t.clone() for n, t in held.items()} for s, held in slots.items()},
        }

    def resume(self, saved: Mapping[str, Any]) -> ToyWorker:
        """Start from such a checkpoint."""
        self.load(saved)
        self.worker.load_parameter_state(saved["slots"])
        return self.start(saved["state"])

    def load(self, saved: Mapping[str, Any]) -> None:
        self.step = saved["step"]
        with torch.no_grad():
            for name, part in self.view.parts().items():
                part.copy_(saved["weights"][name])


@contextmanager
def serving(folder: Path, model: Any = None, **options: Any) -> Iterator[DiLoCoServer]:
    """A server that lives as long as the block, on this machine, for everybody."""
    settings = {"num_workers": 1, "disable_auth": True, "output_dir": folder, **options}
    server = DiLoCoServer(model, **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def stopped(*workers: ToyWorker) -> Iterator[None]:
    """Leave the server at the end, whatever happens."""
    try:
        yield
    finally:
        for one in workers:
            one.worker.stop()


def together(*acts: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Do all of it at the same time, as workers of one round must; raises what one raised."""
    errors: list[BaseException] = []

    def run(act: Callable[[], Any]) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"workers did not end within {limit_s:g} s")


def train_together(workers: Sequence[ToyWorker], num_steps: int, *, last: bool = True) -> None:
    """All workers at the same time: in synchronous rounds each waits for the others."""
    together(*(lambda one=one: one.train(num_steps, last=last) for one in workers))  # type: ignore[misc]
