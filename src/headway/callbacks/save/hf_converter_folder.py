"""One model folder of one committed checkpoint, whole or not at all.

Owns: what goes into the folder and when an earlier one may be replaced. Does not own: which
checkpoints are converted (hf_converter.py), the comparison of the models (hf_converter_check.py).
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from headway.checkpoint.draft import Draft
    from headway.checkpoint.manifest import Manifest

logger = logging.getLogger(__name__)

_MADE_BY = "HFConverterCallback"
# Of a tokenizer; they go when another takes its place.
_TOKENIZER_FILES = (
    "tokenizer",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template",
    "vocab",
    "merges.txt",
    "spiece.model",
    "sentencepiece",
)
_TOKENIZER_SETTINGS = "tokenizer_config.json"


@dataclass(frozen=True)
class FolderPlan:
    """What the folder of a checkpoint is to be."""

    dtype: str | None
    tokenizer_id: str | None = None
    max_sequence_length: int | None = None
    validate: bool = False
    debug: bool = False
    device: str = "cpu"

    def describe(self, manifest: Manifest) -> dict[str, Any]:
        """What tells one folder from another, as its manifest has it."""
        return {
            "made_by": _MADE_BY,
            "source_digest": manifest.digest,
            "dtype": self.dtype,
            "tokenizer_id": self.tokenizer_id,
            "max_sequence_length": self.max_sequence_length,
        }


def check_target(target: Path) -> None:
    """Refuse a target that is there and was not made by a converter."""
    if not os.path.lexists(target):
        return
    from headway.checkpoint import CheckpointError, read_manifest

    try:
        made_by = read_manifest(target).metadata.get("made_by")
    except CheckpointError:
        made_by = None
    if made_by != _MADE_BY:
        raise ConfigError(
            f"HFConverterCallback: output_folder: {target} exists and is no folder of an earlier "
            "conversion; nothing else is overwritten, choose another name"
        )


def is_made(checkpoint: Path, target: Path, plan: FolderPlan) -> bool:
    """Whether the folder of this very checkpoint is there already, made by the same plan."""
    from headway.checkpoint import CheckpointError, read_manifest

    try:
        return read_manifest(target).metadata == plan.describe(read_manifest(checkpoint))
    except CheckpointError:
        return False


def make_folder(checkpoint: Path, target: Path, plan: FolderPlan, *, apart: bool = False) -> Path:
    """Write the folder beside its place, validate it if asked for, and put it there.

    `apart`: what runs in this process meanwhile must not notice the validation.
    """
    from headway.checkpoint import CheckpointError, read_manifest
    from headway.checkpoint.casting import write_cast
    from headway.checkpoint.draft import Draft
    from headway.checkpoint.export import require_whole
    from headway.checkpoint.weights import open_weights

    manifest = read_manifest(checkpoint)
    entry = manifest.component("model")
    if entry is None:
        raise CheckpointError(f"{checkpoint} holds no model")
    check_target(target)
    top = {name for name in manifest.files if "/" not in name and not name.startswith("optimizer")}
    require_whole(checkpoint, {*entry["files"], *top})
    with Draft(target) as draft:
        files = write_cast(draft, open_weights(checkpoint), plan.dtype)
        files += _take_files(draft, checkpoint, plan)
        draft.add_component("model", files)
        if plan.validate:
            from headway.callbacks.save.hf_converter_check import validate_apart, validate_folder

            validate = validate_apart if apart else validate_folder
            validate(checkpoint, draft.directory, plan.dtype, device=plan.device, debug=plan.debug)
        described = draft.describe(
            kind="export", step=manifest.step, metadata=plan.describe(manifest)
        )
        return draft.commit(described, replace=True)


def _take_files(draft: Draft, checkpoint: Path, plan: FolderPlan) -> list[str]:
    """The configuration and the tokenizer; returns the names."""
    from headway.checkpoint.export import model_files
    from headway.checkpoint.jsonfile import read_json_object

    sources = model_files(checkpoint)
    if plan.tokenizer_id is None:
        return _write_files(draft, sources, plan)
    kept = {n: p for n, p in sources.items() if not n.startswith(_TOKENIZER_FILES)}
    with tempfile.TemporaryDirectory(prefix="headway-tokenizer-") as folder:
        load_tokenizer(plan.tokenizer_id).save_pretrained(folder)
        own = {path.name: path for path in sorted(Path(folder).iterdir()) if path.is_file()}
        vocab = read_json_object(checkpoint / "config.json").get("vocab_size")
        _compare_vocabulary(own, vocab)
        return _write_files(draft, {**kept, **own}, plan)


def _write_files(draft: Draft, sources: dict[str, Path], plan: FolderPlan) -> list[str]:
    from headway.checkpoint.jsonfile import read_json_object
    from headway.models.hf_config import is_supported_family

    length = plan.max_sequence_length
    for name, path in sources.items():
        if name == "config.json":
            config = read_json_object(path)
            if plan.dtype is not None:
                # Older readers know the second name alone.
                config |= dict.fromkeys(("dtype", "torch_dtype"), plan.dtype)
            # Other families may have a weight for every position.
            if length is not None and is_supported_family(config):
                config["max_position_embeddings"] = length
            draft.write_json(name, config, indent=2)
        elif name == _TOKENIZER_SETTINGS and length is not None:
            settings = {**read_json_object(path), "model_max_length": length}
            draft.write_json(name, settings, indent=2)
        else:
            draft.take(path, name)
    return list(sources)


def load_tokenizer(tokenizer_id: str) -> Any:
    """A tokenizer by a name of ours, a folder, or a name that transformers knows."""
    from headway.data import tokenizer as own

    if tokenizer_id == "bytes" or Path(tokenizer_id).exists():
        return own.load_tokenizer(tokenizer_id)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing_extra(
            "transformers", "transformers", f"HFConverterCallback: tokenizer_id={tokenizer_id!r}"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(tokenizer_id)
    except Exception as error:
        raise ConfigError(
            f"HFConverterCallback: tokenizer_id={tokenizer_id!r} is neither 'bytes' nor a folder, "
            f"nor can transformers load it: {error}"
        ) from error


def _compare_vocabulary(files: dict[str, Path], vocab_size: Any) -> None:
    from headway.checkpoint.jsonfile import read_json_object

    if "tokenizer.json" not in files or not isinstance(vocab_size, int):
        return
    model = read_json_object(files["tokenizer.json"]).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict | list) and len(vocabulary) > vocab_size:
        raise ConfigError(
            f"HFConverterCallback: tokenizer_id: its {len(vocabulary)} tokens do not fit the "
            f"model's vocabulary of {vocab_size}"
        )
