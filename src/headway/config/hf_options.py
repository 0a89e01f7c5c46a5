"""Options of Hugging Face's TrainingArguments that have another name here, or none.

Owns: what to use in the place of each, and of values that only theirs take. Does not own: the
options that both have (args).
"""

from __future__ import annotations

_ALWAYS = "it is always so here, leave it out"
_NO_METRICS = "compute_metrics is called once, with all predictions and labels; or call predict()"
_NO_UPLOAD = "nothing is uploaded here, push the folder that save_model() writes"
_OLD_DEVICES = "the device is found by itself, leave it out; use_cpu and device choose another"
_NO_LENGTH_GROUPS = (
    "samples are not sorted by length here; packed data has little padding (TokenDataset with "
    "packing='best_fit')"
)
_NO_GENERATION = (
    "evaluations do not generate; give TextgenCallback, or a callback whose on_evaluate calls "
    "model.generate(...) on your data"
)
_IN_FSDP2 = "use FSDP2Trainer with FSDP2TrainingArguments(fsdp2={...})"
_TRACKIO = "give TrackioCallback(...) in callbacks"

HF_OPTIONS: dict[str, str] = {
    "accelerator_config": "use AccelTrainer with an Accelerator of your own",
    "adafactor": "give optimizer_cls_and_kwargs to the trainer",
    "auto_find_batch_size": "run 'headway batch-find'",
    "average_tokens_across_devices": _ALWAYS,
    "batch_eval_metrics": _NO_METRICS,
    "bf16": "use mixed_precision='bf16'",
    "bf16_full_eval": "evaluations run under mixed_precision too, leave it out",
    "data_seed": "use seed, which orders the data too",
    "dataloader_in_order": _ALWAYS,
    "dataloader_multiprocessing_context": "give a DataLoader of your own as train_dataset",
    "ddp_backend": "it follows from the device, leave it out",
    "ddp_broadcast_buffers": "use DDPTrainingArguments(ddp={'broadcast_buffers': ...})",
    "ddp_bucket_cap_mb": "use DDPTrainingArguments(ddp={'bucket_cap_mb': ...})",
    "ddp_find_unused_parameters": "use DDPTrainingArguments(ddp={'find_unused_parameters': ...})",
    "ddp_static_graph": "use DDPTrainingArguments(ddp={'static_graph': ...})",
    "debug": "use detect_anomaly=True to find where a NaN came from",
    "deepspeed": "use AccelTrainer with make_deepspeed_plugin (docs/accelerate.md)",
    "dispatch_batches": "use DDPTrainingArguments or FSDP2TrainingArguments",
    "do_eval": "eval_strategy and evaluate() say when to evaluate, leave it out",
    "do_predict": "call predict(), leave it out",
    "do_train": "call train(), leave it out",
    "enable_jit_checkpoint": "SIGTERM always saves and stops here, leave it out",
    "eval_accumulation_steps": "predict() moves each batch to the host by itself, leave it out",
    "eval_do_concat_batches": "predict() joins batches of one shape, leave it out",
    "eval_use_gather_object": "predict() gathers anything, leave it out",
    "evaluation_strategy": "use eval_strategy",
    "fp16": "use mixed_precision='fp16'",
    "fp16_backend": "use mixed_precision='fp16'",
    "fp16_full_eval": "evaluations run under mixed_precision too, leave it out",
    "fp16_opt_level": "use mixed_precision='fp16'",
    "fsdp": _IN_FSDP2,
    "fsdp_config": _IN_FSDP2,
    "full_determinism": "call torch.use_deterministic_algorithms(True); seed does the rest",
    "generation_config": _NO_GENERATION,
    "generation_max_length": _NO_GENERATION,
    "generation_num_beams": _NO_GENERATION,
    "group_by_length": _NO_LENGTH_GROUPS,
    "half_precision_backend": "use mixed_precision",
    "hub_always_push": _NO_UPLOAD,
    "hub_model_id": _NO_UPLOAD,
    "hub_private_repo": _NO_UPLOAD,
    "hub_revision": _NO_UPLOAD,
    "hub_strategy": _NO_UPLOAD,
    "hub_token": _NO_UPLOAD,
    "ignore_data_skip": "a resume is at its place in the data at once, leave it out",
    "include_for_metrics": _NO_METRICS,
    "include_inputs_for_metrics": _NO_METRICS,
    "include_num_input_tokens_seen": _ALWAYS,
    "include_tokens_per_second": _ALWAYS,
    "label_names": "labels are called 'labels': rename the column, or let the data collator do it; "
    "what the model itself takes under other names (start_positions) it is given, leave it out",
    "label_smoothing_factor": "give compute_loss_func to the trainer",
    "length_column_name": _NO_LENGTH_GROUPS,
    "liger_kernel_config": "use fused_loss='liger', which is Liger's loss alone",
    "local_rank": "it comes from the environment, leave it out",
    "log_level": "use Python's logging: logging.getLogger('headway').setLevel(...)",
    "log_level_replica": "use Python's logging: logging.getLogger('headway').setLevel(...)",
    "log_on_each_node": "rank 0 writes the logs, leave it out",
    "logging_nan_inf_filter": "use nonfinite_action, which says what follows such a step",
    "neftune_noise_alpha": "there is none here; a forward hook of the embedding can add the noise",
    "no_cuda": "use use_cpu",
    "optim_target_modules": "give optimizer_groups to the trainer",
    "parallelism_config": "use DDPTrainer, FSDP2Trainer or PipelineTrainer",
    "per_gpu_eval_batch_size": "use per_device_eval_batch_size",
    "per_gpu_train_batch_size": "use per_device_train_batch_size",
    "predict_with_generate": _NO_GENERATION,
    "prediction_loss_only": "evaluate() keeps the loss alone, leave it out",
    "project": "give the tracker's callback in callbacks, such as WandBCallback(project=...)",
    "push_to_hub": _NO_UPLOAD,
    "push_to_hub_model_id": _NO_UPLOAD,
    "push_to_hub_organization": _NO_UPLOAD,
    "push_to_hub_token": _NO_UPLOAD,
    "remove_unused_columns": "what the model does not take is left out by itself, leave it out",
    "restore_callback_states_from_checkpoint": _ALWAYS,
    "save_only_model": "use checkpoint_components=['model'], from which no run can go on exactly",
    "skip_memory_metrics": "give PeakMemory() in callbacks to have them",
    "sortish_sampler": _NO_LENGTH_GROUPS,
    "split_batches": "use global_batch_size",
    "tf32": "use float32_matmul_precision='high'",
    "torch_empty_cache_steps": "use gc_threshold",
    "trackio_bucket_id": _TRACKIO,
    "trackio_space_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
    "train_sampling_strategy": _NO_LENGTH_GROUPS,
    "use_cache": "a cache is never kept in training, leave it out",
    "use_ipex": _OLD_DEVICES,
    "use_legacy_prediction_loop": "leave it out",
    "use_liger_kernel": "use fused_loss='liger', which is Liger's loss alone",
    "use_mps_device": _OLD_DEVICES,
}
"""Option -> what to do instead."""

_EVERY = "for other lengths use {}_every, such as '0.1 epochs'"
HF_SHARES: dict[str, str] = {
    "eval_steps": _EVERY.format("eval"),
    "logging_steps": _EVERY.format("log"),
    "save_steps": _EVERY.format("save"),
    "warmup_steps": "for a share of the training use warmup_ratio",
}
"""Option that takes a share of the training there, a number below 1 -> what to use instead."""
