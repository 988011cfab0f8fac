"""Damage that a verify finds is shown on all pages, until a verify finds none."""

import random

import pytest
from test_cli_repair import damage

from support import browser, site
from support.nbdserver import wait_until
from support.service import Coldrised


@pytest.fixture
def place(tmp_path):
    """A machine with a point and a session on it, and another machine."""
    made = site.Site(tmp_path)
    made.disk = tmp_path / "web01.raw"
    made.disk.write_bytes(random.Random(5).randbytes(8 << 20))
    made.point = made.coldrise.backup("web01", vda=made.disk)
    made.back_up("db01", [1])
    made.coldrise.publish(made.point, "trial")
    work = tmp_path / "service"
    work.mkdir()
    with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file,
                   options=["--web", str(browser.PAGE)]) as made.service:
        made.service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        yield made


def verify(visitor):
    """Verifies everything by the page's button; returns what the page says at the end."""
    visitor.go("repository")
    visitor.page.get_by_role("button", name="Verify all data").click()
    said = visitor.page.get_by_text("Verify: ").filter(has_not_text="started")
    said.wait_for(timeout=60_000)
    return said.inner_text()


def test_damage_is_shown_until_a_verify_finds_none(place, visit):
    service, visitor = place.service, visit(place.service)
    visitor.log_in()
    page = visitor.page
    damage(place.coldrise, 3)
    assert "Verify: 3 chunks damaged, affects web01, live/trial" in verify(visitor)
    see_the_damage(visitor, place)
    # It is an alarm, which a new start of the service does not forget.
    service.kill()
    service.start()
    page.reload()
    see_the_damage(visitor, place)

    # The run shows the data that verify has read; the run before it is not called killed.
    run = next(run["id"] for run in service.get("runs")["runs"] if run["plan"]["command"] == "verify")
    visitor.go(f"runs/{run}")
    alert = page.get_by_role("alert")
    alert.get_by_text("3 chunks damaged, affects").wait_for()
    alert.get_by_role("list", name="Affected disks").get_by_role("link", name=f"{place.point}/vda").click()
    page.get_by_role("button", name="Recover").click()
    drawer = page.get_by_role("dialog", name="Recover web01")
    drawer.get_by_text("The chosen point is affected.").wait_for()
    assert not visitor.violations()

    # The next backup heals what a repair has noted; the verify after it ends the alarm.
    assert place.coldrise.run("repair").returncode == 1
    place.coldrise.backup("web01", vda=place.disk)
    page.keyboard.press("Escape")
    page.reload()
    assert "Verify: done." in verify(visitor)
    page.get_by_text("none known").wait_for()
    wait_until(lambda: not [alarm for alarm in service.get("alarms?active=true") if alarm["topic"] == "damage"], "no alarm is left")


def see_the_damage(visitor, place):
    page = visitor.page
    visitor.go("repository")
    page.get_by_text("see above").wait_for(timeout=30_000)
    page.locator(".note", has_text="the verify found damage: 3 chunks").get_by_role("link", name="web01").wait_for()
    page.get_by_text(f"affected: {place.point}/vda").wait_for()
    assert page.get_by_text("none known").count() == 0
    visitor.go("machines")
    rows = page.get_by_role("list", name="Machines").get_by_role("listitem")
    rows.filter(has_text="web01").get_by_text("damaged", exact=True).wait_for()
    assert rows.filter(has_text="db01").get_by_text("damaged", exact=True).count() == 0
    visitor.go("machines/web01")
    page.get_by_text(f"affected: {place.point}/vda").wait_for()
