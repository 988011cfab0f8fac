"""The page of a session goes back to a time mark."""

import datetime
import re

import pytest

from support import browser
from support.nbdserver import wait_until

BLOCK = 4096


@pytest.fixture
def service(coldrise, live, tmp_path):
    """It has the session `trial`, of which each role sees the page."""
    with browser.served(coldrise, tmp_path) as service:
        yield service


def write(service, disk, number):
    """Writes a block that says its number, and waits for the mark that is the first to have it."""
    known = len(marks(service))
    disk.pwrite(bytes([number]) * BLOCK, 0)
    disk.flush()
    return wait_until(lambda: marks(service)[known:], "a mark")[0]


def marks(service):
    return service.get("sessions/trial/marks")["marks"]


def shown(mark):
    """Its time, as the page shows it."""
    return f"{datetime.datetime.fromtimestamp(mark['marked_at_ms'] // 1000, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def without_seals(route):
    """Answers with the points of backups only."""
    answer = route.fetch()
    page = answer.json()
    route.fulfill(response=answer, json={**page, "points": [point for point in page["points"] if point["kind"] == "backup"]})


def test_a_machine_is_recovered_from_a_chosen_second(service, coldrise, live, nbdkit, visit, tmp_path):
    with nbdkit().connect(live) as disk:
        made = [write(service, disk, number) for number in (1, 2, 3)]
        visitor = visit(service)
        visitor.log_in("operator")
        page = visitor.page
        visitor.go("sessions/trial")
        part = page.get_by_role("region", name="Time marks")
        part.get_by_role("heading", name="Go back to any second").wait_for()
        part.get_by_text(f"{shown(made[0])}, ").wait_for()
        part.get_by_text(" of at most ").wait_for()
        slider = part.get_by_role("slider", name="Time to go back to")
        # The newest one, until one is chosen.
        part.get_by_text(f"coldrise boot {made[2]['address']}", exact=True).wait_for()
        slider.press("Home")
        part.get_by_text(f"coldrise boot {made[0]['address']}", exact=True).wait_for()
        slider.press("ArrowRight")
        assert slider.get_attribute("aria-valuetext") == shown(made[1])
        # What comes while the page is open is shown, and leaves the choice.
        newest = write(service, disk, 4)
        part.locator(".ends").get_by_text(shown(newest).removesuffix(" UTC")).wait_for()
        assert slider.get_attribute("aria-valuetext") == shown(made[1])
        part.locator(".strip").click(position={"x": 2, "y": 30})
        assert slider.get_attribute("aria-valuetext") == shown(made[0])
        slider.press("ArrowRight")
        browser.look(visitor, "Go back to any second", "Recover from here")

        page.route("**/machines/web01/points", without_seals)
        part.get_by_role("button", name="Recover from here").click()
        drawer = page.get_by_role("dialog", name="Recover web01")
        drawer.get_by_role("alert").get_by_text("is not listed now").wait_for()
        assert drawer.get_by_role("radio").count() == 0, "no other point is offered in its place"
        page.unroute("**/machines/web01/points")
        drawer.get_by_role("button", name="Try again").click()
        chosen = drawer.get_by_role("radio", checked=True).first
        option = drawer.locator("label").filter(has_text="the chosen time mark")
        # With its second, in the time zone of the browser.
        option.get_by_text(re.compile(f":{shown(made[1])[-6:-4]}$")).wait_for()
        point = chosen.input_value()
        drawer.get_by_text(f"coldrise publish web01/{point}").or_(drawer.get_by_text(f"coldrise boot web01/{point}")).first.wait_for()
        browser.look(visitor, "the chosen time mark")
        drawer.get_by_role("button", name="Close", exact=True).last.click()

        watcher = visit(service)
        watcher.log_in("viewer")
        watcher.go("sessions/trial")
        part = watcher.page.get_by_role("region", name="Time marks")
        part.get_by_role("slider").press("Home")
        part.get_by_text(f"coldrise boot {made[0]['address']}", exact=True).wait_for()
        assert part.get_by_role("button", name="Recover").count() == 0
        assert not watcher.violations()
    coldrise.json("restore", f"web01/{point}/vda", tmp_path / "restored.raw")
    assert (tmp_path / "restored.raw").read_bytes()[:BLOCK] == bytes([2]) * BLOCK


def test_a_chosen_mark_stays_chosen_while_newer_ones_come(service, live, nbdkit, visit):
    """A list of 20 minutes that becomes longer with each answer."""
    lengths = []

    def answer(route):
        lengths.append(1200 + 60 * len(lengths))
        times = [1_795_000_000_000 + 1000 * second for second in range(lengths[-1])]
        route.fulfill(json={"session": "trial", "rule": "1s=1d", "interval_factor": 2, "stretches": [],
                            "marks": [{"address": f"live/trial@{ms}", "marked_at_ms": ms} for ms in times]})

    with nbdkit().connect(live):
        visitor = visit(service)
        visitor.log_in("viewer")
        page = visitor.page
        page.route("**/sessions/trial/marks", answer)
        visitor.go("sessions/trial")
        part = page.get_by_role("region", name="Time marks")
        part.get_by_text("Intervals are 2 times as long as the rule says").wait_for()
        slider = part.get_by_role("slider")
        slider.press("Home")
        chosen = slider.get_attribute("aria-valuetext")
        first = int(slider.get_attribute("max"))
        assert first >= 600
        wait_until(lambda: int(slider.get_attribute("max")) >= first + 60, "newer marks")
        assert slider.get_attribute("aria-valuetext") == chosen
        part.get_by_label("Show").select_option("all marks")
        slider.press("Home")
        assert slider.get_attribute("aria-valuetext") == shown({"marked_at_ms": 1_795_000_000_000})


def test_a_session_without_marks_says_why(service, coldrise, point, visit):
    coldrise.json("publish", point, "--name", "plain", "--marks", "off")
    visitor = visit(service)
    visitor.log_in("viewer")
    visitor.go("sessions/trial")
    visitor.page.get_by_text("No marks yet: they are made while a front end serves the session and clients write.").wait_for()
    assert visitor.page.get_by_role("slider").count() == 0
    assert not visitor.violations()
    with visitor.page.expect_response("**/sessions/plain/marks"):
        visitor.go("sessions/plain")
    visitor.page.get_by_role("heading", name="plain").wait_for()
    assert visitor.page.get_by_role("region", name="Time marks").count() == 0
