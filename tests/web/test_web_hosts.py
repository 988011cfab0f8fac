"""The page Hosts: a host of libvirt is added, checked and removed."""

import pytest

from support import browser
from support.browser import look
from support.domain import Domain
from support.image import Image
from support.running import MIB
from support.service import Coldrised
from support.ssh_host import SshHost


@pytest.fixture
def service(coldrise, tmp_path):
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, options=["--web", str(browser.PAGE)]) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        yield service


@pytest.fixture
def host():
    started = SshHost()
    Domain(started.libvirt, "web01")
    Domain(started.libvirt, "db01")
    yield started
    started.close()


def test_a_host_is_added_checked_and_removed(service, host, visit, coldrise, tmp_path):
    admin = visit(service)
    admin.log_in()
    page = admin.page
    admin.go("hosts")
    look(admin, "Add other KVM hosts")
    page.get_by_role("button", name="Add a host").click()
    form = page.get_by_role("dialog", name="Add a host")
    form.get_by_label("Name").fill("hv1")
    form.get_by_label("Address").fill(host.address)
    form.get_by_label("Fingerprint").fill("SHA256:" + "A" * 43)
    form.get_by_role("button", name="Add and check").click()
    form.get_by_role("alert").get_by_text("it was not added").wait_for()
    form.get_by_label("Fingerprint").fill("")
    look(admin, "the key that it shows now is remembered")
    form.get_by_role("button", name="Add and check").click()
    hosts = page.get_by_role("region", name="Hosts of libvirt")
    hosts.get_by_text("does not accept this repository's key").wait_for()
    line = page.get_by_role("region", name="Login").locator("code").last.inner_text()
    assert line == service.get("kvm-hosts")["authorized_keys"]
    look(admin, "authorized_keys")
    host.keys.write_text(line + "\n", encoding="utf-8")
    makes_a_job(service, admin)
    changes_a_job(service, admin)
    viewer_sees_the_job(service, visit)
    admin.go("hosts")
    hosts.get_by_role("button", name="Check", exact=True).click()
    hosts.get_by_text("1 machine in no job: db01").wait_for()
    look(admin, "in no job")
    image = Image(MIB)
    coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    admin.go("machines/web01")
    page.get_by_role("button", name="Recover").click()
    drawer = page.get_by_role("dialog", name="Recover web01")
    drawer.get_by_label("Run under libvirt").check()
    drawer.get_by_role("combobox", name="Host").select_option("hv1")
    drawer.get_by_text("--to libvirt --on hv1").wait_for()
    look(admin, "under libvirt on hv1")
    admin.go("hosts")
    hosts.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog", name="Remove hv1?").get_by_role("button", name="Remove").click()
    page.get_by_text("host hv1 is named by jobs: nightly").wait_for()
    service.call("DELETE", "jobs/nightly")
    hosts.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog", name="Remove hv1?").get_by_role("button", name="Remove").click()
    page.get_by_text("Add other KVM hosts").wait_for()
    assert service.get("kvm-hosts")["hosts"] == []


def card(page, name):
    return page.get_by_role("article").filter(has=page.get_by_role("heading", name=name, exact=True))


def makes_a_job(service, admin):
    """For the machines of libvirt on a registered host."""
    page = admin.page
    admin.go("jobs?new")
    form = page.get_by_role("dialog", name="New job")
    form.get_by_role("textbox", name="Name", exact=True).fill("nightly")
    form.get_by_role("combobox", name="Source").select_option("Machines of libvirt")
    form.get_by_role("group", name="Hosts").get_by_label("hv1").check()
    form.get_by_role("textbox", name="Machines").fill("web*")
    assert form.get_by_role("group", name="Disks").count() == 0
    form.get_by_role("button", name="Save").click()
    card(page, "nightly").get_by_text("libvirt on hv1", exact=True).wait_for()
    job = service.get("jobs/nightly")
    assert (job["from"], job["hosts"], job["machines"], job.get("disks")) == ("libvirt", ["hv1"], ["web*"], None)


def changes_a_job(service, admin):
    """One that is off, as it names a host that was removed: first the hosts, then the source."""
    page = admin.page
    service.post("jobs", {"name": "old", "kind": "backup", "from": "libvirt", "hosts": ["hv2", "hv1"], "machines": ["db01"],
                          "quiesce": True, "enabled": False})
    old = card(page, "old")
    old.get_by_text("libvirt on hv2, hv1").wait_for()
    old.get_by_role("button", name="Edit").click()
    form = page.get_by_role("dialog", name="Job old")
    hosts = form.get_by_role("group", name="Hosts")
    hosts.get_by_text("hv2, not registered").wait_for()
    look(admin, "not registered")
    assert hosts.get_by_label("hv1").is_checked()
    hosts.get_by_label("hv2").uncheck()
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="detached")
    job = service.get("jobs/old")
    assert (job["from"], job["hosts"], job["quiesce"]) == ("libvirt", ["hv1"], True)
    old.get_by_text("libvirt on hv1", exact=True).wait_for()
    old.get_by_role("button", name="Edit").click()
    form.get_by_role("combobox", name="Source").select_option("Files or devices of this server")
    form.get_by_label("Disk 1: source").fill("raw:/srv/db01.raw")
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="detached")
    job = service.get("jobs/old")
    assert job["disks"] == {"vda": "raw:/srv/db01.raw"} and not {"from", "hosts", "quiesce"} & job.keys()


def viewer_sees_the_job(service, visit):
    service.post("users", {"name": "viewer", "role": "viewer", "password": browser.PASSWORD})
    viewer = visit(service)
    viewer.log_in("viewer")
    viewer.go("jobs")
    card(viewer.page, "nightly").get_by_text("libvirt on hv1", exact=True).wait_for()
    assert viewer.page.get_by_role("button", name="Edit").count() == 0
