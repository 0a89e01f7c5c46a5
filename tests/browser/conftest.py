"""A real Chromium for tests of the dashboard; what it says in its console counts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import PATIENCE_MS, Watched

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
DESK, PHONE = {"width": 1400, "height": 900}, {"width": 375, "height": 812}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))


# Not for the whole session: while playwright is started, asyncio.run does not work in its thread,
# and a test of another folder may come next in the same process.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        reason = "chromium is not installed (apt-get install chromium)"
        if os.environ.get("CI") or os.environ.get("HEADWAY_NEEDS_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    api = pytest.importorskip("playwright.sync_api")
    api.expect.set_options(timeout=PATIENCE_MS)
    playwright = api.sync_playwright().start()
    try:
        started = playwright.chromium.launch(
            executable_path=found,
            headless=True,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        yield started
        started.close()
    finally:
        playwright.stop()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Makes pages, each in a profile of its own; at the end none may have complained."""
    contexts, watched = [], []

    def open_one(
        *, phone: bool = False, scheme: str = "light", allow: tuple[str, ...] = (), **options: Any
    ) -> Any:
        mobile = {"is_mobile": True, "has_touch": True} if phone else {}
        context = browser.new_context(
            viewport=PHONE if phone else DESK,
            color_scheme=scheme,
            reduced_motion="reduce",
            **mobile,
            **options,
        )
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.watched = Watched(page)
        page.watched.allowed += allow
        watched.append(page.watched)
        return page

    yield open_one
    for context in contexts:
        context.close()
    for one in watched:
        one.check()


@pytest.fixture
def shoot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps a picture of a page, for people."""

    def take(page: Any, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png")

    return take
