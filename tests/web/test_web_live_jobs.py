"""Jobs that follow machines which run elsewhere, made and watched on the page, with a real QEMU."""

import contextlib
import os
import pathlib
import re
import signal

import pytest

from support import browser
from support.nbdserver import wait_until
from support.protection import SESSION, marks
from support.running import Machine, assert_same_as_now


@pytest.fixture
def service(coldrise, tmp_path):
    with browser.served(coldrise, tmp_path) as service:
        yield service


@pytest.fixture
def machine(service, tmp_path):
    """Starts the machine, each time with the same monitor; it is ended."""
    link = pathlib.Path(service.short.name) / "web01.qmp"
    with contextlib.ExitStack() as stack:
        def start():
            running = Machine(tmp_path)
            stack.callback(running.close)
            link.unlink(missing_ok=True)
            link.symlink_to(running.monitor)
            return running

        yield start


@pytest.fixture
def admin(service, visit):
    visitor = visit(service)
    visitor.log_in("admin")
    return visitor


def job(service, **more):
    return {"name": "always", "kind": "protect-live", "machines": ["web01"], "from": f"qmp:{service.short.name}/{{machine}}.qmp",
            "every_seconds": 1, "lag_limit_seconds": 5, "retry_seconds": 1, **more}


def marked(coldrise):
    """The marks of the session; none before it exists."""
    return marks(coldrise) if coldrise.run("--json", "marks", SESSION).returncode == 0 else []


def card(page, name="always"):
    return page.get_by_role("article").filter(has=page.get_by_role("heading", name=name, exact=True))


def pids(service):
    """The processes of the runs that follow a machine."""
    runs = service.get("runs?state=running&job=always")["runs"]
    return [run["plan"]["who"]["pid"] for run in runs if run["plan"]["command"] == "protect-live"]


def test_the_form_makes_a_job_that_follows_a_machine(service, coldrise, machine, admin, tmp_path):
    running = machine()
    running.write("vda", "write -P 5 0 1M")
    page = admin.page
    admin.go("jobs?new=web01")
    form = page.get_by_role("dialog", name="New job")
    form.get_by_label("Name").first.fill("always")
    form.get_by_label("What it does").select_option("Follow running machines")
    assert form.get_by_label("Window").count() == form.get_by_label("Runs at once").count() == form.get_by_label("Daily").count() == 0
    # The default comes from the description of the API.
    assert form.get_by_label("Reads changes every").get_attribute("placeholder") == "5"
    form.get_by_role("combobox", name="Source").select_option("QEMU without libvirt")
    form.get_by_label("Socket of QEMU’s monitor").fill(f"{service.short.name}/{{machine}}.qmp")
    form.get_by_label("Reads changes every").fill("1")
    form.get_by_label("Alarm if behind").fill("5")
    # A refusal is shown at its field, which gets the focus.
    agent = form.get_by_label("Socket of the guest agent")
    agent.fill("/run/{machine}.agent")
    form.get_by_role("button", name="Save").press("Enter")
    form.get_by_role("alert").get_by_text("consistent marks need the guest agent's socket").wait_for()
    assert agent.get_attribute("aria-invalid") == "true"
    assert agent.evaluate("(input) => input === document.activeElement")
    browser.look(admin, "consistent marks need the guest agent's socket")
    agent.fill("")
    form.get_by_role("textbox", name="Machines").fill("web*")
    form.get_by_role("button", name="Save").click()
    form.get_by_role("alert").get_by_text("a job of kind protect-live names each machine").wait_for()
    assert agent.get_attribute("aria-invalid") is None
    form.get_by_role("textbox", name="Machines").fill("web01")
    form.get_by_role("textbox", name="Restore points").fill("")
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="detached")

    shown = card(page)
    shown.get_by_text("follows", exact=True).first.wait_for()
    shown.get_by_text(re.compile(r"^everything up to \d s ago$")).wait_for()
    shown.get_by_role("link", name=f"Session {SESSION}").wait_for()
    before = len(marked(coldrise))
    running.write("vda", "write -P 6 1M 64k")
    newest = wait_until(lambda: marked(coldrise)[before:], "a mark")[-1]["address"]
    assert_same_as_now(coldrise, newest, running, tmp_path)
    shown.get_by_role("button", name="Make restore points").click()
    page.get_by_text("Job always: 1 run started or waiting.").wait_for()

    # An edited job has the fields that it takes, and its run is started again.
    first = pids(service)
    shown.get_by_role("button", name="Edit").click()
    form = page.get_by_role("dialog", name="Job always")
    assert form.get_by_label("Socket of QEMU’s monitor").input_value() == f"{service.short.name}/{{machine}}.qmp"
    form.get_by_label("Reads changes every").fill("2")
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="detached")
    stored = service.get("jobs/always")
    assert (stored["every_seconds"], stored["lag_limit_seconds"], stored["machines"]) == (2, 5, ["web01"])
    shown.get_by_text("each 2 s").wait_for()
    wait_until(lambda: (found := pids(service)) and found != first, "the changed run")


def test_the_form_makes_a_job_that_sends_machines_which_run_from_coldrise(service, far, admin):
    page = admin.page
    admin.go("jobs?new=web01")
    form = page.get_by_role("dialog", name="New job")
    form.get_by_label("Name").first.fill("always")
    form.get_by_label("What it does").select_option("Follow running machines")
    form.get_by_label("Reads changes every").fill("3")
    form.get_by_role("combobox", name="Source").select_option("Machines that run from Coldrise")
    for label in ["Reads changes every", "Consistent mark every", "Socket of the guest agent", "scratch files first", "Disk 1: name"]:
        assert form.get_by_label(label).count() == 0, label
    browser.look(admin, "Site that gets the marks")
    form.get_by_role("button", name="Save").click()
    # The site is required.
    assert form.get_by_label("Site that gets the marks").evaluate("(input) => input === document.activeElement")
    form.get_by_label("Site that gets the marks").fill("far")
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="detached")
    stored = service.get("jobs/always")
    assert (stored["from"], stored["to"], stored.get("every_seconds")) == ("live", "far", None)
    card(page).get_by_text("does not run from Coldrise", exact=True).first.wait_for()
    card(page).get_by_text("machines that run from Coldrise").wait_for()
    browser.look(admin, "does not run from Coldrise")


def test_the_card_shows_how_a_machine_is_followed_now(service, coldrise, machine, admin):
    running = machine()
    service.post("jobs", job(service))
    wait_until(lambda: marked(coldrise), "the first mark")
    page = admin.page
    admin.go("jobs")
    shown = card(page)
    shown.get_by_text("follows", exact=True).first.wait_for()
    # The run is killed, and another one follows: the card says both, and not that the job was lost.
    [lost] = pids(service)
    os.kill(lost, signal.SIGKILL)
    shown.get_by_text(re.compile("was lost .* ago: its process is gone")).wait_for()
    wait_until(lambda: pids(service) not in ([], [lost]), "another run")
    shown.get_by_text("follows", exact=True).first.wait_for()
    assert shown.get_by_text("last: lost").count() == 0
    browser.look(admin, "was lost")
    shown.get_by_role("link", name="The run before").click()
    page.get_by_text("Found lost after").wait_for()
    took = page.locator("dt", has_text="Found lost after").locator("xpath=following-sibling::dd[1]")
    run = service.get(f"runs/{page.url.split('/')[-1]}")
    assert run["state"] == "lost" and run["ended_at_ms"] >= run["plan"]["started_at_ms"]
    # What it shows stays: it is that of the service, whatever the time is.
    page.clock.set_fixed_time(run["ended_at_ms"] / 1000 + 7200)
    before = took.text_content()
    page.reload()
    page.get_by_text("Found lost after").wait_for()
    assert took.text_content() == before and "h" not in before
    assert service.get(f"runs/{run['id']}")["ended_at_ms"] == run["ended_at_ms"]

    # QEMU does not answer: the machine's page says how far it is behind, and why.
    watcher = admin.context.new_page()
    watcher.goto("/#/machines/web01")
    watcher.get_by_role("link", name="Job always").wait_for()
    watcher.get_by_text("follows", exact=True).wait_for()
    running.process.send_signal(signal.SIGSTOP)
    watcher.get_by_text("is behind", exact=True).wait_for()
    # A round that reads from a stopped QEMU does not fail before that ends.
    running.process.kill()
    watcher.get_by_text("The last round failed: ").wait_for()
    running.close()
    machine()
    watcher.get_by_text("is behind", exact=True).wait_for(state="detached")
    watcher.close()


def test_a_job_whose_run_was_cancelled_says_how_to_continue(service, coldrise, machine, admin):
    machine()
    service.post("jobs", job(service))
    wait_until(lambda: marked(coldrise), "the first mark")
    [run] = [run["id"] for run in service.get("runs?state=running")["runs"]]
    assert service.call("POST", f"runs/{run}/cancel").status == 202
    page = admin.page
    admin.go("jobs")
    shown = card(page)
    shown.get_by_text("not followed", exact=True).first.wait_for()
    shown.get_by_text("A user ended its run. Start the job to follow it again.").wait_for()
    browser.look(admin, "not followed")
    shown.get_by_role("button", name="Follow again").click()
    shown.get_by_text("follows", exact=True).first.wait_for()
    shown.get_by_role("button", name="Switch off").click()
    shown.get_by_text("off", exact=True).wait_for()
    # Its session names the job, and no command that would follow the machine beside it.
    admin.go(f"sessions/{SESSION}")
    page.get_by_role("link", name="Job always").wait_for()
    assert page.get_by_text("The same command continues").count() == 0
