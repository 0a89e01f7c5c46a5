"""`headway schema`: the JSON Schema of a run file, for editors and checkers."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--json", action="store_true", help="accepted; the schema is always JSON")


def run(options: argparse.Namespace) -> int:
    """Print the schema."""
    from headway.config.json_schema import run_schema

    print(json.dumps(run_schema(), indent=2))
    return 0
