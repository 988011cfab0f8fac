"""coldrise attach to domains of libvirt, and the leftovers of a kill."""

import json
import subprocess

import pytest

from support.foreground import child_called, is_running
from support.image import Image
from support.nbdserver import wait_until
from support.running import MIB, TICKING_SECTOR
from support.virsh import changed_virsh, killed_at, on, skip


@pytest.fixture
def stored(coldrise, tmp_path):
    image = Image(4 * MIB)
    image.write(MIB, b"\x5a" * 65536)
    return coldrise.backup("db01", vda=image.save(tmp_path / "vda.raw"))


@pytest.fixture
def attach(coldrise, libvirt, stored, entered_tmp, clock):
    """A running attach, and its ready line; none if it fails."""
    def start():
        with clock.of(coldrise):
            process = coldrise.start("--json", "attach", stored, "--to", "libvirt:web01", "--connect", libvirt.uri,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = json.loads(process.stdout.readline() or "{}")
        return process, line if line.get("event") == "ready" else None

    return start


@pytest.fixture
def detach(coldrise, libvirt):
    return lambda: coldrise.run("detach", "db01-vda", "--from", "libvirt:web01", "--connect", libvirt.uri)


def has_disk(libvirt):
    return "vdz" in libvirt.virsh("domblklist", "web01")


def test_a_disk_is_attached_to_a_domain_and_detached(libvirt, domain, attach, detach, clock):
    running = domain(sector=TICKING_SECTOR)
    process, ready = attach()
    assert ready and ready["is_read_only"], process.stderr.read()
    assert "nbd" in libvirt.virsh("dumpxml", "web01") and has_disk(libvirt)
    again, none = attach()
    assert none is None and "attached already" in again.stderr.read()
    done = detach()
    assert done.returncode == 0 and not has_disk(libvirt), done.stderr
    assert clock.end_of(process) == 0
    running.goes_on()
    assert "no disk db01-vda" in detach().stderr


def test_a_disk_that_the_guest_does_not_release_stays(coldrise, libvirt, domain, attach, detach, clock, tmp_path):
    # Paused, it releases nothing.
    domain()
    process, ready = attach()
    assert ready, process.stderr.read()
    with clock.of(coldrise), changed_virsh(tmp_path, on(" dumpxml ", skip(clock, 7))):
        refused = detach()
    assert refused.returncode == 11 and "does not release" in refused.stderr, refused.stderr
    assert "whether the guest has mounted the disk is unknown" in refused.stderr and has_disk(libvirt)
    libvirt.virsh("destroy", "web01")
    assert clock.end_of(process) == 0
    assert "no domain web01" in detach().stderr


def test_the_server_of_a_killed_attach_ends(coldrise, libvirt, domain, attach, tmp_path):
    coldrise.runs = tmp_path / "runs"
    domain(sector=TICKING_SECTOR)
    process, ready = attach()
    assert ready, process.stderr.read()
    server = child_called(process.pid, "nbdkit")
    process.kill()
    process.communicate()
    wait_until(lambda: not is_running(server), "the end of the server")
    assert "libvirt:web01 still has disk db01-vda" in coldrise.run("doctor").stdout
    libvirt.virsh("destroy", "web01")
    assert "still has disk" not in coldrise.run("doctor").stdout


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_attach_leaves_all_or_nothing(coldrise, libvirt, domain, attach, detach, tmp_path, moment):
    coldrise.runs = tmp_path / "runs"
    domain(sector=TICKING_SECTOR)
    with killed_at(tmp_path, moment, "attach-device"):
        _, ready = attach()
    assert ready is None
    is_there = moment == "after"
    assert has_disk(libvirt) == is_there
    output = coldrise.run("doctor").stdout
    assert is_there == (f"coldrise detach db01-vda --from libvirt:web01 --connect {libvirt.uri}" in output), output
    done = detach()
    assert (done.returncode == 0) == is_there and ("no disk db01-vda" in done.stderr) == (not is_there), done.stderr
    assert not has_disk(libvirt)
