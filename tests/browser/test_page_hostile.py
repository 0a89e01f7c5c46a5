"""Text of a run is shown as text, whatever it looks like."""

from __future__ import annotations

from typing import Any

import pytest
from pages import has_sideways_scroll, wait_until
from stub import Stub, make_run

expect = pytest.importorskip("playwright.sync_api").expect

PAYLOADS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    '"><iframe src=http://elsewhere.example/></iframe>',
    "<a href='javascript:alert(1)'>press</a>",
    "<a href='http://elsewhere.example/'>press</a><b>bold</b>",
    "%{y}<br><sub>x</sub>&lt;img src=http://elsewhere.example/i.png&gt;",
    "${alert(1)} {{alert(1)}} `alert(1)`",
    "</style><style>body{background:url(http://elsewhere.example/s.png)}</style>",
    "\u202e\u0000\u2028' OR 1=1 -- " + "W" * 300,
)


def fill_with(stub: Stub, text: str) -> None:
    """The text in every field that the page shows."""
    for run in stub.runs:
        run.update(name=text + run["id"], output_dir=text, latest={"loss": text, "eval_loss": 1.5})
    stub.keys = ["loss", text]
    stub.curve = lambda run, key: ([1.0, 2.0, 3.0], [3.0, text, 1.0])
    stub.config, stub.files = {text: text, "inner": {text: [text]}}, [text]
    stub.diff = [{"key": text, "values": [text, {"a": text}]}]
    one = {"name": text, "path": text, "step": text, "bytes": text, "saved_at": text}
    stub.checkpoints = [{**one, "kind": text, "best": True, "state": text, "message": text}]
    stub.samples = [{"step": text, "prompt": text, "text": text}]
    stub.incidents = [{"kind": text, "step": text, "message": text, "timestamp": text}]
    stub.message = text
    stub.refusals["abort"] = 400, {"error": text, "valid_fields": {text: text}}
    stub.post_mortem = dict.fromkeys(
        ("culprit_rank", "world_size", "error_type", "error", "traceback", "signal", "step", "host")
        + ("exit_code", "resume_command", "directory", "run_id", "reported_by", "pid", "version"),
        text,
    )
    stub.post_mortem |= {"memory": {text: {text: text}}, "last_steps": [{text: text, "step": text}]}
    stub.post_mortem |= {"checkpoint": {"path": text, "step": text}, "time": text}


def test_hostile_text_stays_text(open_page: Any, shoot: Any) -> None:
    page = open_page(phone=True, allow=("400",))
    stub = Stub(make_run("one"), make_run("two", "failed"))
    stub.plotly = "real"
    fill_with(stub, PAYLOADS[0])
    stub.open(page, more="&with=two")
    for number, text in enumerate(PAYLOADS):
        fill_with(stub, text)
        stub.runs[0]["step"] = 500 + number
        page.evaluate("document.getElementById('retry').click()")
        page.click("#tab-charts")
        wait_until(
            page,
            "text => document.getElementById('run-name').textContent === text",
            text + "one",
        )
        for tab in ("config", "checkpoints", "samples", "incidents"):
            page.click(f"#tab-{tab}")
            wait_until(
                page,
                "([tab, text]) => document.getElementById(`panel-${tab}`)"
                ".textContent.includes(text)",
                [tab, text],
            )
            assert not has_sideways_scroll(page), (tab, text)
        check_page(page, stub)
    choose_hostile_metric(page, text=PAYLOADS[6], stub=stub)
    shoot(page, "hostile-charts")
    send_hostile_commands(page, stub)
    page.locator("#run-drawer").evaluate("drawer => { drawer.open = true; }")
    page.click(".run[data-run=two] .run-open")
    page.click("#tab-post_mortem")
    expect(page.locator("#panel-post_mortem")).to_contain_text("elsewhere.example")
    assert not has_sideways_scroll(page)
    shoot(page, "hostile-post_mortem")
    check_page(page, stub)


def choose_hostile_metric(page: Any, text: str, stub: Stub) -> None:
    """A curve named by the text, for a run named by it, with the pointer on it."""
    fill_with(stub, text)
    stub.runs[0]["step"] += 100
    page.click("#tab-charts")
    page.click("#metrics summary")
    wait_until(
        page,
        "text => [...document.querySelectorAll('#metric-list li')]"
        ".some((li) => li.textContent === text)",
        text,
    )
    page.locator("#metric-list li").filter(has_text="%{y}").locator("input").check()
    page.click("#metrics summary")
    plot = page.locator(".plot").last
    plot.scroll_into_view_if_needed()
    expect(plot.locator(".scatterlayer .trace").first).to_be_visible()
    box = plot.locator(".nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = plot.locator(".hoverlayer text").filter(has_text="%{y}<br>").first
    expect(label).to_be_attached()
    assert plot.locator(".hoverlayer a").count() == 0


def send_hostile_commands(page: Any, stub: Stub) -> None:
    page.click("[data-command=abort]")
    page.click("#ask-send")
    expect(page.locator("#ask-error")).to_contain_text("elsewhere.example")
    check_page(page, stub)
    page.keyboard.press("Escape")
    page.click("[data-command=save_checkpoint]")
    page.click("#ask-send")
    expect(page.locator("#receipts")).to_contain_text("elsewhere.example")


def check_page(page: Any, stub: Stub) -> None:
    """No element came out of data, and nothing went elsewhere."""
    strange = page.evaluate(
        """() => [...document.querySelectorAll(
            'img, iframe, object, embed, base, b, sub, a[href]:not(.skip), '
            + 'script:not([src^="/assets/"]), [onerror], [onload], [onclick]')]
            .map((node) => node.outerHTML.slice(0, 200))"""
    )
    assert strange == []
    assert stub.elsewhere == []
    assert page.watched.dialogs == []
