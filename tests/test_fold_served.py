"""fold: the session of a running server moves on to the chunks."""

import concurrent.futures
import random
import signal
import struct
import threading

import pytest

from support.cli import Coldrise
from support.faults import FAMILIES, Fault, Faults, build_shim
from support.image import Image
from support.nbdserver import Nbdkit

MIB = 1 << 20
DISK_BYTES = 16 * MIB
# The file operations that decide about a rebase.
STEPS = ("rename", "sync")


def layer_files(coldrise):
    return sorted(path.name for path in (coldrise.repository / "layers").iterdir())


class Served:
    """A server that can be killed at a file operation."""

    def __init__(self, coldrise, shim, directory):
        self.faults = Faults(shim, directory, coldrise.repository)
        self.server = Nbdkit(coldrise, directory / "server", environment=coldrise.environment() | self.faults.environment())  # fmt: skip

    def kill_at(self, fault):
        """The fault's number counts from here on."""
        number = self.faults.counts()[fault.family] + fault.number
        with open(self.faults.plan, "r+b") as plan:
            # The number before the kill: the server has not sent it before.
            plan.seek(8)
            plan.write(struct.pack("=Q", number))
            plan.seek(0)
            plan.write(struct.pack("=ii", FAMILIES.index(fault.family), -2))


def test_a_server_killed_at_any_step_loses_nothing(tmp_path):
    # Without encryption: its keys take no time to derive.
    plain = Coldrise(tmp_path / "repository")
    plain.init("--no-encryption")
    disk = Image(DISK_BYTES)
    disk.fill(0, 6 * MIB, "first")
    live = plain.publish(plain.backup("web01", vda=disk.save(tmp_path / "vda.raw")), "trial", "--marks", "off")["vda"]
    shim = build_shim(tmp_path)
    numbers = random.Random(5)
    steps = [None]
    killed = 0
    points = []
    while steps:
        step = steps.pop()
        served = Served(plain, shim, tmp_path)
        server = served.server
        with server.connect(live) as handle:
            assert handle.pread(DISK_BYTES, 0) == disk.content, step
            for _ in range(4):
                data, at = numbers.randbytes(9000), numbers.randrange(DISK_BYTES - 9000)
                handle.pwrite(data, at)
                disk.write(at, data)
            handle.flush()
            points.append((plain.json("seal", "trial")["address"], bytes(disk.content)))
            before = served.faults.counts()
            if step is not None:
                served.kill_at(step)
            assert plain.run("fold").returncode == 0
            if step is None:
                counts = {family: served.faults.counts()[family] - before[family] for family in STEPS}
                assert all(counts.values()), counts
                total = sum(counts.values())
                steps = [Fault(family, "kill before", number + 1)
                         for family, count in counts.items() for number in range(count)]  # fmt: skip
        killed += server.process.poll() == -signal.SIGKILL
        server.kill()
    with Nbdkit(plain, tmp_path / "last") as server, server.connect(live) as handle:
        assert handle.pread(DISK_BYTES, 0) == disk.content
        # Leftovers of the kills are folded with the next point.
        handle.pwrite(b"last" * 1024, 0)
        disk.write(0, b"last" * 1024)
        points.append((plain.json("seal", "trial")["address"], bytes(disk.content)))
        assert plain.json("fold")["served_sessions"] == 0
        assert len(layer_files(plain)) == 1
        assert handle.pread(DISK_BYTES, 0) == disk.content
        for address, content in points:
            with server.connect(f"{address}/vda") as old:
                assert old.pread(DISK_BYTES, 0) == content
    # The server's own syncs may occur in between.
    assert killed >= total * 2 // 3, f"{killed} of {total}"
    assert plain.json("verify")["is_clean"]


@pytest.fixture
def live(coldrise, point):
    """Without time marks: fold leaves the layers to whose marks a session can go back."""
    return coldrise.publish(point, "trial", "--marks", "off")["vda"]


def test_readers_see_writes_made_during_seals_and_folds(coldrise, image, live, nbdkit):
    server, viewer = nbdkit(), nbdkit(options=["--readonly"])
    stop = threading.Event()

    def write():
        numbers = random.Random(9)
        with server.connect(live) as handle:
            while not stop.is_set():
                data, at = numbers.randbytes(5000), numbers.randrange(len(image) - 5000)
                handle.pwrite(data, at)
                image.write(at, data)
                assert handle.pread(5000, at) == data

    with concurrent.futures.ThreadPoolExecutor() as pool, viewer.connect(live) as view:
        writing = pool.submit(write)
        try:
            for _ in range(6):
                coldrise.json("seal", "trial")
                assert coldrise.json("fold")["served_sessions"] == 0
                view.pread(len(image), 0)
        finally:
            stop.set()
        writing.result()
        with server.connect(live) as handle:
            for reader in (handle, view):
                assert reader.pread(len(image), 0) == image.content
