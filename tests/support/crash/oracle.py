"""The valid contents of a disk, known outside the server.

The oracle keeps, for each cell, the writes that may still be seen in it. Every
event (a request sent, a reply received) gets the next tick of one clock, so of
two writes it is known whether the first had ended before the second began; where
they overlapped, either order is right.

A read is judged by one rule. Some writes *bind*: it is certain that they took
effect before what is read was fixed. A value is right when one of the writes that
could have left it there had not ended when the latest binding write began. What
binds depends on what is read:

    live read         every write that had ended when the read began
    after a crash     the writes that a finished flush or FUA covered
    sealed point      every write that had ended when the seal was requested

and, where everything read was fixed at one instant (a sealed point as a whole;
after a crash, one 4 KiB block), also every write that had ended when any other
write began whose effect is seen.
"""

import dataclasses
import math

from .stamp import BLOCK, FINE, ZERO, Garbage, read_stamp, stamp

RUNNING = math.inf


class Write:
    """One request that changes cells, or initial content."""

    __slots__ = ("value", "issue", "end", "is_certain", "is_durable")

    def __init__(self, value, issue, end=RUNNING, is_certain=False, is_durable=False):
        self.value = value
        self.issue = issue
        self.end = end
        # Its answer was success; otherwise it may or may not have happened.
        self.is_certain = is_certain
        self.is_durable = is_durable

    def __repr__(self):
        what = "zeroes" if self.value == ZERO else f"sequence {self.value}"
        state = "durable" if self.is_durable else "done" if self.is_certain else "unanswered"
        return f"{what} [ticks {self.issue}..{self.end}, {state}]"


@dataclasses.dataclass
class Violation:
    """A cell with impossible content."""

    disk: str
    offset: int
    found: object
    allowed: list
    why: str

    def __str__(self):
        allowed = "\n".join(f"      {write!r}" for write in self.allowed)
        return (
            f"{self.why}: disk {self.disk} offset {self.offset:#x}: found {self.found!r};\n"
            f"    known writes of this cell:\n{allowed}"
        )


class Clock:
    """Numbers the events of all disks."""

    def __init__(self):
        self.now = 0
        self.sequence = 1

    def tick(self):
        self.now += 1
        return self.now

    def next_sequence(self):
        self.sequence += 1
        return self.sequence


class DiskOracle:
    """One disk: 4 KiB cells up to `fine_start`, 128-byte cells from there on."""

    BASE_SEQUENCE = 1

    def __init__(self, clock, number, name, size_bytes, fine_start):
        assert fine_start % BLOCK == 0 and size_bytes % FINE == 0
        self.clock = clock
        self.number = number
        self.name = name
        self.size_bytes = size_bytes
        self.fine_start = fine_start
        self.coarse_cells = fine_start // BLOCK
        self.cells = self.coarse_cells + (size_bytes - fine_start) // FINE
        # A finished flush covers writes that ended before this tick.
        self.flushed_tick = 0
        # Set from a power cut until the end of the server; see cut_power.
        self.power_is_cut = False
        self.running = set()
        # Ticks at which events began that will be judged later.
        self.observers = {}
        self.histories = []
        self.rebase([ZERO] * self.cells)

    # ------------------------------------------------------------- places

    def place(self, cell):
        """Offset and length of a cell."""
        if cell < self.coarse_cells:
            return cell * BLOCK, BLOCK
        return self.fine_start + (cell - self.coarse_cells) * FINE, FINE

    def extent(self, first, count):
        """Offset and length of neighbouring cells of one kind."""
        offset, size = self.place(first)
        assert first >= self.coarse_cells or first + count <= self.coarse_cells
        return offset, size * count

    def content(self, first, count, sequence):
        """The bytes that a write of this sequence number puts into the cells."""
        places = (self.place(cell) for cell in range(first, first + count))
        return b"".join(stamp(self.number, offset, size, sequence) for offset, size in places)

    def cells_of(self, offset, length):
        """The cells of a range that starts and ends with cells."""
        first = self._cell_at(offset)
        return first, self._cell_at(offset + length) - first

    def _cell_at(self, offset):
        if offset <= self.fine_start:
            return offset // BLOCK
        return self.coarse_cells + (offset - self.fine_start) // FINE

    # ------------------------------------------------------------- events

    def rebase(self, values):
        """The disk durably holds exactly this content."""
        past = {}
        for value in set(values):
            past[value] = Write(value, -1, -1, is_certain=True, is_durable=True)
        self.histories = [[past[value]] for value in values]
        self.flushed_tick = 0

    def begin_write(self, first, count, value, is_fua=False):
        write = Write(value, self.clock.tick(), is_durable=is_fua)
        self.running.add(write)
        for history in self.histories[first : first + count]:
            if len(history) > 5:
                self._forget(history)
            history.append(write)
        return write

    def end_write(self, write, succeeded):
        write.end = self.clock.tick()
        write.is_certain = succeeded
        if self.power_is_cut:
            write.is_durable = False
        self.running.discard(write)

    def begin_flush(self):
        return self.clock.tick()

    def end_flush(self, began):
        if self.power_is_cut:
            return
        self.flushed_tick = max(self.flushed_tick, began)

    def begin_read(self):
        began = self.clock.tick()
        self.observers[began] = self.observers.get(began, 0) + 1
        return began

    def end_read(self, began):
        self.observers[began] -= 1
        if not self.observers[began]:
            del self.observers[began]

    def cut_power(self):
        """From now on no answer counts as a promise. A real cut ends server and client together;
        ours leaves them running for a moment, and an fdatasync in progress may return success
        without effect when ext4 is shut down."""
        self.power_is_cut = True

    def crashed(self):
        """The server is gone: requests in flight end here, done or not."""
        for write in list(self.running):
            self.end_write(write, succeeded=False)
        self.observers.clear()
        self.power_is_cut = False

    def _forget(self, history):
        """Drops writes that no read can return now."""
        horizon = min(self.observers, default=RUNNING)
        binding = max(
            (w.issue for w in history if self._survives(w) and w.end < horizon), default=-1
        )
        history[:] = [write for write in history if write.end >= binding]

    def _survives(self, write):
        return write.is_certain and (write.is_durable or write.end < self.flushed_tick)

    # ------------------------------------------------------------ judging

    def values(self, data, offset=0):
        """The sequence numbers in the cells of some bytes."""
        first, count = self.cells_of(offset, len(data))
        found = []
        at = 0
        for cell in range(first, first + count):
            start, size = self.place(cell)
            found.append(read_stamp(self.number, start, data[at : at + size]))
            at += size
        assert at == len(data)
        return first, found

    def judge_read(self, data, offset, began):
        """Judges a read of the running session that began at this tick and has just ended."""
        first, found = self.values(data, offset)
        violations = []
        for cell, value in enumerate(found, first):
            history = self.histories[cell]
            binding = latest(w for w in history if w.is_certain and w.end < began)
            if not may_show(history, value, binding):
                violations.append(self._violation(cell, value, history, "a live read"))
        return violations

    def judge_crash(self, data):
        """Judges the whole disk after a crash. From now on its content counts as the newest,
        durable with the next flush."""
        _, found = self.values(data)
        violations = []
        for cell, value in enumerate(found):
            history = self.histories[cell]
            if len(history) == 1 and history[0].value == value:
                continue
            binding = latest(w for w in history if self._survives(w))
            if not may_show(history, value, binding):
                violations.append(self._violation(cell, value, history, "after a crash"))
        if not violations:
            violations = self._judge_blocks(found)
        if not violations:
            self._adopt(found)
        return violations

    def _judge_blocks(self, found):
        """Every write of a block of fine cells wrote the whole block."""
        violations = []
        per_block = BLOCK // FINE
        for start in range(self.coarse_cells, self.cells, per_block):
            cells = range(start, min(start + per_block, self.cells))
            shown = Shown()
            for cell in cells:
                history = self.histories[cell]
                binding = latest(w for w in history if self._survives(w))
                shown.note(history, found[cell], binding)
            for cell in cells:
                history = self.histories[cell]
                if not may_show(history, found[cell], shown.binding(history)):
                    why = "after a crash, a block torn between sub-block writes"
                    violations.append(self._violation(cell, found[cell], history, why))
        return violations

    def _adopt(self, found):
        began, ended = self.clock.tick(), self.clock.tick()
        adopted = {}
        for cell, value in enumerate(found):
            history = self.histories[cell]
            if len(history) == 1:
                continue
            write = adopted.get(value)
            if write is None:
                write = adopted[value] = Write(value, began, ended, is_certain=True)
            binding = latest(w for w in history if self._survives(w))
            history[:] = [w for w in history if w.end >= binding] + [write]

    def _violation(self, cell, value, history, why):
        offset, _ = self.place(cell)
        return Violation(self.name, offset, value, list(history), why)


class PointOracle:
    """The possible content of a sealed point: all disks as of one instant between the seal's
    request (`began`) and its answer (`ended`)."""

    def __init__(self, disks, began, ended, survives_only=False):
        # After a crash between request and answer only durable writes are certain.
        self.survives_only = survives_only
        self.began = began
        self.ended = ended
        self.snapshots = [(disk, [list(history) for history in disk.histories]) for disk in disks]
        self.flushed = [disk.flushed_tick for disk in disks]

    def judge(self, contents):
        """The whole content of each disk, in the disks' order. Returns the
        violations and what the cells hold."""
        violations = []
        shown = Shown()
        read = []
        for (disk, histories), flushed, data in zip(self.snapshots, self.flushed, contents):
            _, found = disk.values(data)
            read.append(found)
            for history, value in zip(histories, found):
                if len(history) == 1 and history[0].value == value and history[0].issue < 0:
                    continue
                history[:] = [write for write in history if write.issue < self.ended]
                shown.note(history, value, self._binding(history, flushed))
        for (disk, histories), flushed, found in zip(self.snapshots, self.flushed, read):
            for cell, (history, value) in enumerate(zip(histories, found)):
                binding = self._binding(history, flushed)
                why = "a sealed point"
                if not self.survives_only and may_show(history, value, binding):
                    binding = max(binding, shown.binding(history, with_shown=False))
                    why = "a sealed point of more than one instant"
                if not may_show(history, value, binding):
                    violations.append(disk._violation(cell, value, history, why))
        return violations, read

    def _binding(self, history, flushed):
        if self.survives_only:
            return latest(
                w
                for w in history
                if w.is_certain and w.end < self.began and (w.is_durable or w.end < flushed)
            )
        return latest(w for w in history if w.is_certain and w.end < self.began)


class Shown:
    """The writes visible in cells that were fixed together."""

    def __init__(self):
        self.writes = set()
        self.last_issue = -1

    def note(self, history, value, binding):
        could = [w for w in history if w.value == value and w.end >= binding]
        if not could:
            return
        # If several writes could have left the value, the earliest proves least.
        self.last_issue = max(self.last_issue, min(write.issue for write in could))
        if len(could) == 1:
            self.writes.add(could[0])

    def binding(self, history, with_shown=True):
        return latest(
            w
            for w in history
            if (w.is_certain and w.end < self.last_issue) or (with_shown and w in self.writes)
        )


def latest(writes):
    return max((write.issue for write in writes), default=-1)


def may_show(history, value, binding):
    if isinstance(value, Garbage):
        return False
    return any(write.value == value and write.end >= binding for write in history)
