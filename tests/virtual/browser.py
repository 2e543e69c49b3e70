"""A headless Chromium for tests of pages: found on this machine, or the reason why there is none."""

import contextlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
# Nothing of a page may be asked of the network: every host but none is unreachable.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"


def why_no_browser() -> str:
    """What is missing; "" where there is a browser."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed"
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found" if missing else ""


@contextlib.contextmanager
def browser(width: int = 1240, height: int = 1400) -> Iterator[Any]:
    """A driver of a browser of its own, with its console kept."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in (*FLAGS, OFFLINE, f"--user-data-dir={folder}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def address(path: Path, **query: str) -> str:
    return path.absolute().as_uri() + ("?" + "&".join(f"{k}={v}" for k, v in query.items()) if query else "")
