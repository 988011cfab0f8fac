"""coldrise backup --from libvirt: running domains, at one instant, and what is left when it fails."""

import json
import os
import signal
import subprocess

import pytest

from support.domain import Domain
from support.libvirt import Libvirt
from support.nbdserver import wait_until
from support.running import DISKS, MIB, assert_one_instant


@pytest.fixture(scope="module")
def libvirt():
    libvirt = Libvirt()
    yield libvirt
    libvirt.close()


@pytest.fixture
def scratch(libvirt):
    """A folder that QEMU's user can enter; empty after each test."""
    folder = libvirt.folder / "scratch"
    folder.mkdir(exist_ok=True)
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def domain(libvirt):
    """Starts domains; all are ended."""
    def start(name="web01", **options):
        return Domain(libvirt, name, **options)

    yield start
    for name in libvirt.domains():
        libvirt.virsh("destroy", name)
    for folder in libvirt.folder.glob("disks-*"):
        subprocess.run(["rm", "-r", folder], check=True)
    for name in libvirt.virsh("list", "--all", "--name").split():
        libvirt.virsh("undefine", "--checkpoints-metadata", name)


@pytest.fixture
def live(coldrise, libvirt, scratch):
    def backup(*options, machine="web01", source="libvirt", program=coldrise):
        return program.json("backup", machine, "--from", source, "--connect", libvirt.uri, "--scratch", scratch, *options)

    return backup


@pytest.fixture
def refused(coldrise, libvirt, scratch):
    def backup(*options, source="libvirt"):
        done = coldrise.run("backup", "web01", "--from", source, "--connect", libvirt.uri, "--scratch", scratch, *options)
        assert done.returncode not in (0, 101), done.stdout
        return done.stderr

    return backup


def restored(coldrise, address, folder):
    """The disks of a point as raw images."""
    images = [folder / f"restored-{disk}.raw" for disk in DISKS]
    for disk, image in zip(DISKS, images):
        coldrise.json("restore", f"{address}/{disk}", image, "--force")
    return images


def assert_same_as_now(coldrise, address, domain, folder):
    """Whether a point has the content of the domain's images, which nobody writes."""
    for disk, image in zip(DISKS, restored(coldrise, address, folder)):
        domain.write(disk, "flush")
        command = ["qemu-img", "compare", "-U", "-f", "raw", "-F", domain.format, image, domain.images[disk]]
        assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0, disk


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_a_point_is_one_instant_of_all_disks(coldrise, domain, live, tmp_path, mode):
    running = domain(counting=True)
    rounds = []
    for number in range(4):
        made = live(*mode)
        assert [disk["is_incremental"] for disk in made["disks"]] == [number > 0] * 2
        rounds.append(assert_one_instant(*restored(coldrise, made["address"], tmp_path)))
        assert len(running.checkpoints()) == 1 and not running.has_job()
    assert rounds == sorted(set(rounds)), "the guest goes on"
    running.goes_on()
    assert "<name>web01</name>" in coldrise.json("show", made["address"])["configuration"]["text"]


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_only_changed_blocks_are_read(coldrise, domain, live, tmp_path, mode):
    running = domain()
    running.write("vda", "write -P 17 0 20M")
    full = live(*mode)
    assert full["disks"][0]["read_bytes"] >= 20 * MIB and not full["instant"]["remarks"]
    running.write("vda", "write -P 18 8M 1M")
    running.write("vda", "write -z 4M 64k")
    running.write("vdb", "write -P 19 63M 1M")
    part = live(*mode)
    assert [disk["read_bytes"] for disk in part["disks"]] == [MIB, MIB]
    assert [disk["base"] for disk in part["disks"]] == [full["point"]] * 2
    assert_same_as_now(coldrise, part["address"], running, tmp_path)
    # libvirt forgets the checkpoints of a transient domain; the images keep the bitmaps over a clean end.
    running.end()
    again = domain()
    assert again.checkpoints() == []
    again.write("vdb", "write -P 20 1M 64k")
    made = live(*mode)
    assert [disk["read_bytes"] for disk in made["disks"]] == [0, 65536]
    assert_same_as_now(coldrise, made["address"], again, tmp_path)
