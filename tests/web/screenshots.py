#!/usr/bin/env python3
"""Takes pictures of the page on a site with a past: light, dark, and as on a phone.

    screenshots.py --out build/screenshots [--only WORD]
"""

import argparse
import pathlib
import sqlite3
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from support import browser, site  # noqa: E402
from support.cli import ROOT  # noqa: E402
from support.nbdserver import wait_until  # noqa: E402
from support.service import Coldrised  # noqa: E402

LAPTOP = {"width": 1366, "height": 768}
LOOKS = {
    "light": {"color_scheme": "light", "viewport": LAPTOP},
    "dark": {"color_scheme": "dark", "viewport": LAPTOP},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True},
}
# Plots of that time show something.
PLOT_MS = 15_000
JOBS = [
    {"name": "nightly", "kind": "backup", "machines": ["web01", "db01", "mail01"], "disks": {"vda": "raw:{folder}/{{machine}}.raw"},
     "schedule": ["Mon..Fri 22:00", "Sat,Sun 04:00"], "window": "22:00-06:00", "retention": {"keep_daily": 7, "keep_weekly": 4},
     "boot_check": {"when": "weekly"}, "age_limit_hours": 26},
    {"name": "files", "kind": "backup", "machines": ["files01", "ldap01", "proxy01"], "disks": {"vda": "raw:{folder}/{{machine}}.raw"},
     "schedule": ["*-*-* 02:30"], "age_limit_hours": 48},
    {"name": "weekly-verify", "kind": "verify", "schedule": ["Sun 12:00"], "sample_percent": 10},
]


def pages(made):
    """The address of each picture, and the steps before it is taken."""
    return {
        "machines": ("machines", None),
        "machine": ("machines/web01", None),
        "verified": (f"machines/{made.daily[-2]}", None),
        "recover": ("machines/web01", recover),
        "recover-nbd": ("machines/web01", way("Serve over NBD")),
        "recover-nfs": ("machines/web01", way("Serve over NFS")),
        "recover-others": ("machines/web01", way("Serve over NFS", "Other hosts")),
        "recover-restore": ("machines/web01", way("Restore on the host")),
        "recover-download": ("machines/web01", way("Download")),
        "machine-failed": ("machines/mail01", None),
        "session": ("sessions/web01-trial", None),
        "activity": ("activity", None),
        "jobs": ("jobs", None),
        "copies": ("copies", None),
        "job-new": ("jobs?new", None),
        "job-copy": ("jobs?new", copy_job),
        "repository": ("repository", None),
        "compare": ("compare/" + "/".join(address.replace("/", "%2F") for address in made.daily[-2:]), None),
        "access": ("access", None),
        "notifications": ("notifications", None),
        "about": ("about", None),
        "keys": ("about", keys),
        "user-new": ("access", new("New user")),
        "hypervisor-new": ("access", new("New hypervisor")),
        "target-new": ("notifications", new("New target")),
    }


def live_pages(run):
    """The same of the machine that runs."""
    return {
        "live-screen": ("sessions/erp01-trial", screen),
        "live-serial": ("sessions/erp01-trial", serial),
        "run": (f"runs/{run}", None),
    }


def screen(page):
    page.get_by_role("application", name="Screen of the machine").locator("canvas").wait_for()
    page.get_by_text("Connecting to the screen").wait_for(state="detached")
    page.get_by_role("img", name="Disk vda").wait_for()
    page.wait_for_timeout(PLOT_MS)


def serial(page):
    page.get_by_role("button", name="Serial console").click()
    page.get_by_role("application", name="Serial console").get_by_text("login:").first.wait_for()


def start_guest(service, made):
    """The project's guest, booted and logged in; returns its run."""
    run = service.post("runs", {"kind": "boot", "address": "erp01/latest", "session": "erp01-trial", "memory_mib": 512})["run"]
    wait_until(lambda: service.call("GET", "sessions/erp01-trial").status == 200
               and (service.get("sessions/erp01-trial")["running"] or {}).get("state") == "running", "the machine")
    with service.websocket("sessions/erp01-trial/serial", timeout_s=300) as console:
        console.read_until(b"coldrise-guest login: ")
        console.send(b"root\n")
        console.read_until(b"# ")
        console.send(b"systemctl is-system-running; df -h / | tail -1; head -c 20M /dev/urandom >/root/new; sync\n")
        console.read_until(b"# ")
        # Something to see in the plots.
        console.send(b"clear; while sleep 1; do dd if=/dev/vda of=/dev/null bs=1M count=$((RANDOM % 20)) skip=$((RANDOM % 900)) "
                     b"iflag=direct; head -c $((RANDOM * 200)) /dev/urandom >/root/new; sync; done 2>/dev/null &\n")
    return run


def recover(page):
    page.get_by_role("button", name="Recover").first.click()
    page.get_by_role("button", name="Start").wait_for()


def copy_job(page):
    page.get_by_label("What it does").select_option("copy")


def way(*choices):
    """The complete drawer, also the part below its edge."""
    def choose(page):
        recover(page)
        for choice in choices:
            page.get_by_label(choice).check()
        hidden = page.get_by_role("dialog").locator(".content").evaluate("content => content.scrollHeight - content.clientHeight")
        size = page.viewport_size
        page.set_viewport_size({"width": size["width"], "height": size["height"] + max(0, hidden)})

    return choose


def remember(service):
    """Six weeks of growth, with a prune and some days without the service."""
    wait_until(lambda: service.get("repository/growth"), "the first sample")
    now_ms, day_ms = int(time.time() * 1000), 86_400_000
    [today] = service.get("repository/growth")
    with sqlite3.connect(service.state / "coldrised.db", timeout=10) as database:
        for back in [*range(42, 19, -1), *range(16, 0, -1)]:
            at_ms, share = now_ms - back * day_ms, 0.35 + (42 - back) / 60 - (0.22 if back < 12 else 0)
            database.execute("INSERT INTO growth SELECT DISTINCT repository, ?, ?, ? FROM growth",
                             (at_ms // day_ms, at_ms, int(today["occupied_bytes"] * (share + 0.02 * (back % 3)))))
            for target in service.get("copies"):
                database.execute("INSERT OR IGNORE INTO copies_behind SELECT DISTINCT repository, ?, ?, ?, ?, ? FROM growth",
                                 (target["target"], at_ms // day_ms, back % 4, back << 20, back * 3_600_000))


def keys(page):
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()


def new(button):
    def open_form(page):
        page.get_by_role("button", name=button).click()
        page.get_by_role("dialog").wait_for()

    return open_form


def fill(service, made):
    for job in JOBS:
        disks = {disk: source.format(folder=made.folder) for disk, source in job.get("disks", {}).items()}
        service.post("jobs", {**job, **({"disks": disks} if disks else {})})
    for start in ({"kind": "verify"}, {"kind": "protect", "addresses": [made.daily[3]]},
                  {"kind": "restore", "address": f"{made.daily[-1]}/vda", "target": "missing/x.raw"},
                  {"kind": "backup", "machine": "web01", "disks": {"vda": "raw:/nowhere.raw"}}):
        service.call("POST", "runs", start)
    service.token("operator", name="ci")
    deadline = time.monotonic() + 60
    while service.get("runs?state=running")["runs"] and time.monotonic() < deadline:
        time.sleep(0.2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/screenshots"))
    parser.add_argument("--only", default="", help="pictures with this word in their name")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = site.make(folder)
        second = made.folder / "second"
        made.coldrise.json("--repo", second, "init", "--no-encryption")
        made.coldrise.json("copy", "--to", second)
        made.back_up("web01", [0.2], seed=3)
        built = subprocess.run([ROOT / "images/guest/build.sh"], stdout=subprocess.PIPE, text=True, check=True)
        made.coldrise.backup("erp01", vda=built.stdout.splitlines()[-1])
        work = pathlib.Path(folder, "service")
        work.mkdir()
        options = ["--web", str(browser.PAGE)]
        with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file, options=options) as service, \
                browser.chromium() as chromium:
            try:
                take(chromium, service, made, arguments)
            finally:
                for run in service.get("runs?state=running")["runs"]:
                    service.call("POST", f"runs/{run['id']}/cancel", {})
                wait_until(lambda: not service.get("runs?state=running")["runs"], "the machine ends")
    return 0


def take(chromium, service, made, arguments):
    for look, options in LOOKS.items():
        first = browser.Visitor(chromium, service, **options)
        first.page.goto(f"/#/setup/{service.setup_secret()}")
        first.page.get_by_role("button").wait_for()
        first.page.screenshot(path=arguments.out / f"{look}-setup.png")
    first.set_up()
    fill(service, made)
    remember(service)
    wanted = pages(made)
    if any(arguments.only in f"{look}-{name}" for look in LOOKS for name in live_pages("")):
        wanted |= live_pages(start_guest(service, made))
    for look, options in LOOKS.items():
        visitor = browser.Visitor(chromium, service, **options)
        visitor.go("machines")
        visitor.page.get_by_role("button", name="Log in").wait_for()
        visitor.page.screenshot(path=arguments.out / f"{look}-login.png")
        visitor.log_in()
        visitor.page.reload()
        for name, (address, before) in wanted.items():
            if arguments.only not in f"{look}-{name}":
                continue
            visitor.page.set_viewport_size(options["viewport"])
            # Nothing of the page before stays open.
            visitor.go("about")
            visitor.page.get_by_role("heading", name="About", level=1).wait_for()
            visitor.go(address)
            visitor.page.locator("h1").first.wait_for()
            visitor.page.wait_for_load_state("load")
            visitor.page.wait_for_timeout(900)
            if before:
                before(visitor.page)
                visitor.page.wait_for_timeout(400)
            visitor.page.mouse.move(0, 0)
            visitor.page.screenshot(path=arguments.out / f"{look}-{name}.png", full_page=not visitor.page.get_by_role("dialog").count())
        for complaint in visitor.complaints:
            print(f"{look}: {complaint}", file=sys.stderr)
        visitor.close()


if __name__ == "__main__":
    sys.exit(main())
