"""The training arguments: one keyword-only dataclass per trainer, a docstring under each field.

Owns: fields, types, defaults. Does not own: the rules between them (config/rules), conversion and
checking (config/arguments).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from headway.config.arguments import Arguments

__all__ = [
    "AccelTrainingArguments",
    "BaseTrainingArguments",
    "DDPArguments",
    "DDPTrainingArguments",
    "FSDP2Arguments",
    "FSDP2TrainingArguments",
    "MinimalTrainingArguments",
    "PipelineTrainingArguments",
    "PostLocalSGDArguments",
    "TrainingArguments",
]

HEAD_LAYERS = (r"\blm_head$", r"\bembed_out$", "^output$", "^head$")
"""What the output heads of language models are called."""


@dataclass(kw_only=True)
class MinimalTrainingArguments(Arguments):
    """The baseline whose names agree with Hugging Face's TrainingArguments."""

    output_dir: str = "tmp_trainer"
    """Folder that receives the checkpoints, the final model and the logs; no address."""
    checkpoint_address: str | None = None
    """Address such as `s3://bucket/run` (fsspec) that receives the checkpoints, from one process.
    None: `output_dir`."""
    logging_dir: str | None = None
    """TensorBoard folder. None: `runs/<timestamp>_<host>` inside `output_dir`."""
    run_name: str | None = None
    """Name of the run in logs and experiment trackers."""
    device: Any = None
    """Device to train on. None: the one of this process."""
    seed: int = -1
    """Seed of every random number generator. -1: draw one, log it and keep it in checkpoints."""
    use_cpu: bool = False
    """Train on the CPU although there is an accelerator; stronger than `device`."""
    ddp_timeout: int | None = None
    """Seconds that ranks wait for each other in one collective, such as for what rank 0 does alone.
    None: 1800, or what `init_distributed` was given."""

    num_train_epochs: float = 1
    """Passes over the data; fractions allowed. Negative: no limit, `max_steps` decides."""
    max_steps: int = -1
    """Optimizer steps to train for; takes the place of `num_train_epochs` when above 0."""
    train_for: int | str | None = None
    """Length of training as a duration: `2B tokens`, `3 epochs`, `71h`."""
    stop_at: int | str | None = None
    """End this run early at a duration; schedules still aim at the full length."""
    epoch_train_steps: int = 100_000
    """Optimizer steps taken as one epoch when the data has no length, and does not end sooner."""

    per_device_train_batch_size: int = 16
    """Samples in one training micro-batch on each device."""
    per_device_eval_batch_size: int = 16
    """Samples in one evaluation batch on each device."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all devices; the accumulation is derived from it."""
    global_batch_tokens: int | None = None
    """Tokens per optimizer step over all devices; the accumulation is derived from it."""
    max_grad_norm: float | None = None
    """Clip the gradient's L2 norm to this. None or 0: measure the norm, clip nothing."""
    nonfinite_action: str = "stop"
    """After a non-finite loss or gradient, which never reaches the weights: stop, skip or raise."""
    dataloader_num_workers: int = 0
    """Processes that load data. 0: load in the training process."""
    dataloader_pin_memory: bool = True
    """Load into pinned host memory, so that copies to the device overlap with work."""
    dataloader_persistent_workers: bool = False
    """Keep the loading processes between epochs."""
    dataloader_prefetch_factor: int | None = None
    """Batches each worker loads ahead. None: 2 when there are workers."""
    dataloader_drop_last: bool = False
    """Leave out the last batch of an epoch when it is incomplete."""

    eval_strategy: str = "no"
    """When to evaluate: `no`, `steps` or `epoch`."""
    eval_steps: int = 100
    """Optimizer steps between evaluations when `eval_strategy` is `steps`."""
    eval_every: int | str | None = None
    """Evaluate at this interval, a duration; in place of `eval_strategy` and `eval_steps`."""
    eval_delay: int = 0
    """No evaluation before this many steps (epochs when `eval_strategy` is `epoch`)."""
    logging_strategy: str = "steps"
    """When to log: `no`, `steps` or `epoch`."""
    logging_steps: int = 50
    """Optimizer steps between log records when `logging_strategy` is `steps`."""
    log_every: int | str | None = None
    """Log at this interval, a duration; in place of `logging_strategy` and `logging_steps`."""
    logging_first_step: bool = False
    """Also log the first step."""
    report_to: list[str] | str | None = "none"
    """Experiment trackers that receive the run's figures: names, `all` (those that are installed)
    or `none`. To give one parameters, list its callback."""
    disable_tqdm: bool | None = None
    """Show no progress bar. None: show one when the output is a terminal."""

    torch_compile: bool = False
    """Compile the model with `torch.compile`."""
    torch_compile_backend: str | None = None
    """Compiler backend. None: `inductor`."""
    torch_compile_mode: str | None = None
    """Compiler mode. None: `default`; others trade compile time for speed."""
    torch_compile_dynamic: bool = True
    """Compile for shapes that change."""
    torch_compile_full_graph: bool = False
    """Fail at a graph break in place of splitting the graph."""
    torch_compile_scope: str = "blocks"
    """What is compiled: each of the model's `blocks`, equal ones once, or the whole `model`."""
    torch_compile_cache: str | None = None
    """Folder where compiled code is kept for later runs. None: `TORCHINDUCTOR_CACHE_DIR`, or else
    `headway/compile` in the user's cache folder."""

    save_strategy: str = "steps"
    """When to save a checkpoint: `no`, `steps` or `epoch`."""
    save_steps: int = 1000
    """Optimizer steps between checkpoints when `save_strategy` is `steps`."""
    save_async: bool = True
    """Write checkpoints in the background while training goes on; at most one at a time."""
    save_every: int | str | None = None
    """Save at this interval, a duration; in place of `save_strategy` and `save_steps`."""
    save_total_limit: int | None = 2
    """Newest checkpoints to keep, beside the protected best ones. None: keep all."""
    keep_every_n_steps: int | None = None
    """Checkpoints at multiples of this step are kept for good, beside `save_total_limit`."""
    save_on_error: bool = False
    """When a run fails, save the last completed step before the error goes on."""
    save_safetensors: bool = True
    """Weights are always written as safetensors; False is refused."""
    save_on_each_node: bool = False
    """Every node writes its own copy of a checkpoint; only where nodes share no storage."""
    overwrite_output_dir: bool = False
    """Permit a fresh run in an `output_dir` that already holds one."""
    resume_from_checkpoint: bool | str = True
    """True: continue from the newest checkpoint if any. False: start fresh. Text: that folder."""
    on_damaged_checkpoint: str = "fallback"
    """When the newest checkpoint, or the best at the end, is damaged: `fallback` or `stop`."""
    load_components: list[str] | None = None
    """What a resume restores: model, optimizer, scheduler, trainer, ... None: everything."""
    load_best_model_at_end: bool = False
    """Go back to the best checkpoint's weights when training ends."""
    metric_for_best_model: str = "loss"
    """Evaluation metric that decides which checkpoint is best."""
    greater_is_better: bool | None = None
    """Whether a higher metric is better. None: told from the metric's name."""

    optim: str = "adamw"
    """Optimizer used when none is given: `adamw`, `adam`, `sgd`, `muon`, `adamw_8bit`, ..."""
    optim_args: dict[str, Any] | None = None
    """Further arguments of that optimizer, such as `{momentum: 0.9}` of `sgd`."""
    learning_rate: float = 5e-5
    """Peak learning rate of the optimizer that `optim` names."""
    weight_decay: float = 0.0
    """Weight decay of that optimizer."""
    no_decay_on: list[str] | str | None = None
    """Parameters without weight decay: `norm`, `bias`, `embedding`, `head`, `vector`. None: none.

    Told by the module that holds them. `vector` is all that has fewer than two dimensions.
    """
    adam_beta1: float = 0.9
    """First moment's decay of the default optimizer."""
    adam_beta2: float = 0.999
    """Second moment's decay of the default optimizer."""
    adam_epsilon: float = 1e-8
    """Term that keeps the default optimizer's division finite."""
    lr_scheduler_type: str = "linear"
    """Learning-rate schedule used when no scheduler is given: `linear`, `cosine`, ..."""
    lr_scheduler_kwargs: dict[str, Any] | None = field(default_factory=dict)
    """Further arguments of that schedule."""
    warmup_steps: int = 0
    """Steps over which the learning rate climbs; the first one is above 0 already."""
    warmup_ratio: float = 0.0
    """Part of the training over which the learning rate climbs, in place of a count."""
    lr_scheduler_unit: str = "steps"
    """What the schedule counts as progress: `steps` or `tokens`."""
    warmup_tokens: int = 0
    """Tokens over which the learning rate climbs, with `lr_scheduler_unit: tokens`."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    gradient_checkpointing_policy: str = "block"
    """What is recomputed: every `block`, `every_2` (3, ...) of them, or `selective`.

    `selective` keeps the results of matrix products and attention and recomputes the rest.
    """
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    """Further options of torch's checkpointing, such as `{preserve_rng_state: false}`."""

    # Facts of the process, not options: the trainer sets them on the instance.
    _process_index = 0
    _local_process_index = 0
    _world_size = 1
    _n_gpu = 0
    _parallel_mode = "not_distributed"

    @property
    def checkpoint_place(self) -> str:
        """Where the checkpoints are: `checkpoint_address`, else `output_dir`."""
        return self.checkpoint_address or self.output_dir

    @property
    def process_index(self) -> int:
        """Rank of this process; the trainer sets it."""
        return self._process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self._local_process_index

    @property
    def world_size(self) -> int:
        """Number of processes; the trainer sets it."""
        return self._world_size

    @property
    def n_gpu(self) -> int:
        """Accelerators this process uses: 0 or 1."""
        return self._n_gpu

    @property
    def parallel_mode(self) -> str:
        """Hugging Face's word for the way of working: `not_distributed` or `distributed`."""
        return self._parallel_mode

    @property
    def do_train(self) -> bool:
        """Always True: the arguments describe a training run."""
        return True

    @property
    def do_eval(self) -> bool:
        """Whether evaluation is scheduled."""
        return self.eval_strategy != "no" or bool(getattr(self, "eval_on_save", False))

    @property
    def asked_evaluations(self) -> str | None:
        """The options that ask for evaluations, in words; None where none does."""
        when = "eval_strategy" if self.eval_every is None else "eval_every"
        options = (when, "eval_on_save", "eval_on_start")
        asked = [
            f"{name}={value!r}"
            for name in options
            if (value := getattr(self, name, None)) not in (None, False, "no")
        ]
        return " and ".join(asked) or None

    @property
    def train_batch_size(self) -> int:
        """Samples in a training micro-batch of this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples in an evaluation batch of this process."""
        return self.per_device_eval_batch_size

    @property
    def should_log(self) -> bool:
        """Whether this process writes logs."""
        return self._process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes what only one process writes."""
        return self._process_index == 0

    @property
    def place_model_on_device(self) -> bool:
        """The trainer moves the model."""
        return True


@dataclass(kw_only=True)
class BaseTrainingArguments(MinimalTrainingArguments):
    """What every trainer adds to the baseline: precision, best checkpoints, attention."""

    default_dtype: str | None = None
    """Dtype active while the model is built: `float32`, `bfloat16` or `float16`."""
    max_eval_steps: int = -1
    """Most batches of one evaluation. -1: all."""
    preserve_best_model: bool = False
    """Keep the best checkpoints although newer ones push old ones out."""
    best_model_metric: str = "loss"
    """Evaluation metric that decides which checkpoints `preserve_best_model` keeps."""
    best_model_greater_is_better: bool | None = None
    """Whether a higher `best_model_metric` is better. None: told from its name."""
    preserve_n_best: int = 1
    """How many best checkpoints `preserve_best_model` keeps."""
    eval_on_save: bool = False
    """Evaluate right before each save, so that every checkpoint has a metric."""
    eval_on_start: bool = False
    """Evaluate before the first step: a start to compare with, and what fails in it fails then."""
    enable_activation_offloading: bool = False
    """Move saved activations to host memory between forward and backward."""
    detect_anomaly: bool = False
    """Let autograd look for the operation that made a NaN; slow, for debugging."""
    sdpa_backend: list[str] | str | None = None
    """Attention kernels allowed: `math`, `flash`, `efficient`, `cudnn`, or a list of them; or
    `flash4`, by which the decoder's plain causal attention goes (FlashAttention 4)."""
    sdpa_set_priority: bool = False
    """Take the list in `sdpa_backend` as an order of preference."""
    float32_matmul_precision: str | None = None
    """Precision of float32 matrix products: `highest`, `high` (TF32) or `medium`."""
    dynamo_recompile_limit: int | None = None
    """Recompilations of one function before the compiler gives up on it."""
    mixed_precision: str | None = None
    """Autocast: None or `no` for none, `bf16`, or `fp16` with loss scaling."""
    fp8_recipe: str | None = None
    """FP8 training: `tensorwise`, `rowwise` or `rowwise_with_gw_hp`."""
    fp8_dim_alignment: int = 16
    """Linear layers with a dimension that is no multiple of this stay out of FP8. 0: none do."""
    fp8_exclude: list[str] = field(default_factory=lambda: [*HEAD_LAYERS])
    """Regular expressions for names of linear layers that stay out of FP8; by default the head."""
    qat_recipe: str | None = None
    """Quantization-aware training; the name says how activations and weights are quantized."""
    qat_group_size: int | None = None
    """Weights along a row that share a scale. None: 32 with int8 activations, else 128."""
    qat_exclude: list[str] = field(default_factory=lambda: [*HEAD_LAYERS])
    """Regular expressions for names of linear layers that stay whole; by default the head."""


@dataclass(kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """The arguments of the single-device trainer, and the ground of the parallel ones."""

    gc_threshold: float = 0.5
    """Share of device memory in use above which cached blocks are given back."""
    construct_model_on: str = "default"
    """Where the model is built: `default` (host, then moved), `device` or `meta`."""
    activation_memory_budget: float | None = None
    """Share of activations the compiler may keep, 0 to 1; needs `torch_compile`."""
    fuse_optim_with_backward: bool = False
    """Update each parameter as soon as its gradient is there, and free the gradient."""
    metrics_collect_interval: int = 5
    """Steps between two deliveries of metrics to callbacks; every step is delivered.

    What a log record or a save needs is delivered then in any case.
    """
    speed_metrics_start_step: int = 1
    """Steps left out of speed metrics at the start. 0: measure all."""
    set_dataset_epoch: bool = True
    """Tell a dataset that has `set_epoch` which epoch begins."""
    fused_loss: str | None = None
    """Loss made along with the logits: `chunked`, `liger`, `cut_cross_entropy`. None: the model's.

    Headway's decoder has the chunked one of its own accord.
    """
    debug_optimizer_groups: bool = False
    """Log which parameter went into which optimizer group."""
    checkpoint_components: list[str] | None = None
    """Parts to save and load: model, optimizer, scheduler, trainer, dataset, rng. None: all."""


@dataclass(kw_only=True)
class AccelTrainingArguments(TrainingArguments):
    """Arguments of the trainer on Hugging Face Accelerate, which brings no option of its own."""

    strategy_name: ClassVar[str] = "accelerate"


@dataclass(kw_only=True)
class DDPArguments:
    """Options handed to DistributedDataParallel."""

    broadcast_buffers: bool = True
    """Send rank 0's buffers to all ranks at each forward."""
    init_sync: bool = True
    """Make parameters and buffers equal on all ranks at the start."""
    bucket_cap_mb: int | None = None
    """Size of a gradient bucket in MB. None: PyTorch's own."""
    find_unused_parameters: bool = False
    """Look in each step for parameters that took no part; costs a traversal."""
    gradient_as_bucket_view: bool = True
    """Let gradients live inside the buckets; saves a copy of them."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""
    skip_all_reduce_unused_params: bool = False
    """Do not reduce parameters that took no part."""


@dataclass(kw_only=True)
class PostLocalSGDArguments:
    """Options of local SGD: ranks step on their own and average parameters now and then."""

    enabled: bool = False
    """Switch local SGD on."""
    start_step: int = 500
    """Reduce gradients in the ordinary way before this step."""
    period: int = 4
    """Optimizer steps between two averagings of the parameters."""
    post_local_gradient_allreduce: bool = False
    """Go on reducing gradients after `start_step`."""


@dataclass(kw_only=True)
class DDPTrainingArguments(TrainingArguments):
    """Arguments of the data-parallel trainer."""

    strategy_name: ClassVar[str] = "ddp"

    dispatch_batches: bool = True
    """True: rank 0 loads and hands out batches. False: every rank reads its own share."""
    dispatch_eval_batches: bool | None = None
    """The same for evaluation. None: as `dispatch_batches`."""
    ddp: DDPArguments = field(default_factory=DDPArguments)
    """Options of the DistributedDataParallel wrapper."""
    post_local_sgd: PostLocalSGDArguments = field(default_factory=PostLocalSGDArguments)
    """Options of local SGD."""


@dataclass(kw_only=True)
class FSDP2Arguments:
    """How parameters are sharded over the ranks."""

    reshard_after_forward: bool | int = True
    """True: free gathered parameters after the forward. False: keep them. N: keep over N ranks."""
    param_dtype: str | None = None
    """Dtype of gathered parameters: float32, bfloat16 or float16. None: their own."""
    reduce_dtype: str | None = None
    """Dtype in which gradients are reduced. None: that of the parameters."""
    buffer_dtype: str | None = None
    """Dtype of buffers. None: their own."""
    cpu_offload: bool = False
    """Keep parameters and gradients in host memory between uses."""
    shard_transformer_layers: bool = True
    """Shard each block before the whole model; without it little memory is saved."""
    transformer_layers_path: str = "causal_lm.layer_stack.layers"
    """Dotted path from the model to its blocks; the default finds them where it leads nowhere."""
    shard_size: int | None = None
    """Ranks that share one copy of the model; groups of so many hold a copy each. None: all."""


@dataclass(kw_only=True)
class FSDP2TrainingArguments(TrainingArguments):
    """Arguments of the sharded data-parallel trainer."""

    strategy_name: ClassVar[str] = "fsdp2"

    dispatch_batches: bool = True
    """True: rank 0 loads and hands out batches. False: every rank reads its own share."""
    fsdp2: FSDP2Arguments = field(default_factory=FSDP2Arguments)
    """How parameters are sharded."""


@dataclass(kw_only=True)
class PipelineTrainingArguments(TrainingArguments):
    """Arguments of the pipeline-parallel trainer."""

    strategy_name: ClassVar[str] = "pipeline"

    n_microbatches: int = 4
    """Pieces a batch is cut into; must divide the train and the eval batch size."""
    stages_per_rank: int = 1
    """Model stages on each rank; more than 1 needs `is_multistage`."""
    pp_stage_type: str = "loop"
    """Order of stages over ranks: `loop` (round robin) or `v` (there and back)."""
    is_multistage: bool = False
    """The schedule runs several stages on a rank."""
    pipe_schedule: str | None = None
    """GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.

    `pipe_schedule_factory` of the trainer goes before it; without either it is GPipe.
    """
    pipeline_size: int | None = None
    """Ranks of one pipeline; several pipelines train on different data. None: all ranks."""
    debug_pipeline: bool = False
    """Log what the pipeline does, in detail."""
    debug_split_model: bool = False
    """Log how the model was split into stages."""
    debug_model_params: bool = False
    """Log device and dtype of each parameter."""
    debug_model_init: bool = False
    """Log the tensors exchanged while the stages are initialised."""
