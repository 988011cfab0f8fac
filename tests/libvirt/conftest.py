"""Fixtures of tests with a libvirtd: one for each file."""

import pytest

from support import counting_machine
from support.cli import Coldrise
from support.domain import Domain
from support.libvirt import QEMU_USER, Libvirt
from support.nbdserver import wait_until
from support.recovery import Recovery


@pytest.fixture(scope="module")
def libvirtd():
    started = Libvirt()
    yield started
    started.close()


@pytest.fixture
def libvirt(libvirtd):
    """Without any domain, before and after each test."""
    yield libvirtd
    libvirtd.clear()


@pytest.fixture
def domain(libvirt):
    """Starts domains."""
    def start(name="web01", **options):
        return Domain(libvirt, name, **options)

    return start


@pytest.fixture
def entered_tmp(own_tmp):
    """A folder of temporary files that QEMU's user can enter."""
    own_tmp.chmod(0o755)
    return own_tmp


@pytest.fixture
def scratch(libvirt):
    """A folder that QEMU's user can enter; empty after each test."""
    folder = libvirt.folder / "scratch"
    folder.mkdir(exist_ok=True)
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def live(coldrise, libvirt, scratch):
    def backup(*options, machine="web01", source="libvirt", program=coldrise):
        return program.json("backup", machine, "--from", source, "--connect", libvirt.uri, "--scratch", scratch, *options)

    return backup


@pytest.fixture
def other(template, tmp_path):
    return Coldrise.copied(template, tmp_path / "other")


@pytest.fixture
def address(coldrise, tmp_path):
    return counting_machine.store(coldrise, tmp_path)


@pytest.fixture
def recover(coldrise, libvirt, entered_tmp, address):
    """Recovers a machine."""
    def start(what=address, *options, name="nbd", **keywords):
        socket = entered_tmp / name
        return Recovery(coldrise, socket.with_suffix(".err"), what, "--connect", libvirt.uri, "--socket", socket,
                        "--socket-owner", QEMU_USER, *options, **keywords)

    return start


@pytest.fixture
def tried(coldrise, libvirt, entered_tmp):
    """The result of a short recovery."""
    def run(address, *options):
        return coldrise.run("recover", address, "--to", "libvirt", "--connect", libvirt.uri, "--socket", entered_tmp / "nbd",
                            "--socket-owner", QEMU_USER, *options)

    return run


@pytest.fixture
def grows(coldrise, tmp_path):
    """The machine's counter continues in the repository."""
    def check():
        before = counting_machine.count(coldrise, "live/web01-1", tmp_path)
        wait_until(lambda: counting_machine.count(coldrise, "live/web01-1", tmp_path) > before, "the machine writes")

    return check
