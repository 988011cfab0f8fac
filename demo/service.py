#!/usr/bin/env python3
"""Demonstrates the service on a real guest: points, boot badges and metrics appear automatically.

It starts coldrised, without systemd, with one job: back up the demo guest every minute and boot
each new point in isolation. It prints what the service's event stream tells until the given number of points
has a green boot badge (2 by default). Then a machine that runs elsewhere loses a file, and is read as it was a second before. On a terminal the service then stays for its visitors until Ctrl-C.

    demo/service.py --build-dir target/release [--points N] [--end] [--keep]

The last line of standard output is either

    demo-service: ok points=… boots=… first_point_s=… first_badge_s=… event_ms=… back_s=…

or says what failed and where its logs are (exit status 1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "tests"))

from support.guest import Guest  # noqa: E402
from support.service import SETUP_MARK, Coldrised  # noqa: E402

MACHINE = "demo"
ORDERS, ORDER = "orders", "order 4711: twelve pumps"
GUEST_BUILD_SECONDS = 900
PATIENCE_SECONDS = 900
METRICS = ("coldrise_machine_last_point_timestamp_seconds",
           "coldrise_machine_last_verified_boot_timestamp_seconds", "coldrise_machine_boot_stage")


class DemoError(Exception):
    """A step failed; the message says what happened."""


class Events(threading.Thread):
    """Reads the service's event stream into a queue."""

    def __init__(self, service: Coldrised):
        super().__init__(daemon=True)
        self.service = service
        self.queue: queue.Queue[dict] = queue.Queue()

    def run(self):
        with contextlib.suppress(OSError, ValueError):
            connection = self.service.connection(timeout_s=60)
            connection.request("GET", "/api/v1/events")
            for line in connection.getresponse():
                if line.startswith(b"data: {\""):
                    self.queue.put(json.loads(line[6:]))

    def next(self, timeout: float) -> dict | None:
        with contextlib.suppress(queue.Empty):
            return self.queue.get(timeout=timeout)
        return None


def page_options() -> list[str]:
    """The service has the page if it is built: `make web`."""
    page = PROJECT / "build" / "web"
    return ["--web", str(page)] if (page / "index.html").exists() else []


def guest_image(work: Path) -> Path:
    log = work / "guest-build.log"
    with open(log, "w") as errors:
        built = subprocess.run([PROJECT / "images/guest/build.sh"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=errors, text=True, timeout=GUEST_BUILD_SECONDS)
    if built.returncode != 0:
        raise DemoError(f"images/guest/build.sh ended with exit status {built.returncode}: see {log}")
    image = work / "guest.raw"
    subprocess.run(["cp", "--sparse=always", built.stdout.strip().splitlines()[-1], image], check=True)
    return image


def make_repository(coldrise: Path, work: Path) -> tuple[Path, Path]:
    passphrase, repository = work / "passphrase", work / "repository"
    passphrase.touch(mode=0o600)
    passphrase.write_text(secrets.token_urlsafe(24) + "\n")
    command = [coldrise, "--repo", repository, "--passphrase-file", passphrase, "init"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLDRISE_RUNS": "none"})
    if done.returncode != 0:
        raise DemoError(f"coldrise init failed: {done.stderr}")
    return repository, passphrase


def show_run(event: dict, started: float) -> None:
    progress = event.get("progress") or {}
    words = [f"{time.monotonic() - started:6.1f} s", f"run {event['id']:<38}", event["state"]]
    if event["state"] == "running" and progress.get("total_bytes"):
        words.append(f"{100 * progress.get('done_bytes', 0) // progress['total_bytes']} %")
    print("  ".join(words), flush=True)


def watch(service: Coldrised, events: Events, wanted: int, started: float) -> dict:
    """Prints what happens until enough points are proven to boot."""
    figures, shown = {}, {}
    deadline = started + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        event = events.next(5)
        if event is None:
            continue
        if event["type"] == "run":
            key = (event["id"], event["state"])
            if key not in shown:
                shown[key] = True
                show_run(event, started)
            if event["state"] in ("failed", "lost"):
                run = service.get(f"runs/{event['id']}")
                raise DemoError(f"run {event['id']}: {run.get('result') or run['problems']}")
        if event["type"] != "machine":
            continue
        points = service.get(f"machines/{MACHINE}/points")["points"]
        green = [point for point in points if point.get("boot") == "ok"]
        figures.setdefault("first_point_s", time.monotonic() - started)
        if green:
            figures.setdefault("first_badge_s", time.monotonic() - started)
        badges = " ".join({"ok": "●", "failed": "✗"}.get(point.get("boot"), "○") for point in points)
        print(f"{time.monotonic() - started:6.1f} s  {MACHINE}: {len(points)} points  {badges}", flush=True)
        if len(green) >= wanted:
            return {**figures, "points": len(points), "boots": len(green)}
    raise DemoError(f"not {wanted} proven points within {PATIENCE_SECONDS} s")


def demonstrate(coldrise: Path, work: Path, wanted: int, stays: bool) -> dict:
    print("building the guest and the repository", flush=True)
    image = guest_image(work)
    repository, passphrase = make_repository(coldrise, work)
    with Coldrised(work, repository, passphrase, options=page_options()) as service:
        started = time.monotonic()
        events = Events(service)
        events.start()
        settings = {
            "name": "demo", "kind": "backup", "machines": [MACHINE], "disks": {"vda": f"raw:{image}"},
            "schedule": ["*:*:00"], "boot_check": {"when": "always"}, "age_limit_hours": 1,
        }
        service.post("jobs", settings)
        job = service.get("jobs/demo")
        address = f"https://127.0.0.1:{service.port}"
        page = f"{address}{SETUP_MARK}{service.setup_secret()}" if page_options() else address
        print(f"its page: {page}", flush=True)
        print(f"the service answers on https://127.0.0.1:{service.port}; job demo, every minute, next: {next_date(job)}",
              flush=True)
        figures = watch(service, events, wanted, started)
        figures["event_ms"] = event_latency_ms(service, events)
        figures["back_s"] = go_back(service, coldrise, repository, passphrase, image, work)
        print("\nmetrics:")
        for line in service.call("GET", "/metrics").body.decode().splitlines():
            if line.startswith(METRICS):
                print(f"  {line}")
        print("\nrecent runs:")
        for run in service.get("runs?count=8")["runs"]:
            print(f"  {run['id']:<40} {run['state']}")
        if stays:
            stay(service, settings, page)
        stop_runs(service)
    return figures


def go_back(service: Coldrised, coldrise: Path, repository: Path, passphrase: Path, image: Path, work: Path) -> float:
    """A machine that runs elsewhere loses its data, and is read as it was a second before. Returns the seconds of that."""
    disk, monitor = work / "orders.qcow2", work / "orders.qmp"
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", image, disk], check=True)
    arguments = ["-blockdev", f"driver=qcow2,node-name=vda,file.driver=file,file.filename={disk}",
                 "-device", "virtio-blk-pci,id=dvda,drive=vda", "-qmp", f"unix:{monitor},server=on,wait=off"]
    print(f"\na machine of its own, {ORDERS}, runs in QEMU; the job always follows it each second", flush=True)
    with Guest([arguments], log=work / "orders.log") as guest:
        guest.wait_for_login(timeout=PATIENCE_SECONDS)
        guest.login()
        service.post("jobs", {"name": "always", "kind": "protect-live", "machines": [ORDERS],
                              "from": f"qmp:{monitor}", "every_seconds": 1})
        guest.check(f"echo '{ORDER}' > /root/orders.txt; sync")
        good = mark_after(service, time.time())
        guest.check("rm /root/orders.txt; sync")
        print(f"rm /root/orders.txt in the machine; {mark_after(service, time.time())} does not have it", flush=True)
    begun = time.monotonic()
    command = [coldrise, "--repo", repository, "--passphrase-file", passphrase, "files", "get",
               f"{good}:/root/orders.txt", "-"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLDRISE_RUNS": "none"})
    if done.stdout.strip() != ORDER:
        raise DemoError(f"{good} does not have the file: {done.stdout}{done.stderr}")
    print(f"coldrise files get {good}:/root/orders.txt -\n  {done.stdout.strip()}", flush=True)
    service.call("DELETE", "jobs/always")
    return time.monotonic() - begun


def mark_after(service: Coldrised, seconds: float) -> str:
    """The first mark of the followed machine after a time, once it is there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for session in service.get("sessions")["sessions"]:
            if session["machine"] == ORDERS:
                marks = service.get(f"sessions/{session['session']}/marks")["marks"]
                later = [mark["address"] for mark in marks if mark["marked_at_ms"] > seconds * 1000]
                if later:
                    return later[0]
        time.sleep(0.2)
    raise DemoError(f"{ORDERS} has no mark of {time.ctime(seconds)} after {PATIENCE_SECONDS} s")


def stay(service: Coldrised, settings: dict, page: str) -> None:
    """Leaves the service to the visitor until Ctrl-C."""
    # Less often from now on: boots in emulation take the processors from the visitor's machines.
    service.call("PUT", "jobs/demo", {**settings, "schedule": ["*:00/30:00"]})
    print(f"\nThe service stays until Ctrl-C: {page}\nThen all of it goes, and machines that you recovered with it.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def next_date(job: dict) -> str:
    return time.strftime("%H:%M:%S", time.localtime(job["next_ms"][0] / 1000)) if job["next_ms"] else "never"


def event_latency_ms(service: Coldrised, events: Events) -> float:
    """From a change to its event at this client."""
    while events.next(0.2) is not None:
        pass
    begun = time.monotonic()
    service.post("tokens", {"name": "latency", "role": "viewer"})
    while (event := events.next(10)) is not None:
        if event["type"] == "settings":
            return (time.monotonic() - begun) * 1000
    raise DemoError("a change of the settings gave no event")


def stop_runs(service: Coldrised) -> None:
    """Ends the job and its runs: runs outlive the service."""
    service.call("DELETE", "jobs/demo")
    for run in service.get("runs?state=running")["runs"]:
        service.call("POST", f"runs/{run['id']}/cancel")
    deadline = time.monotonic() + 60
    while service.get("runs?state=running")["runs"] and time.monotonic() < deadline:
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description="Let the service protect a guest for some minutes.")
    parser.add_argument("--build-dir", type=Path, default=PROJECT / "target/release")
    parser.add_argument("--points", type=int, default=2, help="proven points to wait for (2)")
    parser.add_argument("--end", action="store_true", help="end then, on a terminal, too")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    arguments = parser.parse_args()
    coldrise = arguments.build_dir.resolve() / "coldrise"
    if not os.access(coldrise, os.X_OK):
        print(f"demo-service: failed: no program at {coldrise}; build it: make build")
        return 1
    os.environ["COLDRISE_BUILD_DIR"] = str(arguments.build_dir.resolve())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = Path(tempfile.mkdtemp(prefix="coldrise-service-"))
    try:
        figures = demonstrate(coldrise, work, arguments.points, sys.stdout.isatty() and not arguments.end)
    except KeyboardInterrupt:
        print("demo-service: interrupted")
        return 130
    except (DemoError, AssertionError, OSError, subprocess.SubprocessError) as error:
        print(f"\n{error}\n\ndemo-service: failed; logs: {work}")
        return 1
    if arguments.keep:
        print(f"kept: {work}")
    else:
        shutil.rmtree(work)
    print("demo-service: ok " + " ".join(
        f"{name}={value:.1f}" if isinstance(value, float) else f"{name}={value}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
