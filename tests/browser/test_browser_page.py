"""The saved page: from a file, with the network off."""

import json

import pytest
from browsing import errors, picture, until
from selenium.webdriver import ActionChains, Keys
from toyrun import toy_run

from minichunk.lab import scrubber
from minichunk.lab.html import to_html
from minichunk.lab.scenes_blocks import replay_blocks

ROOT = "document.getElementById('scrubber')"


@pytest.fixture
def offline(driver):
    driver.execute_cdp_cmd("Network.enable", {})
    off = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", {"offline": True, **off})
    yield driver
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", {"offline": False, **off})


def color_scheme(driver, scheme):
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def shown(driver):
    return driver.execute_script(f"return {ROOT}.dataset.step")


def test_the_saved_page_works_from_a_file_without_a_network(offline, tmp_path):
    driver, run = offline, toy_run()
    driver.get("about:blank")
    driver.get_log("browser")  # what an earlier page said
    driver.get(to_html(run, tmp_path / "run.html").as_uri())
    until("the scrubber is drawn", lambda: shown(driver) == "0")
    root = driver.find_element("id", "scrubber")
    root.find_element("css selector", ".mc-head").click()
    keys = lambda *k: ActionChains(driver).send_keys(*k).perform()  # noqa: E731
    driver.execute_script(f"{ROOT}.focus()")
    keys(Keys.ARROW_RIGHT * 4)
    until("step 4", lambda: shown(driver) == "4")
    assert "step 4 of 0…22" in root.text and "128 of 128 tokens" in root.text
    keys(Keys.END)
    until("the last step", lambda: shown(driver) == "22")
    keys(Keys.HOME)
    until("the first step", lambda: shown(driver) == "0")
    # the frames are Python's, in this browser too
    for i in (0, 4, 5, 22, 3):
        got = driver.execute_script(
            f"const f = {ROOT}.mcApp.players[0].frame(arguments[0]); return [f.cu, f.lens, f.slots, [...f.pool], f.wasted]",
            i,
        )
        f = scrubber.frame(run, i)
        pool = [{"empty": -1, "cached": -2}[b] if isinstance(b, str) else b[0] for b in f["pool"]]
        assert got == [f["cu_seqlens_q"], f["seq_lens_k"], f["slots"], pool, f["wasted"]], i
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert errors(driver) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_two_runs_and_a_gap_in_light_and_dark(offline, tmp_path, scheme):
    driver = offline
    color_scheme(driver, scheme)
    pair = toy_run(), toy_run(policy="prefill_first", budget=512)
    driver.get(to_html(pair, tmp_path / "two.html").as_uri())
    until("the scrubber is drawn", lambda: shown(driver) == "0")
    assert driver.execute_script(f"return {ROOT}.mcApp.paint.dark") is (scheme == "dark")
    driver.execute_script(f"{ROOT}.focus()")
    ActionChains(driver).send_keys("n").perform()
    until("a gap is selected", lambda: "gap" in driver.execute_script(f"return {ROOT}.dataset.selection"))
    chosen = json.loads(driver.execute_script(f"return {ROOT}.dataset.selection"))
    (id, k), n = chosen["gap"], chosen.get("run", 0)
    assert scrubber.gaps.explain(pair[n], id, k) in driver.find_element("id", "scrubber").text
    who = scrubber.gaps.culprit(pair[n], id, k)
    assert driver.execute_script(f"return {ROOT}.mcApp.views[{n}].f.step") == who["step"]
    small = driver.execute_script(
        f"return [...{ROOT}.querySelectorAll('*')].filter((e) => e.childNodes.length && [...e.childNodes].some((n) => n.nodeType === 3"
        " && n.textContent.trim()) && parseFloat(getComputedStyle(e).fontSize) < 14).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert small == []
    picture(driver, f"page-two-{scheme}")
    # what is compared comes first, and the blocks wait until they are asked for, both at once
    top = lambda title: driver.execute_script(  # noqa: E731
        f"return [...{ROOT}.querySelectorAll(`[aria-label='${{arguments[0]}}']`)].map((e) => e.getBoundingClientRect().top)",
        title,
    )
    tops = [top(title) for title in ("Time line", "Queues and budget", "Packed batch", "Blocks")]
    assert all(a == b for a, b in tops) and tops == sorted(tops)
    closed = f"return [...{ROOT}.querySelectorAll('details')].map((d) => d.open)"
    assert driver.execute_script(closed) == [False, False]
    driver.find_element("css selector", "details summary").send_keys(Keys.ENTER)
    until("both are open", lambda: driver.execute_script(closed) == [True, True])
    grids = f"return [...{ROOT}.querySelectorAll(`canvas[data-shows='block pool']`)].map((c) => c.getBoundingClientRect().width)"
    until("they have the whole room", lambda: min(driver.execute_script(grids)) > 400)
    assert shown(driver) != "0"  # Enter was the pane's
    picture(driver, f"page-two-open-{scheme}")
    color_scheme(driver, "light")


@pytest.mark.parametrize("width", [900, 1000, 1300])
def test_no_column_head_is_cut_and_a_foreign_packers_columns_are_named(offline, tmp_path, width):
    driver, run = offline, toy_run()
    run.meta["integers"] = "the plan's, not what this packer sent"
    before = driver.get_window_size()
    try:
        driver.set_window_size(width, 1000)
        driver.get(to_html(run, tmp_path / "plan.html").as_uri())
        until("the scrubber is drawn", lambda: shown(driver) == "0")
        cut = (
            f"return [...{ROOT}.querySelectorAll('.mc-ints th')].filter((e) => {{ const text = document.createRange(); text.selectNodeContents(e);"
            " return text.getBoundingClientRect().width > e.clientWidth - 6; }).map((e) => e.textContent)"
        )
        assert driver.execute_script(cut) == []
        assert driver.find_element("class name", "mc-plan").text == "columns: the plan's, not what this packer sent"
        picture(driver, f"page-plan-{width}")
    finally:
        driver.set_window_size(before["width"], before["height"])


def test_a_freed_request_is_shown_as_freed(offline, tmp_path):
    driver, run = offline, replay_blocks([("grow", "A", 9), ("free", "A"), ("grow", "B", 2)], 6, 4)
    driver.get(to_html(run, tmp_path / "blocks.html").as_uri())
    until("the scrubber is drawn", lambda: shown(driver) == "0")
    driver.execute_script(f"{ROOT}.focus()")
    ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()
    until("step 1", lambda: shown(driver) == "1")
    assert driver.find_element("class name", "mc-events").text.split() == ["in", "this", "step", "freed", "A"]
    assert "step 1 of 0…2" in driver.find_element("class name", "mc-head").text
    assert driver.execute_script(f"return {ROOT}.querySelector('details').open")
    picture(driver, "page-blocks")
