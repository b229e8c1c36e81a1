"""The chunk splitter and the free-lunch meter in JupyterLab: the slider by keyboard, the figure changed in place."""

import pytest
from browsing import picture, press, until
from selenium.webdriver import Keys

pytestmark = pytest.mark.timeout(600)

CELLS = [
    "from minichunk import lab",
    "splitter = lab.split_prompt(571, 64)\nsplitter",
    "meter = lab.free_lunch(*lab.recorded_lunch(), tokens=64)\nmeter",
]


@pytest.fixture(scope="module")
def sliders(lab):
    lab.run_cells("sliders.ipynb", *CELLS)
    return lab


def text(lab, cell):
    return lab.js("return nb.widgets[args[0]].outputArea.node.textContent;", cell)


@pytest.mark.parametrize(
    "cell, before, after, name",
    [
        (1, "lab.split_prompt(571, 64)", "lab.split_prompt(571, 128)", "splitter"),
        (2, "tokens=64)", "tokens=96)", "meter"),
    ],
)
def test_an_arrow_key_moves_the_slider_and_redraws_the_figure(sliders, cell, before, after, name):
    lab = sliders
    lab.element(cell, ".js-plotly-plot .main-svg")
    until("the status line", lambda: before in text(lab, cell))
    handle = lab.element(cell, ".noUi-handle")
    lab.driver.execute_script("arguments[0].scrollIntoView({ block: 'center' }); arguments[0].focus()", handle)
    press(lab, Keys.ARROW_RIGHT)
    until("the status line follows", lambda: after in text(lab, cell))
    drawn = "return arguments[0].querySelector('.js-plotly-plot')"
    node = lab.driver.execute_script(
        "return window.jupyterapp.shell.currentWidget.content.widgets[arguments[0]].node", cell
    )
    if name == "splitter":
        until("five bars", lambda: lab.driver.execute_script(f"{drawn}.data[0].y.length", node) == 5)
        assert "571 tokens in 5 chunks" in lab.driver.execute_script(f"{drawn}.layout.title.text", node)
    else:
        lines = f"{drawn}.layout.shapes.filter((s) => s.name === 'at').map((s) => s.x0)"
        until("the line moved", lambda: lab.driver.execute_script(lines, node) == [96])
    lab.show(cell)
    picture(lab.driver, f"lab-{name}")
    assert len(lab.cells()) == len(CELLS)  # the keys were the slider's, not the notebook's
