"""Where a machine's end is announced besides signals: a file, or a server of the cloud.

Owns: how each of them is asked and what counts as a notice. Does not own: when they are asked, and
what follows (preemption.py).
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Protocol

_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 16
_TOKEN_LIFE_S = 21600
CLOUDS = ("aws", "azure", "gce")
LINK_LOCAL = "http://169.254.169.254"


class Source(Protocol):
    """Something that may announce the end."""

    def look(self) -> str | None:
        """The notice in words, if there is one; OSError where nobody can tell."""


class NoticeFile:
    """A file that appears, or is written anew."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._before = self._stamp()

    @property
    def was_there(self) -> bool:
        return self._before is not None

    def look(self) -> str | None:
        stamp = self._stamp()
        return f"the file {self.path}" if stamp not in (None, self._before) else None

    def _stamp(self) -> int | None:
        try:
            return os.stat(self.path).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None


class NoticeURL:
    """An address that answers 200; with `pattern`, with a text in which that is found."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, pattern: str | None = None
    ) -> None:
        self.url, self.headers = url, dict(headers or {})
        self.pattern = None if pattern is None else re.compile(pattern)

    def look(self) -> str | None:
        text = fetch(self.url, self.headers)
        if text is None or (self.pattern is not None and not self.pattern.search(text)):
            return None
        return f"the answer of {self.url}"


class SpotNotice:
    """Amazon's notice of a spot instance, which asks for a token first."""

    def __init__(self, base: str) -> None:
        self.base, self._token = base, ""

    def look(self) -> str | None:
        if not self._token:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIFE_S)}
            self._token = fetch(f"{self.base}/latest/api/token", life, "PUT") or ""
        try:
            text = fetch(
                f"{self.base}/latest/meta-data/spot/instance-action",
                {"X-aws-ec2-metadata-token": self._token},
            )
        except PermissionError:  # the token has expired
            self._token = ""
            return None
        return None if text is None else f"a spot notice: {text[:80]}"


class ScheduledEvents:
    """Azure's list of what is going to happen to the machines of a set; this one's count."""

    def __init__(self, base: str) -> None:
        self.url = f"{base}/metadata/scheduledevents?api-version=2020-07-01"
        self._name_url = f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        self._name = ""

    def look(self) -> str | None:
        text = fetch(self.url, {"Metadata": "true"})
        try:
            events = json.loads(text or "{}").get("Events", [])
            found = [
                (event["EventType"], event.get("Resources") or [])
                for event in events
                if event.get("EventType") in ("Preempt", "Terminate")
            ]
            affected = [kind for kind, names in found if not names or self._is_among(names)]
        except (ValueError, AttributeError, TypeError) as error:
            raise OSError(f"{self.url} answers with something else than events") from error
        return f"a scheduled event: {affected[0]}" if affected else None

    def _is_among(self, names: list[str]) -> bool:
        """Whether this machine is one of them; also where nobody says what it is called."""
        if not self._name:
            try:
                self._name = (fetch(self._name_url, {"Metadata": "true"}) or "").strip().lower()
            except OSError:
                return True
        return not self._name or self._name in [name.strip().lower() for name in names]


def cloud_source(cloud: str, base: str | None = None) -> Source:
    """The source of one of `CLOUDS`; `base` stands for the address of its server."""
    if cloud == "gce":
        base = base or "http://metadata.google.internal"
        path = "/computeMetadata/v1/instance/preempted"
        return NoticeURL(f"{base}{path}", {"Metadata-Flavor": "Google"}, r"(?i)^\s*true\s*$")
    return (SpotNotice if cloud == "aws" else ScheduledEvents)(base or LINK_LOCAL)


def fetch(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """What an address answers; None for 404, which is how some say that there is nothing."""
    # Such servers are reached directly, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            text: bytes = answer.read(_MOST_BYTES)
            return text.decode(errors="replace")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        if error.code == 401:
            raise PermissionError(f"{url}: {error}") from error
        raise OSError(f"{url}: {error}") from error
