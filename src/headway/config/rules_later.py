"""The rules that arguments alone cannot decide, with the stage at which each is checked.

Owns: their descriptions, for `headway explain`. Does not own: the checks, which stand where the
model, the device, the data or the world size is known.
"""

from __future__ import annotations

from headway.config.rules import Rule

_FUSE = ("fuse_optim_with_backward",)

# fmt: off
RULES: list[Rule] = [
    Rule("1", ("model", "model_init"), "init", "One of model and model_init is needed."),
    Rule("9", ("fp8_recipe",), "prepare",
         "FP8 needs a CUDA device of compute capability 8.9 or more."),
    Rule("10", ("fp8_recipe", "fp8_dim_alignment"), "prepare",
         "A linear layer whose dimensions are not aligned stays out of FP8.", outcome="fallback"),
    Rule("11", ("fp8_recipe",), "prepare",
         "rowwise_with_gw_hp does not work with torchao 0.16.0."),
    Rule("18", _FUSE, "prepare", "No fused optimizer with several optimizer factories."),
    Rule("25", ("enable_activation_offloading",), "prepare",
         "Activation offloading does not work with flex attention."),
    Rule("28", ("save_on_each_node",), "prepare",
         "save_on_each_node is not for storage that the nodes share."),
    Rule("29", ("construct_model_on",), "prepare", "'meta' needs model_init."),
    Rule("30", ("construct_model_on",), "prepare", "'device' needs model_init."),
    Rule("31", ("construct_model_on",), "prepare",
         "'meta' without a checkpoint builds in the ordinary way.", outcome="fallback"),
    Rule("34", ("checkpoint_components",), "prepare",
         "Leaving out the model needs model_init."),
    Rule("35", ("checkpoint_components",), "prepare",
         "Leaving out the model needs a callback with on_load_model_weights that loads every "
         "tensor."),
    Rule("36", ("trainer",), "prepare", "Trainer runs in one process."),
    Rule("37", ("trainer",), "prepare",
         "DDPTrainer and FSDP2Trainer on several ranks need torch.distributed to be initialised."),
    Rule("38", ("trainer",), "prepare", "PipelineTrainer needs more than one process."),
    Rule("39", ("model",), "init", "PipelineTrainer takes no ready model."),
    Rule("40", ("model_init",), "init", "PipelineTrainer needs model_init."),
    Rule("46", ("is_multistage",), "prepare",
         "More than one stage on a rank needs is_multistage, where that is not left to the "
         "schedule."),
    Rule("H73", ("pipeline_size",), "prepare",
         "The number of ranks is a multiple of pipeline_size."),
    Rule("H74", ("stages_per_rank", "pipeline_size"), "prepare",
         "A pipeline has no more stages than the model has layers."),
    Rule("H75", ("n_microbatches", "pipe_schedule"), "prepare",
         "1F1B and DualPipeV need as many micro-batches as stages; interleaved schedules need "
         "equal rounds of them."),
    Rule("53", ("trainer",), "prepare", "Pipeline stages have parameters of different names."),
    Rule("54", ("fused_loss", "pipe_schedule"), "prepare",
         "A fused loss under a zero-bubble schedule becomes the plain one.", outcome="fallback"),
    Rule("55", ("fused_loss",), "prepare",
         "A fused loss works under FSDP2: it is made in the forward, where the head is whole."),
    Rule("56", ("fused_loss",), "prepare",
         "A fused loss needs a model whose output layer gives its logits as they are; another "
         "keeps its own loss.", outcome="fallback"),
    Rule("58", ("gradient_accumulation_steps",), "init",
         "In AccelTrainer the Accelerator's accumulation wins.", outcome="warn"),
    Rule("59", ("trainer",), "init", "AccelTrainer needs an Accelerator."),
    Rule("61", ("fsdp2.transformer_layers_path",), "prepare",
         "The path leads to a list of blocks; its default may lead nowhere."),
    Rule("H62", ("fsdp2.shard_size",), "prepare",
         "fsdp2.shard_size divides the number of ranks."),
    Rule("H63", ("fsdp2.reshard_after_forward", "fsdp2.shard_size"), "prepare",
         "A number of ranks to reshard over divides the ranks that share a copy."),
    Rule("62", ("resume_from_checkpoint",), "prepare",
         "A checkpoint can be resumed at any world size."),
    Rule("64", ("dispatch_batches",), "prepare",
         "A device mesh has one or two axes: the trainers make no other, and "
         "wrap_model_distributed takes no other."),
    Rule("65", ("eval_strategy", "max_eval_steps"), "run",
         "An evaluation that sees no batch is an error."),
    Rule("66", ("optimizer_groups",), "prepare",
         "A group is a mapping with regex and config; __default__ is reserved."),
    Rule("69", ("post_local_sgd.enabled",), "run",
         "Between averagings the replicas differ; a save must not take them for equal."),
    Rule("70", ("save_safetensors",), "command line",
         "A quantized export is safetensors too, never a pickle."),
    Rule("71", ("output_dir",), "command line", "--root-copy excludes --keep-optimizer."),
    Rule("72", ("output_dir",), "command line", "finalize writes only into a new folder."),
    Rule("73", ("args",), "args", "An unknown key is refused with the nearest one."),
    Rule("H60", ("global_batch_size", "per_device_train_batch_size"), "prepare",
         "The global batch is a whole number of micro-batches on all ranks."),
    Rule("H61", ("global_batch_tokens", "per_device_train_batch_size"), "prepare",
         "The global batch is a whole number of micro-batches of full sequences on all ranks."),
]
# fmt: on
