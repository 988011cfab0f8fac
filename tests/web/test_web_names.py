"""Display names of machines on the page: shown with the address everywhere, found by the search, and always escaped."""

import re

import pytest

from support import browser, site
from support.nbdserver import wait_until
from support.service import Coldrised

HTML = "<img src=x onerror=alert(1)><script>alert(2)</script> & \"'"
LONG = "Warenwirtschaft " + "W" * 200
RIGHT = "خادم الويب 01"
CONFIGURATION = "<domain type='kvm'><name>{name}</name><title>{title}</title><memory unit='MiB'>64</memory></domain>"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Machines with a usual name, HTML, a long one, one from right to left, and none; a service."""
    folder = tmp_path_factory.mktemp("names")
    made = site.Site(folder)
    titles = {"vm17": "Web Server 01", "vm18": HTML.replace("&", "&amp;").replace("<", "&lt;"), "vm19": LONG, "vm20": RIGHT, "db01": "db01"}
    for machine, title in titles.items():
        made.back_up(machine, [24, 2], configuration_text=CONFIGURATION.format(name=machine, title=title))
    made.coldrise.publish("vm19/latest", "trial")
    work = folder / "service"
    work.mkdir()
    with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file, options=["--web", str(browser.PAGE)]) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        service.post("jobs", {"name": "nightly", "kind": "verify", "machines": ["web server*", "Waren*"]})
        service.post("jobs/nightly/start", {}, expected=(202,))
        wait_until(lambda: not service.get("queue")["runs"], "the end of the runs")
        made.service = service
        yield made


def enter(visit, place, **options):
    visitor = visit(place.service, **options)
    visitor.log_in()
    return visitor, visitor.page


def test_lists_show_and_find_either_name(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("machines")
    rows = page.get_by_role("list", name="Machines").get_by_role("listitem")
    page.get_by_text("5 machines. Press").wait_for()
    named = rows.filter(has_text="Web Server 01")
    assert named.get_by_role("link").inner_text().split("\n") == ["Web Server 01", "vm17"]
    search = page.get_by_label("Search machines")
    for text, found in [("web server", ["vm17"]), ("VM17", ["vm17"]), ("waren vm19", ["vm19"]), ("<img", ["vm18"]), ("خادم", ["vm20"]),
                        ("db", ["db01"])]:
        search.fill(text)
        page.get_by_text(f"{len(found)} of 5 machines. Press").wait_for()
        assert [row.get_by_role("link").get_attribute("href") for row in rows.all()] == [f"#/machines/{name}" for name in found], text
    search.fill("vm17")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Web Server 01", exact=True).wait_for()
    page.get_by_text("vm17", exact=True).wait_for()
    page.get_by_role("button", name="Recover").click()
    page.get_by_role("dialog", name=re.compile(r"Web Server 01.*\(vm17\)")).wait_for()
    page.keyboard.press("Escape")
    visitor.go("activity")
    page.get_by_role("link", name=re.compile("Web Server 01 vm17")).first.wait_for()
    visitor.go("sessions/trial")
    page.get_by_role("link", name=re.compile("Warenwirtschaft.*vm19.20")).first.wait_for()


def test_a_new_name_appears_without_a_reload(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("machines/db01")
    page.get_by_role("heading", name="db01", exact=True).wait_for()
    place.coldrise.json("backup", "db01", f"vda=raw:{place.folder}/db01.raw", "--display-name", "Datenbank")
    page.get_by_role("heading", name="Datenbank", exact=True).wait_for()
    place.coldrise.json("backup", "db01", f"vda=raw:{place.folder}/db01.raw", "--display-name", "db01")
    page.get_by_role("heading", name="db01", exact=True).wait_for()


def test_names_are_text(place, visit):
    visitor, page = enter(visit, place)
    for address in ("machines", "machines/vm18", "activity", "jobs", "repository", "notifications"):
        visitor.go(address)
        page.locator("h1").first.wait_for()
        page.wait_for_timeout(400)
        assert page.locator("script:not([src]), img[src='x']").count() == 0
    visitor.go("machines/vm18")
    page.get_by_role("heading", name=HTML).wait_for()
    page.get_by_role("button", name="Recover").click()
    page.get_by_role("dialog", name=re.compile("onerror=alert")).wait_for()
    assert visitor.complaints == []


@pytest.mark.parametrize("address", ["machines", "machines/vm19", "activity", "jobs", "repository", "sessions/trial", "notifications"])
def test_long_names_fit(place, visit, address):
    visitor, page = enter(visit, place)
    visitor.go(address)
    page.locator("h1").first.wait_for()
    page.wait_for_timeout(400)
    browser.look(visitor)
    if address == "machines/vm19":
        page.set_viewport_size({"width": 390, "height": 844})
        heading = page.get_by_role("heading", name="Warenwirtschaft")
        assert heading.bounding_box()["height"] > 60, "it wraps"
        page.get_by_role("button", name="Recover").click()
        drawer = page.get_by_role("dialog")
        drawer.wait_for()
        page.wait_for_function("() => document.getAnimations().every((each) => each.playState !== 'running')")
        assert drawer.evaluate("drawer => drawer.scrollWidth <= drawer.clientWidth")
        close = drawer.get_by_label("Close").bounding_box()
        assert close["x"] + close["width"] <= 390
