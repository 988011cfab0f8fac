"""Copies: where they are, a copy that runs, how far behind each day was, and the job that makes them."""

import os
import pathlib
import random
import re
import sqlite3
import time

import pytest

from support import browser, site
from support.cli import PROGRAM
from support.far_site import FarSite
from support.nbdserver import wait_until
from support.service import Coldrised

DAY_MS = 86_400_000
MIB = 1 << 20


@pytest.fixture
def made(tmp_path):
    made = site.Site(tmp_path)
    made.back_up("web01", [50, 26, 2])
    made.back_up("db01", [2])
    return made


@pytest.fixture
def far(made, tmp_path, clock):
    far = FarSite(tmp_path)
    far.start(clock.environment())
    far.put_gate()
    far.pair(made.coldrise, "berlin")
    yield far
    far.close()


@pytest.fixture
def service(made, tmp_path, clock):
    """Its runs have the clock."""
    work = tmp_path / "service"
    work.mkdir()
    options = ["--web", str(browser.PAGE), "--program", clock.program(PROGRAM, tmp_path)]
    with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file, options=options) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        wait_until(lambda: service.call("GET", "copies").status == 200, "the repository")
        yield service


def picture(visitor, name):
    """Screenshots, if they are requested."""
    folder = os.environ.get("COLDRISE_PICTURES")
    for scheme in ("light", "dark") if folder else ():
        visitor.page.emulate_media(color_scheme=scheme)
        visitor.page.screenshot(path=pathlib.Path(folder) / f"{name}-{scheme}.png", full_page=True)


def big(made, name, seed, *counts):
    """Backs up a disk of each of these sizes, in MiB."""
    disks = {f"vd{letter}": made.folder / f"{name}-{letter}.raw" for letter in "ab"[:len(counts)]}
    content = random.Random(seed)
    for path, count in zip(disks.values(), counts):
        path.write_bytes(content.randbytes(count * MIB))
    made.coldrise.json("backup", name, *(f"{disk}=raw:{path}" for disk, path in disks.items()))


def test_a_link_shows_its_running_copy_and_the_remaining_points(made, far, service, visit, clock):
    visitor = visit(service)
    visitor.log_in()
    visitor.go("copies")
    page = visitor.page
    page.get_by_text("never copied").first.wait_for()
    # The job, by the form.
    visitor.go("jobs")
    page.get_by_role("button", name="New job").click()
    page.get_by_label("Name", exact=True).fill("offsite")
    page.get_by_label("What it does").select_option("copy")
    page.get_by_label(re.compile("^To a link")).fill("berlin")
    page.get_by_label(re.compile("^Schedule")).fill("")
    page.get_by_label("Alarm if behind for, minutes").fill("240")
    page.get_by_label("Sends at most, MiB/s").fill("1")
    picture(visitor, "job")
    assert not visitor.violations()
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Job offsite is saved.").wait_for()
    job = service.get("jobs/offsite")
    assert (job["kind"], job["to"], job["behind_limit_minutes"], job["rate_bytes_per_second"]) == ("copy", "berlin", 240, MIB)
    big(made, "web01", 1, 6)
    far.gate.hold_after(MIB)
    service.post("jobs/offsite/start", {}, expected=(202,))
    visitor.go("copies")
    # Rates are sent every 10 s, and two make a plot.
    far.gate.wait_for_hold()
    far.step_until(page.get_by_role("img", name=re.compile("^Rate: content .*on the line")).is_visible, clock)
    page.get_by_text("Left").wait_for()
    card = page.get_by_role("article").filter(has_text="berlin")
    assert "copying" in card.inner_text() and "on the line" in card.inner_text()
    picture(visitor, "copying")
    browser.look(visitor, "berlin", "copying")
    far.gate.release()
    card.get_by_text("Left", exact=True).wait_for(state="detached", timeout=90_000)
    wait_until(lambda: not service.get("queue")["runs"], "the end of the copy")
    card.get_by_text("up to date").first.wait_for(timeout=60_000)
    # All that was copied is random: it was neither known there, nor does it compress. The page hears of the end a moment
    # after the queue.
    card.get_by_role("img", name=re.compile(r"sent: 6\.\d MiB")).wait_for(timeout=60_000)
    picture(visitor, "current")

    # The lag appears without a reload.
    big(made, "web01", 2, 2)
    card.get_by_text("behind by 1 point").first.wait_for(timeout=60_000)
    assert re.search(r"1 point, \d", card.inner_text())
    visitor.go("machines/web01")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="berlin"))
    row.get_by_text("behind by 1 point").wait_for()
    assert "4 points" in row.inner_text()
    picture(visitor, "machine")
    browser.look(visitor, "berlin")

    # The other site is away.
    far.stop()
    far.gate.close()
    service.post("jobs/offsite/start", {}, expected=(202,))
    visitor.go("copies")
    card.get_by_text("failing").first.wait_for(timeout=60_000)
    card.get_by_text("cannot be reached").first.wait_for()
    picture(visitor, "failing")
    browser.look(visitor, "failing")


def test_an_incomplete_point_is_booted_from_the_page(made, far, visit, tmp_path, clock):
    big(made, "mail01", 3, 4, 12)
    work = tmp_path / "there"
    work.mkdir()
    with Coldrised(work, far.program.repository, far.program.passphrase_file, options=["--web", str(browser.PAGE)]) as there:
        there.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        visitor = visit(there)
        visitor.log_in()
        visitor.go("copies")
        page = visitor.page
        with clock.of(made.coldrise):
            # The first disk has arrived: only then the next one begins. Parts of a disk arrive in any order.
            copy = far.held(made.coldrise, 6 * MIB, "--to", "berlin", "mail01")
        card = page.get_by_role("region", name="On their way here")
        card.get_by_text("connected", exact=True).wait_for(timeout=60_000)
        (incoming,) = there.get("coming")
        assert incoming["address"] in card.inner_text() and not visitor.violations()
        # It is recorded after 10 s, and appears without a reload.
        clock.skip(10)
        card.get_by_role("progressbar").and_(page.locator("[aria-valuenow]:not([aria-valuenow='0'])")).wait_for(timeout=60_000)
        picture(visitor, "coming")
        browser.look(visitor, "On their way here")
        card.get_by_role("button", name="Boot…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_text("is fetched from the other site").wait_for()
        picture(visitor, "coming-boot")
        dialog.get_by_role("button", name="Boot", exact=True).click()
        page.get_by_role("heading", level=1, name=re.compile("^mail01-")).wait_for(timeout=60_000)
        # The page shows the session's own place before the disks are published.
        (session,) = wait_until(lambda: there.get("sessions")["sessions"], "the session")
        assert session["machine"] == "mail01"
        for run in there.get("runs?state=running")["runs"]:
            there.call("POST", f"runs/{run['id']}/cancel", {})
        wait_until(lambda: not there.get("runs?state=running")["runs"], "the end of the machine")
        visitor.go("copies")
        copy.kill()
        copy.wait()
        card.get_by_text("not connected").wait_for(timeout=60_000)
        picture(visitor, "coming-lost")
        far.gate.release()
        made.coldrise.json("copy", "--to", "berlin", "mail01")
        card.wait_for(state="detached", timeout=60_000)


def test_the_days_are_drawn(made, service, visit, tmp_path):
    second = tmp_path / "second"
    made.coldrise.json("--repo", second, "init", "--no-encryption")
    made.coldrise.json("copy", "--to", second)
    wait_until(lambda: service.get("copies"), "the copies")
    service.stop()
    with sqlite3.connect(service.state / "coldrised.db") as database:
        (repository,) = database.execute("SELECT repository FROM growth").fetchone()
        today = int(time.time() * 1000) // DAY_MS
        rows = [(repository, str(second), today - back, back % 3, back * MIB, back * 3_600_000) for back in range(1, 30) if back != 9]
        database.executemany("INSERT OR REPLACE INTO copies_behind VALUES (?, ?, ?, ?, ?, ?)", rows)
    service.start()
    wait_until(lambda: service.get("copies"), "the copies")
    visitor = visit(service)
    visitor.log_in()
    visitor.go("copies")
    plot = visitor.page.get_by_role("img", name=re.compile("Points behind by day. At most 2 points"))
    plot.wait_for()
    assert plot.locator("rect").count() >= len(rows)
    picture(visitor, "days")
    browser.look(visitor, "second")
