"""What two disks were after each of many writes, over kills of their server: the oracle of the states that time marks show."""

import bisect
import contextlib
import math
import random
import struct
import threading
import time

import nbd

from .nbdserver import read_all
from .numbered_writes import BLOCK, content

BLOCKS = 1024
DISK_BYTES = BLOCKS * BLOCK
DISKS = ["vda", "vdb"]
# Most blocks are written again and again.
HOT_BLOCKS = 200
# A write is captured in pieces of so many blocks, and a mark may fall between two of them.
STRIPE_BLOCKS = 64
# Marks have milliseconds; the clock of a write is read before it begins.
SLACK_S = 0.002
# States that are compared behind the newest number that one has.
MOST_COVERED = 50
# How long before the clock was set back marks may have got their times last.
BACK_SLACK_S = 60


class Write:
    """A write of `value` to `count` blocks from `first` on: blocks of both disks are numbered through. Zero: zeroes."""

    def __init__(self, value, first, count):
        self.value, self.first, self.count = value, first, count
        self.begin, self.end = time.time(), math.inf

    def apply(self, state, count=None):
        count = self.count if count is None else count
        state[self.first:self.first + count] = [self.value] * count

    def pieces(self):
        """The numbers of blocks after which a mark may see it while it is under way."""
        return range(STRIPE_BLOCKS - self.first % STRIPE_BLOCKS, self.count, STRIPE_BLOCKS)


class Served:
    """The writes while one server ran, and the state before them."""

    def __init__(self, base, begin, first_number):
        self.base, self.begin, self.end, self.first_number = base, begin, math.inf, first_number
        self.writes, self.flushed = [], 0

    def after(self, number):
        state = list(self.base)
        for write in self.writes[:number]:
            write.apply(state)
        return state


class WriteHistory:
    """The writes of all servers, and which clock their marks had."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.served = []
        # That of the newest write, and how many states had a write in part.
        self.number = self.in_part = 0
        # Since when the clock was so many seconds ahead.
        self.ahead = [(0, 0)]
        # From when to when it was behind that.
        self.behind = []

    def begin(self, server, exports):
        """A server runs now: reads the disks, which must have every write that was flushed. Returns the thread that writes."""
        images = []
        for name in exports:
            with server.connect(name) as disk:
                images.append(read_all(disk))
        base = numbers(images)
        if self.served:
            last = self.served[-1]
            possible = [{value} for value in last.after(last.flushed)]
            for write in last.writes[last.flushed:]:
                for block in range(write.first, write.first + write.count):
                    possible[block].add(write.value)
            lost = [block for block in range(2 * BLOCKS) if base[block] not in possible[block]]
            assert not lost, f"flushed writes are lost after a kill: blocks {lost[:10]}"
        self.served.append(Served(base, self.served[-1].end if self.served else 0, self.number + 1))
        return Writer(self, server, exports)

    @property
    def ahead_s(self):
        return self.ahead[-1][1]

    def set_ahead(self, seconds):
        self.ahead.append((time.time(), seconds))

    def set_back(self):
        if not self.behind or self.behind[-1][1] < math.inf:
            self.behind.append([time.time(), math.inf])

    def set_right(self):
        if self.behind:
            self.behind[-1][1] = min(self.behind[-1][1], time.time())

    def real_time(self, mark):
        """The host's time of a mark, and until when its instant can have been."""
        at = mark["marked_at_ms"] / 1000
        since = bisect.bisect_right([since + ahead for since, ahead in self.ahead], at) - 1
        at -= self.ahead[since][1]
        return at, max([at, *(end for begin, end in self.behind if begin - BACK_SLACK_S < at < end)])

    def find(self, mark, images):
        """The number of the server and of the write after which the disks were so, at a time that fits the mark's; and the
        state. A write that was under way then may be there in part."""
        at, until = self.real_time(mark)
        state = numbers(images)
        newest, elsewhere = max(state), []
        of = max(bisect.bisect_right([served.first_number for served in self.served], newest) - 1, 0)
        for number, served in enumerate(self.served[of:], of):
            writes = list(served.writes)
            first = max(newest - served.first_number, 0) if number == of else 0
            expected = served.after(first)
            # The writes behind the newest number that is there can only be zeroes, those that these cover, and one in part.
            for n in range(first, min(first + MOST_COVERED, len(writes)) + 1):
                begin = writes[n - 1].begin if n else served.begin
                end = writes[n].end if n < len(writes) else math.inf
                for part in [0, *(writes[n].pieces() if n < len(writes) else [])]:
                    seen = list(expected)
                    if part:
                        begin = writes[n].begin
                        writes[n].apply(seen, part)
                    if seen == state:
                        if begin <= until + SLACK_S and at < min(end, served.end):
                            self.in_part += part > 0
                            return (number, n), state
                        elsewhere.append((number, n, part, f"{begin - at:.3f} to {min(end, served.end) - at:.3f} s"))
                if n < len(writes):
                    writes[n].apply(expected)
        raise AssertionError(f"{mark}: the disks are not as after any write of that time, but as after {elsewhere} of {newest}")


class Writer(threading.Thread):
    """Writes to both disks or one, one write after the other, until it is ended or its server is."""

    def __init__(self, history, server, exports):
        super().__init__(daemon=True)
        self.history, self.server, self.exports = history, server, exports
        self.served, self.random = history.served[-1], random.Random(history.random.random())
        self.pause_s = self.random.choice([0, 0.002, 0.01, 0.3])
        # A disk that is idle has marks only.
        self.only = self.random.choice([None, 0, 1])
        self.flush_every = self.random.choice([20, 300, 300, 10 ** 6])
        # Held for each write: who has it pauses them.
        self.writing = threading.Lock()
        self.must_end = threading.Event()
        # Writes that failed because the drive was full.
        self.failed = 0
        self.start()

    def run(self):
        with contextlib.suppress(nbd.Error):  # The server has ended.
            with self.server.connect(self.exports[0]) as first, self.server.connect(self.exports[1]) as second:
                while not self.must_end.wait(self.pause_s):
                    with self.writing:
                        self.write_one([first, second])

    def write_one(self, disks):
        self.history.number += 1
        disk, kind = self.random.randrange(2) if self.only is None else self.only, self.random.random()
        count = self.random.randint(1, 128) if kind < 0.05 else 1
        first = self.random.randrange(HOT_BLOCKS if kind < 0.8 else BLOCKS - count + 1)
        write = Write(0 if kind > 0.95 else self.history.number, disk * BLOCKS + first, count)
        self.served.writes.append(write)
        self.repeat(lambda: disks[disk].pwrite(content(write.value) * count, first * BLOCK) if write.value
                    else disks[disk].zero(count * BLOCK, first * BLOCK))
        write.end = time.time()
        if len(self.served.writes) % self.flush_every == 0:
            for disk in disks:
                self.repeat(disk.flush)
            self.served.flushed = len(self.served.writes)

    def repeat(self, call):
        """The same again while the drive is full: the write is under way for so long."""
        while True:
            try:
                return call()
            except nbd.Error as error:
                if error.errno != "ENOSPC":
                    raise
                self.failed += 1
                self.must_end.wait(0.05)

    def finish(self, is_closed):
        """After the end of its server. One that closed the session has all writes that it has answered."""
        self.must_end.set()
        self.join()
        self.served.end = time.time()
        if is_closed:
            self.served.flushed = sum(write.end < math.inf for write in self.served.writes)


def numbers(images):
    """The number in each block; each block must be whole."""
    found = []
    for image in images:
        found += [struct.unpack_from("<Q", image, offset)[0] for offset in range(0, DISK_BYTES, BLOCK)]
    for image, part in zip(images, (found[:BLOCKS], found[BLOCKS:])):
        assert image == b"".join(map(content, part)), "a block is of two writes"
    return found
