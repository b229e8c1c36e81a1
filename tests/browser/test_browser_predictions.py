"""A prediction in JupyterLab: what was typed is what is locked, however fast, and while the kernel works."""

import pytest
from browsing import press, until
from selenium.webdriver import Keys

pytestmark = pytest.mark.timeout(600)

CELLS = ["from minichunk import lab", *(f'p{n} = lab.predict("9{n}", "How many?", "tokens")\np{n}' for n in range(3))]


@pytest.fixture(scope="module")
def asked(lab):
    lab.run_cells("predictions.ipynb", *CELLS)
    return lab


def field(lab, cell):
    found = lab.element(cell, "input")
    lab.driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", found)
    found.click()
    return found


def lock(lab, cell):
    next(
        b for b in lab.element(cell, ".jp-OutputArea").find_elements("css selector", "button") if b.text == "Lock"
    ).click()


def text(lab, cell):
    return lab.js("return nb.widgets[args[0]].outputArea.node.textContent;", cell)


def test_typed_fast_and_locked_by_a_click(asked):
    field(asked, 1)
    press(asked, "18432")
    lock(asked, 1)
    until("the lock", lambda: "Locked: 18432 tokens" in text(asked, 1))


def test_typed_and_locked_while_the_kernel_works(asked):
    asked.show(3)
    index, _ = asked.execute("import time; time.sleep(8)", wait=False)
    until("the cell sleeps", lambda: asked.cells()[index]["running"])
    field(asked, 2)
    press(asked, "4", "1", "2")
    lock(asked, 2)
    until("the lock", lambda: "Locked: 412 tokens" in text(asked, 2), 60)


def test_an_ambiguous_number_is_asked_back_and_can_be_corrected(asked):
    field(asked, 3)
    press(asked, "1,164")
    lock(asked, 3)
    until("the question", lambda: "can be read in two ways: write 1164 or 1.164" in text(asked, 3))
    field(asked, 3)
    press(asked, Keys.END + Keys.BACKSPACE * 5, "1164")
    lock(asked, 3)
    until("the lock", lambda: "Locked: 1164 tokens" in text(asked, 3))
