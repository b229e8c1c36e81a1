"""Driving a page and JupyterLab from the tests."""

import time
from pathlib import Path

import nbformat
from selenium.webdriver import ActionChains

SCREENSHOTS = Path(__file__).resolve().parent.parent.parent / "screenshots"  # git-ignored: to be looked at


def until(what, check, seconds=30, every=0.2):
    """Waits until check() is true, and returns what it gave."""
    end = time.monotonic() + seconds
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s in vain: {what}; last seen: {found!r}")
        time.sleep(every)


def picture(driver, name):
    """A screenshot for people to look at."""
    SCREENSHOTS.mkdir(exist_ok=True)
    driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))


def press(lab, *keys):
    """Keys, to whatever has the focus."""
    ActionChains(lab.driver).send_keys(*keys).perform()


def errors(driver):
    """What the page complained about in its console, favicons apart."""
    return [e["message"] for e in driver.get_log("browser") if e["level"] == "SEVERE" and "favicon" not in e["message"]]


class Lab:
    """JupyterLab in the browser. Cells are counted from 0; their state is read from JupyterLab's own model."""

    def __init__(self, driver, url, folder):
        self.driver, self.url, self.folder = driver, url, folder

    def js(self, body, *arguments):
        """Runs `body` (may await) with `nb`, the open notebook, and `app`; returns its value."""
        code = (
            "const done = arguments[arguments.length - 1], args = arguments; (async () => { const app = window.jupyterapp, "
            f"panel = app.shell.currentWidget, nb = panel?.content; {body} }})().then(done, (e) => done('ERROR ' + e));"
        )
        value = self.driver.execute_async_script(code, *arguments)
        assert not str(value).startswith("ERROR "), value
        return value

    def open(self, name):
        self.driver.get(f"{self.url}/lab/tree/{name}")
        until("JupyterLab is there", lambda: self.driver.execute_script("return Boolean(window.jupyterapp)"), 120)
        until(
            f"{name} is open and its kernel idle",
            lambda: self.js(
                "return Boolean(nb && panel.context?.isReady && panel.context.path === args[0]"
                " && panel.sessionContext.session?.kernel?.status === 'idle');", name,
            ),
            120,
        )  # fmt: skip

    def run_cells(self, name, *sources):
        """Writes a notebook of these code cells into the folder, opens it and runs it without an error."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(notebook, self.folder / name)
        self.open(name)
        assert self.run_all(240) == []

    def in_themes(self, element, name):
        """A screenshot of what `element` (a function) gives, drawn by a widget of ours, in light and in dark."""
        for theme in ("Light", "Dark"):
            self.theme(theme)
            dark = "return arguments[0].mcApp.paint?.dark"
            until(theme, lambda: self.driver.execute_script(dark, element()) is (theme == "Dark"))
            picture(self.driver, f"{name}-{theme.lower()}")
        self.theme("Light")

    def command(self, name, **arguments):
        self.js("app.commands.execute(args[0], args[1]);", name, arguments)

    def cells(self):
        """[{id, type, source, count, running, errors}]"""
        return self.js(
            "return nb.widgets.map((w) => ({ id: w.model.id, type: w.model.type, source: w.model.sharedModel.source,"
            " count: w.model.executionCount, running: w.model.executionState === 'running',"
            " errors: (w.model.outputs?.toJSON() ?? []).filter((o) => o.output_type === 'error')"
            ".map((o) => `${o.ename}: ${o.evalue}`) }));"
        )

    def run_all(self, seconds):
        """Run All Cells, until each code cell has run; returns the errors."""
        self.command("notebook:run-all-cells")

        def done():
            code = [c for c in self.cells() if c["type"] == "code" and c["source"].strip()]
            return any(c["errors"] for c in code) or all(c["count"] is not None and not c["running"] for c in code)

        until("all cells have run", done, seconds, every=1)
        return [(c["source"][:60], c["errors"]) for c in self.cells() if c["errors"]]

    def show(self, index):
        """Scrolls to a cell and makes it the active one."""
        self.js("nb.activeCellIndex = args[0]; await nb.scrollToItem(args[0], 'start');", index)

    def find(self, text):
        """Index of the code cell whose source holds `text`."""
        return next(n for n, c in enumerate(self.cells()) if c["type"] == "code" and text in c["source"])

    def element(self, index, selector):
        """The first element with this selector in a cell's outputs, when it has appeared."""
        self.show(index)
        return until(
            f"{selector} in cell {index}",
            lambda: self.driver.execute_script(
                "return window.jupyterapp.shell.currentWidget.content.widgets[arguments[0]].node"
                ".querySelector(arguments[1])", index, selector,
            ),
        )  # fmt: skip

    def execute(self, source, wait=True):
        """Adds a cell with this source below the active one and runs it; returns (its index, the text it printed)."""
        self.js("await app.commands.execute('notebook:insert-cell-below');")
        index = self.js("nb.activeCell.model.sharedModel.setSource(args[0]); return nb.activeCellIndex;", source)
        self.command("notebook:run-cell")
        if not wait:
            return index, None
        until(f"{source!r} has run", lambda: self.cells()[index]["count"] is not None)
        text = self.js(
            "return nb.widgets[args[0]].model.outputs.toJSON().map((o) => String(o.text ?? o.evalue ?? '')).join('');",
            index,
        )
        return index, text

    def theme(self, name):
        self.js("await app.commands.execute('apputils:change-theme', { theme: args[0] });", f"JupyterLab {name}")
        time.sleep(1)
