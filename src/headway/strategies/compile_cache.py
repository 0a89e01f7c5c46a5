"""Where compiled code is kept, so that the next run of the same model does not compile it again.

Owns: the folder, for the time of a run. Does not own: what is kept there and when it is valid (the
compiler), what is compiled (compilation.py).

torch's own choice is in the system's folder for temporary files, which many machines empty when
they start.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from headway.args import TrainingArguments

logger = logging.getLogger(__name__)

# The compiler writes the second one itself, below the first, and would keep it for later runs.
_FOLDER, _KERNELS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def choose_folder(given: str | None, environment: Mapping[str, str]) -> Path:
    """The folder that the option names, or the environment, or else one of the user's own."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = given or environment.get(_FOLDER)
    # torch writes its own choice there, some versions as soon as they are imported.
    if named and not given and named == default_cache_dir():
        named = None
    if named:
        return Path(named).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME")
    # What is relative is to be left out of account, by the convention of these folders.
    home = Path(base) if base and os.path.isabs(base) else Path("~/.cache").expanduser()
    return home / "headway" / "compile"


def usable_folder(given: str | None, part: str = "", *, locks: bool = False) -> Path | None:
    """The folder, or a part of it, ready to be written in; None, and a warning, where it is not.

    `locks`: files in it will be locked, which not every file system can do.
    """
    try:
        folder = choose_folder(given, os.environ) / part
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write in {folder}")
        if locks:
            import fcntl

            with tempfile.TemporaryFile(dir=folder) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, RuntimeError, KeyError) as error:  # the latter two: no home, no user's name
        kept = f"nothing is kept of {part}" if part else "compiled code is kept where torch does"
        logger.warning("torch_compile_cache: %s; %s", error, kept)
        return None
    return folder


@contextmanager
def compile_cache(args: TrainingArguments) -> Iterator[None]:
    """Inside, compiled code is kept in, and taken from, the run's folder for it."""
    if not args.torch_compile or args.torch_compile_backend not in (None, "inductor"):
        yield
        return
    before = {name: os.environ.get(name) for name in (_FOLDER, _KERNELS)}
    folder = usable_folder(args.torch_compile_cache)
    if folder is not None:
        os.environ[_FOLDER] = str(folder)
    try:
        with _cached_functions():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _cached_functions() -> Iterator[None]:
    """Have graphs with gradients of their own (`torch.autograd.Function`) kept like all others.

    What they compute, in both directions, is part of what a graph is looked up by.
    """
    from torch._functorch import config

    name = "autograd_cache_allow_custom_autograd_functions"
    with config.patch({name: True}) if hasattr(config, name) else nullcontext():
        yield
