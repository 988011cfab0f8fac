"""The service of the page's tests."""

import pytest

from support import browser
from support.service import Coldrised


@pytest.fixture
def service(tmp_path):
    """A service without a repository."""
    with Coldrised(tmp_path, options=["--web", str(browser.PAGE)]) as started:
        yield started
