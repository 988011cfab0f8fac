"""Fixtures of the page's tests: Chromium, and a service with the page."""

import pytest

from support import browser
from support.service import Coldrised


@pytest.fixture(scope="session")
def chromium():
    missing = browser.missing()
    if missing:
        pytest.fail(f"build and install first: {missing}", pytrace=False)
    with browser.chromium() as started:
        yield started


@pytest.fixture
def service(tmp_path):
    """A service without a repository."""
    with Coldrised(tmp_path, options=["--web", str(browser.PAGE)]) as started:
        yield started


@pytest.fixture
def visit(chromium):
    """Opens windows; none of them may complain."""
    visitors = []

    def open_window(service, **options):
        visitors.append(browser.Visitor(chromium, service, **options))
        return visitors[-1]

    yield open_window
    complaints = [complaint for visitor in visitors for complaint in visitor.complaints]
    for visitor in visitors:
        visitor.close()
    assert not complaints, "\n".join(complaints)
