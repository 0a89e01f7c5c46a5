"""What of the files of one committed checkpoint goes into which live objects.

Owns: the order of loading and what counts as missing. Does not own: filling tensors and
verification (loading.py) or the choice of a checkpoint (manager.py).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from headway.checkpoint.component import SharingPattern, StateComponent, file_stem
from headway.checkpoint.contents import (
    MODEL_EXTRA_STEM,
    OPTIMIZER_STATE_NAME,
    TRAINER_STATE_NAME,
    CheckpointContents,
)
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import Header
from headway.checkpoint.intake import Destination
from headway.checkpoint.jobs import num_readers
from headway.checkpoint.jsonfile import read_json, read_json_object
from headway.checkpoint.manifest import Manifest
from headway.checkpoint.model import (
    ModelTensors,
    collect_model,
    describe_names,
    load_extra_state,
    plan_model,
    tensors_made,
)
from headway.checkpoint.optimizer import plan_optimizer
from headway.checkpoint.parameter_state import ParameterState
from headway.checkpoint.ranks import Ranks
from headway.checkpoint.rng import RNGState
from headway.checkpoint.sharding import local_part
from headway.checkpoint.tensors import ShardReader, read_tensor_file
from headway.checkpoint.tree import join_tree
from headway.errors import ConfigError, unknown
from headway.models.shards import index_name

logger = logging.getLogger(__name__)


def read_tree(directory: Path, stem: str, manifest: Manifest) -> Any:
    """The state stored as `<stem>.json`, with its tensors if it has any."""
    path = directory / f"{stem}.json"
    encoded = read_json(path)
    tensor_file = f"{stem}.safetensors"
    stored = tensor_file in manifest.files
    tensors = read_tensor_file(directory / tensor_file) if stored else {}
    return join_tree(encoded, tensors, what=str(path))


@dataclass
class LoadPlan:
    """A checkpoint that fits what it is loaded into; nothing is changed yet."""

    trainer_state: dict[str, Any] = field(default_factory=dict)
    destinations: list[Destination] = field(default_factory=list)
    """To be filled first."""
    headers: dict[str, Header] = field(default_factory=dict)
    """By name of a tensor file: the header from which this was planned."""
    steps: list[Callable[[], None]] = field(default_factory=list)
    """To be taken then, in this order."""

    def add(self, reader: ShardReader, destinations: list[Destination]) -> None:
        """Have tensors filled from the files of a reader."""
        self.destinations += destinations
        self.headers.update(reader.headers)


def plan_weights(
    model: nn.Module,
    directory: Path,
    manifest: Manifest,
    *,
    ranks: Ranks,
    elsewhere: Collection[str] = (),
) -> LoadPlan:
    """How to load the weights (and the modules' extra state) into a live model."""
    if "quantized" in manifest.metadata:
        raise CheckpointError(
            f"{directory} holds quantized weights, which a run's model cannot take; for evaluation "
            "put them into a model with load_checkpoint(directory, module)"
        )
    plan, live = LoadPlan(), collect_model(model)
    _plan_model(plan, model, live, directory, manifest, ranks, elsewhere)
    return plan


def _plan_model(
    plan: LoadPlan,
    model: nn.Module,
    live: ModelTensors,
    directory: Path,
    manifest: Manifest,
    ranks: Ranks,
    elsewhere: Collection[str],
) -> None:
    reader = _open_shards(directory, "model", ranks)
    plan.add(reader, plan_model(live, reader, elsewhere))

    def give_rest() -> None:
        has_extra = f"{MODEL_EXTRA_STEM}.json" in manifest.files
        extra = read_tree(directory, MODEL_EXTRA_STEM, manifest) if has_extra else {}
        load_extra_state(model, {**tensors_made(model, live), **extra})

    plan.steps.append(give_rest)


def _plan_tensors(
    plan: LoadPlan,
    contents: CheckpointContents,
    directory: Path,
    manifest: Manifest,
    wanted: Collection[str],
    ranks: Ranks,
    elsewhere: Collection[str],
) -> None:
    """The model's and the optimizer's share of a plan."""
    live = collect_model(contents.model)
    if "model" in wanted:
        if manifest.component("model") is None:
            raise CheckpointError(
                f"{directory} holds no model; name the components to load to go without it"
            )
        _plan_model(plan, contents.model, live, directory, manifest, ranks, elsewhere)
    if "optimizer" in wanted and contents.optimizer is not None:
        if manifest.component("optimizer") is None:
            raise CheckpointError(
                f"{directory} holds no optimizer state; name the components to load to go "
                "without it"
            )
        reader = _open_shards(directory, "optimizer", ranks)
        of_optimizer = plan_optimizer(
            contents.optimizer,
            live.names_by_id(),
            read_json_object(directory / OPTIMIZER_STATE_NAME),
            reader,
            elsewhere,
        )
        plan.add(reader, of_optimizer.destinations)
        plan.steps.append(of_optimizer.finish)


def _open_shards(directory: Path, prefix: str, ranks: Ranks) -> ShardReader:
    return ShardReader(directory, prefix, num_threads=num_readers(ranks.num_on_node))


def plan_contents(
    contents: CheckpointContents,
    directory: Path,
    manifest: Manifest,
    *,
    components: Collection[str] | None = None,
    ranks: Ranks,
    elsewhere: Collection[str] = (),
) -> LoadPlan:
    """How to fill `contents`, or only the named `components`.

    `elsewhere` names weights that other ranks hold and load.
    """
    contents.check_keys()
    known = {"model", "optimizer", *(component.key for component in contents.components)}
    wanted = known if components is None else set(components)
    for name in sorted(wanted - known):
        raise ConfigError(unknown("checkpoint component", name, known))

    trainer_state = join_tree(
        read_json_object(directory / TRAINER_STATE_NAME),
        {},
        what=str(directory / TRAINER_STATE_NAME),
    )
    if not isinstance(trainer_state, dict):
        raise CheckpointError(f"{directory / TRAINER_STATE_NAME} does not hold a state by name")
    plan = LoadPlan(trainer_state)
    if wanted & {"model", "optimizer"}:
        _plan_tensors(plan, contents, directory, manifest, wanted, ranks, elsewhere)
    # The generators last: restoring another component may draw random numbers.
    ordered = sorted(contents.components, key=lambda c: isinstance(c.stateful, RNGState))
    plan.steps += [
        functools.partial(_load_component, component, directory, manifest, ranks)
        for component in ordered
        if component.key in wanted
    ]
    unclaimed = {entry["key"] for entry in manifest.components} - known
    if unclaimed:
        told = ", ".join(sorted(unclaimed))
        text = "%s holds state that nothing in this run takes: %s"
        plan.steps.append(lambda: logger.warning(text, directory, told))
    return plan


def held_elsewhere(model: nn.Module, ranks: Ranks) -> set[str]:
    """Names of weights that other ranks hold and this one does not; every rank must call it."""
    if ranks.world_size == 1:
        return set()
    own = collect_model(model).by_name
    told = ranks.exchange(sorted(own))
    return {name for names in told for name in names} - set(own)


def _load_component(
    component: StateComponent, directory: Path, manifest: Manifest, ranks: Ranks
) -> None:
    entry = manifest.component(component.key)
    if entry is None:
        if component.required:
            raise CheckpointError(
                f"{directory} holds no state for the required component {component.key!r}"
            )
        logger.warning("%s holds no state for %r; it starts fresh", directory, component.key)
        return
    pattern = component.sharing_pattern
    group = ranks.group_of(component).number if pattern is SharingPattern.PER_GROUP else 0
    stem = file_stem(component, rank=ranks.rank, node=ranks.node, group=group)
    wanted = index_name(stem) if pattern is SharingPattern.SHARDED else f"{stem}.json"
    fresh = component.metadata.get("on_missing_rank") == "fresh"
    difference = _layout_difference(component, manifest, ranks)
    if difference and not fresh:
        raise CheckpointError(
            f"component {component.key!r} is {pattern.value}: {difference}. It cannot be dealt "
            'anew; metadata={"on_missing_rank": "fresh"} lets ranks without a file start fresh'
        )
    if wanted not in entry["files"]:
        if difference:
            logger.warning("%r starts fresh on rank %d: %s", component.key, ranks.rank, difference)
            return
        raise CheckpointError(
            f"component {component.key!r} is {pattern.value} here and "
            f"{entry['sharing_pattern']} in {directory}, which has no {wanted}"
        )
    try:
        if isinstance(component.stateful, ParameterState):
            component.stateful.load_from(_open_shards(directory, stem, ranks))
            return
        if pattern is SharingPattern.SHARDED:
            state: Any = _read_sharded(component, _open_shards(directory, stem, ranks))
        else:
            state = read_tree(directory, stem, manifest)
        component.stateful.load_state_dict(state)
    except CheckpointError:
        raise
    except ConfigError as error:  # the checkpoint is whole, and the run is another one
        raise ConfigError(f"{directory / wanted}: {error}") from error
    except Exception as error:
        raise CheckpointError(
            f"component {component.key!r} could not take its state from "
            f"{directory / wanted}: {type(error).__name__}: {error}"
        ) from error


def _layout_difference(component: StateComponent, manifest: Manifest, ranks: Ranks) -> str | None:
    """How the ranks of the save differ from these where the component depends on it."""
    saved, now = manifest.topology, ranks.topology()
    match component.sharing_pattern:
        case SharingPattern.PER_RANK:
            then, here = saved.get("world_size", 1), ranks.world_size
            what = f"it was saved by {then} ranks, this run has {here}"
        case SharingPattern.PER_NODE:
            then = len(set(saved.get("nodes", [0])))
            here = len(set(ranks.nodes))
            what = f"it was saved on {then} nodes, this run has {here}"
        case SharingPattern.PER_GROUP:
            name = component.process_group_name or ""
            then = saved.get("groups", {}).get(name)
            here = now.get("groups", {}).get(name)
            what = f"the groups {name!r} were {then}, here they are {here}"
        case _:
            return None
    return what if then != here else None


def _read_sharded(component: StateComponent, reader: ShardReader) -> dict[str, Any]:
    """What this rank holds of a SHARDED component, by the names its live state has."""
    live = component.stateful.state_dict()
    missing = sorted(set(live) - set(reader.weight_map))
    if missing:
        raise CheckpointError(
            f"{reader.index_path} does not fit component {component.key!r}: missing in it: "
            f"{describe_names(missing, reader.weight_map)}"
        )
    shapes = reader.shapes(live)
    parts: dict[str, tuple[slice, ...]] = {}
    for name, held in live.items():
        here = tuple(held.shape)
        if shapes[name] != here:
            raise CheckpointError(
                f"{reader.index_path}: {name} is {list(shapes[name])} there, {list(here)} here"
            )
        parts[name] = local_part(held)
    return dict(reader.parts(parts))
