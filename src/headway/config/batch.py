"""The size of an optimizer step: accumulation derived from a global batch.

Owns: `derive_accumulation`. Does not own: the world size (dist) or the sequence length (data).
"""

from __future__ import annotations

import copy
from typing import Any

from headway.config import rules
from headway.errors import ConfigError


def derive_accumulation(args: Any, *, world_size: int, sequence_length: int | None) -> int:
    """Micro-batches per optimizer step, from whichever option sets the size of one."""
    problems = [
        message
        for rule in rules.all_rules()
        if rule.number == "H6" and rule.check and (message := rule.check(args))
    ]
    if problems:
        raise ConfigError(problems)
    if args.global_batch_size is None and args.global_batch_tokens is None:
        return int(args.gradient_accumulation_steps)
    micro = args.per_device_train_batch_size * world_size
    made_of = f"per_device_train_batch_size={args.per_device_train_batch_size} x {world_size} ranks"
    if args.global_batch_size is not None:
        return _accumulate(args, "global_batch_size", args.global_batch_size, micro, made_of)
    if sequence_length is None:
        raise ConfigError(
            "global_batch_tokens needs a known sequence length; give global_batch_size or "
            "gradient_accumulation_steps for data of unknown length"
        )
    made_of += f" x {sequence_length} tokens"
    wanted = args.global_batch_tokens
    return _accumulate(args, "global_batch_tokens", wanted, micro * sequence_length, made_of)


def _accumulate(args: Any, option: str, wanted: int, micro: int, made_of: str) -> int:
    number, rest = divmod(wanted, micro)
    if rest or number < 1:
        below, above = number * micro, (number + 1) * micro
        choices = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"{option}={wanted} must be a multiple of {micro} ({made_of}); the nearest: {choices}"
        )
    effective = copy.copy(args)
    effective.gradient_accumulation_steps = number
    effective.global_batch_size = effective.global_batch_tokens = None
    broken = [
        problem.message
        for problem in rules.find_broken(effective)
        if "gradient_accumulation_steps" in problem.options
    ]
    if broken:
        raise ConfigError([f"{option}={wanted}: {message}" for message in broken])
    return number
