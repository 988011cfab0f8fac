"""A machine is recovered under libvirt and moved to production, and a disk rolled back, on the page."""

import pytest

from support import browser, counting_machine
from support.cli import PROGRAM
from support.counting_machine import MIB
from support.libvirt import Libvirt
from support.nbdserver import wait_until
from support.service import Coldrised


@pytest.fixture
def libvirt():
    libvirt = Libvirt()
    yield libvirt
    libvirt.close()


@pytest.fixture
def service(coldrise, tmp_path, own_tmp, libvirt, clock):
    """Its runs have the clock."""
    # A move at 1 MiB/s is slow enough to be inspected and cancelled on a busy machine, too.
    counting_machine.store(coldrise, tmp_path, random_mib=24)
    own_tmp.chmod(0o755)
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, prefix=libvirt.inside(),
                   environment={"RUNTIME_DIRECTORY": str(own_tmp)},
                   options=["--web", str(browser.PAGE), "--program", clock.program(PROGRAM, tmp_path)]) as service:
        for role in ("admin", "operator", "viewer"):
            service.post("users", {"name": role, "role": role, "password": browser.PASSWORD})
        yield service
        libvirt.clear()
        wait_until(lambda: clock.skip(1) or not service.get("runs?state=running")["runs"], "the servers end")


def test_a_machine_is_recovered_under_libvirt_and_moved(service, libvirt, visit, clock):
    visitor = visit(service)
    visitor.log_in("operator")
    page = visitor.page
    visitor.go("machines/web01")
    page.get_by_role("button", name="Recover").click()
    drawer = page.get_by_role("dialog", name="Recover web01")
    drawer.get_by_label("Run under libvirt").check()
    drawer.get_by_text("--to libvirt").wait_for()
    assert drawer.get_by_label("Connection").count() == 0, "sockets of the host are for administrators"
    browser.look(visitor, "It can be moved later, while it runs.")
    drawer.get_by_role("button", name="Start").click()
    page.get_by_role("heading", name="web01-1").wait_for(timeout=30_000)
    production = page.get_by_role("region", name="Production")
    production.get_by_text("web01, under libvirt at qemu:///system").wait_for()
    production.get_by_text("It runs.").wait_for()
    page.get_by_text("under libvirt,").get_by_text("after its run began").wait_for()
    assert libvirt.state("web01").startswith("running")
    assert production.get_by_role("button", name="Move").count() == 0, "an operator writes to no path of the host"
    assert page.get_by_role("button", name="Seal and end").is_disabled()

    watcher = visit(service)
    watcher.log_in("viewer")
    watcher.go("sessions/web01-1")
    watcher.page.get_by_text("web01, under libvirt").wait_for()
    assert watcher.page.get_by_role("region", name="Production").get_by_role("button").count() == 0

    # Cancelled, its run suspends it; a suspended or stopped machine is started again.
    service.call("POST", f"runs/{service.get('sessions/web01-1')['recovered']['run']}/cancel", {})
    production.get_by_text("It is suspended").wait_for()
    production.get_by_role("button", name="Serve its disks again").click()
    production.get_by_text("It runs.").wait_for(timeout=30_000)
    libvirt.virsh("destroy", "web01")
    wait_until(lambda: clock.skip(1) or production.get_by_text("It is off.").is_visible(), "the end of its run")
    # Its last server may close the session a moment after its run has ended.
    wait_until(page.get_by_role("button", name="Seal and end").is_enabled, "the session can end")
    production.get_by_role("button", name="Start it again").click()
    production.get_by_text("It runs.").wait_for(timeout=30_000)

    admin = visit(service)
    admin.log_in()
    move(admin, libvirt)


def move(visitor, libvirt):
    page = visitor.page
    folder = libvirt.images
    visitor.go("sessions/web01-1")
    production = page.get_by_role("region", name="Production")
    production.get_by_role("button", name="Move to production").click()
    form = page.get_by_role("dialog", name="Move web01-1")
    target = form.get_by_label("Disk vda")
    assert target.input_value() == "/var/lib/libvirt/images/web01-vda.qcow2"
    target.fill(f"{folder}/none/web01.qcow2")
    form.get_by_role("button", name="Move").click()
    form.get_by_role("alert").get_by_text("does not exist").wait_for()
    target.fill(f"{folder}/web01.qcow2")
    form.get_by_label("At most").fill("1")
    form.get_by_text("--rate 1M").wait_for()
    browser.look(visitor, "Safe to cancel until the switch.")
    form.get_by_role("button", name="Move").click()
    production.get_by_text("Safe to cancel").wait_for()
    production.get_by_role("progressbar", name="Move").wait_for()
    production.get_by_text("Moving vda:").wait_for()
    assert not visitor.violations()
    production.get_by_role("button", name="Cancel the move").click()
    page.get_by_text("Move: cancelled.").wait_for(timeout=30_000)
    assert not list(folder.iterdir())
    production.get_by_role("button", name="Move to production").click()
    target.fill(f"{folder}/web01.qcow2")
    form.get_by_role("button", name="Move").click()
    page.get_by_text("moved to production", exact=True).wait_for(timeout=30_000)
    # Both clocks, where it is now, and how it is kept.
    production.get_by_text(f"vda to {folder}/web01.qcow2").wait_for()
    production.get_by_text("before its disks were there").wait_for()
    production.get_by_text("virsh define web01.xml").wait_for()
    page.locator("dd", has_text="its writes waited").wait_for()
    assert str(folder / "web01.qcow2") in libvirt.virsh("domblklist", "web01")
    browser.look(visitor, "virsh define web01.xml")
    page.get_by_role("button", name="Seal and end").click()
    page.get_by_text("Seal and end: done.").wait_for()


def test_a_disk_is_rolled_back_after_its_numbers_are_shown(service, visit, tmp_path):
    path = tmp_path / "boot.raw"
    stored = path.read_bytes()
    with open(path, "r+b") as file:
        file.seek(20 * MIB)
        file.write(b"\xa5" * 8192)
    changed = path.read_bytes()
    visitor = visit(service)
    visitor.log_in()
    page = visitor.page
    visitor.go("machines/web01")
    page.get_by_role("button", name="Roll back disks").click()
    form = page.get_by_role("dialog", name="Roll disks back")
    assert form.get_by_role("button", name="Roll back, write").count() == 0, "nothing is written unseen"
    form.get_by_label("Disk vda").fill(str(path))
    form.get_by_role("button", name="Compare").click()
    form.get_by_text("It would write 8.0 KiB in 1 range.").wait_for(timeout=30_000)
    assert path.read_bytes() == changed
    browser.look(visitor, "It would write")
    # Other targets were not compared.
    form.get_by_label("Disk vda").fill("/dev/null")
    assert form.get_by_role("button", name="Roll back, write").count() == 0
    form.get_by_label("Disk vda").fill(str(path))
    form.get_by_role("button", name="Roll back, write 8.0 KiB").click()
    page.get_by_text("Rollback: done.").wait_for(timeout=30_000)
    assert path.read_bytes() == stored
    operator = visit(service)
    operator.log_in("operator")
    operator.go("machines/web01")
    operator.page.get_by_role("button", name="Verify data").wait_for()
    assert operator.page.get_by_role("button", name="Roll back").count() == 0
