"""A run's start, checkpoints, end or failure as messages in Slack."""

from __future__ import annotations

import enum
import json
from typing import Any

from headway.callbacks.remote.http_post import Make
from headway.callbacks.remote.notifier import Notifier, Report, beaker_link
from headway.errors import ConfigError, unknown

# Slack cuts a message after 40,000 characters; a long line of a traceback must not eat the rest.
_MOST_CHARACTERS = 8_000
_OUTCOMES = {
    "completed": ":white_check_mark: completed",
    "stopped": ":octagonal_sign: stopped before its end",
    "interrupted": ":warning: interrupted",
    "aborted": ":x: aborted",
    "failed": ":x: failed",
}


class SlackNotificationSetting(enum.StrEnum):
    """What is told."""

    all = "all"
    """Start, every checkpoint, every epoch, and the end."""
    end_only = "end_only"
    """The end, whatever it is."""
    failure_only = "failure_only"
    """An end by an error or an abort."""
    none = "none"


_WANTED = {
    SlackNotificationSetting.all: ("start", "save", "epoch", "end", "failure"),
    SlackNotificationSetting.end_only: ("end", "failure"),
    SlackNotificationSetting.failure_only: ("failure",),
    SlackNotificationSetting.none: (),
}


class SlackNotifierCallback(Notifier):
    """Posts to a Slack webhook: `webhook_url`, or the variable `SLACK_WEBHOOK_URL`.

    `name` is the run's name in messages, by default `run_name`. A message is tried `max_retries`
    times more, on a thread of its own; the end of a run waits `close_timeout_s` for it at most.
    """

    url_option, url_variable = "webhook_url", "SLACK_WEBHOOK_URL"

    def __init__(
        self,
        name: str | None = None,
        notifications: SlackNotificationSetting | str = SlackNotificationSetting.end_only,
        enabled: bool = True,
        webhook_url: str | None = None,
        *,
        timeout_s: float = 10.0,
        max_retries: int = 3,
        queue_size: int = 100,
        close_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(
            url=webhook_url,
            name=name,
            enabled=enabled,
            timeout_s=timeout_s,
            max_retries=max_retries,
            queue_size=queue_size,
            close_timeout_s=close_timeout_s,
        )
        if notifications not in tuple(SlackNotificationSetting):
            allowed = [setting.value for setting in SlackNotificationSetting]
            raise ConfigError(unknown("notifications", str(notifications), allowed))
        self.notifications = SlackNotificationSetting(notifications)

    def wants(self, moment: str) -> bool:
        return moment in _WANTED[self.notifications]

    def compose(self, report: Report) -> Make:
        body = json.dumps({"text": make_text(report)}).encode()
        return lambda: (body, {"Content-Type": "application/json"})


def make_text(report: Report) -> str:
    """A message in Slack's markup."""
    what = {"start": "started", "epoch": "finished an epoch", "save": "saved a checkpoint"}.get(
        report.moment, _OUTCOMES.get(report.outcome or "failed", str(report.outcome))
    )
    of = f" of {report.max_steps:,}" if report.max_steps > 0 else ""
    facts: list[tuple[str, Any]] = [
        ("step", f"{report.step:,}{of}"),
        ("epoch", f"{report.epoch:.2f}"),
        ("tokens", f"{report.tokens:,}"),
    ]
    if report.loss is not None:
        facts.append(("loss", f"{report.loss:.4g}"))
    if report.checkpoint is not None:
        facts.append(("checkpoint", report.checkpoint))
    facts.append(("host", report.host))
    run = report.run_name if report.run_id is None else f"{report.run_name} ({report.run_id})"
    lines = [f"*{_escape(run)}* {what}"]
    lines.append(", ".join(f"{label} {_escape(str(value))}" for label, value in facts))
    link = beaker_link()
    if link is not None:
        lines.append(f"<{_escape(link)}|Beaker job>")
    if report.error is not None:
        lines.append(_escape(report.error[:_MOST_CHARACTERS]))
    if report.trace:
        tail = _escape("\n".join(report.trace))[-_MOST_CHARACTERS:]
        lines.append(f"```\n{tail}\n```")
    return "\n".join(lines)


def _escape(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("```", "` ` `")  # which would open or close a block
