"""`headway diloco ...`: one model, trained by several runs that may be far apart.

Owns: the arguments of its commands, and `worker`, which is `headway train` with a server. What the
others do is in diloco_server.py, diloco_local.py and diloco_status.py.

Exit codes as everywhere: 2 is a mistake of the user, also a server that is not there.
"""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from headway.cli.launch import add_launch_arguments
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import RunConfig

TAKES_OVERRIDES = True
_ACTIONS = {
    "server": "hold the model, and join what the workers learn",
    "worker": "train a run file as one of several workers",
    "local": "server and workers on this machine, in one command",
    "status": "what a server does: workers, rounds, bytes",
}
_CALLBACK = "DiLoCoCallback"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    actions = parser.add_subparsers(
        dest="action", required=True, metavar=f"{{{','.join(_ACTIONS)}}}"
    )
    made = {name: actions.add_parser(name, help=text) for name, text in _ACTIONS.items()}
    _add_server(made["server"])
    _add_worker(made["worker"])
    _add_local(made["local"])
    made["status"].add_argument(
        "address", nargs="?", metavar="HOST:PORT", help="the server; by default DILOCO_SERVER"
    )
    made["status"].add_argument("--token-file", metavar="FILE", help="a token that may read")
    made["status"].add_argument("--tls-ca", metavar="FILE", help="certificates to trust")
    for command in made.values():
        command.add_argument("--json", action="store_true", help="print JSON")
        loud = command.add_mutually_exclusive_group()
        for short, name, text in (("-v", "verbose", "say more"), ("-q", "quiet", "say less")):
            loud.add_argument(
                short, f"--{name}", action="store_true", default=argparse.SUPPRESS, help=text
            )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="FOLDER|CONFIG",
        help="what the model begins as: a model folder, a run or checkpoint, or a run file. "
        "Without it: what the first worker has",
    )
    parser.add_argument(
        "--output-dir", metavar="DIR", default="diloco-server", help="where its state is kept"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument(
        "--address-file", metavar="FILE", help="write HOST:PORT here once it listens"
    )
    _add_rules(parser)
    group = parser.add_argument_group("who may take part")
    group.add_argument(
        "--token-file", metavar="FILE", help="tokens: 'WORKER TOKEN' or 'TOKEN' lines"
    )
    group.add_argument(
        "--no-auth", action="store_true", help="no tokens; on this machine's own address only"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="certificate, for TLS")
    group.add_argument("--tls-key", metavar="FILE", help="its key")


def _add_rules(parser: argparse.ArgumentParser) -> None:
    """What server and `local` have in common."""
    group = parser.add_argument_group("rounds")
    group.add_argument(
        "--workers", type=int, required=True, metavar="N", help="how many are expected"
    )
    group.add_argument(
        "--min-workers", type=int, metavar="N", help="enough once the deadline is over"
    )
    group.add_argument("--mode", choices=("sync", "async"), default="sync")
    group.add_argument(
        "--sync-every",
        type=int,
        metavar="STEPS",
        help="local steps per exchange, which DyLU goes by",
    )
    group.add_argument("--num-fragments", type=int, metavar="N")
    group.add_argument("--dylu", action="store_true", help="step counts by each worker's speed")
    group.add_argument("--deadline-s", type=float, default=600.0, metavar="S")
    group.add_argument("--heartbeat-s", type=float, default=30.0, metavar="S")
    group.add_argument(
        "--max-uploads", type=int, default=8, metavar="N", help="bodies received at one time"
    )
    group.add_argument(
        "--max-update-norm", type=float, metavar="X", help="refuse larger pseudo-gradients"
    )
    group.add_argument(
        "--max-norm-ratio",
        type=float,
        default=20.0,
        metavar="X",
        help="refuse those that are so many times the median of the last ones (20)",
    )
    group.add_argument(
        "--keep-submissions", action="store_true", help="keep every body, for a replay"
    )
    group.add_argument("--outer-lr", type=float, default=0.7)
    group.add_argument("--momentum", type=float, default=0.9)
    group.add_argument("--no-nesterov", action="store_true")
    group.add_argument("--accumulate", choices=("float32", "float64"), default="float32")


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "headway diloco worker CONFIG --server HOST:PORT [--worker-id ID] [--sync-every STEPS] "
        "[any option of headway train] [--any.key=value ...]"
    )
    parser.add_argument("config", metavar="CONFIG", help="a run file (YAML)")
    parser.add_argument("--server", metavar="HOST:PORT", help="by default DILOCO_SERVER")
    parser.add_argument("--worker-id", metavar="ID", help="unique; by default made up")
    parser.add_argument("--sync-every", type=int, metavar="STEPS", help="local steps per exchange")
    parser.add_argument("--num-fragments", type=int, metavar="N", help="as the server has it")
    parser.add_argument("--comm", metavar="KIND", help="float32, bf16 or int8")
    _add_fetch(parser)
    parser.add_argument("--dylu", action="store_true", default=None, help="follow the server")
    parser.add_argument("--token-file", metavar="FILE", help="this worker's token")
    parser.add_argument("--tls-ca", metavar="FILE", help="certificates to trust")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--resume", metavar="PATH", help="continue from this checkpoint")
    group.add_argument("--no-resume", action="store_true", help="start afresh")
    add_launch_arguments(parser)


def _add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bf16-fetch", action="store_true", default=None, help="parameters come back as bfloat16"
    )


def _add_local(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headway diloco local CONFIG --workers N [--any.key=value ...]"
    parser.add_argument("config", metavar="CONFIG", help="a run file (YAML)")
    _add_rules(parser)
    parser.add_argument("--comm", metavar="KIND", help="float32, bf16 or int8")
    _add_fetch(parser)
    parser.add_argument("--timeout-s", type=float, metavar="S", help="end all after so long")


def run(options: argparse.Namespace) -> int:
    """Do what the action says."""
    if options.action == "worker":
        return run_worker(options)
    if options.overrides and options.action != "local":
        raise ConfigError(
            f"{options.overrides[0]!r} given; headway diloco {options.action} reads no run file "
            "that it could change"
        )
    module = importlib.import_module(f"headway.cli.diloco_{options.action}")
    code: int = module.run(options)
    return code


def run_worker(options: argparse.Namespace) -> int:
    """Train with the callback that exchanges."""
    from headway.callbacks import DiLoCoCallback
    from headway.cli import train

    given = {
        "server_addr": options.server,
        "worker_id": options.worker_id,
        "sync_every": options.sync_every,
        "num_fragments": options.num_fragments,
        "comm": options.comm,
        "bf16_fetch": options.bf16_fetch,
        "dylu": options.dylu,
        "token_file": options.token_file,
        "tls_ca": options.tls_ca,
    }
    chosen = {name: value for name, value in given.items() if value is not None}

    def amend(run_config: RunConfig) -> None:
        component = find_or_add_callback(run_config)
        component.init_args = {**component.init_args, **chosen}
        # What is wrong with its options is told before models and data are made.
        if not DiLoCoCallback(**component.init_args).active:
            raise ConfigError("--server: no address given; allowed: HOST:PORT (or DILOCO_SERVER)")

    return train.run(options, amend)


def find_or_add_callback(run_config: RunConfig) -> Any:
    """The run's component of the callback, which it may have already."""
    from headway.config.schema import Component

    callbacks = run_config.callbacks
    listed = callbacks.values() if isinstance(callbacks, dict) else callbacks
    for component in listed:
        if component is not None and component.class_path.rpartition(".")[2] == _CALLBACK:
            return component
    added = Component(_CALLBACK)
    if isinstance(callbacks, dict):
        callbacks["diloco"] = added
    else:
        callbacks.append(added)
    return added
