"""The rules about recomputation and compilation that arguments alone decide.

Owns: our own rules for these options. Does not own: the reference's (rules_values, rules_pairs).
"""

from __future__ import annotations

import re
from typing import Any

from headway.config.rules import Rule, idle
from headway.config.rules_values import FLASH4, one_of
from headway.errors import unknown

POLICIES = ("block", "every_2", "every_3", "selective")
"""`every_` takes any number from 2."""
COMPILE_SCOPES = ("blocks", "model")
CHECKPOINTING_KEYS = ("context_fn", "determinism_check", "preserve_rng_state", "use_reentrant")
_EVERY = re.compile(r"every_([2-9]|[1-9]\d+)")
_POLICY = "gradient_checkpointing_policy"
_KWARGS = "gradient_checkpointing_kwargs"
_COMPANIONS = (
    "torch_compile_backend",
    "torch_compile_mode",
    "torch_compile_dynamic",
    "torch_compile_full_graph",
    "torch_compile_scope",
    "dynamo_recompile_limit",
)
_CACHE = "torch_compile_cache"
# What stands in an option that was left out.
_FILLED = {"torch_compile_backend": "inductor", "torch_compile_mode": "default"}


def _policy(args: Any) -> str | None:
    value = args.gradient_checkpointing_policy
    if value in POLICIES or _EVERY.fullmatch(value):
        return None
    return f"{unknown(_POLICY, value, POLICIES)}, or every_N with another N from 2"


def _checkpointing_keys(args: Any) -> str | None:
    for key in args.gradient_checkpointing_kwargs or {}:
        if key not in CHECKPOINTING_KEYS:
            return unknown(f"{_KWARGS} key", key, CHECKPOINTING_KEYS)
    return None


def _reentrant(args: Any) -> str | None:
    given = args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing_policy == "block" or not given.get("use_reentrant"):
        return None
    return (
        f"{_KWARGS}: use_reentrant=True cannot be used with {_POLICY}="
        f"{args.gradient_checkpointing_policy!r}; leave it out"
    )


def _selects_twice(args: Any) -> str | None:
    given = args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing_policy != "selective" or "context_fn" not in given:
        return None
    return f"{_KWARGS}: context_fn and {_POLICY}='selective' both say what is kept; give one"


def _mode_needs_inductor(args: Any) -> str | None:
    mode, backend = args.torch_compile_mode, args.torch_compile_backend
    if mode in (None, "default") or backend in (None, "inductor"):
        return None
    return (
        f"torch_compile_mode={mode!r} is a mode of torch_compile_backend='inductor'; with "
        f"{backend!r} leave it out"
    )


def _idle_cache(args: Any) -> str | None:
    if getattr(args, "sdpa_backend", None) == FLASH4:  # its kernels are kept there as well
        return None
    return idle("torch_compile", _CACHE)(args)


# fmt: off
RULES: list[Rule] = [
    Rule("H120", (_POLICY,), "args",
         f"{_POLICY} is block, selective or every_N with N from 2.", _policy),
    Rule("H121", (_KWARGS,), "args",
         f"{_KWARGS} holds options of torch.utils.checkpoint: {', '.join(CHECKPOINTING_KEYS)}.",
         _checkpointing_keys),
    Rule("H122", (_KWARGS, _POLICY), "args",
         "use_reentrant=True is for whole blocks only.", _reentrant),
    Rule("H123", (_KWARGS, _POLICY), "args",
         "context_fn takes the place of the selective policy.", _selects_twice),
    Rule("H124", (_POLICY, _KWARGS, "gradient_checkpointing"), "args",
         "A policy of recomputation needs gradient_checkpointing.",
         idle("gradient_checkpointing", _POLICY, _KWARGS), "warn"),
    Rule("H125", ("torch_compile_scope",), "args",
         f"torch_compile_scope is one of {', '.join(COMPILE_SCOPES)}.",
         one_of("torch_compile_scope", COMPILE_SCOPES)),
    Rule("H126", ("torch_compile_mode", "torch_compile_backend"), "args",
         "A mode of compilation is for inductor.", _mode_needs_inductor),
    Rule("H127", (*_COMPANIONS, "torch_compile"), "args",
         "Options of the compiler need torch_compile.",
         idle("torch_compile", *_COMPANIONS, filled=_FILLED), "warn"),
    Rule("H127", (_CACHE, "torch_compile", "sdpa_backend"), "args",
         f"A folder for compiled code needs torch_compile, or sdpa_backend={FLASH4!r}.",
         _idle_cache, "warn"),
]
# fmt: on
