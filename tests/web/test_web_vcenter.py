"""A vCenter is configured on the page, and a machine recovered, moved and undone there."""

import pytest

from support import browser
from support.browser import look
from support.service import Coldrised
from support.vcenter import PASSWORD, USER, Vcenter

HOST, SESSION, NAME = "DC0_C0_H0", "web01-1", "web01-recovered"


@pytest.fixture
def vcenter(network, tmp_path):
    vcenter = Vcenter(network, tmp_path / "vcenter")
    vmx = tmp_path / "empty.vmx"
    vmx.touch()
    vcenter.make_datastore_folder(SESSION, NAME, vmx)
    yield vcenter
    vcenter.close()


@pytest.fixture
def service(coldrise, point, network, vcenter, nfs, tmp_path):
    """A service with an NFS server, in the network of the vCenter."""
    assert point.startswith("web01/")
    nfs("--versions", "3", "--idle", "1")
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, prefix=network.command(),
                   options=["--web", str(browser.PAGE)]) as service:
        network.relay(service.port)
        for role in ("admin", "operator"):
            service.post("users", {"name": role, "role": role, "password": browser.PASSWORD})
        yield service


def test_a_vcenter_is_configured_and_a_machine_recovered_there(service, vcenter, visit):
    admin = visit(service)
    admin.log_in()
    page = admin.page
    admin.go("machines/web01")
    page.get_by_role("button", name="Recover").click()
    page.get_by_role("dialog", name="Recover web01").get_by_label("Boot here").wait_for()
    assert page.get_by_label("Run under vCenter or ESXi").count() == 0, "none is configured"
    admin.go("access")
    servers = page.get_by_role("region", name="Hypervisors")
    servers.get_by_role("button", name="New hypervisor").click()
    form = page.get_by_role("dialog", name="New hypervisor")
    form.get_by_label("Name").fill("vc01")
    form.get_by_label("Address with a port").fill(vcenter.server)
    form.get_by_label("User").fill(USER)
    form.get_by_label("Password").first.fill(PASSWORD)
    form.get_by_label("SHA-256 thumbprint").fill("00:" * 31 + "00")
    form.get_by_label("This service’s host").fill("127.0.0.1")
    look(admin, "As the server’s console shows it.")
    form.get_by_role("button", name="Save and test").click()
    # Its certificate can be compared, and is adopted.
    servers.get_by_text(vcenter.thumbprint()).wait_for()
    servers.get_by_role("button", name="Edit").click()
    form = page.get_by_role("dialog", name="Hypervisor vc01")
    form.get_by_label("SHA-256 thumbprint").fill(vcenter.thumbprint().lower())
    assert form.get_by_label("Password").first.input_value() == ""
    form.get_by_role("button", name="Save and test").click()
    servers.get_by_text("hosts").wait_for()
    look(admin, "datastore")

    visitor = visit(service)
    visitor.log_in("operator")
    recover(visitor, vcenter)
    move_and_undo(visitor, vcenter, service)


def recover(visitor, vcenter):
    page = visitor.page
    visitor.go("machines/web01")
    page.get_by_role("button", name="Recover").click()
    drawer = page.get_by_role("dialog", name="Recover web01")
    drawer.get_by_label("Run under vCenter or ESXi").check()
    drawer.get_by_label("Host that runs it").select_option(HOST)
    drawer.get_by_text(f"--to vcenter:vc01 --host {HOST}").wait_for()
    look(visitor, "It can be moved later, while it runs.")
    drawer.get_by_role("button", name="Start").click()
    page.get_by_role("heading", name=SESSION).wait_for(timeout=30_000)
    production = page.get_by_role("region", name="Production")
    production.get_by_text("It was powered on.").wait_for(timeout=30_000)
    production.get_by_text(f"{NAME}, at vc01").wait_for()
    assert vcenter.look()["machines"][NAME]["state"] == "poweredOn"
    assert page.get_by_role("button", name="Seal and end").is_disabled()


def move_and_undo(visitor, vcenter, service):
    page = visitor.page
    production = page.get_by_role("region", name="Production")
    assert production.get_by_role("button", name="Undo, discard").count() == 0, "for administrators"
    production.get_by_role("button", name="Undo…").click()
    page.get_by_role("dialog", name=f"Undo the recovery of {NAME}").get_by_role("button", name="Undo").click()
    page.get_by_text("Undo: done.").wait_for(timeout=30_000)
    assert vcenter.look()["nas"] == {}
    recover(visitor, vcenter)
    vcenter.order("hold", "RelocateVm")
    production.get_by_role("button", name="Move to production").click()
    form = page.get_by_role("dialog", name=f"Move {NAME}")
    form.get_by_label("Datastore").select_option("LocalDS_0")
    look(visitor, "Storage vMotion")
    form.get_by_role("button", name="Move").click()
    production.get_by_text("Safe to cancel").wait_for()
    vcenter.order("release")
    production.get_by_text(f"{NAME} at {vcenter.server} was moved to LocalDS_0").wait_for(timeout=30_000)
    production.get_by_text("the session ends with the point").wait_for(timeout=30_000)
    look(visitor, "moved to production")
    assert vcenter.look()["machines"][NAME]["datastores"] == ["LocalDS_0"]
