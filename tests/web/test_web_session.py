"""The page of a session: its machine's keyboard, and its messages when the machine or the session is gone."""

import os
import re
import signal

import pytest

from support import browser, site
from support.nbdserver import Nbdkit, wait_until
from support.service import Coldrised
from support.stopped import stop

# Longer than the list of sessions at the edge is wide.
SESSION = "used-" + "u" * 50
IS_FOCUSED = "element => element === document.activeElement"


@pytest.fixture
def place(tmp_path):
    made = site.Site(tmp_path)
    [made.point] = made.back_up("web01", [1])
    work = tmp_path / "service"
    work.mkdir()
    with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file,
                   options=["--web", str(browser.PAGE)]) as made.service:
        made.service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        try:
            yield made
        finally:
            for run in made.service.get("runs?state=running")["runs"]:
                made.service.call("POST", f"runs/{run['id']}/cancel", {})
            wait_until(lambda: not made.service.get("runs?state=running")["runs"], "the machine ends")


OVERLAP = """row => { const [a, b] = ['.state', '.age'].map(name => row.querySelector(name).getBoundingClientRect());
const badge = row.querySelector('.state > *').getBoundingClientRect();
return Math.max(a.right, badge.right) > b.left; }"""


def test_a_phone_shows_all_pages_and_a_running_machine_with_its_last_boot(place, visit):
    place.check_boot(place.point)
    place.service.post("runs", {"kind": "boot", "address": place.point, "session": "trial", "memory_mib": 64, "cpus": 1})
    visitor = visit(place.service, viewport={"width": 390, "height": 844})
    visitor.log_in()
    page = visitor.page
    visitor.go("machines")
    row = page.get_by_role("list", name="Machines").get_by_role("listitem")
    row.get_by_text("running from backup").wait_for()
    row.get_by_text("booted:").wait_for()
    assert not row.evaluate(OVERLAP)
    links = page.get_by_role("navigation", name="Pages").get_by_role("listitem").get_by_role("link").all()
    boxes = [link.bounding_box() for link in links]
    assert len(boxes) > 8 and all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes[:8]), boxes
    # The audit log records the action and the request.
    visitor.go("access")
    log = page.get_by_role("table").filter(has_text="started a boot")
    log.get_by_text(f"started a boot of {place.point} (isolated)").wait_for()
    log.get_by_text("added user admin").wait_for()
    request = log.get_by_role("row").filter(has_text="started a boot")
    assert not request.get_by_text("POST /api/v1/runs").is_visible()
    request.get_by_text("Request").click()
    assert request.get_by_text("POST /api/v1/runs").is_visible()


def test_the_life_of_a_session(place, visit):
    service, visitor = place.service, visit(place.service)
    visitor.log_in()
    page = visitor.page
    visitor.go(f"sessions/{SESSION}")
    page.get_by_text("There is no session").wait_for()
    assert page.get_by_text("it was ended").count() == 0, "nobody knows that"
    run = service.post("runs", {"kind": "boot", "address": place.point, "session": SESSION, "memory_mib": 64})["run"]
    page.locator("dt", has_text="Published").wait_for(timeout=60_000)
    assert page.get_by_text("in the future").count() == 0
    entry = page.get_by_role("navigation", name="Pages").get_by_role("link", name=SESSION)
    assert entry.evaluate("link => link.getBoundingClientRect().right <= link.closest('nav').getBoundingClientRect().right")
    # Default names differ in their ends.
    assert entry.get_by_text(SESSION, exact=True).evaluate("name => name.scrollWidth <= name.clientWidth")
    page.get_by_text("To end the session, power the machine off first.").wait_for()
    page.get_by_role("region", name="How its disks are reached").get_by_text("The machine that runs here has these disks").wait_for()
    use_the_keyboard(page)
    assert not visitor.violations()
    take_no_other_for_its_own(place, page)

    page.get_by_role("button", name="Type text").click()
    dialog = page.get_by_role("dialog", name="Type text")
    dialog.get_by_label("Text").fill("ж")
    dialog.get_by_role("button", name="Type", exact=True).click()
    dialog.get_by_role("alert").wait_for()
    dialog.get_by_role("button", name="Close", exact=True).last.click()

    # This machine ignores the button, as some do.
    page.get_by_role("button", name="Shut down").click()
    page.get_by_role("status").get_by_text("it still runs").wait_for()
    assert page.locator(".message").count() == 0, "it is said once"
    find_the_machine_without_the_repository(place, page)

    # The address names no run; the page finds the one that was killed, also when it is opened later.
    process = service.get(f"runs/{run}")["plan"]["who"]["pid"]
    lose_the_disks(place, page, process)
    os.kill(process, signal.SIGKILL)
    page.get_by_text("lost", exact=True).wait_for(timeout=30_000)
    page.reload()
    page.get_by_text("lost", exact=True).wait_for()
    page.get_by_text("published, not in use").wait_for()
    place.coldrise.run("unpublish", SESSION, "--discard")
    page.get_by_text("it was ended").wait_for()
    page.locator(".note").get_by_role("link", name="web01").wait_for()
    assert page.get_by_role("button", name=re.compile("Seal|Discard")).count() == 0
    assert page.get_by_text("published, not in use").count() == 0


def find_the_machine_without_the_repository(place, page):
    repository = place.coldrise.repository
    away = repository.with_name("away")
    repository.rename(away)
    try:
        page.reload()
        page.get_by_text("the repository does not tell of the session now").wait_for()
        page.get_by_role("link", name="its run").wait_for()
        page.get_by_role("button", name="Power off").wait_for()
    finally:
        away.rename(repository)
    # It refreshes automatically.
    page.locator("dt", has_text="Published").wait_for()
    assert page.get_by_text("does not tell of the session").count() == 0


def take_no_other_for_its_own(place, page):
    """A name in use never opens another machine's keyboard: neither from the dialog nor by an address."""
    service = place.service
    before = {run["id"] for run in service.get("runs")["runs"]}
    page.goto("/#/machines/web01")
    page.get_by_role("button", name="Recover").click()
    drawer = page.get_by_role("dialog", name="Recover web01")
    drawer.get_by_label("Session name").fill(SESSION)
    drawer.get_by_role("button", name="Start").click()
    drawer.get_by_role("alert").get_by_text(f"there is already a session {SESSION}: choose another name").wait_for()
    assert "/machines/" in page.url and {run["id"] for run in service.get("runs")["runs"]} == before
    later = service.post("runs", {"kind": "verify", "address": place.point})["run"]
    wait_until(lambda: service.call("GET", f"runs/{later}").status == 200, "the later run")
    page.goto(f"/#/sessions/{SESSION}?run={later}")
    page.get_by_text("it is not the one that was to be started").wait_for()
    assert page.get_by_role("application").count() == 0 and page.get_by_role("button", name=re.compile("Seal|Power")).count() == 0
    page.get_by_role("link", name="open this session of web01").click()
    page.get_by_role("button", name="Power off").wait_for()


def lose_the_disks(place, page, process):
    """The server of the disks is killed. The run's process, which would end the machine, is stopped, and stays so."""
    try:
        stop(process)
        os.kill(place.service.get(f"sessions/{SESSION}")["server"]["process"], signal.SIGKILL)
        page.get_by_text("nothing serves its disks now").wait_for(timeout=30_000)
        assert page.get_by_text("running", exact=True).count() == 0
        for name in ("Seal and end", "Discard…"):
            assert page.get_by_role("button", name=name).is_disabled(), name
    except BaseException:
        os.kill(process, signal.SIGCONT)
        raise


def use_the_keyboard(page):
    """The screen captures keys only on request, and releases them."""
    screen = page.get_by_role("application", name="Screen of the machine")
    canvas = screen.locator("canvas")
    canvas.wait_for(timeout=60_000)
    page.get_by_text("Connecting to the screen").wait_for(state="detached")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    page.keyboard.press("Escape")
    canvas.click()
    assert canvas.evaluate(IS_FOCUSED)
    page.keyboard.press("?")
    assert page.get_by_role("dialog").count() == 0
    # Keys with both are the machine's.
    page.keyboard.press("Control+Alt+F2")
    assert canvas.evaluate(IS_FOCUSED)
    page.keyboard.press("Control+Alt")
    wait_until(lambda: screen.evaluate(IS_FOCUSED), "the page has the keyboard")
    page.keyboard.press("Enter")
    assert canvas.evaluate(IS_FOCUSED)
    page.keyboard.press("Control+Alt")
    wait_until(lambda: screen.evaluate(IS_FOCUSED), "the page has the keyboard")
    page.keyboard.press("Tab")
    assert not screen.evaluate(IS_FOCUSED) and not canvas.evaluate(IS_FOCUSED)


def test_a_seal_without_writes_asks_for_confirmation(place, visit, tmp_path):
    place.coldrise.publish(place.point, "quiet")
    visitor = visit(place.service)
    visitor.log_in()
    page = visitor.page

    def points():
        return len(place.service.get("machines/web01/points")["points"])

    visitor.go("sessions/quiet")
    page.get_by_text(re.compile("^0 B since the publish")).wait_for()
    page.get_by_role("button", name="Seal", exact=True).click()
    dialog = page.get_by_role("dialog", name="Seal although nothing was captured?")
    dialog.get_by_role("button", name="Do not seal").click()
    dialog.wait_for(state="detached")
    assert points() == 1 and not place.service.get("runs")["runs"]
    page.get_by_role("button", name="Seal", exact=True).click()
    dialog.get_by_role("button", name="Seal anyway").click()
    wait_until(lambda: points() == 2, "the point")
    with Nbdkit(place.coldrise, tmp_path / "nbdkit") as server, server.connect("live/quiet/vda") as disk:
        disk.pwrite(b"w" * 4096, 0)
        disk.flush()
    page.get_by_role("button", name="Seal", exact=True).click()
    wait_until(lambda: points() == 3, "the point")
    assert page.get_by_role("dialog").count() == 0
    # Nothing is lost: earlier captured writes are in the point.
    page.get_by_text(re.compile(r"^0 B since the last seal, \d+ s ago")).wait_for()
    visitor.go("machines/web01")
    page.get_by_text("with 0 B captured since the last seal").wait_for()


def test_a_failed_start_is_shown(place, visit):
    visitor = visit(place.service)
    visitor.log_in()
    run = place.service.post("runs", {"kind": "boot", "address": place.point, "session": "none", "memory_mib": 999_999})["run"]
    visitor.go(f"sessions/none?run={run}")
    visitor.page.get_by_text("failed", exact=True).wait_for(timeout=30_000)
    visitor.page.get_by_text("The session was not published.").wait_for()
    assert visitor.page.get_by_text("is being published").count() == 0
