"""JupyterLab as `make lab` opens it."""

import json
import time

import pytest
from browsing import picture, press, until
from selenium.webdriver import ActionChains, Keys
from toyrun import toy_run

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def scrubber(lab):
    """A notebook with one named scrubber over a toy run, run; → (lab, index of its cell)."""
    toy_run().save(lab.folder / "toy.json.gz")
    load = "from minichunk import lab\nfrom minichunk.record import Run\nrun = Run.load('toy.json.gz')"
    lab.run_cells("scrubber.ipynb", load, "w = lab.scrub(run)\nw")
    until("the scrubber is drawn", lambda: lab.element(1, ".mc-scrubber[data-step]"))
    return lab, 1


def root(lab, cell):
    return lab.element(cell, ".mc-scrubber[data-step]")


def step(lab, cell):
    return int(root(lab, cell).get_attribute("data-step"))


def focus(lab, cell):
    root(lab, cell).find_element("css selector", ".mc-now").click()
    lab.driver.execute_script("arguments[0].focus()", root(lab, cell))


def test_arrow_keys_step_and_python_knows(scrubber):
    lab, cell = scrubber
    focus(lab, cell)
    press(lab, Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    until("step 3", lambda: step(lab, cell) == 3)
    assert "step 3 of 0…22" in root(lab, cell).text
    time.sleep(1)
    _, said = lab.execute("print(w.state['step'], w.run()['step'])")
    assert said.strip() == "3 3"


def test_python_moves_the_widget_and_errors_are_shown(scrubber):
    lab, cell = scrubber
    lab.show(cell)
    lab.execute("w.state = {'step': 7, 'selection': {'request': 4, 'position': 10}}")
    until("step 7", lambda: step(lab, cell) == 7)
    assert "E's token 10 is not in this step" in root(lab, cell).text
    lab.show(cell)
    lab.execute("def boom(change): raise RuntimeError('my own observer')\nw.observe(boom, 'state')")
    focus(lab, cell)
    press(lab, Keys.ARROW_RIGHT)
    until("the error is shown", lambda: "error: RuntimeError: my own observer" in root(lab, cell).text)
    lab.execute("w.unobserve(boom, 'state')")


def test_steps_while_a_cell_sleeps(scrubber):
    lab, cell = scrubber
    lab.show(cell)
    index, _ = lab.execute("import time; time.sleep(12)", wait=False)
    until(
        "the cell sleeps", lambda: lab.cells()[index]["running"]
    )  # the kernel's status may say idle: comms have a subshell
    focus(lab, cell)
    press(lab, Keys.HOME)
    until("the first step", lambda: step(lab, cell) == 0, 5)
    press(lab, Keys.ARROW_RIGHT * 5)
    until("step 5", lambda: step(lab, cell) == 5, 5)
    assert "step 5 of 0…22" in root(lab, cell).text
    assert lab.cells()[index]["running"], "the cell had woken up before"
    until("the cell is done", lambda: lab.cells()[index]["count"] is not None, 60)
    _, said = lab.execute("print(w.state['step'])")
    assert said.strip() == "5"  # the last state arrived


def test_a_click_on_a_token_lights_it_in_every_pane(scrubber):
    lab, cell = scrubber
    lab.show(cell)
    lab.execute("w.state = {'step': 4}")
    until("step 4", lambda: step(lab, cell) == 4)
    row = 50  # step 4 is A B C D and E's tokens 124…247, so row 50 is E's token 170
    x, y = lab.driver.execute_script(
        "const { lay } = arguments[0].mcApp.views[0], [x, y] = lay.xy(arguments[1]); return [x + lay.cell / 2, y + lay.cell / 2];",
        root(lab, cell), row,
    )  # fmt: skip
    strip = root(lab, cell).find_element("css selector", "canvas[data-shows='packed batch']")
    lab.driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", strip)
    size = strip.size
    ActionChains(lab.driver).move_to_element_with_offset(
        strip, round(x - size["width"] / 2), round(y - size["height"] / 2)
    ).click().perform()
    until("the token is selected", lambda: json.loads(root(lab, cell).get_attribute("data-selection") or "null"))
    assert json.loads(root(lab, cell).get_attribute("data-selection")) == {"request": 4, "position": 170}
    said = root(lab, cell).text
    run = toy_run()
    table = run.tables_at(4)[4]
    slot = table[10] * 16 + 10
    assert f"row {row} · E's token 170" in said and "mask row: sees keys 0…170 of 248" in said
    assert f"slot {slot} = {table[10]} · 16 + 10" in said
    lit = lab.driver.execute_script(
        "const v = arguments[0].mcApp.views[0], p = v.resolve(arguments[0].mcApp.state.selection, v.f.step);"
        "return [p.block, p.moment, v.table.querySelector('.mc-on').textContent]", root(lab, cell),
    )  # fmt: skip
    assert lit[:2] == [table[10], 4] and lit[2].startswith("E4124…247248")
    lab.in_themes(lambda: root(lab, cell), "lab-scrubber")
    time.sleep(0.5)
    _, said = lab.execute("print(w.state['selection'])")
    assert said.strip() == "{'request': 4, 'position': 170}"


def test_b_and_x_inside_it_leave_the_notebook_alone(scrubber):
    lab, cell = scrubber
    before = [c["id"] for c in lab.cells()]
    focus(lab, cell)
    press(lab, "b", "x", "a", "d", "d", "m")
    time.sleep(1)
    after = lab.cells()
    assert [c["id"] for c in after] == before
    assert after[cell]["type"] == "code"


def test_a_long_gap_leads_to_its_culprit(scrubber):
    lab, cell = scrubber
    lab.show(cell)
    lab.execute("w.state = {}")
    until("the first step", lambda: step(lab, cell) == 0)
    focus(lab, cell)
    press(lab, "n")
    until("a gap is selected", lambda: "waited" in root(lab, cell).text)
    time.sleep(1)
    _, said = lab.execute(
        "from minichunk.lab import views\nid, k = w.state['selection']['gap']\nprint(views.culprit(run, id, k)['step'] == w.state['step'])"
    )
    assert said.strip() == "True"


def copy(lab, number):
    """The copy of a notebook that `minichunk lab` made."""
    return next(p.name for p in lab.folder.glob(f"{number}_*.ipynb"))


def test_notebook_00_runs_and_its_selector_answers(lab):
    lab.open(copy(lab, "00"))
    assert lab.run_all(240) == []
    cell = lab.find("budget_selector(")
    handle = lab.element(cell, ".noUi-handle")
    # in one call: the table is made anew when the slider moves, and an element held in between would be stale
    table = lambda: lab.js("return nb.widgets[args[0]].node.querySelector('table')?.innerText;", cell)  # noqa: E731
    before = until("the table", table)
    handle.click()
    handle.send_keys(Keys.ARROW_RIGHT)
    after = until("the numbers change", lambda: table() != before and table(), 20)
    assert "longest step" in after
    picture(lab.driver, "lab-00")


def test_notebook_40_runs_and_shows_the_schedule(lab):
    lab.open(copy(lab, "40"))
    assert lab.run_all(400) == []
    cell = lab.find("lab.scrub_at(6, mine)")
    assert "571" in root(lab, cell).text or "step 8 of" in root(lab, cell).text
    focus(lab, cell)
    press(lab, Keys.ARROW_RIGHT)
    until("step 9", lambda: step(lab, cell) == 9)
    assert "mixed" in root(lab, cell).text and "64 of 64 tokens" in root(lab, cell).text
    picture(lab.driver, "lab-40")
    two = lab.find("lab.scrub_at(6, mine, frozen)")
    focus(lab, two)
    assert "policy prefill_first" in root(lab, two).text
    picture(lab.driver, "lab-40-two")
