"""The groups of parameters that torch gathers and reduces together under FSDP2.

Owns: what Headway reads and changes in them, whose names differ between versions of torch: that
parameters a rank did not use in a step are reduced with zeros in their place, and that gradients of
a step can be dropped. Does not own: sharding itself (fsdp2.py).

Left to itself, torch reduces what a rank has gradients of, and so adds up gradients of different
parameters where ranks have different ones. From 2.13 on it can be told to put zeros there, but
before 2.15 it then fails where gradients were summed over micro-batches in another dtype; so it is
told from 2.15 on. Either way a group of parameters is reduced where it stands in the backward pass:
one that a rank leaves out of it as a whole comes last there, at the turn of another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

# Whether sums over micro-batches are kept beside gradients, as before torch 2.15.
_SUMS_APART = hasattr(FSDPParam, "to_accumulated_grad_if_needed")


def reduce_unused(model: nn.Module) -> None:
    """Have all parameters of a sharded model reduced, by all ranks alike."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module._get_fsdp_state()):
                if _SUMS_APART:
                    _fill_before_reduction(group)
                else:
                    group.reduce_scatter_unused_params = True


def groups_of(state: Any) -> list[Any]:
    """Those of a sharded module, by torch's state of it."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:  # before torch 2.12
        several = [state._fsdp_param_group]
    return [group for group in several if group is not None]


def drop_gradients(group: Any) -> None:
    """Forget what a step that was not finished has left of gradients."""
    for parameter in group.fsdp_params:
        if _SUMS_APART:
            parameter.unsharded_accumulated_grad = None
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None:
            whole.grad = None


def _fill_before_reduction(group: Any) -> None:
    """Give a group zeros before it looks for gradients.

    It looks once in a backward pass, at the end of it where the group was not used at all.
    """
    plain = group.post_backward

    def post_backward(*unused: Any) -> Any:
        if group.reduce_grads:
            # Not made before the first forward pass through the group.
            made = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
            _fill([one for one in made if one.unsharded_param.requires_grad])
        return plain(*unused)

    group.post_backward = post_backward


def _fill(parameters: list[Any]) -> None:
    # Sums over earlier micro-batches have the dtype of the reduction, and a group has one dtype.
    summed = any(one.unsharded_accumulated_grad is not None for one in parameters)
    for one in parameters:
        if summed and one.unsharded_accumulated_grad is None:
            one.to_accumulated_grad_if_needed()
        if one.unsharded_accumulated_grad is not None or one.unsharded_param.grad is not None:
            continue
        if summed:
            zeros = torch.zeros_like(one.unsharded_param, dtype=one.reduce_dtype)
            one.unsharded_accumulated_grad = zeros
        else:
            one.unsharded_param.grad = torch.zeros_like(one.unsharded_param)
