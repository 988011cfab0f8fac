"""The drive of the service's folder is full: users cannot log in, and every page reports the cause."""

import pytest

from support import browser
from support.full_drive import fill
from support.nbdserver import wait_until
from support.service import Coldrised
from support.sources import tool
from support.wallclock import BothClocks


@pytest.fixture
def small(tmp_path):
    """A service whose folder is on a drive of 24 MiB, with a clock."""
    clock = BothClocks(tmp_path)
    service = Coldrised(tmp_path, environment=clock.environment(), options=["--web", str(browser.PAGE), "--runs", str(tmp_path / "runs")])
    service.clock = clock
    service.state.mkdir(mode=0o700)
    tool("mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", service.state)
    try:
        with service:
            yield service
    finally:
        tool("umount", "--lazy", service.state)


def alarm(service):
    # The alarms are computed every 20 s.
    service.clock.skip(20)
    found = [alarm for alarm in service.get("alarms?active=true") if alarm["key"] == "service-folder"]
    return found[0] if found else {"summary": ""}


def test_a_full_service_folder(small, visit):
    service = small
    inside = visit(service)
    inside.set_up()
    wait_until(lambda: "almost full" in alarm(service)["summary"], "the warning")
    fill(service.state / "ballast")
    outside = visit(service)
    page = outside.page
    outside.go("machines")
    page.get_by_label("User").fill("admin")
    page.get_by_label("Password").fill(browser.PASSWORD)
    # The free space in the database's own files may suffice for some logins.
    credentials = {"user": "admin", "password": browser.PASSWORD}
    wait_until(lambda: service.call("POST", "login", credentials, over="https").status == 507, "no room for a login")
    page.get_by_role("button", name="Log in").click()
    said = page.get_by_role("alert").get_by_text(f"the drive of the service's folder {service.state} is full")
    said.wait_for()
    assert "free some space" in said.inner_text() and said.inner_text().count("is full") == 1
    # A wrong password is reported as such, even on a full drive.
    page.get_by_label("Password").fill("wrong password")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").get_by_text("The user or the password is wrong.").wait_for()

    # Logged-in users see the alarm, although the database has no space for it.
    wait_until(lambda: alarm(service)["summary"].endswith("is full"), "the alarm")
    inside.page.get_by_text("is full", exact=False).first.wait_for(timeout=30_000)
    found = alarm(service)
    assert found["severity"] == "fail" and found["summary"].endswith("is full")
    health = service.call("GET", "/healthz")
    assert health.status == 200 and b"users cannot log in" in health.body
    metrics = service.call("GET", "/metrics").body.decode()
    assert 'coldrise_alarms{severity="fail"} 1' in metrics
    [free] = [line.split()[-1] for line in metrics.splitlines() if line.startswith("coldrise_service_folder_available_bytes{")]
    assert float(free) < 1 << 20

    (service.state / "ballast").unlink()
    page.get_by_label("Password").fill(browser.PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Machines").wait_for()
    wait_until(lambda: "almost full" in alarm(service)["summary"], "it sees that there is room")
    assert service.call("GET", "/healthz").body == b"ok\n"
