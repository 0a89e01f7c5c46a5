"""A run's status in Prometheus' text format.

Owns: names and escaping. Does not own: the status (status.py), the route (server.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.control.status import PHASES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = {
    "global_step": ("headway_step", "Optimizer steps done."),
    "max_steps": ("headway_max_steps", "Optimizer steps of the whole run."),
    "epoch": ("headway_epoch", "Passes over the training data."),
    "num_input_tokens_seen": ("headway_tokens", "Tokens trained on."),
    "eta_s": ("headway_eta_seconds", "Seconds of training left, by the speed so far."),
    "last_checkpoint_step": ("headway_last_checkpoint_step", "Step of the newest checkpoint."),
    "started_at": ("headway_start_time_seconds", "When the process began to train, Unix time."),
    "timestamp": ("headway_status_time_seconds", "When the status was last written, Unix time."),
}


def render(status: Mapping[str, Any]) -> str:
    """The whole page."""
    job = f'job_id="{_escape(str(status.get("job_id", "")))}"'
    lines: list[str] = []
    for key, (name, help_text) in _GAUGES.items():
        if (number := _number(status.get(key))) is not None:
            lines += [
                f"# HELP {name} {help_text}",
                f"# TYPE {name} gauge",
                f"{name}{{{job}}} {number}",
            ]
    lines += ["# HELP headway_phase What the run does now.", "# TYPE headway_phase gauge"]
    lines += [
        f'headway_phase{{{job},phase="{phase}"}} {int(status.get("status") == phase)}'
        for phase in PHASES
    ]
    incidents = status.get("incidents")
    lines += [
        "# HELP headway_incidents Incidents that are kept.",
        "# TYPE headway_incidents gauge",
        f"headway_incidents{{{job}}} {len(incidents) if isinstance(incidents, list) else 0}",
    ]
    metrics = status.get("metrics")
    if isinstance(metrics, Mapping) and metrics:
        lines += [
            "# HELP headway_metric Last logged metrics by name.",
            "# TYPE headway_metric gauge",
        ]
        for key, value in metrics.items():
            if (number := _number(value)) is not None:
                lines.append(f'headway_metric{{{job},name="{_escape(str(key))}"}} {number}')
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str | None:
    """A sample's value; what is not finite is a text in the status and has a word here."""
    words = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
    if isinstance(value, str):
        return words.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
