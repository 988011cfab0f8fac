"""Machines, a machine's timeline, Recover: on a small real repository."""

import datetime
import re
import zoneinfo

import pytest

from support import browser, site
from support.service import Coldrised


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The site and its service; tests of this file change little."""
    folder = tmp_path_factory.mktemp("site")
    made = site.Site(folder)
    made.web = made.back_up("web01", [24 * day + 1 for day in range(6)])
    made.back_up("db01", [30, 6])
    made.back_up("old01", [24 * 9])
    made.check_boot(made.web[-2])
    made.sealed = made.seal(made.web[-3], "patch")
    work = folder / "service"
    work.mkdir()
    with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file,
                   options=["--web", str(browser.PAGE)]) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        service.post("users", {"name": "auditor", "role": "viewer", "password": browser.PASSWORD})
        service.post("jobs", {"name": "nightly", "kind": "backup", "machines": ["web01", "old01"], "age_limit_hours": 48,
                              "disks": {"vda": f"raw:{folder}/{{machine}}.raw"}, "schedule": ["*-*-* 04:00"],
                              "retention": {"keep_last": 3}})
        made.service = service
        yield made


def enter(visit, place, user="admin", **options):
    visitor = visit(place.service, **options)
    visitor.log_in(user)
    return visitor, visitor.page


def test_machines_by_state_with_search_and_keys(place, visit):
    visitor, page = enter(visit, place)
    asked = []
    page.on("request", lambda request: asked.extend(re.findall(r"/machines/(\w+)/points\?limit", request.url)))
    visitor.go("machines")
    rows = page.get_by_role("list", name="Machines").get_by_role("listitem")
    page.get_by_role("list", name="Machines").get_by_text("old", exact=True).wait_for()
    assert [row.get_by_role("link").inner_text() for row in rows.all()] == ["old01", "db01", "web01"], "the worst first"
    assert rows.nth(2).get_by_role("img").get_attribute("aria-label") == "last 7 points: 1 verified, 6 not booted"
    page.get_by_text("One machine is in no job").wait_for()
    site = page.get_by_role("list", name="The whole site")
    # db01 is in no job, old01 is older than its limit. Of web01 one point was booted just now.
    site.get_by_text("1 of 3 machines protected").wait_for()
    site.get_by_text("1 of 3 machines booted within 7 days").wait_for()
    site.get_by_text(re.compile("oldest point: old01, 9 d")).wait_for()
    site.get_by_text(re.compile("iB free$")).wait_for()
    site.get_by_text(re.compile("alarms? to look at")).wait_for()
    assert site.locator(".good").count() == 0, "green only if it holds for all"
    assert sorted(asked) == ["db01", "old01", "web01"], "each strip is asked for once"
    page.get_by_text("3 machines. Press").wait_for()
    # Keys work immediately; the search has the focus only after its key. Enter opens the only row that is left.
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    drawer = page.get_by_role("dialog", name="Recover old01")
    drawer.get_by_role("radio", checked=True).first.wait_for()
    assert drawer.get_by_role("button", name="Start").evaluate("button => button === document.activeElement")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("x")
    page.get_by_text("No machine matches").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("3 machines. Press").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("WEB")
    page.get_by_text("1 of 3 machines. Press").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="web01").wait_for()
    page.keyboard.press("/")
    page.get_by_role("heading", name="Machines").wait_for()
    assert page.get_by_role("searchbox").evaluate("field => field === document.activeElement")


def test_the_timeline_is_used_by_keys(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("machines/web01")
    timeline = page.get_by_role("slider", name="Restore point")
    timeline.wait_for()
    assert timeline.get_attribute("aria-valuemax") == "7"
    timeline.focus()
    page.keyboard.press("Home")
    panel = page.get_by_label("Chosen point")
    panel.get_by_text(place.web[0]).wait_for()
    panel.get_by_text("removes it").wait_for()
    first = place.web[0].split("/")[1]
    page.wait_for_url(f"**/#/machines/web01/{first}")
    page.keyboard.press("End")
    panel.get_by_text("sealed session, session patch").or_(panel.get_by_text(place.web[-1])).first.wait_for()
    # The address follows a moment later: it must not replace the next one.
    page.wait_for_url(lambda url: not url.endswith(first))
    verified = place.web[-2].split("/")[1]
    visitor.go(f"machines/web01/{verified}")
    page.get_by_label("Evidence").get_by_text("web01 login").first.wait_for()
    assert "boot verified" in timeline.get_attribute("aria-valuetext")
    picture = page.get_by_role("img", name="The machine's screen at the end of the boot check")
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300


def test_the_recover_form_is_prefilled(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("machines/web01")
    page.get_by_role("button", name="Recover").click()
    drawer = page.get_by_role("dialog", name="Recover web01")
    chosen = drawer.get_by_role("radio", checked=True)
    chosen.first.wait_for()
    assert chosen.first.get_attribute("value") == place.web[-2].split("/")[1], "the newest verified point"
    drawer.get_by_text("not yet booted").first.wait_for()
    command = drawer.locator("code")
    assert f"coldrise boot {place.web[-2]}" in command.inner_text() and "--network isolated" in command.inner_text()
    drawer.get_by_label("Memory, MiB").fill("512")
    drawer.get_by_label("Connected").check()
    drawer.get_by_text("both act in your network").wait_for()
    assert "--memory 512M" in command.inner_text() and "--network user" in command.inner_text()
    page.keyboard.press("Escape")
    drawer.wait_for(state="detached")


def test_a_boot_check_is_not_a_recovery(place, visit):
    """The session of a boot check that runs: its machine does not run from the backup."""
    visitor, page = enter(visit, place)
    place.coldrise.publish(place.web[0], "web01-throwaway")

    def check(route):
        listing = route.fetch().json()
        for session in listing["sessions"]:
            session["is_served"] = session["session"] == "web01-throwaway"
        route.fulfill(json=listing)

    page.route("**/api/v1/sessions", check)
    try:
        visitor.go("machines")
        page.get_by_label("Machines").get_by_text("web01").wait_for()
        page.get_by_role("button", name="2 backed up").wait_for()
        visitor.go("machines/web01")
        page.get_by_text("Session patch is published").wait_for()
        # Its one disk, not the sum over all points.
        page.get_by_text("disks of 1.0 MiB").wait_for()
        assert page.get_by_text("running from backup").or_(page.get_by_text("web01-throwaway")).count() == 0
    finally:
        # The page repeats requests at any time: the current answer must not overlap with the end of the window.
        page.unroute_all(behavior="wait")
        place.coldrise.json("unpublish", "web01-throwaway", "--discard")


def test_the_chosen_point_is_recovered(place, visit):
    visitor, page = enter(visit, place)
    drawer = page.get_by_role("dialog", name="Recover web01")
    base = place.web[-3]
    for address in (place.web[1], place.sealed):
        visitor.go(f"machines/{address}")
        page.get_by_label("Chosen point").get_by_text(address, exact=True).wait_for()
        page.get_by_role("button", name="Recover").click()
        chosen = drawer.get_by_role("radio", checked=True).first
        chosen.wait_for()
        assert chosen.get_attribute("value") == address.split("/")[1]
        assert f"coldrise boot {address} " in drawer.locator("code").inner_text()
        page.keyboard.press("Escape")
        drawer.wait_for(state="detached")
    # A sealed session shows when it was sealed, not the time of the point that it began from.
    panel = page.get_by_label("Chosen point")
    stored = next(point for point in place.service.get("machines/web01/points")["points"] if point["address"] == place.sealed)
    moment = datetime.datetime.fromtimestamp(stored["created_at_ms"] / 1000, zoneinfo.ZoneInfo("Europe/Berlin"))
    assert panel.get_by_role("heading", name=f"{moment:%H:%M}").count() == 1
    place.coldrise.json("quarantine", base)
    try:
        visitor.go(f"machines/{base}")
        panel.get_by_text("set aside by hand").wait_for()
        page.get_by_role("button", name="Recover").click()
        drawer.get_by_text(f"{base} is in quarantine and cannot be recovered").wait_for()
        assert base.split("/")[1] not in [radio.get_attribute("value") for radio in drawer.get_by_role("radio").all()]
    finally:
        place.coldrise.json("release", base)


def test_unknown_addresses_show_an_error(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("machines/none01")
    page.get_by_role("alert").first.wait_for()
    visitor.go("nowhere")
    page.get_by_role("heading", name="No such page").wait_for()
    # Names that every object of JavaScript has, and a path that a browser would resolve.
    for address in ("constructor", "__proto__"):
        visitor.go("about")
        visitor.go(address)
        page.get_by_role("heading", name="No such page").wait_for()
    visitor.go("machines/../../jobs")
    page.get_by_role("alert").get_by_text("There is no machine “..”").first.wait_for()
    assert page.get_by_text("Loading…").count() == 0


def test_a_machine_without_a_job_links_to_its_form(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("machines/db01")
    page.get_by_role("link", name="Make a job for it").click()
    assert page.get_by_role("dialog", name="New job").get_by_role("textbox", name="Machines").input_value() == "db01"


def test_a_viewer_gets_no_advice(place, visit):
    visitor, page = enter(visit, place, "auditor")
    visitor.go("machines/db01")
    page.get_by_text("no job backs up db01").wait_for()
    assert page.get_by_text("Add it to a job").count() == 0
    # All its points may be of one day.
    for machine in ("old01", "db01"):
        visitor.go(f"machines/{machine}")
        page.get_by_role("heading", level=1, name=machine).wait_for()
        span = page.locator(".timeline .bar p").inner_text().split(" – ")
        assert len(span) == len(set(span)), span


def test_a_viewer_starts_nothing(place, visit):
    visitor, page = enter(visit, place, "auditor")
    visitor.go("machines/web01")
    page.get_by_label("Chosen point").get_by_text("Next prune").wait_for()
    for name in ("Recover", "Verify boot", "Protect", "Forget…"):
        assert page.get_by_role("button", name=name).count() == 0, name


def test_every_page_is_accessible(place, visit):
    visitor, page = enter(visit, place)
    for address in ("machines", "machines/web01", "activity", "jobs", "jobs?new", "repository", "access", "notifications", "about",
                    "compare/" + "/".join(address.replace("/", "%2F") for address in place.web[-2:])):
        print(address)
        page.goto("about:blank")
        visitor.go(address)
        page.get_by_role("heading", level=1).wait_for()
        page.get_by_text("Loading…").last.wait_for(state="detached")
        browser.look(visitor)


def test_the_newest_is_the_newest_by_time(place, visit):
    """A sealed point's time is that of its seal, not of its name."""
    visitor, page = enter(visit, place)
    visitor.go("machines/web01")
    page.get_by_text(re.compile(r"last one \d+ (s|min) ago")).wait_for()
    page.get_by_role("button", name="Recover").click()
    options = page.get_by_role("dialog", name="Recover web01").locator("label", has=page.locator("input[name=point]"))
    options.filter(has_text=place.sealed).get_by_text(re.compile("^newest, ")).wait_for()
    options.filter(has_text=place.web[-1]).get_by_text(re.compile("^newest backup, ")).wait_for()


def test_choices_are_stable_while_the_drawer_is_open(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("machines/db01")
    page.get_by_role("button", name="Recover").click()
    drawer = page.get_by_role("dialog", name="Recover db01")
    chosen = drawer.get_by_role("radio", checked=True).first
    chosen.wait_for()
    before = chosen.get_attribute("value")
    [newer] = place.back_up("db01", [2])
    drawer.get_by_text("Points have come").wait_for()
    assert chosen.get_attribute("value") == before and drawer.get_by_text(newer).count() == 0
    # New points are shown on request, and the user's choice is kept.
    drawer.get_by_role("button", name="Show them").click()
    drawer.get_by_text(newer).wait_for()
    assert chosen.get_attribute("value") == before
    assert f"coldrise boot db01/{before}" in drawer.locator("code").inner_text()
    drawer.get_by_text("Points have come").wait_for(state="detached")
