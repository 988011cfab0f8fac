"""The pages of a machine that runs elsewhere, and of the session that follows it."""

import datetime
import re
import signal

import pytest

from support import browser
from support.nbdserver import wait_until
from support.protection import SESSION, Protections, marks
from support.running import MIB, Machine
from test_backup_running import Agent

MINUTE_MS = 60_000


@pytest.fixture
def running(tmp_path):
    """A paused machine: it writes what the test writes."""
    machine = Machine(tmp_path)
    yield machine
    machine.close()


@pytest.fixture
def protect(coldrise, own_tmp):
    started = Protections(coldrise)
    yield started
    started.end()


@pytest.fixture
def service(coldrise, tmp_path):
    with browser.served(coldrise, tmp_path) as service:
        yield service


def write(coldrise, running, number):
    """Writes as the guest, and returns the mark that has it."""
    known = len(marks(coldrise))
    running.write("vda", f"write -P {number} 1M 64k")
    return wait_until(lambda: marks(coldrise)[known:], "a mark")[0]


def shown(mark):
    """Its time, as the page shows it: that of its address."""
    return re.sub(r".*@(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z$", r"\1-\2-\3 \4:\5:\6 UTC", mark["address"])


def test_the_session_shows_how_far_it_follows(service, coldrise, running, protect, visit):
    agent = Agent(running.folder / "agent")
    source = f"qmp:{running.monitor}"
    protection = protect("--from", source, "--agent", agent.listener.getsockname(), "--consistent-every", "1s")
    protection.next_round()
    # Not each round is consistent, as its time is not exactly a second after the last one.
    newest = next(mark for mark in (write(coldrise, running, number) for number in range(1, 60)) if mark.get("is_consistent"))
    visitor = visit(service)
    visitor.log_in("operator")
    page = visitor.page
    visitor.go(f"sessions/{SESSION}")
    page.get_by_text(re.compile(rf"^Follows {re.escape(source)} · everything up to \d+ s ago$")).wait_for()
    page.get_by_text("follows a machine elsewhere").wait_for()
    part = page.get_by_role("region", name="Time marks")
    part.get_by_text("Each time that the changes of the machine are read").wait_for()
    slider = part.get_by_role("slider", name="Time to go back to")
    slider.press("End")
    assert slider.get_attribute("aria-valuetext") == f"{shown(newest)}, consistent"
    part.get_by_text("consistent", exact=True).last.wait_for()
    # The page measures the lag itself.
    lag = page.get_by_role("region", name="Lag")
    lag.get_by_text("highest ").or_(lag.get_by_text("never behind")).first.wait_for()
    assert page.get_by_role("region", name="How its disks are reached").count() == 0
    assert page.get_by_role("button", name=re.compile("Boot|Serve|console")).count() == 0
    end = page.get_by_role("button", name="Seal and end")
    assert end.is_disabled() and page.get_by_text("To end the session, end coldrise protect-live first.").is_visible()
    browser.look(visitor, "everything up to", "Behind the machine")

    # Its monitor does not answer: the last round failed. Between two rounds: a read of a disk waits for minutes.
    protection.next_round()
    running.process.send_signal(signal.SIGSTOP)
    try:
        page.get_by_text("the last round failed: ").wait_for()
    finally:
        running.process.send_signal(signal.SIGCONT)
    page.get_by_text("the last round failed: ").wait_for(state="detached")
    assert protection.end()[0] == 0
    page.get_by_role("alert").get_by_text(f"No process follows {source} now · everything up to").wait_for()
    page.get_by_text(f"coldrise protect-live web01 --from {source} --name {SESSION}", exact=True).wait_for()
    page.get_by_text("not followed now").wait_for()
    browser.look(visitor, "No process follows")
    before = len(coldrise.json("list")["machines"][0]["points"])
    end.click()
    page.get_by_text(f"There is no session {SESSION} now: it was ended.").wait_for()
    assert len(coldrise.json("list")["machines"][0]["points"]) == before + 1


def test_a_second_is_chosen_on_the_machines_page(service, coldrise, running, protect, visit):
    protect("--from", f"qmp:{running.monitor}").next_round()
    made = [write(coldrise, running, number) for number in (1, 2, 3)]
    visitor = visit(service)
    visitor.log_in("operator")
    page = visitor.page
    visitor.go("machines/web01")
    timeline = page.get_by_role("slider", name="Restore point or time mark")
    timeline.wait_for()
    page.get_by_text(f"Session {SESSION} follows qmp:").wait_for()
    assert page.get_by_text("running from backup").count() == 0
    assert int(timeline.get_attribute("aria-valuemax")) == 1 + len(marks(coldrise))
    page.get_by_role("button", name="10 min").click()
    timeline.focus()
    page.keyboard.press("End")
    panel = page.get_by_role("region", name="Chosen time mark")
    panel.get_by_text(shown(made[2])).wait_for()
    for _ in range(24):
        page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    assert timeline.get_attribute("aria-valuetext") == f"{shown(made[1])}, time mark"
    # A mark that comes leaves the choice.
    newest = write(coldrise, running, 4)
    wait_until(lambda: timeline.get_attribute("aria-valuemax") == str(1 + len(marks(coldrise))), "the newer mark")
    assert timeline.get_attribute("aria-valuetext") == f"{shown(made[1])}, time mark"
    page.keyboard.press("Home")
    page.get_by_label("Chosen point").wait_for()
    page.keyboard.press("End")
    panel.get_by_text(shown(newest)).wait_for()
    page.keyboard.press("PageDown")
    page.get_by_label("Chosen point").wait_for()
    page.keyboard.press("End")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    panel.get_by_text(shown(made[1])).wait_for()
    browser.look(visitor, "Go back to this second")

    # Closed: nothing is left. Started: the restored disk is that of the mark.
    before = coldrise.json("list")
    for action in ("Close", "Start"):
        panel.get_by_role("button", name="Recover from here").click()
        drawer = page.get_by_role("dialog", name="Recover web01")
        drawer.locator("label").filter(has_text="the chosen time mark").wait_for()
        drawer.get_by_label("Restore on the host").check()
        drawer.get_by_label("Format").select_option("raw")
        drawer.get_by_text(f"coldrise restore {made[1]['address']}/vda ").wait_for()
        drawer.get_by_role("button", name=action, exact=True).last.click()
        drawer.wait_for(state="detached")
        if action == "Close":
            assert coldrise.json("list") == before
            assert "seal" not in [run["plan"]["command"] for run in service.get("runs")["runs"]]
    page.get_by_text("web01: restore: done.").wait_for()
    [restored] = (service.state / "restores").iterdir()
    assert restored.read_bytes()[MIB:MIB + 65536] == bytes([2]) * 65536


def thinned(newest_ms):
    """Marks as the default rule keeps them for a day, each 15 min consistent, and their stretches."""
    steps = [(86_400 - 60, 3_660, 60), (3_600, 610, 10), (600, 0, 1)]
    stretches, listed = [], []
    for oldest, youngest, step in steps:
        times = [newest_ms - age * 1000 for age in range(oldest, youngest - 1, -step)]
        stretches.append({"from_ms": times[0], "to_ms": times[-1], "marks": len(times), "finest_step_s": step})
        listed += [{"address": f"live/trial@{ms}", "marked_at_ms": ms, "is_consistent": (newest_ms - ms) % (15 * MINUTE_MS) == 0}
                   for ms in times]
    return listed, stretches


def test_clicks_and_drags_choose_among_a_day_of_marks(service, point, coldrise, visit):
    coldrise.publish(point, "trial")
    session = coldrise.json("sessions")["sessions"][0]
    newest_ms = session["created_at_ms"]
    listed, stretches = thinned(newest_ms)
    follows = {"source": "libvirt:web01 on kvm7", "is_running": True, "current_ms": newest_ms, "lag_s": 75, "problem": "no space left"}
    visitor = visit(service, has_touch=True)
    visitor.log_in("operator")
    page = visitor.page
    page.route("**/sessions", lambda route: route.fulfill(json={"sessions": [{**session, "follows": follows["source"]}]}))
    page.route("**/sessions/trial", lambda route: route.fulfill(json={**session, "follows": follows["source"], "is_served": True}))
    page.route("**/sessions/trial/marks", lambda route: route.fulfill(json={
        "session": "trial", "rule": "1s=10m,10s=1h,1m=1d", "stretches": stretches, "marks": listed,
        "follows": follows}))
    # An alarm, such as of a machine without a job, would move it, too.
    page.route("**/alarms?**", lambda route: route.fulfill(json=[]))
    visitor.go("machines/web01")
    timeline = page.get_by_role("slider", name="Restore point or time mark")
    # The line about the session moves the timeline down when it comes.
    page.get_by_text("no space left").wait_for()
    wait_until(lambda: timeline.get_attribute("aria-valuemax") == str(1 + len(listed)), "the marks on the timeline")
    page.get_by_role("button", name="Hour").click()
    box = timeline.bounding_box()
    # The newest mark is at 7 of 10 of an hour's width, so a click there is within half a minute of it.
    x, y = box["x"] + box["width"] * 0.7, box["y"] + 130
    chosen = page.get_by_role("region", name="Chosen time mark")
    # A pinch that begins on marks zooms and does not choose.
    screen = visitor.context.new_cdp_session(page)
    for kind, *fingers in [("Start", 99), ("Start", 99, 101), ("Move", 90, 110), ("Move", 80, 120), ("End",)]:
        touches = [{"x": x - 200 + finger, "y": y, "id": number} for number, finger in enumerate(fingers)]
        screen.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": touches})
    assert "time mark" not in timeline.get_attribute("aria-valuetext")
    page.get_by_role("button", name="Hour").click()
    page.mouse.click(x - 1, y)
    chosen.wait_for()
    clicked = timeline.get_attribute("aria-valuetext")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - box["width"] * 0.3, y, steps=4)
    page.mouse.up()
    dragged = timeline.get_attribute("aria-valuetext")
    assert dragged < clicked, "the drag went back"
    # An arrow passes over marks that share a line; zoomed in, each is a stop.
    for _ in range(3):
        page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    before, after = (datetime.datetime.fromisoformat(text[:19]) for text in (dragged, timeline.get_attribute("aria-valuetext")))
    assert (after - before).total_seconds() == 10
    page.get_by_text("the last round failed: no space left").wait_for()
    browser.look(visitor, "Go back to this second")
    visitor.go("sessions/trial")
    part = page.get_by_role("region", name="Time marks")
    part.locator("svg text").first.wait_for()
    part.get_by_label("Show").select_option("all marks")
    assert part.locator("svg text").first.text_content() == "each 1 min"
    browser.look(visitor, "Behind the machine")
