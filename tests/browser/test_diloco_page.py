"""The page of a real DiLoCo server in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.testing.diloco import ToyWorker, serving, stopped, train_together

expect = pytest.importorskip("playwright.sync_api").expect


def figure(page: Any, title: str) -> Any:
    return page.locator("#figures div", has=page.get_by_text(title, exact=True)).locator("dd")


def test_it_shows_workers_rounds_drift_and_bytes_and_renews_itself(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    with serving(tmp_path / "run", num_workers=2) as server:
        workers = [ToyWorker(server.address, number).start() for number in range(2)]
        with stopped(*workers):
            train_together(workers, 8)
            page = open_page()
            page.goto(f"http://{server.address}/")
            expect(figure(page, "Round")).to_have_text("2")
            expect(figure(page, "Workers")).to_have_text("2 of 2")
            expect(figure(page, "State")).to_have_text(server.state_hash)
            expect(figure(page, "Received")).to_contain_text("B")
            rows = page.locator("#workers tbody tr")
            expect(rows).to_have_count(2)
            heads = page.locator("#workers thead th").all_inner_texts()
            shown = dict(zip(heads, rows.nth(0).locator("td").all_inner_texts(), strict=True))
            assert shown["Worker"] == "worker-0" and shown["Accepted"] == "2"
            assert shown["Steps per round"] == "4" and shown["Sends"] == "float32"
            expect(page.locator("#drift polyline")).to_have_attribute("points", _is_line_of(2))
            train_together(workers, 4)
            expect(figure(page, "Round")).to_have_text("3")
            expect(page.locator("#recent tbody tr")).to_have_count(3)
            expect(page.locator("#drift polyline")).to_have_attribute("points", _is_line_of(3))
        expect(rows).to_have_count(0)
    expect(page.locator("#state")).to_have_class("bad")
    expect(figure(page, "Round")).to_have_text("3")


def _is_line_of(num_points: int) -> Any:
    return re.compile(rf"^[\d.]+,[\d.]+(?: [\d.]+,[\d.]+){{{num_points - 1}}}$")


@pytest.mark.parametrize("given", ["typed", "in the address"])
def test_it_asks_for_a_token_and_keeps_it_out_of_the_address(
    tmp_path: Path, open_page: Callable[..., Any], given: str
) -> None:
    with serving(tmp_path / "run", disable_auth=False) as server:
        page = open_page(allow=("401",))
        in_address = f"#token={server.token}" if given == "in the address" else ""
        page.goto(f"http://{server.address}/{in_address}")
        if given == "typed":
            expect(page.locator("#entry")).to_be_visible()
            expect(page.locator("#state")).to_have_class("bad")
            page.fill("#token", server.token)
            page.click("#entry button")
        expect(figure(page, "Parameters")).to_have_text("none yet")
        expect(page.locator("#entry")).to_be_hidden()
        assert server.token not in page.url
