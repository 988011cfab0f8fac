"""Numbered writes to two disks: the oracle of what a time mark must show."""

import contextlib
import math
import random
import struct
import threading
import time

import nbd

BLOCK = 4096
# Few blocks, so that each is written again and again.
BLOCKS = 200
DISK_BYTES = 4 << 20


class NumberedWrites(threading.Thread):
    """Writes numbered blocks to two disks by turns, as fast as the server takes them, or with a pause in between."""

    def __init__(self, server, exports, pause_s=0):
        super().__init__()
        self.server = server
        self.exports = exports
        self.pause_s = pause_s
        self.random = random.Random(7)
        # For each write: its start and end in seconds, its disk and its block.
        self.writes = []
        self.must_end = threading.Event()

    def run(self):
        with self.server.connect(self.exports[0]) as first, self.server.connect(self.exports[1]) as second:
            with contextlib.suppress(nbd.Error):  # The server was killed.
                while not self.must_end.is_set():
                    disk, block = len(self.writes) % 2, self.random.randrange(BLOCKS)
                    self.writes.append([time.time(), math.inf, disk, block])
                    (first, second)[disk].pwrite(content(len(self.writes)), block * BLOCK)
                    self.writes[-1][1] = time.time()
                    self.must_end.wait(self.pause_s)
                    if len(self.writes) % 500 == 0:
                        first.flush()
                        second.flush()

    def end(self):
        self.must_end.set()
        self.join()

    def check(self, mark, images):
        """The disks must be what they were after a number of writes that fits the mark's time."""
        found = [
            [struct.unpack_from("<Q", image, block * BLOCK)[0] for block in range(BLOCKS)] for image in images
        ]
        number = max(map(max, found))
        expected = [[0] * BLOCKS, [0] * BLOCKS]
        for n, (_, _, disk, block) in enumerate(self.writes[:number], 1):
            expected[disk][block] = n
        assert found == expected, f"the disks are not as after write {number}"
        for disk, numbers in enumerate(found):
            for block, n in enumerate(numbers):
                assert n == 0 or images[disk][block * BLOCK:][:BLOCK] == content(n)
        # The mark's time is cut to milliseconds.
        at = mark["marked_at_ms"] / 1000
        assert all(end > at for _, end, _, _ in self.writes[number:]), "a write before the mark is missing"
        assert all(start < at + 0.002 for start, _, _, _ in self.writes[:number]), "a write after the mark is there"
        return number


def content(number):
    return struct.pack("<Q", number) * (BLOCK // 8)


def images(coldrise, address, folder):
    """The disks of a point or a mark, as restore writes them."""
    found = []
    for disk in ["vda", "vdb"]:
        target = folder / f"{disk}-restored.raw"
        coldrise.json("restore", "--force", f"{address}/{disk}", target)
        found.append(target.read_bytes())
    return found


def publish_empty_disks(coldrise, folder, session):
    """A session of a machine with two empty disks."""
    disks = {}
    for name in ["vda", "vdb"]:
        disks[name] = folder / f"{name}.raw"
        disks[name].write_bytes(bytes(DISK_BYTES))
    return coldrise.publish(coldrise.backup("web01", **disks), session)
