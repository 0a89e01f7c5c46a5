"""`headway diloco server`: the server of a model, in the foreground.

Owns: its options on the command line, where the first parameters come from, and its end by a
signal. Does not own: the server (diloco/).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

_RUN_FILES = (".yaml", ".yml")
_FLAGS = {"num_workers": "workers", "outer_momentum": "momentum"}
_OPTION = re.compile(r"^\w+(?=[=:])|\b\w+(?==)")
"""The option that a message begins with, and those whose values it tells."""


def server_options(options: argparse.Namespace) -> dict[str, Any]:
    """The rules of rounds, as the server has them; checked without torch."""
    from headway.diloco.server_options import ServerOptions

    chosen = {
        "num_workers": options.workers,
        "min_workers": 1 if options.min_workers is None else options.min_workers,
        "mode": options.mode,
        "num_fragments": 1 if options.num_fragments is None else options.num_fragments,
        "sync_every": options.sync_every,
        "dylu": options.dylu,
        "deadline_s": options.deadline_s,
        "heartbeat_s": options.heartbeat_s,
        "max_uploads": options.max_uploads,
        "max_update_norm": options.max_update_norm,
        "max_norm_ratio": options.max_norm_ratio,
        "keep_submissions": options.keep_submissions,
        "outer_lr": options.outer_lr,
        "outer_momentum": options.momentum,
        "nesterov": not options.no_nesterov,
        "accumulate": options.accumulate,
    }
    with as_flags():
        ServerOptions(**chosen)
    return chosen


@contextlib.contextmanager
def as_flags() -> Iterator[None]:
    """Mistakes told inside are told of options as they are written on the command line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_OPTION.sub(_flag_of, text) for text in error.problems]) from None


def _flag_of(found: re.Match[str]) -> str:
    name = found[0]
    return "--" + _FLAGS.get(name, name.replace("_", "-"))


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; 0 after SIGTERM too, as that is how a server ends."""
    from headway.cli.messages import write_line

    chosen = server_options(options)
    model = None if options.model is None else load_first_model(options.model)
    from headway.diloco.server import DiLoCoServer

    server = DiLoCoServer(
        model,
        output_dir=options.output_dir,
        host=options.host,
        port=options.port,
        token_file=options.token_file,
        disable_auth=options.no_auth,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        **chosen,
    )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server.start()
    try:
        scheme = "https" if options.tls_cert else "http"
        print(f"DiLoCo server on {server.address} ({scheme}://{server.address}/)", flush=True)
        if server.token is not None and options.token_file is None:
            write_line(f"workers' token: {Path(options.output_dir, 'token')} (--token-file)")
        if options.address_file:
            _write_whole(Path(options.address_file), server.address)
        ended.wait()
    finally:
        server.stop()
    return 0


def load_first_model(given: str) -> nn.Module:
    """What training begins from: a model folder, a run's newest checkpoint, or a run file's."""
    path = Path(given)
    if path.suffix in _RUN_FILES:
        from headway.config.load import load_run
        from headway.dist.seed import seed_all
        from headway.trainers.from_config import build_model_init

        run_config = load_run(path)
        seed_all(max(0, run_config.args.seed))
        return build_model_init(run_config)()
    from headway.cli.model_folder import find_model_folder, load_model

    try:
        return load_model(find_model_folder(given))
    except ConfigError as error:
        raise ConfigError(
            [f"--model: {text.removeprefix('DIR: ')}" for text in error.problems]
        ) from None


def _write_whole(path: Path, text: str) -> None:
    """Whoever waits for the file finds all of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text)
    os.replace(beside, path)
