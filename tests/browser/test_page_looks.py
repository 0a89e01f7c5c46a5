"""The page as a reader uses it: curves, comparison, keyboard, small screens, dark and light."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pages import has_sideways_scroll, wait_until
from stub import Stub, make_run

expect = pytest.importorskip("playwright.sync_api").expect

TABS = ("charts", "config", "checkpoints", "samples", "incidents", "post_mortem")
LOSS = ".plot[data-key=loss]"
DATA = f"(document.querySelector('{LOSS}')?.data ?? [])"
FULL = {
    "culprit_rank": 2,
    "world_size": 4,
    "error_type": "OutOfMemoryError",
    "error": "CUDA out of memory",
    "traceback": "Traceback (most recent call last):\n  File 'train.py', line 10\nOutOfMemoryError",
    "step": 2399,
    "last_steps": [{"step": s, "loss": 2.25, "grad_norm": 0.4} for s in range(2396, 2400)],
    "memory": {"host": {"available_bytes": 2**34}, "cuda:0": {"allocated_bytes": 70 * 2**30}},
    "checkpoint": {"path": "/runs/three/checkpoint-2000", "step": 2000},
    "resume_command": "headway train run.yaml --args.resume_from_checkpoint true",
    "directory": "/projects/seven",
    "host": "node7",
    "pid": 4711,
    "time": 1_790_000_000.0,
}


@pytest.fixture
def stub() -> Stub:
    """Several runs, and something in every tab."""
    stub = Stub(
        make_run("one", incidents=2),
        make_run("two with a name that is rather long for a list", "finished", step=400),
        make_run("three", "failed", step=300),
    )
    stub.plotly = "real"
    stub.diff = [{"key": "args.learning_rate", "values": [3e-4, 6e-4]}]
    stub.config.update({f"args.option_{i}": i for i in range(20)})
    stub.checkpoints = [
        {"name": "checkpoint-500", "path": "/runs/one/checkpoint-500", "step": 500}
        | {"bytes": 3 * 2**30, "saved_at": 1_790_000_000, "kind": "training", "best": True}
        | {"state": "complete", "message": ""},
        {"name": "checkpoint-250", "path": "/runs/one/checkpoint-250", "step": 250}
        | {"bytes": 2**30, "saved_at": 1_789_990_000, "kind": "training", "best": False}
        | {"state": "damaged", "message": "model-00001-of-00002.safetensors: digest differs"},
    ]
    text = "Once upon a time there was an engine that did not stop.\nIt went on and on."
    stub.samples = [{"step": 500, "prompt": "Once upon a time", "text": text}]
    stub.incidents = [
        {
            "kind": "divergence",
            "step": 480,
            "message": "loss 1.05 above its best",
            "timestamp": 1.79e9,
        }
    ]
    stub.post_mortem = FULL
    return stub


def points(page: Any, key: str = "loss") -> int:
    return page.evaluate(
        "key => document.querySelector(`.plot[data-key='${key}']`).data.at(-1).x.length", key
    )


def wait_for_curves(page: Any) -> None:
    expect(page.locator(f"{LOSS} .scatterlayer .trace").first).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("phone", [False, True], ids=["desk", "phone"])
def test_every_tab_fits_the_screen(
    open_page: Any, shoot: Any, stub: Stub, phone: bool, scheme: str
) -> None:
    page = open_page(phone=phone, scheme=scheme)
    size = "phone" if phone else "desk"
    stub.open(page)
    wait_for_curves(page)
    shade = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    )
    assert (shade < 60) == (scheme == "dark")
    for tab in TABS:
        if tab == "post_mortem":
            page.locator("#run-drawer").evaluate("drawer => { drawer.open = true; }")
            page.click(".run[data-run=three] .run-open")
        page.click(f"#tab-{tab}")
        expect(page.locator(f"#panel-{tab} > *").first).to_be_attached()
        if tab == "charts":
            page.locator(LOSS).scroll_into_view_if_needed()
        assert not has_sideways_scroll(page), tab
        shoot(page, f"{tab}-{size}-{scheme}")
    expect(page.locator("#panel-post_mortem")).to_contain_text("Rank 2 of 4 failed first")
    expect(page.locator("#panel-post_mortem")).to_contain_text("70.0 GiB")
    page.locator("#run-drawer").evaluate("drawer => { drawer.open = true; }")
    page.click(".run[data-run=one] .run-open")
    page.click("[data-command=generate_now]")
    assert not has_sideways_scroll(page)
    shoot(page, f"dialog-{size}-{scheme}")
    page.keyboard.press("Escape")
    for width in (320, 768, 1000):
        page.set_viewport_size({"width": width, "height": 800})
        assert not has_sideways_scroll(page), width


def test_the_theme_can_be_chosen_and_is_kept(open_page: Any, stub: Stub) -> None:
    page = open_page(scheme="dark")
    stub.open(page)
    wait_for_curves(page)
    axis = "document.querySelector('.plot').layout.font.color"
    dark = page.evaluate(axis)
    page.click("#theme")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    wait_until(page, f"() => {axis} !== {dark!r}")
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: light")


def test_curves_grow_without_being_made_anew(open_page: Any, stub: Stub) -> None:
    page = open_page()
    stub.open(page)
    wait_for_curves(page)
    assert points(page) == 50
    page.locator(".plot[data-key=peak_mem]").scroll_into_view_if_needed()
    expect(page.locator(".plot[data-key=peak_mem] .trace")).to_be_attached()
    page.evaluate(f"window.before = document.querySelector('{LOSS} .main-svg')")
    stub.runs[0] = make_run("one", step=900)
    wait_until(page, f"() => {DATA}[0].x.length === 90")
    assert page.evaluate(f"window.before === document.querySelector('{LOSS} .main-svg')")
    assert page.locator(f"{LOSS} canvas").count() == 0, "SVG, not WebGL"
    low, high = page.evaluate(
        "document.querySelector('.plot[data-key=peak_mem]').layout.yaxis.range"
    )
    assert 0 < low < 21.3 < high < 100, "a curve that does not change is drawn at its height"


def test_smoothing_log_scale_and_axes(open_page: Any, stub: Stub) -> None:
    page = open_page()
    stub.curve = lambda run, key: ([1.0, 2.0, 3.0, 4.0], [4.0, "nan", 2.0, 1.0])
    stub.open(page)
    wait_for_curves(page)
    box = f"document.querySelector('{LOSS}')"
    assert page.evaluate(f"{DATA}.map(t => t.y)") == [[4, None, 2, 1], [4]]
    page.locator("#smoothing").fill("0.5")
    wait_until(page, f"() => {DATA}.length === 3")
    assert page.evaluate(f"{DATA}[1].y") == [2, None, 1, 0.5], "what the server says"
    assert page.evaluate(f"{DATA}[0].opacity") < 0.5
    page.check("#log-y")
    wait_until(page, f"() => {box}.layout.yaxis.type === 'log'")
    page.select_option("#axis-x", "tokens")
    wait_until(page, f"() => {DATA}[0].x[3] === 4 * 4096")
    page.select_option("#axis-x", "time")
    wait_until(page, f"() => {DATA}[0].x[3] === 2 && {box}.layout.xaxis.title.text === 'seconds'")
    page.reload()
    expect(page.locator("#smoothing-value")).to_have_text("0.50")
    expect(page.locator("#log-y")).to_be_checked()


def test_zooming_asks_the_server_for_that_part(open_page: Any, stub: Stub, shoot: Any) -> None:
    page = open_page()
    stub.runs = [make_run("big", "finished", step=100_000, max_steps=100_000)]
    stub.curve = lambda run, key: (
        [float(i) for i in range(1, 100_001)],
        [2 + (i % 977) / 977 for i in range(1, 100_001)],
    )
    stub.keys = ["loss"]
    stub.open(page)
    wait_for_curves(page)
    expect(page.locator("figcaption").first).to_contain_text("of 100,000 points")
    assert 1000 < points(page) <= 3100
    shoot(page, "hundred-thousand")
    plot = page.locator(f"{LOSS} .nsewdrag").bounding_box()
    middle = plot["y"] + plot["height"] / 2
    page.mouse.move(plot["x"] + plot["width"] * 0.50, middle)
    page.mouse.down()
    page.mouse.move(plot["x"] + plot["width"] * 0.51, middle, steps=4)
    page.mouse.move(plot["x"] + plot["width"] * 0.60, middle, steps=4)
    page.mouse.up()
    expect(page.locator("#zoom-reset")).to_be_visible()
    wait_until(page, f"() => {DATA}[0].x[0] > 40000 && {DATA}[0].x.at(-1) < 70000")
    asked = parse_qs(urlsplit([a for a in stub.asked if "from=" in a][-1]).query)
    assert 45_000 < float(asked["from"][0]) < 52_000
    page.click("#zoom-reset")
    wait_until(page, f"() => {DATA}[0].x[0] === 1")
    page.locator("figure.chart").first.focus()
    page.keyboard.press("+")
    expect(page.locator("#zoom-reset")).to_be_visible()
    wait_until(page, f"() => {DATA}[0].x[0] > 20000")
    page.keyboard.press("0")
    expect(page.locator("#zoom-reset")).to_be_hidden()


def test_runs_are_compared_sorted_and_filtered(open_page: Any, stub: Stub, shoot: Any) -> None:
    page = open_page()
    stub.runs[1]["latest"]["loss"], stub.runs[2]["latest"]["loss"] = 2.0, "nan"
    stub.open(page)
    wait_for_curves(page)
    names = page.locator(".run-row-name")
    page.select_option("#run-sort", "loss")
    expect(names.first).to_contain_text("two")
    page.fill("#run-filter", "THREE")
    expect(names).to_have_count(1)
    page.fill("#run-filter", "")
    expect(names).to_have_count(3)
    second = f".run[data-run={stub.runs[1]['id']}]"
    page.check(f"{second} input")
    wait_until(page, f"() => {DATA}.length === 2")
    colours = page.evaluate(f"{DATA}.map(t => t.line.color)")
    assert len(set(colours)) == 2
    expect(page.locator("#legend li")).to_have_count(2)
    shoot(page, "comparison")
    page.click("#tab-config")
    expect(page.locator(".diff tbody tr")).to_have_count(1)
    expect(page.locator(".diff")).to_contain_text("args.learning_rate")
    shoot(page, "diff")
    # The address says what is shown: opened anew, it is the same.
    page.reload()
    expect(page.locator(".diff tbody tr")).to_have_count(1)
    page.click("#tab-charts")
    page.uncheck(f"{second} input")
    wait_until(page, f"() => {DATA}.length === 1")
    expect(page.locator("#legend")).to_be_hidden()


def test_other_metrics_by_choice(open_page: Any, stub: Stub) -> None:
    page = open_page()
    stub.open(page)
    wait_for_curves(page)
    page.click("#metrics summary")
    page.fill("#metric-filter", "layers")
    page.check("#metric-list input")
    # A name with a comma is one name all the way.
    plot = page.locator(".plot[data-key='f1/layers.0,1']")
    plot.scroll_into_view_if_needed()
    expect(plot.locator(".scatterlayer path").first).to_be_attached()
    page.fill("#metric-filter", "")
    page.uncheck("#metric-list li:has-text('mfu') input")
    expect(page.locator(".plot[data-key=mfu]")).to_have_count(0)
    page.click("#metric-reset")
    expect(page.locator(".plot[data-key=mfu]")).to_be_attached()
    expect(page.locator(".plot[data-key='f1/layers.0,1']")).to_have_count(0)


def test_everything_works_from_the_keyboard(open_page: Any, stub: Stub, shoot: Any) -> None:
    page = open_page()
    stub.open(page)
    wait_for_curves(page)
    focused = "document.activeElement"
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, ring = page.evaluate(
            f"[{focused}.dataset.command"
            f" ?? ({focused}.id || {focused}.className || {focused}.tagName),"
            f" getComputedStyle({focused}).outlineStyle]"
        )
        if name == "BODY":  # out of the page, and round again
            break
        seen.append(name)
        assert ring != "none" or name == "skip", f"{name} shows no focus"
    for wanted in ("skip", "theme", "forget", "run-filter", "run-sort", "run-open", "pause"):
        assert wanted in seen, seen
    for wanted in ("abort", "tab-charts", "axis-x", "smoothing", "log-y", "card chart"):
        assert wanted in seen, seen
    assert "tab-config" not in seen, "one stop for all tabs; arrow keys move between them"

    page.locator("#tab-charts").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-config")).to_be_focused()
    expect(page.locator("#panel-config")).to_contain_text("model.hidden_size")
    page.keyboard.press("End")
    expect(page.locator("#panel-post_mortem")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-charts")).to_be_focused()

    page.locator("[data-command=pause]").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#ask")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#ask")).to_be_hidden()
    expect(page.locator("[data-command=pause]")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    expect(page.locator("#field-offload")).to_be_checked()
    page.keyboard.press("Enter")
    expect(page.locator("#receipts")).to_contain_text("applied")
    assert stub.commands[-1]["data"] == {"offload": True}
    # The button gives way to another; who pressed it is not thrown to the top of the page.
    stub.status["status"] = "paused"
    expect(page.locator("[data-command=resume]")).to_be_focused()
    shoot(page, "keyboard")
