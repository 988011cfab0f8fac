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
    service.post("jobs", {"name": "nightly", "kind": "backup", "from": "libvirt", "hosts": ["hv1"], "machines": ["web*"]})
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
