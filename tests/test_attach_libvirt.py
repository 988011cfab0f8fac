"""coldrise attach to domains of libvirt, and what a kill leaves."""

import contextlib
import json
import pathlib
import subprocess

import pytest

from support.domain import Domain
from support.image import Image
from support.killed_at import killed_at
from support.libvirt import Libvirt
from support.nbdserver import wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def libvirt():
    libvirt = Libvirt()
    yield libvirt
    libvirt.close()


@pytest.fixture(autouse=True)
def ended(libvirt, own_tmp):
    """QEMU's user can enter the folder of temporary files. All domains end."""
    own_tmp.chmod(0o755)
    yield
    for name in libvirt.domains():
        libvirt.virsh("destroy", name)
    for folder in libvirt.folder.glob("disks-*"):
        subprocess.run(["rm", "-r", folder], check=True)


@pytest.fixture
def stored(coldrise, tmp_path):
    image = Image(4 * MIB)
    image.write(MIB, b"\x5a" * 65536)
    return coldrise.backup("db01", vda=image.save(tmp_path / "vda.raw"))


def attach(coldrise, libvirt, what):
    process = coldrise.start("--json", "attach", what, "--to", "libvirt:web01", "--connect", libvirt.uri,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = json.loads(process.stdout.readline() or "{}")
    return process, line if line.get("event") == "ready" else None


def children(process):
    """Of all its threads."""
    found = []
    for thread in pathlib.Path(f"/proc/{process}/task").iterdir():
        # Those that read virsh's answers come and go.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += (thread / "children").read_text(encoding="ascii").split()
    return [int(child) for child in found]


def is_running(process):
    try:
        stat = pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def detach(coldrise, libvirt, *options):
    return coldrise.run("detach", "db01-vda", "--from", "libvirt:web01", "--connect", libvirt.uri, *options)


def test_a_disk_is_attached_to_a_domain_and_detached(coldrise, libvirt, stored):
    running = Domain(libvirt, "web01", counting=True)
    process, ready = attach(coldrise, libvirt, stored)
    assert ready and ready["is_read_only"], process.stderr.read()
    assert "nbd" in libvirt.virsh("dumpxml", "web01") and "vdz" in libvirt.virsh("domblklist", "web01")
    again, none = attach(coldrise, libvirt, stored)
    assert none is None and "attached already" in again.stderr.read()
    # This guest has no operating system that would release the disk.
    refused = detach(coldrise, libvirt)
    assert refused.returncode == 11 and "does not release" in refused.stderr, refused.stderr
    assert "whether the guest has mounted the disk is unknown" in refused.stderr
    running.goes_on()
    libvirt.virsh("destroy", "web01")
    assert process.wait(timeout=30) == 0
    assert "no domain web01" in detach(coldrise, libvirt).stderr


def test_the_server_of_a_killed_attach_ends(coldrise, libvirt, stored, tmp_path):
    coldrise.runs = tmp_path / "runs"
    Domain(libvirt, "web01", counting=True)
    process, ready = attach(coldrise, libvirt, stored)
    assert ready, process.stderr.read()
    servers = children(process.pid)
    assert servers
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_running(server) for server in servers), "the end of the server")
    assert "libvirt:web01 still has disk db01-vda" in coldrise.run("doctor").stdout
    libvirt.virsh("destroy", "web01")
    assert "still has disk" not in coldrise.run("doctor").stdout


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_attach_leaves_all_or_nothing(coldrise, libvirt, stored, tmp_path, moment):
    coldrise.runs = tmp_path / "runs"
    Domain(libvirt, "web01", counting=True)
    with killed_at(tmp_path, moment, "attach-device"):
        _, ready = attach(coldrise, libvirt, stored)
    assert ready is None
    is_there = "vdz" in libvirt.virsh("domblklist", "web01")
    assert is_there == (moment == "after")
    told = coldrise.run("doctor").stdout
    assert is_there == (f"coldrise detach db01-vda --from libvirt:web01 --connect {libvirt.uri}" in told), told
    assert ("no disk db01-vda" in detach(coldrise, libvirt).stderr) == (not is_there)
