"""The federation in a browser: regions, an agreement, and the negotiation that it came from."""

import re

from harness.clients.browser import DashboardPage, chromium, dashboard_link
from harness.cluster.delegation import NEAR, delete_delegated, in_regions, wait_all_acquainted, wait_delegated
from harness.cluster.stack import DevStack


def test_the_federation_is_shown_with_an_agreement_and_its_negotiation(neighbourhood: DevStack) -> None:
    wait_all_acquainted(neighbourhood)
    neighbourhood.apply(in_regions("abroad", NEAR))
    agreement = wait_delegated(neighbourhood, "abroad")
    try:
        with dashboard_link(neighbourhood) as link, chromium() as browser:
            window = DashboardPage(browser)
            window.log_in(link)
            window.go("federation", "Federation")
            row = window.page.get_by_role("row").filter(has_text=agreement.agreement)
            row.wait_for()
            assert re.search(r"\d[smhd] ago", row.inner_text()), "when it was agreed"
            window.page.get_by_role("img", name="home-3").wait_for()
            window.page.get_by_text("won by").first.wait_for()
            assert {"SOLICITED", "BID", "AWARDED", "GRANTED"} <= set(
                window.page.locator(".move code").all_inner_texts()
            ), "from what was asked to what came of it"
            assert window.has_text("no place at home fits"), "why it was asked, in words"
            assert window.violations() == []
            assert window.violations_in_the_dark() == []
            window.go("workloads/default/abroad", "abroad")
            window.page.get_by_text("home-2 runs it").first.wait_for()
            where = window.page.locator(".panel", has=window.page.get_by_role("heading", name="Where it runs"))
            where.get_by_text(agreement.agreement).wait_for()
            assert "region home-2" in where.inner_text()
            assert window.violations() == []
            assert window.violations_in_the_dark() == []
            assert window.complaints == []
    finally:
        delete_delegated(neighbourhood, "abroad")
