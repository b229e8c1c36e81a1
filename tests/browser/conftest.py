"""A real browser (Debian's Chromium) and JupyterLab as `minichunk lab` opens it, on copies in a temporary folder."""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from browsing import Lab, until

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # toyrun

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1400,1100"
).split()


def pytest_collection_modifyitems(items):
    """Everything in this folder is a browser test."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker("browser")


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.fail("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(chromedriver))
    browser.set_script_timeout(60)
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def lab(driver, tmp_path_factory):
    """`minichunk lab`, as `make lab` starts it; only the token, root's permission and the door for tests are added."""
    folder, config = tmp_path_factory.mktemp("my"), tmp_path_factory.mktemp("jupyter")
    (config / "jupyter_lab_config.json").write_text(json.dumps({"LabApp": {"expose_app_in_browser": True}}))
    server = {"ServerApp": {"allow_root": True}, "IdentityProvider": {"token": ""}}
    (config / "jupyter_server_config.json").write_text(json.dumps(server))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "MINICHUNK_MY": str(folder), "JUPYTER_CONFIG_DIR": str(config),
        "PYTHONPATH": str(ROOT), "JUPYTERLAB_WORKSPACES_DIR": str(config / "workspaces"),
    }  # fmt: skip
    log = open(config / "log.txt", "w")
    server = subprocess.Popen(
        [sys.executable, "-m", "minichunk.cli", "lab", "00", "--port", str(port), "--no-browser"],
        cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    url = f"http://localhost:{port}"

    def answers():
        assert server.poll() is None, (config / "log.txt").read_text()[-2000:]
        try:
            return urllib.request.urlopen(f"{url}/api/status", timeout=5).status == 200
        except OSError:
            return False

    try:
        until("JupyterLab answers", answers, 120)
        yield Lab(driver, url, folder)
    finally:
        server.terminate()  # `minichunk lab` alone: it takes JupyterLab and its kernels with it
        code = server.wait(60)
        log.close()
        with socket.socket() as gone:
            assert code == 143 and gone.connect_ex(("localhost", port)) != 0, (config / "log.txt").read_text()[-2000:]
