"""What the page says when not all is well: tokens, silence, runs that ended or are empty."""

from __future__ import annotations

import re
from typing import Any

import pytest
from stub import CONTROL, READ, Stub, make_run

expect = pytest.importorskip("playwright.sync_api").expect


def state(page: Any) -> Any:
    return page.locator("#run-state")


def test_the_token_leaves_the_address_and_stays_in_the_tab(open_page: Any) -> None:
    page, stub = open_page(allow=("401",)), Stub(make_run("one"))
    stub.open(page)
    expect(state(page)).to_have_text("training")
    assert "token" not in page.url
    assert page.evaluate("document.cookie") == ""
    page.reload()
    expect(state(page)).to_have_text("training")
    assert page.evaluate("Object.values(localStorage).join()").find(CONTROL) < 0
    page.click("#forget")
    expect(page.locator("#sign-in")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_without_a_token_it_asks_and_a_wrong_one_is_told(open_page: Any, shoot: Any) -> None:
    page, stub = open_page(allow=("401",)), Stub(make_run("one"))
    stub.open(page, token=None)
    expect(page.locator("#sign-in")).to_be_visible()
    expect(page.locator("#sign-in-why")).to_be_hidden()
    expect(page.locator("#token")).to_be_focused()
    page.keyboard.type("a wrong one ä")
    page.keyboard.press("Enter")
    expect(page.locator("#sign-in-why")).to_contain_text("does not accept this token")
    shoot(page, "token-wrong")
    page.fill("#token", CONTROL)
    page.keyboard.press("Enter")
    expect(state(page)).to_have_text("training")
    expect(page.locator("#sign-in")).to_be_hidden()


def test_a_token_that_expires_asks_again(open_page: Any) -> None:
    page, stub = open_page(allow=("401",)), Stub(make_run("one"))
    stub.open(page)
    expect(state(page)).to_have_text("training")
    page.evaluate("sessionStorage.setItem('headway-token', 'of another job')")
    page.reload()
    expect(page.locator("#sign-in-why")).to_contain_text("of another job")
    expect(page.locator("#workspace")).to_be_hidden()


def test_a_token_that_may_only_read_has_no_buttons_and_says_why(open_page: Any, shoot: Any) -> None:
    page, stub = open_page(), Stub(make_run("one"))
    stub.open(page, READ)
    buttons = page.locator("#commands button")
    expect(buttons).not_to_have_count(0)
    assert buttons.evaluate_all("all => all.every((one) => one.disabled)")
    expect(page.locator("#commands-why")).to_contain_text("may only read")
    # Another token in the address, and it is another role.
    page.evaluate("token => { location.hash = `token=${token}`; }", CONTROL)
    expect(page.locator("#role")).to_have_text("control")
    expect(page.locator("[data-command=pause]")).to_be_enabled()
    page.evaluate("token => { location.hash = `token=${token}`; }", READ)
    expect(page.locator("#role")).to_have_text("read only")
    shoot(page, "read-only")
    assert not stub.commands


def test_silence_is_told_with_its_beginning_and_ends_by_itself(open_page: Any, shoot: Any) -> None:
    page, stub = open_page(allow=("ERR_CONNECTION_REFUSED",)), Stub(make_run("one"))
    stub.open(page)
    expect(page.locator("#connection")).to_have_text("Connected")
    stub.silent = True
    trouble = page.locator("#trouble")
    expect(trouble).to_contain_text(re.compile(r"No answer from the server since \d\d:\d\d:\d\d"))
    expect(trouble).to_contain_text(re.compile(r"every \d+ s"))
    shoot(page, "silence")
    page.click("#retry")
    expect(trouble).to_contain_text(re.compile(r"every (4|8|16|30) s"))
    expect(page.locator("#run-name")).to_have_text("one")
    stub.silent = False
    page.click("#retry")
    expect(trouble).to_be_hidden()
    expect(page.locator("#connection")).to_have_text("Connected")


def test_the_end_of_a_run_that_serves_itself_names_the_command(open_page: Any) -> None:
    stub = Stub(make_run("one"), standalone=False)
    page = open_page(allow=("ERR_CONNECTION_REFUSED",))
    stub.open(page)
    expect(page.locator("#run-list")).to_be_hidden()
    expect(state(page)).to_have_text("training")
    stub.silent = True
    expect(page.locator("#trouble")).to_contain_text("headway dashboard /runs/one")


def test_a_run_that_vanishes_gives_way_to_another(open_page: Any) -> None:
    stub = Stub(make_run("one"), make_run("two", "finished"))
    page = open_page(allow=("404",))
    stub.open(page)
    expect(page.locator("#run-name")).to_have_text("one")
    del stub.runs[0]
    expect(page.locator("#run-name")).to_have_text("two")
    expect(page.locator("#commands")).to_be_hidden()
    stub.runs.clear()
    expect(page.locator("#runs-empty")).to_have_text("No runs here yet.")
    for what in ("overview", "tabs", "charts"):
        expect(page.locator(f"#{what}")).to_be_hidden()


@pytest.mark.parametrize(
    ("name", "told"),
    [("lost", "The process of this run is gone"), ("failed", "This run failed")],
)
def test_a_run_that_ended_badly_says_so(open_page: Any, name: str, told: str) -> None:
    page, stub = open_page(), Stub(make_run("one", name))
    stub.open(page)
    expect(page.locator("#run-note")).to_contain_text(told)
    expect(page.locator("#commands")).to_be_hidden()


def test_a_run_that_died_without_a_word_says_how_to_go_on(open_page: Any) -> None:
    page, stub = open_page(), Stub(make_run("one", "lost", post_mortem=True))
    stub.post_mortem = {"error_type": "lost", "error": "process 7 on vm is gone", "step": 12}
    stub.post_mortem |= {"culprit_rank": None, "resume_command": "headway train run.yaml"}
    stub.open(page)
    page.click("#tab-post_mortem")
    told = page.locator("#panel-post_mortem")
    expect(told).to_contain_text("The run died without a word")
    expect(told).to_contain_text("headway train run.yaml")


def test_a_run_that_is_about_to_be_held_says_so(open_page: Any) -> None:
    page, stub = open_page(), Stub(make_run("one"))
    stub.status["status"] = "pausing"
    stub.open(page)
    expect(page.locator("#run-state")).to_have_text("pausing")
    expect(page.locator("#run-note")).to_contain_text("what is under way is done first")
    expect(page.locator("[data-command=resume]")).to_be_visible()
    expect(page.locator("[data-command=pause]")).to_have_count(0)


@pytest.mark.parametrize("tab", ["samples", "charts"])
def test_nothing_of_one_run_stands_under_the_name_of_another(open_page: Any, tab: str) -> None:
    page, stub = open_page(), Stub(make_run("one"), make_run("two"))
    stub.samples = [{"step": 1, "prompt": "of the first", "text": " run"}]
    stub.open(page, more=f"&run=one&tab={tab}")
    shown = "#panel-samples .sample" if tab == "samples" else "#charts .chart"
    expect(page.locator(shown)).not_to_have_count(0)
    stub.withheld = "/two/"
    page.click(".run[data-run=two] .run-open")
    expect(page.locator("#run-name")).to_have_text("two")
    assert page.locator(shown).count() == 0
    expect(page.locator(f"#panel-{tab}")).to_contain_text("Reading…")
    stub.samples[0]["prompt"] = "of the second"
    stub.release()
    expect(page.locator(shown)).not_to_have_count(0)
    if tab == "samples":
        expect(page.locator(shown)).to_contain_text("of the second")


def test_a_late_answer_about_one_run_is_not_shown_under_another(open_page: Any) -> None:
    page, stub = open_page(), Stub(make_run("one"), make_run("two"))
    stub.open(page, more="&run=one&tab=incidents")
    panel = page.locator("#panel-incidents")
    expect(panel).to_contain_text("Nothing has gone wrong")
    page.evaluate(
        """() => {
          globalThis.seen = [];
          const look = () => seen.push(document.getElementById("main").textContent);
          const all = { childList: true, subtree: true, characterData: true };
          new MutationObserver(look).observe(document.getElementById("main"), all);
        }"""
    )
    for part in ("/one/status", "/one/incidents"):
        page.click(".run[data-run=one] .run-open")
        stub.withheld = part
        while not stub.is_withholding:
            page.wait_for_timeout(20)
        page.click(".run[data-run=two] .run-open")
        expect(page.locator("#run-name")).to_have_text("two")
        page.evaluate("() => { globalThis.seen = []; }")
        stub.status = {"metrics": {"loss": 987.0}}
        stub.incidents = [{"kind": "x", "step": 1, "message": "of the first", "timestamp": 1}]
        stub.release()
        stub.status, stub.incidents = {}, []
        expect(panel).to_contain_text("Nothing has gone wrong")
        seen = page.evaluate("() => seen.join()")
        assert "987" not in seen and "of the first" not in seen, part


def test_an_empty_run_says_what_will_come(open_page: Any) -> None:
    page = open_page()
    stub = Stub(make_run("one", step=0, max_steps=None, latest={}, epoch=None))
    stub.keys, stub.config = [], {}
    stub.open(page)
    expect(page.locator("#charts-empty")).to_contain_text("Nothing was logged yet")
    for tab, words in {
        "config": "No configuration",
        "checkpoints": "No checkpoint",
        "samples": "No samples yet",
        "incidents": "Nothing has gone wrong",
        "post_mortem": "no post-mortem",
    }.items():
        page.click(f"#tab-{tab}")
        expect(page.locator(f"#panel-{tab}")).to_contain_text(words)


def test_without_plotly_the_rest_works(open_page: Any) -> None:
    page, stub = open_page(allow=("404", "plotly")), Stub(make_run("one"))
    stub.plotly = "absent"
    stub.open(page)
    expect(page.locator(".plot").first).to_contain_text("pip install 'headway[dashboard]'")
    page.click("#tab-config")
    expect(page.locator("#panel-config")).to_contain_text("model.hidden_size")


def test_a_command_asks_first_and_shows_its_receipt(open_page: Any, shoot: Any) -> None:
    page, stub = open_page(allow=("400",)), Stub(make_run("one"))
    stub.open(page)
    page.click("[data-command=set_learning_rate]")
    expect(page.locator("#field-scale")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#ask-error")).to_contain_text("scale is needed")
    page.keyboard.press("Escape")
    expect(page.locator("#ask")).to_be_hidden()
    assert not stub.commands

    stub.refusals["set_learning_rate"] = (
        400,
        {
            "error": "set_learning_rate: value must be at most 1e+06",
            "valid_fields": {"value": "a number at least 0"},
        },
    )
    page.click("[data-command=set_learning_rate]")
    page.fill("#field-value", "1e9")
    page.click("#ask-send")
    expect(page.locator("#ask-error")).to_contain_text("value: a number at least 0")
    shoot(page, "command-refused")
    stub.refusals.clear()
    page.fill("#field-value", "1e-4")
    page.click("#ask-send")
    receipt = page.locator("#receipts li")
    expect(receipt).to_contain_text("applied after step 500")
    wanted = {"value": 1e-4, "keep": True}
    assert [sent["data"] for sent in stub.commands] == [{"value": 1e9, "keep": True}, wanted]
    assert len({sent["id"] for sent in stub.commands}) == 1, "pressed again: the same command"

    stub.settled, stub.message = "refused", "there is nothing to evaluate on"
    page.click("[data-command=evaluate_now]")
    page.click("#ask-send")
    expect(receipt.first).to_contain_text("refused after step 500: there is nothing")


@pytest.mark.parametrize(
    ("command", "shown"), [("save_and_stop", "unknown"), ("graceful_stop", "applied")]
)
def test_of_a_save_nobody_says_that_it_was_done_where_the_run_is_gone(
    open_page: Any, command: str, shown: str
) -> None:
    page, stub = open_page(allow=("404",)), Stub(make_run("one"))
    stub.settled = "gone"
    stub.open(page)
    page.click(f"[data-command={command}]")
    page.click("#ask-send")
    receipt = page.locator(f"#receipts [data-command={command}]")
    expect(receipt).to_have_attribute("data-state", shown)
    expect(receipt).to_contain_text("the run has ended" if shown == "applied" else "before it said")


def test_paused_shows_resume_and_why_nothing_moves(open_page: Any, shoot: Any) -> None:
    page, stub = open_page(), Stub(make_run("one", "paused"))
    stub.status["status"] = "paused"
    stub.open(page)
    expect(state(page)).to_have_text("paused")
    expect(page.locator("#run-note")).to_contain_text("Paused after step 500")
    expect(page.locator("[data-command=pause]")).to_have_count(0)
    expect(page.locator("[data-command=resume]")).to_be_enabled()
    shoot(page, "paused")
