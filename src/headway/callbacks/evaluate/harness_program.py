"""The program that runs EleutherAI's lm-eval-harness on a model folder, in a process of its own.

Owns: calling the harness. Does not own: who starts it and what becomes of its results
(harness.py). The harness seeds every generator of its process, so it must not be that of a run.

Called with two paths: settings to read, results to write, both JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def find_unknown(settings: dict[str, Any]) -> dict[str, Any]:
    """Which of the wanted tasks the harness does not have."""
    manager = _task_manager(settings)
    unknown = [name for name in settings["tasks"] if not manager.match_tasks([name])]
    return {"unknown": unknown}


def evaluate(settings: dict[str, Any]) -> dict[str, Any]:
    """The harness's results by task."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": settings["model"], "dtype": settings["dtype"]},
        tasks=settings["tasks"],
        task_manager=_task_manager(settings),
        num_fewshot=settings["num_fewshot"],
        limit=settings["limit"],
        batch_size=settings["batch_size"],
        device=settings["device"],
        bootstrap_iters=0,
        log_samples=settings["log_samples"],
    )
    assert found is not None, "there is one process"
    return {"results": found["results"], "samples": found.get("samples", {})}


def _task_manager(settings: dict[str, Any]) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(
        include_path=settings["include_path"] or None,
        include_defaults=settings["include_defaults"],
    )


def main() -> None:
    """Read the settings, do what they ask for, write the results."""
    given, target = map(Path, sys.argv[1:3])
    settings = json.loads(given.read_text(encoding="utf-8"))
    results = evaluate(settings) if settings["model"] else find_unknown(settings)
    target.write_text(json.dumps(results, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
