"""A49: script is text in the dashboard, which `shoal dashboard` opens in a browser, on a region of real processes."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from harness.clients.browser import PHONE, DashboardPage, chromium, dashboard_link
from harness.cluster.stack import DevStack, InferenceLoad, documents, policy, workload
from harness.report import record
from harness.wait import wait_until

SCRIPT = "<img src=x onerror=alert(1)>"
GUESS = "A" * 27
"""As long as a real link's secret."""
PAGES = {
    "": "Overview",
    "fleet": "Fleet",
    "fleet/edge-npu": "edge-npu",
    "workloads": "Workloads",
    "workloads/default/seen": "seen",
    "migrations": "Migrations",
    "federation": "Federation",
    "events": "Events",
    "plan": "What if",
    "traces": "Traces",
}
"""Every page, and its heading."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def one_workload(stack: DevStack) -> Iterator[DevStack]:
    """The region with one workload, `seen`, that may run on either node."""
    where = "  require: {where: \"node.name in ['plain-cpu', 'edge-npu']\"}\n"
    stack.apply(documents(policy("either", where), workload("seen", "relu", "either")))
    stack.wait_serving("seen")
    yield stack
    stack.delete_workloads("seen")


@pytest.fixture(scope="module")
def link(one_workload: DevStack) -> Iterator[str]:
    with dashboard_link(one_workload) as printed:
        yield printed


@pytest.fixture(scope="module")
def window(browser: Browser, link: str) -> DashboardPage:
    opened = DashboardPage(browser)
    opened.log_in(link)
    return opened


def test_every_page_shows_without_a_complaint_and_axe_finds_nothing(window: DashboardPage, browser: Browser) -> None:
    session = window.context.storage_state()
    for size, dark in ((None, False), (PHONE, True)):
        view = window if size is None else DashboardPage(browser, size=size, dark=dark, session=session)
        if size is not None:
            view.log_in(window.origin)
        for path, heading in PAGES.items():
            view.go(path, heading)
            assert view.violations() == [], (path, size)
            assert view.hidden_width() <= 0, (path, size)
        assert view.complaints == []
    record("A49", "P", 2 * len(PAGES), listener="dashboard", violations=0)


def test_a_used_or_guessed_link_logs_nobody_in(browser: Browser, window: DashboardPage, link: str) -> None:
    for refused in (link, f"{window.origin}/#link={GUESS}"):
        again = DashboardPage(browser)
        again.page.goto(refused)
        again.page.get_by_text("Nobody is logged in here").wait_for()
        assert "link=" not in again.page.url, "what it says must not stay in the address"
        assert again.violations() == []
        assert again.violations_in_the_dark() == []
        assert {each.split()[0] for each in again.complaints if each[0].isdigit()} == {"401"}
        again.context.close()


def test_a_link_that_is_opened_where_nobody_is_logged_in_any_more_logs_in(
    browser: Browser, one_workload: DevStack
) -> None:
    """The browser loads nothing anew: only the part after # is another."""
    with dashboard_link(one_workload) as link:
        again = DashboardPage(browser)
        again.page.goto(link.partition("/#")[0])
        again.page.get_by_text("Nobody is logged in here").wait_for()
        again.log_in(link)
        assert "link=" not in again.page.url
        again.context.close()


def test_a_migration_is_seen_from_its_start_to_its_end(window: DashboardPage, one_workload: DevStack) -> None:
    (placed,) = one_workload.placements("seen")
    target = "edge-npu" if placed.node == "plain-cpu" else "plain-cpu"
    window.go("migrations", "Migrations")
    with (
        InferenceLoad(one_workload.port("gateway", "data"), one_workload.client_files, "seen", clients=1),
        one_workload.api() as api,
    ):
        move = api.migrate("default", "seen", target)
        window.page.get_by_role("link", name=move.id).first.click()
        stages: list[str] = []

        def is_over() -> bool:
            now = window.page.locator(".track .now, .track .good").first.inner_text()
            if now not in stages:
                stages.append(now)
            return now == "done"

        wait_until(is_over, 60, "the move to be shown as done")
    assert len(stages) > 1, "shown while it went on"
    assert window.has_text("Before and after")
    assert window.page.locator("h1").inner_text().startswith("seen")
    compared = window.page.get_by_role("region", name="Compared outputs")
    assert "cosine" in compared.inner_text(), "by how much the answers differ, and how much they may"
    assert window.violations() == []
    assert window.violations_in_the_dark() == []
    window.go(f"traces/{move.id}", "Traces")
    window.page.get_by_role("region", name="Spans").wait_for()
    assert window.violations() == []
    assert window.violations_in_the_dark() == []


def test_a_plan_of_pasted_documents_is_shown_and_changes_nothing(window: DashboardPage, one_workload: DevStack) -> None:
    window.go("plan", "What if")
    text = documents(policy("later", "  optimize: {latency: 1.0}\n"), workload("later", "relu", "later"))
    window.page.get_by_label("Policies and workloads as YAML").fill(text)
    window.page.get_by_role("button", name="Show the plan").click()
    window.page.get_by_text("it would change the region").wait_for()
    assert window.has_text("1 of 1 placed")
    window.page.get_by_label("Policies and workloads as YAML").fill(f"kind: {SCRIPT}")
    window.page.get_by_role("button", name="Show the plan").click()
    window.page.get_by_text(SCRIPT).first.wait_for()
    assert window.page.locator("main img").count() == 0
    window.page.get_by_label("Workload or model").fill("seen")
    window.page.get_by_label("To a node, a device or a region").fill("edge-npu")
    window.page.get_by_role("button", name="Can it?").click()
    window.page.get_by_role("region", name="Places").or_(window.page.get_by_role("alert")).first.wait_for()
    with one_workload.api() as api:
        assert "later" not in [view.workload.name for view in api.get("workloads").workloads]


def test_a49_script_in_a_label_is_shown_as_text(window: DashboardPage, one_workload: DevStack) -> None:
    with one_workload.api() as api:
        api.label("edge-npu", {"note": SCRIPT})
    try:
        window.go("fleet/edge-npu", "edge-npu")
        window.page.get_by_text(SCRIPT).wait_for()
        assert window.page.locator("main img").count() == 0
    finally:
        with one_workload.api() as api:
            api.label("edge-npu", {}, ["note"])


def test_the_keyboard_reaches_pages_filter_and_help(window: DashboardPage) -> None:
    window.go("", "Overview")
    window.page.keyboard.press("g")
    window.page.keyboard.press("f")
    window.page.get_by_role("heading", level=1, name="Fleet").wait_for()
    window.page.keyboard.press("/")
    window.page.keyboard.type("edge")
    window.page.get_by_role("row").filter(has_text="plain-cpu").wait_for(state="detached")
    window.page.keyboard.press("Escape")
    window.page.keyboard.press("?")
    assert window.violations() == []
    window.page.keyboard.press("Escape")
    window.page.get_by_role("dialog").wait_for(state="detached")
