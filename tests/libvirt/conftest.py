"""Fixtures of tests with a libvirtd: one for each file."""

import contextlib
import json
import subprocess

import pytest

from support import counting_machine
from support.cli import Coldrise
from support.domain import Domain
from support.libvirt import QEMU_USER, Libvirt
from support.nbdserver import wait_until
from support.wallclock import BothClocks


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
def clock(tmp_path):
    return BothClocks(tmp_path)


@pytest.fixture
def address(coldrise, tmp_path):
    return counting_machine.store(coldrise, tmp_path)


class Recovery:
    """A running `coldrise recover`; with a clock, it waits for nothing."""

    def __init__(self, coldrise, libvirt, socket, address, *options, clock=None):
        self.messages = open(socket.with_suffix(".err"), "w+", encoding="utf-8")
        self.clock = clock
        with clock.of(coldrise) if clock else contextlib.nullcontext():
            self.process = coldrise.start("recover", address, "--to", "libvirt", "--json", "--connect",
                                          libvirt.uri, "--socket", socket, "--socket-owner", QEMU_USER,
                                          *options, stdout=subprocess.PIPE, stderr=self.messages)
        line = self.process.stdout.readline()
        assert line, self.said()
        self.event = json.loads(line)

    def said(self):
        self.messages.seek(0)
        return self.messages.read()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        """The final answer."""
        if self.clock:
            self.clock.end_of(self.process)
        self.process.wait(timeout=60)
        assert self.process.returncode == 0, self.said()
        return json.loads(self.process.stdout.read().splitlines()[-1])


@pytest.fixture
def recover(coldrise, libvirt, entered_tmp, address):
    """Recovers a machine."""
    def start(what=address, *options, name="nbd", **keywords):
        return Recovery(coldrise, libvirt, entered_tmp / name, what, *options, **keywords)

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
