"""Sharded data parallelism: every rank keeps a slice of each parameter, gradient and moment.

Owns: the mesh, cutting a model up by `fully_shard`, gradients summed over ranks, the norm of
sharded gradients. Does not own: which modules are blocks (blocks.py), where initial values come
from (models/initial.py, spread.py), files (checkpoint/).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from headway.args import FSDP2Arguments, FSDP2TrainingArguments
from headway.checkpoint.sharding import local_tensor
from headway.data.loader import WindowLoader
from headway.data.windows import Window
from headway.dist.group import DistributedContext
from headway.dist.limits import limit_group
from headway.errors import ConfigError, unknown
from headway.models.generation import generate
from headway.precision.scaler import backward
from headway.strategies.base import EvalStep, Notify
from headway.strategies.blocks import find_blocks, keep_apart
from headway.strategies.fsdp_groups import drop_gradients, groups_of, reduce_unused
from headway.strategies.objective import Objective
from headway.strategies.ranked import (
    RankedStrategy,
    join_buffers,
    own_targets,
    spread_nonfinite,
)
from headway.strategies.source import ModelSource
from headway.strategies.spread import fill_shards, plan_streaming, same_on_all_ranks

_DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
}

logger = logging.getLogger(__name__)


class FullyShardedStrategy(RankedStrategy):
    """ZeRO-3 and ZeRO-2 over all ranks, or over groups of ranks with a copy each."""

    name = "fsdp2"
    forward_is_shared = True

    def __init__(
        self, context: DistributedContext, device: torch.device, args: FSDP2TrainingArguments
    ) -> None:
        self._options = args.fsdp2
        self._shard_size = _check_options(args.fsdp2, context.world_size)
        self._precision = _precision(args.fsdp2)
        super().__init__(context, device, dispatch=args.dispatch_batches)
        # What is kept on the host between uses is stepped there, where a look costs nothing.
        self._reading_waits = self._reading_waits and not args.fsdp2.cpu_offload
        self._model: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []
        self._sharded: list[FSDPModule] = []
        self._mesh: DeviceMesh | None = None
        self.before_save = self._join_buffers

    # -- setting up -------------------------------------------------------------------------

    def setup(self, source: ModelSource) -> nn.Module:
        self._mesh = self._make_mesh()
        plan = plan_streaming(source)
        if plan is None:
            model = source.finish(source.build())
            same_on_all_ranks(model, self._host)
            self._shard(model)
        else:
            model = source.finish(source.build_meta())
            self._shard(model)
            fill_shards(model, plan, self._home)
        self._place_buffers(model)
        self._model = model
        self._parameters = list(model.parameters())  # those too that are frozen for now
        return model

    @property
    def _home(self) -> torch.device:
        """Where parameters are between uses."""
        return torch.device("cpu") if self._options.cpu_offload else self.device

    def _make_mesh(self) -> DeviceMesh:
        world_size, shard_size = self.context.world_size, self._shard_size
        sizes = {"replicate": world_size // shard_size, "shard": shard_size}
        if shard_size == world_size:
            del sizes["replicate"]
        kind, shape = self.device.type, tuple(sizes.values())
        mesh = init_device_mesh(kind, shape, mesh_dim_names=tuple(sizes))
        for group in mesh.get_all_groups():
            if group is not dist.group.WORLD:  # that has what it was given
                limit_group(group)
        return mesh

    def _shard(self, model: nn.Module) -> None:
        options = self._options
        _refuse_dropped_layers(model)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(
                    f"FSDP2 cannot shard the parameter {name}, which has no dimension; make it a "
                    "tensor of shape [1]"
                )
        path = options.transformer_layers_path if options.shard_transformer_layers else ""
        blocks = keep_apart(model, [block for _, block in find_blocks(model, path)])
        offload = OffloadPolicy()
        if options.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        common: dict[str, Any] = {"mesh": self._mesh, "offload_policy": offload}
        for block in blocks:
            fully_shard(
                block,
                reshard_after_forward=options.reshard_after_forward,
                mp_policy=self._precision,
                **common,
            )
        # The root's own parameters are needed again right away: the backward begins with them.
        # Only the root gives another dtype out: a block's output is the next block's input.
        fully_shard(
            model,
            reshard_after_forward=False,
            mp_policy=_with_full_output(self._precision),
            **common,
        )
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        reduce_unused(model)
        for module in self._sharded:
            # Shares of the loss add up to the global mean, so their gradients are summed. gloo
            # has no other operation that does not divide.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if self.device.type == "cuda":
            _prefetch(blocks)

    def _place_buffers(self, model: nn.Module) -> None:
        dtype = _DTYPES.get(self._options.buffer_dtype or "")
        kept = []
        for name, module, key, buffer in _buffers(model):
            wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
            if wanted != buffer.dtype and _is_rotary(name, module):
                kept.append(name)
                wanted = buffer.dtype
            module._buffers[key] = buffer.to(self.device, wanted)
        if kept:
            logger.info(
                "fsdp2.buffer_dtype: positions lose their meaning below float32; %s as they are",
                ", ".join(kept[:4]) + (" and more stay" if len(kept) > 4 else " stay"),
            )

    # -- data -------------------------------------------------------------------------------

    def feed(self, loader: WindowLoader, *, training: bool = True) -> Iterator[Window]:
        if not training:
            self._join_buffers()
        return super().feed(loader, training=training)

    def _join_buffers(self) -> None:
        join_buffers(self.unwrap(), self._host)

    # -- the step ---------------------------------------------------------------------------

    def forward_backward(
        self, window: Window, objective: Objective, num_targets: int | Tensor, notify: Notify
    ) -> Tensor:
        try:
            return self._forward_backward(window, objective, num_targets, notify)
        except BaseException:
            _drop_step(self.unwrap())
            raise

    def _forward_backward(
        self, window: Window, objective: Objective, num_targets: int | Tensor, notify: Notify
    ) -> Tensor:
        model, total = self.unwrap(), None
        assert isinstance(model, FSDPModule)
        count = len(window.micro_batches)
        for number, batch in enumerate(window.micro_batches):
            notify("on_forward_backward_begin")
            if count > 1:
                is_last = number == count - 1
                model.set_requires_gradient_sync(is_last)
                model.set_is_last_backward(is_last)
            batch, own = self._move(batch), own_targets(window, number, objective)
            with self.train_context():
                share = objective.loss(model, batch, num_targets, own)
            if number >= count - window.num_fillers:
                # A mean over nothing is not a number.
                share = share.nan_to_num(0.0, 0.0, 0.0) * 0
            backward(spread_nonfinite(share), self.loss_scale)
            share = share.detach()
            total = share if total is None else total + share
            notify("on_forward_backward_end")
            notify("on_substep_end")
        assert total is not None, "a window has at least one micro-batch"
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._parameters)
        return total

    def eval_forward(
        self, batch: Any, objective: Objective, *, with_logits: bool = False
    ) -> EvalStep:
        try:
            return super().eval_forward(batch, objective, with_logits=with_logits)
        finally:
            self._reshard()

    def _reshard(self) -> None:
        """Free what a forward without a backward has left gathered."""
        # Otherwise the model's parameters would not be those that the optimizer and checkpoints
        # know.
        for module in self._sharded:
            module.reshard()

    @torch.no_grad()
    def clip(
        self, max_norm: float | None, in_step_of: torch.optim.Optimizer | None = None
    ) -> Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        local = [local_tensor(gradient) for gradient in gradients]
        norm = self._total_norm(gradients, local)
        if max_norm and local:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(local, scale.to(local[0].device))
        return norm

    def _total_norm(self, gradients: list[Tensor], local: list[Tensor]) -> Tensor:
        """The norm over all slices, each counted once; the same bits on every rank."""
        # Sums of squares per layout, one small collective each: a layout says which axes of the
        # mesh hold different slices. On the other axes the slices are equal.
        layouts: dict[Any, list[Tensor]] = {}
        for gradient, part in zip(gradients, local):
            layout = None
            if isinstance(gradient, DTensor):
                layout = (gradient.device_mesh, gradient.placements)
            layouts.setdefault(layout, []).append(part)
        total = torch.zeros((), device=self.device)
        for layout, parts in layouts.items():
            square = nn.utils.get_total_norm(parts, foreach=True).to(self.device).float().square()
            if layout is not None:
                mesh, placements = layout
                for axis, placement in enumerate(placements):
                    if placement.is_shard():
                        dist.all_reduce(square, group=mesh.get_group(axis))
            total += square
        return total.sqrt()

    # -- the model --------------------------------------------------------------------------

    def unwrap(self) -> nn.Module:
        """The sharded model: its parameters are this rank's slices."""
        assert self._model is not None, "setup comes first"
        return self._model

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Sample text; every rank calls it with the same prompts and gets the same tokens."""
        generator = options.pop("generator", None)
        device = generator.device if generator is not None else "cpu"
        seed = torch.randint(2**62, (1,), generator=generator, device=device).cpu()
        dist.broadcast(seed, 0, group=self._host)
        options["generator"] = torch.Generator(self.device).manual_seed(int(seed))
        dtype = self._precision.param_dtype
        # Under autocast the key/value cache has the dtype of the gathered parameters.
        with self.eval_context(), torch.autocast(self.device.type, dtype, enabled=dtype in _LOW):
            try:
                tokens = generate(self.unwrap(), input_ids.to(self.device), **options)
            finally:
                self._reshard()
        return tokens

    def teardown(self) -> None:
        self._model, self._mesh = None, None
        self._parameters, self._sharded = [], []


_LOW = (torch.bfloat16, torch.float16)


def _check_options(options: FSDP2Arguments, world_size: int) -> int:
    """The number of ranks that share a copy; `ConfigError` for what does not fit the world."""
    problems = []
    shard_size = options.shard_size or world_size
    if options.shard_size is not None and (shard_size < 2 or world_size % shard_size):
        problems.append(
            f"fsdp2.shard_size={options.shard_size} does not divide the {world_size} ranks; "
            f"allowed: {_factors(world_size)}"
        )
    elif options.reshard_after_forward is not True and options.reshard_after_forward:
        num_ranks = int(options.reshard_after_forward)
        if num_ranks < 2 or shard_size % num_ranks:
            problems.append(
                f"fsdp2.reshard_after_forward={num_ranks} does not divide the {shard_size} ranks "
                f"that share a copy; allowed: True, False, {_factors(shard_size)}"
            )
    for part in ("param", "reduce", "buffer"):
        given = getattr(options, f"{part}_dtype")
        if given is not None and given not in _DTYPES:
            problems.append(unknown(f"fsdp2.{part}_dtype", given, list(_DTYPES)))
    if problems:
        raise ConfigError(problems)
    return shard_size


def _drop_step(model: nn.Module) -> None:
    """Be as between two steps, after an error in the middle of one; its gradients are lost.

    Without it the model keeps whole parameters, which neither optimizer nor checkpoints know, and
    adds the gradients of the step to those of the next one. Speaks to no other rank.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    root: Any = model._get_fsdp_state()
    states = root._state_ctx.all_states
    groups = [group for state in states for group in groups_of(state)]
    reset = getattr(model, "reset_iter_state", None)
    if reset is not None:
        reset()
    else:  # of an older torch
        for thing in (*states, *groups):
            thing._training_state = type(thing._training_state).IDLE
        root._state_ctx.iter_forward_root = None
        root._state_ctx.post_backward_final_callback_queued = False
        root._comm_ctx.post_forward_order.clear()
        for group in groups:
            group._post_forward_indices.clear()
            group._partial_reduce_output = None
            group.wait_for_unshard()
            group.reshard()
    for group in groups:
        drop_gradients(group)


def _factors(number: int) -> str:
    return ", ".join(str(n) for n in range(2, number + 1) if number % n == 0)


def _precision(options: FSDP2Arguments) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES.get(options.param_dtype or ""),
        reduce_dtype=_DTYPES.get(options.reduce_dtype or ""),
    )


def _with_full_output(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=torch.float32 if policy.param_dtype in _LOW else None,
    )


def _prefetch(blocks: list[nn.Module]) -> None:
    """Gather the next block while one computes; in the backward torch does so by itself."""
    for block, following in itertools.pairwise(blocks):
        assert isinstance(block, FSDPModule) and isinstance(following, FSDPModule)
        block.set_modules_to_forward_prefetch([following])


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for prefix, module in model.named_modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield f"{prefix}.{key}" if prefix else key, module, key, buffer


def _is_rotary(name: str, module: nn.Module) -> bool:
    text = f"{name} {type(module).__name__}".lower()
    return any(word in text for word in ("rotary", "rope", "inv_freq"))


def _refuse_dropped_layers(model: nn.Module) -> None:
    """Ranks that leave out different layers would gather each other's weights."""
    config = getattr(model, "config", None)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        chance = getattr(config, name, 0)
        if isinstance(chance, int | float) and chance > 0:
            raise ConfigError(
                f"FSDP2 cannot train a model that leaves layers out at random (its config has "
                f"{name}={chance:g}): ranks gather layers together; set {name}=0, or use "
                "DDPTrainer with ddp.find_unused_parameters=True"
            )
