"""Data parallel: every rank holds the whole model and its own share of each window.

Owns: the DistributedDataParallel wrapper and its options, gradient sums over ranks, accumulation
without needless reductions, keeping buffers equal where ranks meet. Does not own: local steps
(local_sgd), reading data (data/feeding).
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.args import DDPArguments, DDPTrainingArguments
from headway.checkpoint.component import StateComponent
from headway.data.loader import WindowLoader
from headway.data.windows import Window
from headway.dist.group import DistributedContext
from headway.errors import ConfigError
from headway.models.generation import generate
from headway.precision.scaler import backward
from headway.strategies.base import Notify
from headway.strategies.local_sgd import LocalSGD
from headway.strategies.objective import Objective
from headway.strategies.ranked import RankedStrategy, own_targets, spread_nonfinite
from headway.strategies.source import ModelSource
from headway.strategies.unfrozen import UnfrozenLater

# torch's words when parameters had no part in a step, and where it lists them.
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_NUMBERS = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class DistributedDataParallelStrategy(RankedStrategy):
    """torch's DDP, with gradients summed over all ranks' targets."""

    name = "ddp"

    def __init__(
        self, context: DistributedContext, device: torch.device, args: DDPTrainingArguments
    ) -> None:
        super().__init__(
            context,
            device,
            dispatch=args.dispatch_batches,
            dispatch_eval=args.dispatch_eval_batches,
        )
        self._args = args.ddp
        self._options = wrapper_options(args.ddp)
        local = args.post_local_sgd
        self._local = LocalSGD(local, context.world_size) if local.enabled else None
        self._model: nn.Module | None = None
        self._wrapped: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []
        self._reduced: list[str] = []
        self._unfrozen: UnfrozenLater | None = None
        self._rehearses_next = False
        # DDP averages; with the loss multiplied by their number its ranks' gradients are summed.
        self._weight = torch.full((), float(context.world_size), device=device)
        self.before_save = self._join_for_save

    def setup(self, source: ModelSource) -> nn.Module:
        model = source.finish(source.build()).to(self.device)
        self._model = model
        self._parameters = list(model.parameters())  # those too that are frozen for now
        if self._local is not None:
            self._local.attach(model)
        held = _Held(model)
        self._reduced, self._unfrozen = _reduced_names(model), UnfrozenLater(model)
        device_ids = [self.device] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            # What torch offers instead would still make buffers equal at the start.
            warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
            wrapped = DistributedDataParallel(held, device_ids=device_ids, **self._options)
        self._wrapped = wrapped
        if self._args.static_graph:
            self._rehearses_next = True
        elif self._regroups():
            held.rehearses = True
            self._rehearse(lambda: wrapped(rehearsal=True))
            held.rehearses = False
        return model

    def _regroups(self) -> bool:
        """Whether DDP would group gradients anew after the first step of this process."""
        assert self._model is not None
        sparse = any(getattr(module, "sparse", False) for module in self._model.modules())
        return not (self._args.find_unused_parameters or sparse)

    def _rehearse(self, forward: Callable[[], Tensor]) -> None:
        """A backward for nothing, so that DDP groups gradients for good before the first step.

        It does so in the order in which its first backward makes them ready. The reduction adds in
        another order in the old groups, so that the first step after a resume would differ from
        the same step of a run that was not interrupted.
        """
        with self.train_context():
            loss = forward()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self._parameters:
            parameter.grad = None

    def _rehearse_window(self, window: Window, objective: Objective) -> None:
        """With a real batch: a static graph is learnt from the first backward, which has to reduce.

        Gradients are grouped by the second.
        """
        wrapped, self._rehearses_next = self._wrapped, False
        assert wrapped is not None
        batch, buffers = self._move(window.micro_batches[0]), list(self.unwrap().buffers())
        before = [buffer.clone() for buffer in buffers]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            for _ in range(2):
                self._rehearse(lambda: objective.loss(wrapped, batch, 1, 1))
        for buffer, value in zip(buffers, before):
            buffer.copy_(value)

    # -- data -------------------------------------------------------------------------------

    def feed(self, loader: WindowLoader, *, training: bool = True) -> Iterator[Window]:
        if not training:
            self._join(buffers=self._args.broadcast_buffers)
        return super().feed(loader, training=training)

    # -- the step ---------------------------------------------------------------------------

    def forward_backward(
        self, window: Window, objective: Objective, num_targets: int | Tensor, notify: Notify
    ) -> Tensor:
        wrapped, total = self._wrapped, None
        assert wrapped is not None, "setup comes first"
        num_batches = len(window.micro_batches)
        local = self._local is not None and self._local.is_local
        if self._rehearses_next:
            self._rehearse_window(window, objective)
        for number, batch in enumerate(window.micro_batches):
            notify("on_forward_backward_begin")
            own = own_targets(window, number, objective)
            reduces = number == num_batches - 1 and not local
            with nullcontext() if reduces else wrapped.no_sync():
                with _naming_unused_parameters(self._reduced), self.train_context():
                    loss = objective.loss(wrapped, self._move(batch), num_targets, own)
                if number >= num_batches - window.num_fillers:
                    # A mean over nothing is not a number.
                    loss = loss.nan_to_num(0.0, 0.0, 0.0) * 0
                backward(spread_nonfinite(loss) * self._weight.to(loss.dtype), self.loss_scale)
            loss = loss.detach()
            total = loss if total is None else total + loss
            notify("on_forward_backward_end")
            notify("on_substep_end")
        assert total is not None, "a window has at least one micro-batch"
        if not local:
            self._require_gradients()
            assert self._unfrozen is not None
            self._unfrozen.reduce()
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._parameters)
        return total

    def _require_gradients(self) -> None:
        """Refuse a step of which torch has reduced only a part, which it tells in the next one."""
        if self._args.find_unused_parameters or self._args.static_graph:
            return
        if any(p.grad is None and p.requires_grad for p in self._parameters):
            names = {id(p): name for name, p in self.unwrap().named_parameters()}
            ignored = getattr(self._model, "_ddp_params_and_buffers_to_ignore", ())
            left = [names[id(p)] for p in self._parameters if p.grad is None and p.requires_grad]
            left = [name for name in left if name not in ignored]
            if left:
                raise ConfigError(_tell_unused(left))

    def clip(
        self, max_norm: float | None, in_step_of: torch.optim.Optimizer | None = None
    ) -> Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.zeros((), device=self.device)
        if gradients:
            norm = nn.utils.get_total_norm(gradients, foreach=True)
            if max_norm:
                nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm, foreach=True)
        if self._local is not None and self._local.is_local:
            # Each rank clips its own step; whether steps are taken is one decision.
            return self.reduce(norm, "mean")
        return norm

    def apply(self, optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> bool:
        if self._local is not None:
            self._local.before_step(optimizer)
        taken = super().apply(optimizer, loss, grad_norm)
        if self._local is not None:
            self._local.after_step()
        return taken

    def _join(self, *, buffers: bool) -> None:
        """Leave no difference between ranks: the mean of the weights, and rank 0's buffers."""
        if self._local is not None:
            self._local.join()
        for buffer in self.unwrap().buffers() if buffers else ():
            # gloo takes no notice of gaps, and would write into what lies in them.
            value = buffer.contiguous()
            dist.broadcast(value, 0)
            if value is not buffer:
                buffer.copy_(value)

    def _join_for_save(self) -> None:
        # There is one place for a buffer in a checkpoint, whoever writes it; a run that goes on
        # has to have in it what a resumed run will have.
        self._join(buffers=True)

    # -- the rest ---------------------------------------------------------------------------

    def state_components(self) -> list[StateComponent]:
        return [] if self._local is None else self._local.components()

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        with self.eval_context():
            return generate(self.unwrap(), input_ids.to(self.device), **options)

    def unwrap(self) -> nn.Module:
        assert self._model is not None, "setup comes first"
        return self._model

    def teardown(self) -> None:
        self._model = self._wrapped = self._unfrozen = None
        self._parameters = []


class _Held(nn.Module):
    """The user's model inside the wrapper, which can stand still while the wrapper is tried."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.rehearses = False
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in ignored]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not self.rehearses:
            return self.module(*inputs, **options)
        # A gradient of zero for every parameter, the last one first, as in a real backward; the
        # model itself, its buffers and the generators are left alone.
        return sum(p.sum() * 0 for p in self.module.parameters() if p.requires_grad)


def _reduced_names(model: nn.Module) -> list[str]:
    """The parameters whose gradients the wrapper sums, by the numbers that it gives them."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return [n for n, p in model.named_parameters() if p.requires_grad and n not in ignored]


@contextmanager
def _naming_unused_parameters(reduced: list[str]) -> Iterator[None]:
    """torch's complaint about parameters without a gradient, with the option that helps."""
    try:
        yield
    except RuntimeError as error:
        if _UNFINISHED not in str(error):
            raise
        listed = _NUMBERS.search(str(error))
        numbers = [int(number) for number in listed[1].split()] if listed else []
        names = [reduced[number] for number in numbers if number < len(reduced)]
        raise ConfigError(_tell_unused(names)) from error


def _tell_unused(names: list[str]) -> str:
    shown = f" ({', '.join(names[:8])}{', ...' * (len(names) > 8)})" if names else ""
    return (
        "ddp.find_unused_parameters: False given, but the last step left parameters of the "
        f"model without a gradient{shown}; set it to True, or freeze or remove what takes no "
        "part in the loss"
    )


def wrapper_options(args: DDPArguments) -> dict[str, Any]:
    """The options that the installed torch takes; one that it lacks is refused if it is set."""
    known = inspect.signature(DistributedDataParallel).parameters
    given, default = asdict(args), asdict(DDPArguments())
    missing = [name for name in given if name not in known]
    refused = [name for name in missing if given[name] != default[name]]
    if refused:
        raise ConfigError(
            [
                f"ddp.{name}: {given[name]!r} given, but DistributedDataParallel of torch "
                f"{torch.__version__} has no such option; leave it at {default[name]!r}"
                for name in refused
            ]
        )
    return {name: value for name, value in given.items() if name in known}
