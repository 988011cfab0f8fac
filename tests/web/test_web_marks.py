"""The page of a session goes back to a time mark."""

import datetime
import re

import pytest

from support import browser
from support.nbdserver import wait_until
from support.ports import free_port

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

        before = coldrise.json("list")
        part.get_by_role("button", name="Recover from here").click()
        drawer = page.get_by_role("dialog", name="Recover web01")
        option = drawer.locator("label").filter(has_text="the chosen time mark")
        # With its second, in the time zone of the browser.
        option.get_by_text(re.compile(f":{shown(made[1])[-6:-4]}$")).wait_for()
        assert option.get_by_role("radio").is_checked()
        drawer.get_by_text(f"coldrise boot {made[1]['address']}").wait_for()
        drawer.get_by_text("A restore point of the time mark is made first, with this step.").wait_for()
        browser.look(visitor, "the chosen time mark")
        drawer.get_by_role("button", name="Close", exact=True).last.click()
        drawer.wait_for(state="detached")
        assert coldrise.json("list") == before, "a closed form leaves nothing"
        # A download is of a point, which is made with the click.
        part.get_by_role("button", name="Recover from here").click()
        drawer.get_by_label("Download").check()
        drawer.get_by_label("Format").select_option("raw")
        with page.expect_download() as downloaded:
            drawer.get_by_role("button", name="Download").click()
        downloaded.value.save_as(tmp_path / "downloaded.raw")
        assert (tmp_path / "downloaded.raw").read_bytes()[:BLOCK] == bytes([2]) * BLOCK
        assert len(coldrise.json("list")["machines"][0]["points"]) == len(before["machines"][0]["points"]) + 1
        # Served: the first run publishes the mark as a session.
        part.get_by_role("button", name="Recover from here").click()
        drawer.get_by_label("Serve over NBD").check()
        drawer.get_by_label("Session name").fill("before")
        drawer.get_by_label("Listen at").fill(f"127.0.0.1:{free_port()}")
        drawer.get_by_role("button", name="Start").click()
        page.get_by_role("heading", name="before").wait_for()
        running = lambda: service.get("runs?state=running")["runs"]
        [server] = wait_until(lambda: [run for run in running() if run["plan"]["command"].startswith("serve")], "the server")
        service.call("POST", f"runs/{server['id']}/cancel")

        watcher = visit(service)
        watcher.log_in("viewer")
        watcher.go("sessions/trial")
        part = watcher.page.get_by_role("region", name="Time marks")
        part.get_by_role("slider").press("Home")
        part.get_by_text(f"coldrise boot {made[0]['address']}", exact=True).wait_for()
        assert part.get_by_role("button", name="Recover").count() == 0
        assert not watcher.violations()
    coldrise.json("restore", "live/before/vda", tmp_path / "restored.raw")
    assert (tmp_path / "restored.raw").read_bytes()[:BLOCK] == bytes([2]) * BLOCK


def test_a_chosen_mark_stays_chosen_while_newer_ones_come(service, live, nbdkit, visit):
    """A list of 20 minutes that becomes longer with each answer."""
    lengths = []

    def answer(route):
        lengths.append(1200 + 60 * len(lengths))
        times = [1_795_000_000_000 + 1000 * second for second in range(lengths[-1])]
        route.fulfill(json={"session": "trial", "rule": "1s=1d", "reduced_rule": "2s=1d", "stretches": [],
                            "marks": [{"address": f"live/trial@{ms}", "marked_at_ms": ms} for ms in times]})

    with nbdkit().connect(live):
        visitor = visit(service)
        visitor.log_in("viewer")
        page = visitor.page
        page.route("**/sessions/trial/marks", answer)
        visitor.go("sessions/trial")
        part = page.get_by_role("region", name="Time marks")
        part.get_by_text("Marks are kept by 2s=1d now").wait_for()
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
