"""A run's start, checkpoints, end or failure as messages in Slack."""

from __future__ import annotations

import enum
import json
import threading
from typing import Any

from headway.callbacks.remote.credentials import variable
from headway.callbacks.remote.http_post import check_url, post
from headway.callbacks.remote.notifier import Notifier, Report, beaker_link
from headway.errors import ConfigError, unknown

ENVIRONMENT = "SLACK_WEBHOOK_URL"
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
        if webhook_url is not None:
            webhook_url = check_url("SlackNotifierCallback", "webhook_url", webhook_url)
        self._webhook_url = webhook_url

    def find_address(self) -> None:
        self._address()

    def wants(self, moment: str) -> bool:
        return moment in _WANTED[self.notifications]

    def deliver(self, report: Report, closing: threading.Event) -> None:
        body = json.dumps({"text": make_text(report)}).encode()
        post(
            self._address(),
            lambda: (body, {"Content-Type": "application/json"}),
            timeout_s=self.timeout_s,
            max_retries=self.max_retries,
            closing=closing,
        )

    def _address(self) -> str:
        url = self._webhook_url
        if url is None:
            url = variable(ENVIRONMENT)
            if url is None:
                raise ConfigError(
                    "SlackNotifierCallback: no webhook; set the environment variable "
                    f"{ENVIRONMENT} or give webhook_url (or notifications='none')"
                )
            url = check_url("SlackNotifierCallback", ENVIRONMENT, url)
        return url


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
