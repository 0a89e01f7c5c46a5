"""What tests of the dashboard ask of a page in the browser, and what they hold against it."""

from __future__ import annotations

import time
from typing import Any

PATIENCE_MS = 40_000


class Watched:
    """A page, and everything it did that it should not."""

    def __init__(self, page: Any) -> None:
        self.page = page
        # A page asks on while the servers of a test are ended.
        self.allowed = ["ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE"]
        """Parts of console errors that the test expects."""
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self.requests.append(request.url))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def check(self) -> None:
        wrong = [e for e in self.errors if not any(part in e for part in self.allowed)]
        assert not wrong, "\n".join(wrong)
        assert not self.dialogs


def has_sideways_scroll(page: Any) -> bool:
    # Not innerWidth: a phone's browser makes that wider when the content is.
    return page.evaluate("document.scrollingElement.scrollWidth") > page.viewport_size["width"]


def wait_until(page: Any, condition: str, arg: Any = None) -> None:
    """Until a JavaScript function is true. Playwright's own way evaluates text in the page, which
    the page's policy forbids."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition, arg):
        assert time.monotonic() < deadline, condition
        # Not a plain sleep: the answers to the page's requests are given meanwhile.
        page.wait_for_timeout(50)
