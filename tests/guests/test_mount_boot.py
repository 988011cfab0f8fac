"""A guest boots in QEMU from the files of a mounted session that can be written.

It is one disk all the time: each boot finds the files that the guest wrote when it
had booted from the others.
"""

import pytest

from support.cli import Coldrise
from support.guest import Guest, image
from support.mounted import Mounted
from support.readers import qemu
from support.served import driver_of

# The short form takes the first: in it QEMU keeps tables and a journal of its own, apart from the guest's writes.
# `make test-mount-boot` takes all. Other tests write every format through QEMU and compare.
FILES = ["vda.vhdx", "vda.qcow2", "vda.vmdk", "vda.raw", "vda.vhd", "vda.hosted.vmdk",
         "vda.external.qcow2"]  # fmt: skip
LOGIN_SECONDS = 180


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A mounted session of the guest's disk."""
    folder = tmp_path_factory.mktemp("boot")
    coldrise = Coldrise(folder / "repository")
    coldrise.init("--no-encryption")
    coldrise.publish(coldrise.backup("guest", vda=image()), "trial")
    with Mounted(coldrise, folder / "mnt", "--cache", "256M") as mounted:
        yield Session(mounted / "live/trial")


class Session:
    """The files, and which of them the guest has booted from."""

    def __init__(self, folder):
        self.folder = folder
        self.booted = []


def disk(path):
    """Without discard: a qcow2 whose clusters are all allocated refuses it."""
    node = f"driver={driver_of(path.name)},node-name=disk,file.driver=file,file.filename={path}"
    return ["-blockdev", node, "-device",
            "virtio-blk-pci,drive=disk,discard=off,write-zeroes=off"]  # fmt: skip


def pytest_generate_tests(metafunc):
    if "file" in metafunc.fixturenames:
        metafunc.parametrize("file", FILES[: metafunc.config.getoption("--boot-files")])


def test_the_guest_boots(session, tmp_path, file):
    path = session.folder / file
    with Guest([disk(path)], log=tmp_path / "console.log", cpus=1, memory_mib=512) as guest:
        guest.wait_for_login(timeout=LOGIN_SECONDS)
        guest.login()
        assert set(session.booted) <= set(guest.check("ls /root").split())
        guest.check(f"echo {file} > /root/{file} && sync")
        session.booted.append(file)
        # Pulling the plug: QEMU closes nothing.
    qemu("qemu-img", "compare", "-f", "raw", "-F", driver_of(file), session.folder / "vda.raw",
         path)  # fmt: skip
