"""`headway diloco status`: what a server does now, in a few lines or as JSON. Without torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError

_COLUMNS = ("worker", "step", "steps/s", "sync every", "accepted", "refused", "sent MB", "seen")
_ANSWER_S = 10.0


def run(options: argparse.Namespace) -> int:
    """Ask, and print the answer."""
    from headway.cli.messages import print_json
    from headway.diloco.client import DiLoCoClient
    from headway.diloco.faults import DiLoCoError

    address = options.address or os.environ.get("DILOCO_SERVER", "").strip()
    if not address:
        raise ConfigError("HOST:PORT: no address given, and DILOCO_SERVER is not set")
    client = DiLoCoClient(
        address, read_token(options.token_file), tls_ca=options.tls_ca, timeout_s=_ANSWER_S
    )
    try:
        status = client.status()
    except DiLoCoError as error:
        raise ConfigError(str(error)) from None
    if options.json:
        print_json(status)
        return 0
    for line in describe(status, str(client.address)):
        print(line)
    return 0


def read_token(file: str | None) -> str | None:
    """A token that lets read: of its file, else of the environment."""
    file = file or os.environ.get("DILOCO_TOKEN_FILE", "").strip()
    if not file:
        return os.environ.get("DILOCO_TOKEN", "").strip() or None
    from headway.diloco.credentials import read_tokens

    tokens = read_tokens(file)
    return tokens.read or tokens.join or next(iter(tokens.workers.values()), None)


def describe(status: Mapping[str, Any], address: str) -> list[str]:
    """A status in lines."""
    lines = [f"{address}: {headline(status)}"]
    rows = [_COLUMNS, *(_row(worker) for worker in status.get("workers", []))]
    if len(rows) == 1:
        return [*lines, "no worker takes part"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())
    return lines


def headline(status: Mapping[str, Any]) -> str:
    """One line: rounds, who is awaited, bytes."""
    rounds = status.get("rounds") or []
    current = ", ".join(
        f"round {one['number']} has {one['num_submitted']}/{status['expected']}"
        for one in rounds[:4]
    )
    more = f" and {len(rounds) - 4} fragments" if len(rounds) > 4 else ""
    moved = (status["received_bytes"] + status["sent_bytes"]) / 1e6
    return (
        f"{status['mode']}, {len(status['workers'])}/{status['expected']} workers, "
        f"{current}{more}, drift {status['last_drift']:.3g}, {moved:.1f} MB moved"
    )


def _row(worker: Mapping[str, Any]) -> tuple[str, ...]:
    speed = worker.get("steps_per_second")
    return (
        str(worker["id"]),
        f"{worker['step']:,}",
        "-" if speed is None else f"{speed:.2f}",
        str(worker["sync_every"]),
        str(worker["num_accepted"]),
        str(worker["num_refused"]),
        f"{worker['received_bytes'] / 1e6:.1f}",
        f"{worker['seen_s_ago']:.0f} s ago",
    )
