"""Pipeline parallelism: every rank holds some layers, and a batch passes through in pieces.

Owns: `PipelineStrategy`, which puts the parts of this package together behind the contract.
Does not own: any of the parts.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from headway.data.loader import Window, WindowLoader
from headway.dist.agreement import exchange
from headway.dist.group import DistributedContext
from headway.errors import ConfigError
from headway.models.split import CausalLMStage
from headway.optim.in_backward import BackwardSteps
from headway.optim.kinds import parameter_kinds
from headway.strategies.base import DataShard, EvalStep, Notify
from headway.strategies.objective import Objective
from headway.strategies.pipeline.generation import pipeline_generate
from headway.strategies.pipeline.gradients import Gradients
from headway.strategies.pipeline.groups import join_group, make_groups
from headway.strategies.pipeline.layout import resolve_layout
from headway.strategies.pipeline.part import ModelPart
from headway.strategies.pipeline.pieces import check_batch, cut_batch, pad_rows
from headway.strategies.pipeline.placement import Tie, fill_stages, find_ties
from headway.strategies.pipeline.relay import Relay
from headway.strategies.pipeline.running import ScheduleRunner, Task
from headway.strategies.pipeline.schedules import find_schedule
from headway.strategies.pipeline.splitter import ModelSplitter, check_stages, split_automatically
from headway.strategies.pipeline.stages import StageCall
from headway.strategies.ranked import RankedStrategy, join_buffers
from headway.strategies.single import check_whole
from headway.strategies.source import ModelSource

if TYPE_CHECKING:
    from headway.args import PipelineTrainingArguments

logger = logging.getLogger(__name__)

_MOST_DIMS = 6


class PipelineStrategy(RankedStrategy):
    """One rank of a pipeline, or of several side by side.

    `splitter` cuts the model into stages (None: found for known models); `schedule` is a class of
    torch.distributed.pipelining and goes before `args.pipe_schedule`.
    """

    name = "pipeline"
    forward_is_shared = True

    def __init__(
        self,
        context: DistributedContext,
        device: torch.device,
        args: PipelineTrainingArguments,
        *,
        splitter: ModelSplitter | None = None,
        schedule: Any = None,
    ) -> None:
        self._schedule = find_schedule(schedule, args.pipe_schedule)
        self.layout = resolve_layout(args, self._schedule.facts, context.world_size)
        # Every rank of a pipeline reads the same batches; nothing is handed out.
        super().__init__(context, device, dispatch=False)
        self._args, self._splitter = args, splitter or split_automatically
        self._place = self.layout.place_of(context.rank)
        self._replica = self.layout.replica_of(context.rank)
        self._ranks = self.layout.pipeline_ranks(self._replica)
        self._last_place = self.layout.rank_of(self.layout.num_stages - 1)
        self._groups = make_groups(self.layout, context.rank, self._host, on_host=not self._moves)
        self._part: ModelPart | None = None
        self._steps: BackwardSteps | None = None
        self._tied: list[nn.Parameter] = []
        if args.fuse_optim_with_backward:
            self._fuse_optimizer()
        self.before_save = self._join_buffers
        if args.debug_pipeline:
            logger.info(
                "pipeline: schedule %s, %d micro-batches, %s; rank %d is place %d of pipeline %d",
                self._schedule.facts.name,
                args.n_microbatches,
                self.layout.describe(),
                context.rank,
                self._place,
                self._replica,
            )

    # -- set-up -----------------------------------------------------------------------------

    def setup(self, source: ModelSource) -> nn.Module:
        if source.ready:
            raise ConfigError(
                "model: a pipeline takes model_init, which makes the model, and no ready one: each "
                "rank builds only its own stages"
            )
        model, layout, args = source.build_meta(), self.layout, self._args
        kinds = parameter_kinds(model)  # before a splitter takes it apart
        stages = self._splitter(model, layout.num_stages)
        check_stages(stages, model, layout.num_stages)
        numbers = layout.stages_of(self._place)
        own = [stages[number] for number in numbers]
        ties = find_ties(model, stages, layout)
        if args.debug_split_model:
            self._log_split(stages)
        fill_stages(
            own,
            ties,
            self._place,
            model,
            source,
            self.device,
            group=self._host,
            debug=args.debug_model_init,
        )
        for stage in own:
            if isinstance(stage, CausalLMStage):
                stage.plain_loss = self._schedule.facts.is_zero_bubble
            source.finish(stage)
        self._part = ModelPart(model, own, ties, self._place)
        self._part.parameter_kinds = kinds
        calls = {number: StageCall(stages, number, model) for number in numbers}
        group = self._groups.pipeline
        self._relay = Relay(layout, calls, self._ranks, group, self.device)
        self._runner = ScheduleRunner(
            self._schedule, layout, calls, args.n_microbatches, group, self.device
        )
        self._gradients = Gradients(
            list(self._part.parameters()),
            self._copies(ties),
            pipeline=group,
            replicas=self._groups.replicas if layout.num_replicas > 1 else None,
            device=self.device,
        )
        # Their gradient is whole when all stages, and all ranks that hold a copy, have made theirs.
        own_ties = [tie for tie in ties if self._place in tie.members]
        self._tied = [self._part.get_parameter(tie.canonical) for tie in own_ties]
        if args.debug_model_params:
            for name, parameter in self._part.named_parameters():
                logger.info("parameter %s: %s, %s", name, parameter.device, parameter.dtype)
        return self._part

    def _fuse_optimizer(self) -> None:
        if self.layout.num_replicas > 1:
            raise ConfigError(
                f"fuse_optim_with_backward cannot be used with {self.layout.num_replicas} "
                f"pipelines side by side (pipeline_size={self._args.pipeline_size}): gradients "
                f"are summed over them before the update"
            )
        self.adopt = self._step_in_backward

    def _step_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = BackwardSteps(optimizer, later=self._tied, reading_waits=self._reading_waits)

    def _copies(self, ties: Sequence[Tie]) -> list[tuple[nn.Parameter, dist.ProcessGroup, bool]]:
        """Tied weights of which other ranks hold copies; all ranks must call it."""
        layout, copies = self.layout, []
        for tie in ties:
            if len(tie.members) == 1:
                continue
            rows = [layout.pipeline_ranks(replica) for replica in range(layout.num_replicas)]
            members = [[row[place] for place in tie.members] for row in rows]
            group = join_group(members, self.context.rank)
            if group is not None:
                parameter = self.unwrap().get_parameter(tie.canonical)
                copies.append((parameter, group, self._place == tie.members[0]))
        return copies

    def _log_split(self, stages: Sequence[nn.Module]) -> None:
        if self.context.rank:
            return
        for number, stage in enumerate(stages):
            names = [name for name, _ in stage.named_parameters()]
            size = sum(p.numel() for p in stage.parameters())
            logger.info(
                "stage %d on rank %d: %d parameters in %s",
                number,
                self.layout.rank_of(number),
                size,
                ", ".join(names),
            )

    def unwrap(self) -> nn.Module:
        assert self._part is not None, "setup comes first"
        return self._part

    def teardown(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._part, self._tied = None, []
        for name in ("_relay", "_runner", "_gradients"):
            self.__dict__.pop(name, None)

    # -- data -------------------------------------------------------------------------------

    def data_shard(self) -> DataShard:
        return DataShard(self._replica, self.layout.num_replicas, speaks=self._has_last)

    def data_group(self) -> dist.ProcessGroup:
        return self._groups.data

    def feed(self, loader: WindowLoader, *, training: bool = True) -> Iterator[Window]:
        if not training:
            self._join_buffers()
        first = True
        for window in super().feed(loader, training=training):
            if first:
                self._require_same_batch(window)
                first = False
            yield window

    def _join_buffers(self) -> None:
        """Leave no difference between pipelines: the first one's buffers."""
        join_buffers(self.unwrap(), self._groups.data)

    def _require_same_batch(self, window: Window) -> None:
        """Ranks of one pipeline that read different data would train on nonsense, silently."""
        batch, digest = check_batch(window.micro_batches[0]), 0
        for name in ("input_ids", "labels"):
            if isinstance(batch.get(name), Tensor):
                digest = zlib.crc32(batch[name].cpu().contiguous().numpy().tobytes(), digest)
        if len(set(exchange(digest, self._groups.pipeline_host))) > 1:
            raise ConfigError(
                "the ranks of one pipeline read different batches: the dataset and the data "
                "collator must give every process the same samples in the same order"
            )

    @property
    def _has_last(self) -> bool:
        return self._place == self._last_place

    # -- the step ---------------------------------------------------------------------------

    def forward_backward(
        self, window: Window, objective: Objective, num_targets: int | Tensor, notify: Notify
    ) -> Tensor:
        total = torch.zeros((), device=self.device)
        num_real = len(window.micro_batches) - window.num_fillers
        if self._steps is not None:
            check_whole(window)
        for number, batch in enumerate(window.micro_batches):
            notify("on_forward_backward_begin")
            # A loss that is not finite makes its gradients so, on every stage.
            during = self._steps.during(None, self.before_apply) if self._steps else nullcontext()
            with during:
                share = self._step(batch, objective, num_targets, counts=number < num_real)
            if share is not None:
                total += share
            notify("on_forward_backward_end")
            notify("on_substep_end")
        self._gradients.sum()
        return total

    def _step(
        self, batch: Any, objective: Objective, num_targets: int | Tensor, *, counts: bool
    ) -> Tensor | None:
        num_pieces = self._args.n_microbatches
        batch = check_batch(batch)
        rows = max(self._args.per_device_train_batch_size, batch["input_ids"].shape[0])
        batch = pad_rows(batch, -(-rows // num_pieces) * num_pieces)
        pieces = cut_batch(batch, num_pieces)
        own = [objective.count_targets(piece) for piece in pieces] if self._has_last else []
        if self._moves:  # counted before, where it costs no look at the device
            batch = self._move(batch)
            pieces = cut_batch(batch, num_pieces)
        task = Task(pieces, objective, num_targets, own, self.train_context, counts)
        return self._runner.step(batch["input_ids"], task)

    def clip(
        self, max_norm: float | None, in_step_of: torch.optim.Optimizer | None = None
    ) -> Tensor:
        return self._gradients.clip(max_norm, self._steps.norms_of if self._steps else None)

    def apply(self, optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> bool:
        if self._steps is None:
            return super().apply(optimizer, loss, grad_norm)
        self._steps.finish()
        return True

    @torch.no_grad()
    def eval_forward(
        self, batch: Any, objective: Objective, *, with_logits: bool = False
    ) -> EvalStep:
        batch = self._move(check_batch(batch))
        labels = batch.get("labels")
        with self.eval_context():
            results = self._relay.run(
                cut_batch(batch, self._args.n_microbatches),
                lambda call, hidden, piece: objective.evaluate(
                    call.as_model(hidden), piece, with_logits=with_logits
                ),
            )
        # Sums over all ranks count each batch once: where the last stage is.
        loss_sum = None if labels is None else torch.zeros((), device=self.device)
        num_targets: int | Tensor = 0
        logits: list[Tensor] = []
        for piece_sum, count, piece_logits, _ in results:
            loss_sum = piece_sum if loss_sum is None or piece_sum is None else loss_sum + piece_sum
            num_targets = num_targets + count
            if piece_logits is not None:
                logits.append(piece_logits)
        step = EvalStep(loss_sum, num_targets, labels=labels)
        if with_logits:
            step.logits = self._share_logits(torch.cat(logits) if logits else None)
        return step

    def _share_logits(self, logits: Tensor | None) -> Tensor | None:
        """Logits of the last stage on every rank of the pipeline."""
        source = self._ranks[self._last_place]
        header = torch.zeros(_MOST_DIMS + 1, dtype=torch.int64)
        if logits is not None:
            header[0] = logits.dim()
            header[1 : logits.dim() + 1] = torch.tensor(logits.shape)
        dist.broadcast(header, source, group=self._groups.pipeline_host)
        num_dims, *shape = header.tolist()
        if not num_dims:
            return None
        if logits is None:
            logits = torch.empty(shape[:num_dims], device=self.device)
        logits = logits.float().contiguous()
        dist.broadcast(logits, source, group=self._groups.pipeline)
        return logits

    # -- generation -------------------------------------------------------------------------

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        return self.pipeline_generate(input_ids, **options)

    @torch.no_grad()
    def pipeline_generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        do_sample: bool = True,
        temperature: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        top_p: float = 1.0,
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue the prompts; all ranks call it and get the same. See `pipeline_generate`."""
        part = self.unwrap()
        if attention_mask is not None:
            attention_mask = attention_mask.to(self.device)
        was_training = part.training
        part.eval()
        try:
            with self.eval_context():
                return pipeline_generate(
                    self._relay,
                    part.config,
                    input_ids.to(self.device),
                    max_new_tokens,
                    eos_token_id,
                    pad_token_id,
                    source=self.layout.pipeline_ranks(0)[self._last_place],
                    attention_mask=attention_mask,
                    generator=generator,
                    do_sample=do_sample,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    repetition_penalty=repetition_penalty,
                )
        finally:
            part.train(was_training)
