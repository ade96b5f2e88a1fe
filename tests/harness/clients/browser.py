"""Headless Chromium, as Debian has it, on a region's dashboard."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, StorageState, sync_playwright

from harness.cluster.stack import DevStack

DESKTOP = (1440, 900)
PHONE = (390, 844)
WCAG = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def dashboard_link(stack: DevStack, context: str = "") -> Iterator[str]:
    """The link that `shoal dashboard` prints, while that command runs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    command = [str(Path(sys.executable).with_name("shoal")), "dashboard", "--no-browser"]
    running = subprocess.Popen(
        [*command, *(["--context", context] if context else [])],
        env={**environment, "SHOAL_HOME": str(stack.contexts.folder), "SHOAL_DEV_DIR": str(stack.control.folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None
        yield running.stdout.readline().strip()
    finally:
        running.terminate()
        running.communicate(timeout=20)


class DashboardPage:
    """One window of the dashboard. Whatever its console says, and each answer that is an error, is kept."""

    def __init__(
        self,
        browser: Browser,
        *,
        size: tuple[int, int] = DESKTOP,
        dark: bool = False,
        session: StorageState | None = None,
    ) -> None:
        """session: cookies of another window that is logged in."""
        width, height = size
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", storage_state=session
        )
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("response", lambda reply: self._on_reply(reply.status, reply.url))

    def _on_reply(self, status: int, url: str) -> None:
        if status >= 400:
            self.complaints.append(f"{status} {url}")

    def log_in(self, link: str) -> None:
        self.origin = link.partition("/#")[0]
        self.page.goto(link)
        self.page.get_by_role("navigation").wait_for()
        self.page.get_by_text("live", exact=True).wait_for()

    def go(self, path: str, heading: str) -> None:
        """Shows a page and waits for its heading and for the end of `Waiting`."""
        self.page.goto(f"{self.origin}/#/{path}")
        self.page.get_by_role("heading", level=1).filter(has_text=heading).wait_for(state="attached")
        self.page.locator("[aria-busy]").first.wait_for(state="detached")

    def has_text(self, text: str) -> bool:
        return self.page.get_by_role("main").get_by_text(text).first.is_visible()

    def hidden_width(self) -> int:
        """Pixels of the page that its window cuts off."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def violations(self, rules: Sequence[str] = WCAG) -> list[str]:
        """Of the page as it is: rule, and where."""
        found = Axe().run(self.page, options={"runOnly": {"type": "tag", "values": list(rules)}})
        return [
            f"{each['id']}: {'; '.join(' '.join(map(str, node['target'])) for node in each['nodes'])}"
            for each in found.response["violations"]
        ]

    def violations_in_the_dark(self) -> list[str]:
        """As `violations`, of the same page in dark colours, for whoever has it in light ones."""
        self.page.emulate_media(color_scheme="dark")
        try:
            return self.violations()
        finally:
            self.page.emulate_media(color_scheme="light")
