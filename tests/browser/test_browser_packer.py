"""The packer in JupyterLab: the running example built by keyboard, one integer broken, run, and the check read."""

import json
import time

import pytest
from browsing import press, until
from selenium.webdriver import Keys

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def packer(lab):
    """A notebook with one named packer, run; → (lab, index of its cell)."""
    lab.run_cells("packer.ipynb", "from minichunk import lab", "w = lab.packer()\nw")
    until("the packer is drawn", lambda: lab.element(1, ".mc-packer[data-state]"))
    return lab, 1


def root(lab, cell):
    return lab.element(cell, ".mc-packer[data-state]")


def state(lab, cell):
    return json.loads(root(lab, cell).get_attribute("data-state"))


def field(lab, cell, key):
    """The field of an integer, its value as a number."""
    return int(root(lab, cell).find_element("css selector", f'input[data-key="{key}"]').get_attribute("value"))


def focus(lab, cell, key=None):
    script = "(arguments[1] ? arguments[0].querySelector(`[data-key='${arguments[1]}']`) : arguments[0]).focus()"
    lab.driver.execute_script(script, root(lab, cell), key)


def click(lab, cell, name):
    lab.driver.execute_script("arguments[0].querySelector(`[data-do=${arguments[1]}]`).click()", root(lab, cell), name)


def test_the_running_example_by_keyboard_one_integer_broken_and_the_check(packer):
    lab, cell = packer
    click(lab, cell, "clear")
    until("the batch is empty", lambda: state(lab, cell)["chunks"] == [])
    focus(lab, cell)
    press(lab, "d")  # the new request's history has the focus: 7 is there already
    until("A is there", lambda: len(state(lab, cell)["chunks"]) == 1)
    time.sleep(0.2)
    press(lab, "c")
    until("B is there", lambda: len(state(lab, cell)["chunks"]) == 2)
    time.sleep(0.2)
    press(lab, "9", Keys.TAB, "12", Keys.ENTER)
    until("B brings 12", lambda: state(lab, cell)["chunks"][1]["length"] == 12)
    press(lab, "c")
    until("C is there", lambda: len(state(lab, cell)["chunks"]) == 3)
    assert [(c["id"], c["start"], c["length"]) for c in state(lab, cell)["chunks"]] == [("A", 7, 1), ("B", 9, 12), ("C", 0, 3)]  # fmt: skip
    for name, values in {
        "cu_seqlens_q": [0, 1, 13, 16], "seq_lens_k": [8, 21, 3], "kv_indptr": [0, 2, 8, 9], "kv_last_page_len": [4, 1, 3],
    }.items():  # fmt: skip
        assert [field(lab, cell, f"{name}[{i}]") for i in range(len(values))] == values
    assert "16 of 16 tokens" in root(lab, cell).text and "the budget is full" in root(lab, cell).text
    press(lab, "d")
    until("it says why not", lambda: "the budget is full, 16 of 16" in root(lab, cell).text)

    focus(lab, cell, "seq_lens_k[0]")
    press(lab, Keys.ARROW_RIGHT, "12", Keys.ENTER)
    until("the edit is there", lambda: state(lab, cell)["edits"] == {"seq_lens_k[1]": 12})
    press(lab, "r")
    said = "seq_lens_k[1] is 12: B has 9 tokens of history and 12 new, so it must be 21"
    until("the check", lambda: said in root(lab, cell).text)
    until("it is no longer busy", lambda: root(lab, cell).get_attribute("data-busy") == "0")
    verdict = "FlashAttention's form: 12 of 16 rows wrong · FlashInfer's form: all 16 rows agree"
    until("the verdict", lambda: verdict in root(lab, cell).text, 5)
    bad = lab.driver.execute_script(
        "return [...arguments[0].querySelectorAll('tr > td.mc-bad')].map((td) => Number(td.dataset.row))",
        root(lab, cell),
    )
    assert bad == list(range(1, 13))
    lost = lab.driver.execute_script("return JSON.parse(arguments[0].mcApp.canvas.dataset.counts)", root(lab, cell))
    assert lost == {"pairs": 200 - 12 * 9, "missing": 12 * 9, "extra": 0}
    lab.in_themes(lambda: root(lab, cell), "lab-packer")
    _, printed = lab.execute("print(w.state['edits'], w.right['seq_lens_k'], w.check()[:19])")
    assert printed.strip() == "{'seq_lens_k[1]': 12} [8, 21, 3] seq_lens_k[1] is 12"


def test_escape_puts_the_right_integer_back_and_a_refused_form_is_said(packer):
    lab, cell = packer
    click(lab, cell, "reset")
    until("the example", lambda: state(lab, cell)["edits"] == {} and len(state(lab, cell)["chunks"]) == 3)
    focus(lab, cell, "kv_indices[0]")
    press(lab, "999", Keys.ENTER, "r")
    until("refused", lambda: "kv_indices must lie in 0..129, the pool, got 999" in root(lab, cell).text)
    until("its row says so", lambda: "refused: an integer reaches outside" in root(lab, cell).text, 5)
    assert "FlashAttention: A " in root(lab, cell).text  # the other form ran
    focus(lab, cell, "kv_indices[0]")
    press(lab, Keys.ESCAPE)
    until("no edit", lambda: state(lab, cell)["edits"] == {})
    focus(lab, cell, "slot_mapping[0]")
    press(lab, "999", Keys.ENTER, "r")
    until("both are refused", lambda: "both forms were refused, nothing was run" in root(lab, cell).text)
    text = root(lab, cell).text
    assert "FlashAttention's form was refused: nothing was computed." in text
    assert "are computed" not in text and "largest error" not in text
    focus(lab, cell, "slot_mapping[0]")
    press(lab, Keys.ESCAPE)
    until("no edit", lambda: state(lab, cell)["edits"] == {})
    until("the pairs are counted again", lambda: "200 pairs of a row and a key are computed" in root(lab, cell).text)
    focus(lab, cell, "kv_indices[0]")
    press(lab, Keys.ESCAPE)
    until("no edit", lambda: state(lab, cell)["edits"] == {})
    focus(lab, cell, "positions[0]")
    press(lab, Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    until("two edits", lambda: state(lab, cell)["edits"] == {"positions[0]": 9, "positions[1]": 8})


def test_python_moves_the_widget_and_runs_it(packer):
    lab, cell = packer
    sending = "return arguments[0].mcApp.sending"  # what the test before typed would overtake Python's state
    until("all is told", lambda: not lab.driver.execute_script(sending, root(lab, cell)))
    lab.show(cell)
    lab.execute("w.state = {'edits': {'cu_seqlens_q[1]': 5}, 'align': 'top-left'}\n_ = w.run()")
    until("the edit", lambda: field(lab, cell, "cu_seqlens_q[1]") == 5)
    until("the check", lambda: "rows 1…4 go to A's keys" in root(lab, cell).text)
    until("alignment", lambda: state(lab, cell)["align"] == "top-left")
    lab.show(cell)
    lab.execute("w.status = 'error: my own'")
    until("the status", lambda: "error: my own" in root(lab, cell).text)
    lab.execute("w.reset()")


def test_it_builds_while_a_cell_runs_and_leaves_the_notebook_alone(packer):
    lab, cell = packer
    before = [c["id"] for c in lab.cells()]
    lab.show(cell)
    focus(lab, cell)
    press(lab, "b", "a", "m", "y")
    focus(lab, cell, "B.length")
    press(lab, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    until("10 tokens", lambda: field(lab, cell, "seq_lens_k[1]") == 19)
    time.sleep(0.3)
    press(lab, "x")
    until("B is gone", lambda: [c["id"] for c in state(lab, cell)["chunks"]] == ["A", "C"])
    assert [c["id"] for c in lab.cells()] == before
    lab.show(cell)
    index, _ = lab.execute("import time; time.sleep(8)", wait=False)
    until("the cell sleeps", lambda: lab.cells()[index]["running"])
    focus(lab, cell)
    press(lab, "c")
    until("B is back", lambda: [c["id"] for c in state(lab, cell)["chunks"]] == ["A", "C", "B"], 5)
    assert field(lab, cell, "cu_seqlens_q[3]") == 8
    assert lab.cells()[index]["running"], "the cell had woken up before"
    until("the cell is done", lambda: lab.cells()[index]["count"] is not None, 60)
    _, said = lab.execute("print([c['id'] for c in w.state['chunks']])")
    assert said.strip() == "['A', 'C', 'B']"


@pytest.mark.parametrize("width", [1000, 1200, 1300, 1400])
def test_the_table_of_requests_fits(packer, width):
    lab, cell = packer
    before = lab.driver.get_window_size()
    try:
        lab.driver.set_window_size(width, 1100)
        click(lab, cell, "reset")
        time.sleep(0.5)
        sizes = "const e = arguments[0].querySelector('.mc-requests'); return [e.scrollWidth, e.clientWidth]"
        scroll, client = lab.driver.execute_script(sizes, root(lab, cell))
        assert scroll <= client
    finally:
        lab.driver.set_window_size(before["width"], before["height"])


def test_no_text_is_small_and_every_field_is_named(packer):
    lab, cell = packer
    found = lab.driver.execute_script(
        "const all = [...arguments[0].querySelectorAll('*')];"
        "return [all.filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && parseFloat(getComputedStyle(e).fontSize) < 14).map((e) => e.outerHTML.slice(0, 80)),"
        " all.filter((e) => e.matches('input, button, select, canvas') && !e.getAttribute('aria-label')).map((e) => e.outerHTML.slice(0, 80)),"
        " arguments[0].getAttribute('data-lm-suppress-shortcuts')]",
        root(lab, cell),
    )
    assert found == [[], [], "true"]
