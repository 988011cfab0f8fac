#!/usr/bin/env python3
"""Measures the page: bytes of the first visit, time until 1,000 machines can be used, frames of a timeline of 10,000 points.

The service and its answers are real; lists are stretched on their way to the browser, since a repository with
1,000 machines takes minutes to make. So these are the browser's figures.
"""

import datetime
import json
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from support import browser, site  # noqa: E402
from support.service import Coldrised  # noqa: E402

MACHINES, POINTS, ROUNDS = 1000, 10_000, 5
FRAMES = """async (canvas) => {
    canvas.focus();
    const [times, end] = [[], performance.now() + 3000];
    const box = canvas.getBoundingClientRect();
    for (let step = 0; performance.now() < end; step += 1) {
        const wheel = { deltaX: step % 120 < 60 ? 9 : -9, deltaY: 0, bubbles: true, cancelable: true, clientX: box.left + 300, clientY: box.top + 40 };
        canvas.dispatchEvent(new WheelEvent('wheel', wheel));
        times.push(await new Promise(requestAnimationFrame));
    }
    return times;
}"""


def stretch_machines(route):
    answer = route.fetch()
    machine = answer.json()[0]
    route.fulfill(response=answer, json=[{**machine, "machine": f"web{number:04}"} for number in range(MACHINES)])


def same_points(route):
    """Points of made-up machines are those of the real one."""
    answer = route.fetch(url="/".join(route.request.url.split("/")[:6]) + "/web01/points?limit=30")
    route.fulfill(response=answer)


def stretch_points(route):
    answer = route.fetch()
    page = answer.json()
    now = datetime.datetime.now(datetime.UTC)
    page["points"] = []
    for number in range(POINTS):
        name = (now - datetime.timedelta(hours=POINTS - number)).strftime("%Y%m%dT%H%M%SZ")
        boot = {0: "ok", 7: "failed"}.get(number % 24)
        page["points"].append({"address": f"web01/{name}", "point": name, "boot": boot, "kind": "backup", "created_at_ms": 0, "disks": [],
                               "is_in_future": False, "is_passed_over": False, "is_protected": False, "size_bytes": 1})
    page["total"] = POINTS
    route.fulfill(response=answer, json=page)


def machines_ms(visitor):
    visitor.page.route("**/api/v1/machines", stretch_machines)
    visitor.page.route("**/api/v1/machines/web0*/points*", same_points)
    found = []
    for _ in range(ROUNDS):
        visitor.page.goto("about:blank")
        begun = time.monotonic()
        visitor.go("machines")
        visitor.page.get_by_text(f"{MACHINES} machines").wait_for()
        visitor.page.keyboard.type("0999")
        visitor.page.get_by_text(f"1 of {MACHINES} machines").wait_for()
        found.append((time.monotonic() - begun) * 1000)
    return statistics.median(found)


def frames_per_second(visitor):
    visitor.page.route("**/api/v1/machines/web01/points", stretch_points)
    visitor.go("machines/web01")
    canvas = visitor.page.get_by_role("slider", name="Restore point")
    canvas.wait_for()
    visitor.page.get_by_role("button", name="Year").click()
    times = canvas.evaluate(FRAMES)
    steps = sorted(after - before for before, after in zip(times, times[1:]))
    return {"mean": 1000 * len(steps) / sum(steps), "longest_ms": steps[-1], "p99_ms": steps[len(steps) * 99 // 100]}


def first_visit_bytes(visitor):
    found = []
    session = visitor.context.new_cdp_session(visitor.page)
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: found.append(event["encodedDataLength"]))
    visitor.go("machines")
    visitor.page.get_by_role("heading", name="Machines").wait_for()
    visitor.page.wait_for_load_state("load")
    return sum(found)


def main():
    with tempfile.TemporaryDirectory() as folder:
        made = site.Site(folder)
        made.back_up("web01", range(1, 31))
        work = pathlib.Path(folder, "service")
        work.mkdir()
        with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file, options=["--web", str(browser.PAGE)]) as service, \
                browser.chromium() as chromium:
            service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
            visitor = browser.Visitor(chromium, service)
            visitor.log_in()
            figures = {"first_visit_bytes": first_visit_bytes(visitor), "machines_usable_ms": machines_ms(visitor),
                       "timeline_frames_per_second": frames_per_second(visitor), "complaints": visitor.complaints}
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
