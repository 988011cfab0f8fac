#!/usr/bin/env python3
"""Measures the page on a service with 1,000 machines, one of which has 10,000 points.

Prints the bytes of the first visit, the time until the machines are listed and searched, and the frames of the timeline.
Repository, service and answers are real; the points are copies of one (`many_points`).
"""

import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from support import browser, site  # noqa: E402
from support.cli import BUILT, Coldrise  # noqa: E402
from support.nbdserver import wait_until  # noqa: E402
from support.service import Coldrised  # noqa: E402

MACHINES, POINTS_EACH, POINTS, ROUNDS = 1000, 30, 10_000, 5
# Three seconds of the wheel, a step per frame. Returns the times of the frames in milliseconds.
FRAMES = """async ([canvas, name]) => {
    canvas.focus();
    const [times, end] = [[], performance.now() + 3000];
    const box = canvas.getBoundingClientRect();
    for (let step = 0; performance.now() < end; step += 1) {
        const delta = { deltaX: 0, deltaY: 0, [name]: step % 120 < 60 ? -12 : 12 };
        const place = { bubbles: true, cancelable: true, clientX: box.left + 300, clientY: box.top + 40 };
        canvas.dispatchEvent(new WheelEvent('wheel', { ...delta, ...place }));
        times.push(await new Promise(requestAnimationFrame));
    }
    return times;
}"""


def make_repository(folder):
    """Returns an unencrypted repository: many_points opens no other."""
    image = folder / "disk.raw"
    image.write_bytes(site.boot_record("login: ").ljust(1 << 20, b"\0"))
    coldrise = Coldrise(folder / "repository")
    coldrise.init("--no-encryption")
    coldrise.backup("web", vda=image)
    coldrise.backup("long", vda=image)
    many_points = BUILT / "examples" / "many_points"
    for machine, count, machines in (("web", POINTS_EACH - 1, MACHINES - 2), ("long", POINTS - 1, 0)):
        subprocess.run([many_points, coldrise.repository, machine, str(count), str(machines)], check=True)
    return coldrise.repository


def first_visit_bytes(visitor):
    """Bytes that the browser loads until the machines are listed, by kind, compressed."""
    kinds, found = {}, {"files": 0, "answers": 0}
    session = visitor.context.new_cdp_session(visitor.page)
    session.send("Network.enable")
    session.on("Network.requestWillBeSent", lambda event: kinds.update({event["requestId"]: event["request"]["url"]}))

    def finished(event):
        kind = "answers" if "/api/" in kinds.get(event["requestId"], "") else "files"
        found[kind] += event["encodedDataLength"]

    session.on("Network.loadingFinished", finished)
    visitor.go("machines")
    visitor.page.get_by_text(f"{MACHINES:,} machines.").wait_for()
    visitor.page.wait_for_load_state("load")
    visitor.page.wait_for_timeout(1000)
    session.detach()
    return found


def machines_ms(visitor):
    """From the address to the only machine that a search leaves, median."""
    found = []
    for _ in range(ROUNDS):
        visitor.page.goto("about:blank")
        begun = time.monotonic()
        visitor.go("machines")
        visitor.page.get_by_text(f"{MACHINES:,} machines.").wait_for()
        visitor.page.keyboard.press("/")
        visitor.page.keyboard.type("-777")
        visitor.page.get_by_text(f"1 of {MACHINES:,} machines.").wait_for()
        found.append((time.monotonic() - begun) * 1000)
    return round(statistics.median(found))


def timeline_ms(visitor):
    begun = time.monotonic()
    visitor.go("machines/long")
    visitor.page.get_by_label("Chosen point").get_by_text("Address").wait_for()
    return round((time.monotonic() - begun) * 1000)


def frames(visitor, span, wheel):
    """Frames per second, and the page's own processor time per frame: that says more if the machine is busy."""
    canvas = visitor.page.get_by_role("slider", name="Restore point")
    visitor.page.get_by_role("button", name=span, exact=True).click()
    session = visitor.context.new_cdp_session(visitor.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_ms():
        metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
        return 1000 * metrics["TaskDuration"]

    before = busy_ms()
    times = visitor.page.evaluate(FRAMES, [canvas.element_handle(), wheel])
    busy = (busy_ms() - before) / len(times)
    session.detach()
    steps = sorted(later - earlier for earlier, later in zip(times, times[1:]))
    return {"per_second": round(1000 * len(steps) / sum(steps), 1), "p99_ms": round(steps[len(steps) * 99 // 100], 1),
            "longest_ms": round(steps[-1], 1), "processor_ms_per_frame": round(busy, 2)}


def main():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="coldrise-speed-", dir="/dev/shm"))
    try:
        begun = time.monotonic()
        repository = make_repository(folder)
        figures = {"repository_made_s": round(time.monotonic() - begun, 1)}
        with Coldrised(folder, repository, options=["--web", str(browser.PAGE)]) as service, browser.chromium() as chromium:
            wait_until(lambda: service.call("GET", "machines").status == 200 and len(service.get("machines")) == MACHINES, "the machines")
            names = [machine["machine"] for machine in service.get("machines")]
            service.post("jobs", {"name": "nightly", "kind": "backup", "machines": names, "disks": {"vda": "raw:/dev/vg/{machine}"}})
            service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
            visitor = browser.Visitor(chromium, service)
            visitor.log_in()
            figures["first_visit_bytes"] = first_visit_bytes(visitor)
            figures["machines_usable_ms"] = machines_ms(visitor)
            figures["machine_with_10000_points_ms"] = timeline_ms(visitor)
            for span in ("Month", "Year", "All"):
                figures[f"scroll {span}"] = frames(visitor, span, "deltaX")
                figures[f"zoom {span}"] = frames(visitor, span, "deltaY")
            figures["complaints"] = visitor.complaints
        print(json.dumps(figures, indent=2))
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
