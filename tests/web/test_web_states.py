"""Every page in its states: empty, without a repository, slow, not found, not allowed, service gone and back."""

import pytest

from support import browser, site
from support.cli import Coldrise
from support.nbdserver import wait_until
from support.service import Coldrised
from support.stopped import stopped

PAGES = ("machines", "activity", "jobs", "repository", "access", "notifications", "about")
POST = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One machine with two points, and a disk that takes its time to be backed up."""
    place = site.Site(tmp_path_factory.mktemp("site"))
    place.points = place.back_up("web01", [3, 2])
    return place


@pytest.fixture
def running(made, tmp_path):
    with Coldrised(tmp_path, made.coldrise.repository, made.coldrise.passphrase_file,
                   options=["--web", str(browser.PAGE)]) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        service.post("users", {"name": "auditor", "role": "viewer", "password": browser.PASSWORD})
        yield service
        for run in service.get("runs?state=running")["runs"]:
            service.call("POST", f"runs/{run['id']}/cancel", {})
        wait_until(lambda: not service.get("runs?state=running")["runs"], "the end of the runs")


def enter(visit, service, user="admin"):
    visitor = visit(service)
    visitor.log_in(user)
    return visitor, visitor.page


def slow_backup(service, folder):
    """A run that lasts a minute, unless it is cancelled."""
    disk = folder / "slow.raw"
    disk.write_bytes(bytes(range(256)) * 4096 * 60)
    body = {"kind": "backup", "machine": "slow01", "disks": {"vda": f"raw:{disk}"}, "rate_bytes_per_second": 1 << 20}
    return service.post("runs", body)["run"]


def test_an_empty_repository(tmp_path, visit):
    passphrase = tmp_path / "passphrase"
    passphrase.write_text("correct horse\n")
    coldrise = Coldrise(tmp_path / "repository", passphrase)
    coldrise.init()
    with Coldrised(tmp_path, coldrise.repository, passphrase, options=["--web", str(browser.PAGE)]) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        visitor, page = enter(visit, service)
        for address, said in {"machines": "No machine yet", "activity": "No run yet", "jobs": "No job yet", "repository": "none known",
                              "access": "No token.", "notifications": "None yet"}.items():
            visitor.go(address)
            page.get_by_text(said).first.wait_for()
            assert page.get_by_role("alert").count() == 0, address


def test_a_service_without_a_repository_reports_it(service, visit):
    visitor = visit(service)
    visitor.set_up()
    for address in ("machines", "repository"):
        visitor.go(address)
        visitor.page.get_by_role("alert").get_by_text("no repository").first.wait_for()


def test_a_slow_service_is_shown(running, visit):
    """A stopped process does not answer: the page waits, and continues when answers arrive."""
    visitor, page = enter(visit, running)
    for address in (f"#/{page}" for page in (*PAGES, "machines/web01", "jobs?new")):
        print(address)
        # None of it is loaded yet.
        page.goto("about:blank")
        visitor.go("nowhere")
        page.get_by_text("There is nothing at this address").wait_for()
        with stopped(running.process.pid):
            page.evaluate("address => { location.hash = address; }", address)
            if address != "#/about":
                page.get_by_text("Loading…").first.wait_for()
        page.get_by_text("Loading…").first.wait_for(state="detached")
        page.get_by_role("heading", level=1).wait_for()


def test_missing_pages_are_reported(running, made, visit):
    visitor, page = enter(visit, running)
    for address, said in {"machines/none01": "none01", "runs/20200101T000000Z-0000-backup": "no run", "runs/..%2F..%2Fetc": "run",
                          "nowhere": "There is nothing at this address"}.items():
        visitor.go("about")
        visitor.go(address)
        page.locator("#main").get_by_text(said).first.wait_for()
    # A point that is gone: the machine's page reports it, and shows its newest one.
    visitor.go("machines/web01/20200101T000000Z")
    page.get_by_label("Chosen point").get_by_text(made.points[-1]).wait_for()
    page.get_by_role("alert").get_by_text("There is no point 20200101T000000Z").wait_for()


def test_a_login_revoked_elsewhere_leads_to_the_login_page(running, visit):
    visitor, page = enter(visit, running, "auditor")
    visitor.go("about")
    page.get_by_text("auditor, role viewer").wait_for()
    assert running.call("DELETE", "users/auditor").status == 204
    page.get_by_role("button", name="Log in").wait_for(timeout=20_000)
    assert page.get_by_text("The service is away").count() == 0


def test_a_viewer_gets_no_actions(running, made, visit, tmp_path):
    run = slow_backup(running, tmp_path)
    visitor, page = enter(visit, running, "auditor")
    for address, heading, hidden in (
            ("machines", "Machines", ["Recover web01"]),
            ("machines/web01", "web01", ["Recover", "Verify boot", "Protect", "Forget…"]),
            ("activity", "Activity", ["Cancel"]), (f"runs/{run}", "backup", ["Cancel"]), ("jobs", "Jobs", ["New job"]),
            ("repository", "Repository", ["Verify all data", "Free space (gc)"]),
            ("notifications", "Alarms and messages", ["New target", "Acknowledge"]),
            ("access", "Access", ["New user", "New token"])):
        visitor.go(address)
        page.get_by_role("heading", level=1, name=heading).wait_for()
        page.get_by_text("Loading…").first.wait_for(state="detached")
        for name in hidden:
            assert page.get_by_role("button", name=name).count() == 0, (address, name)
    visitor.go("access")
    page.get_by_text("are for administrators").wait_for()
    # The service refuses what the page does not offer.
    body = {"kind": "boot", "address": made.points[0]}
    assert visitor.context.request.post("/api/v1/runs", data=body, headers=POST).status == 403
    assert visitor.context.request.post(f"/api/v1/runs/{run}/cancel", data={}, headers=POST).status == 403
    assert visitor.context.request.get("/api/v1/users").status == 403
    assert visitor.context.request.get(f"/api/v1/machines/{made.points[0].replace('/', '/points/')}/screenshot.png").status == 403


def test_a_run_is_followed_and_cancelled(running, visit, tmp_path):
    run = slow_backup(running, tmp_path)
    visitor, page = enter(visit, running)
    visitor.go("activity")
    row = page.get_by_role("row").filter(has_text="slow01")
    row.get_by_text("running").wait_for()
    row.get_by_text(" of 60.0 MiB").wait_for()
    row.get_by_role("link", name="backup").click()
    bar = page.get_by_role("progressbar")
    before = int(bar.get_attribute("aria-valuenow"))
    wait_until(lambda: int(bar.get_attribute("aria-valuenow")) > before, "progress")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("cancelled", exact=True).wait_for(timeout=30_000)
    assert page.get_by_role("button", name="Cancel").count() == 0
    assert running.get(f"runs/{run}")["state"] == "cancelled"


def test_the_service_is_killed_and_restarted(running, visit):
    """On every page, each in a window of its own."""
    windows = []
    for address in (*PAGES, "machines/web01"):
        visitor, page = enter(visit, running)
        visitor.go(address)
        page.get_by_role("heading", level=1).wait_for()
        page.get_by_text("Loading…").first.wait_for(state="detached")
        windows.append(page)
    running.kill()
    for page in windows:
        page.get_by_text("The service is away").wait_for(timeout=20_000)
        page.get_by_role("heading", level=1).wait_for()
    running.start()
    for page in windows:
        page.get_by_text("The service is away").wait_for(state="detached", timeout=30_000)
        # Requests sent while the service read the repository are repeated.
        page.get_by_role("alert").first.wait_for(state="detached", timeout=30_000)


def test_a_page_opened_during_an_outage_recovers(running, visit):
    visitor, page = enter(visit, running)
    visitor.go("machines")
    page.get_by_role("link", name="web01", exact=True).wait_for()
    running.kill()
    page.get_by_text("The service is away").wait_for(timeout=20_000)
    # Neither the code of that page nor its values are loaded yet.
    visitor.go("jobs")
    page.get_by_text("could not be loaded").wait_for()
    running.start()
    page.get_by_text("No job yet").wait_for(timeout=30_000)
    assert page.get_by_role("alert").count() == 0


def test_an_action_during_a_service_outage(running, visit):
    visitor, page = enter(visit, running)
    visitor.go("repository")
    page.get_by_text("none known").wait_for()
    running.kill()
    page.get_by_role("button", name="Verify all data").click()
    page.get_by_text("The service does not answer").first.wait_for()
    for _ in range(4):
        page.get_by_role("button", name="Verify all data").click()
    # More than three would cover a phone.
    page.get_by_text("2 more before these").wait_for()
    assert page.get_by_role("button", name="Close this message").count() == 3
    page.get_by_role("button", name="Close all").click()
    assert page.get_by_role("button", name="Close this message").count() == 0
    page.get_by_role("button", name="Verify all data").click()
    page.locator(".message").get_by_text("whether this was done is not known yet. It is not repeated").wait_for()
    running.start()
    page.get_by_text("The service is away").wait_for(state="detached", timeout=30_000)
    # The message about the outage is removed.
    page.get_by_role("button", name="Close this message").first.wait_for(state="detached", timeout=5_000)
    page.get_by_role("button", name="Verify all data").click()
    page.get_by_role("link", name="Follow it").wait_for()
    # The first click started nothing: it got an error.
    wait_until(lambda: [run["state"] for run in running.get("runs")["runs"]] == ["ok"], "the verify run")


def test_a_recovery_survives_a_service_outage(running, visit):
    visitor, page = enter(visit, running)
    visitor.go("machines/web01")
    page.get_by_role("button", name="Recover").click()
    drawer = page.get_by_role("dialog", name="Recover web01")
    drawer.get_by_role("radio", checked=True).first.wait_for()
    running.kill()
    drawer.get_by_role("button", name="Start").click()
    said = drawer.get_by_role("alert").get_by_text("whether this was done is not known yet")
    said.wait_for()
    assert "nothing is started twice" in said.inner_text() and "Nothing was started" not in said.inner_text()
    running.start()
    said.wait_for(state="detached", timeout=30_000)
