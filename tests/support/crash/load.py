"""A load on one session: random requests on several connections of each disk."""

import time

from .client import GONE, Connection, Connections
from .stamp import BLOCK, FINE, ZERO

MAX_WRITE_BLOCKS = 64
HOT_BLOCKS = 48
MAX_LISTED = 12


class CrashViolation(AssertionError):
    """The server broke a promise."""

    def __init__(self, violations):
        shown = "\n".join(str(violation) for violation in violations[:MAX_LISTED])
        more = len(violations) - MAX_LISTED
        super().__init__(shown + (f"\nand {more} more" if more > 0 else ""))


class Request:
    """One request in flight."""

    __slots__ = ("kind", "disk", "write", "began", "offset", "buffer", "is_fua", "connection")

    def __init__(self, kind, disk, connection):
        self.kind = kind
        self.disk = disk
        self.connection = connection
        self.write = None
        self.began = 0
        self.offset = 0
        self.buffer = None
        self.is_fua = False


class Mix:
    """The frequency of each request; it differs between rounds."""

    def __init__(self, rng):
        weights = {
            "write": rng.choice((20, 60, 100)),
            "large": rng.choice((0, 3, 15)),
            "fine": rng.choice((5, 20, 60)),
            "zero": rng.choice((0, 2, 10)),
            "trim": rng.choice((0, 2, 6)),
            "flush": rng.choice((1, 4, 20)),
            "read": rng.choice((2, 10)),
        }
        self.kinds = list(weights)
        self.weights = list(weights.values())
        self.hot_share = rng.choice((0.2, 0.6, 0.95))
        self.fua_share = rng.choice((0, 0.02, 0.2))
        self.depth = rng.choice((1, 4, 16))


class Load:
    """Requests to the disks of one session, all recorded with the oracle."""

    def __init__(self, rng, disks, server, exports, connections_per_disk):
        self.rng = rng
        self.mix = Mix(rng)
        self.disks = disks
        self.violations = []
        self.requests = 0
        self.errors = {}
        self.first_failed_flush = None
        self.later_flushes_refused = 0
        self.connections = Connections(
            self._connect(server, disk, exports[disk.name])
            for disk in disks
            for _ in range(connections_per_disk)
        )
        # All at the same time, so that their openings race.
        for connection in self.connections.all:
            connection.wait_until_open()
            assert connection.size_bytes == connection.disk.size_bytes
        self.hot = {
            disk: [rng.randrange(disk.coarse_cells) for _ in range(HOT_BLOCKS)] for disk in disks
        }

    def _connect(self, server, disk, export):
        connection = Connection(server, export, self._finished)
        connection.disk = disk
        return connection

    # ------------------------------------------------------------ sending

    def run(self, seconds, also=None):
        """Keeps requests in flight for a time, or until all connections broke. `also` is called
        between replies; the run ends when it returns True."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            alive = self.connections.alive
            if not alive:
                return
            for connection in alive:
                while not connection.is_gone and connection.under_way < self.mix.depth:
                    self._send_one(connection)
            self.connections.turn(0.01)
            self._raise()
            if also is not None and also():
                return

    def settle(self):
        """Processes all outstanding replies."""
        self.connections.drain()
        self._raise()

    def flush(self, disk):
        """One flush, on any connection of the disk; True when it succeeded."""
        return self._succeeds(self._flush, disk)

    def write(self, disk, cell, count=1, is_fua=False):
        """One write; True when it succeeded."""
        return self._succeeds(self._write, disk, cell, count, is_fua)

    def _succeeds(self, send, disk, *arguments):
        before = dict(self.errors)
        there = [other for other in self.connections.alive if other.disk is disk]
        assert there, f"no connection of disk {disk.name} is left"
        send(self.rng.choice(there), *arguments)
        self.settle()
        return self.errors == before

    def _send_one(self, connection):
        rng, disk = self.rng, connection.disk
        kind = rng.choices(self.mix.kinds, self.mix.weights)[0]
        is_fua = rng.random() < self.mix.fua_share
        if kind == "write":
            self._write(connection, self._block(disk), 1, is_fua)
        elif kind == "large":
            count = rng.choice((2, 5, 16, MAX_WRITE_BLOCKS))
            first = min(self._block(disk), disk.coarse_cells - count)
            self._write(connection, first, count, is_fua)
        elif kind == "fine":
            first, count = self._fine_range(disk)
            self._write(connection, first, count, is_fua)
        elif kind == "zero":
            self._zero(connection, is_fua)
        elif kind == "trim":
            self._trim(connection, is_fua)
        elif kind == "flush":
            self._flush(connection)
        else:
            self._read(connection)

    def _block(self, disk):
        if self.rng.random() < self.mix.hot_share:
            return self.rng.choice(self.hot[disk])
        return self.rng.randrange(disk.coarse_cells)

    def _fine_range(self, disk):
        fine = disk.cells - disk.coarse_cells
        count = self.rng.choice((1, 1, 3, 8, 32, 45))
        return disk.coarse_cells + self.rng.randrange(fine - count + 1), count

    def _begin(self, connection, kind):
        self.requests += 1
        return Request(kind, connection.disk, connection)

    def _write(self, connection, first, count, is_fua):
        disk = connection.disk
        sequence = disk.clock.next_sequence()
        content = disk.content(first, count, sequence)
        request = self._begin(connection, "write")
        request.is_fua = is_fua
        request.write = disk.begin_write(first, count, sequence, is_fua)
        connection.write(request, disk.extent(first, count)[0], content, is_fua)

    def _zero(self, connection, is_fua):
        rng, disk = self.rng, connection.disk
        if rng.random() < 0.3:
            first, count = self._fine_range(disk)
        else:
            # The server treats more than 64 blocks differently.
            count = rng.choice((1, 1, 7, 64, 200))
            first = min(self._block(disk), disk.coarse_cells - count)
        offset, length = disk.extent(first, count)
        request = self._begin(connection, "zero")
        request.is_fua = is_fua
        request.write = disk.begin_write(first, count, ZERO, is_fua)
        connection.zero(request, offset, length, is_fua, keep_space=rng.random() < 0.3)

    def _trim(self, connection, is_fua):
        rng, disk = self.rng, connection.disk
        # A trim affects only whole blocks, so the request has whole blocks.
        if rng.random() < 0.2:
            per_block = BLOCK // FINE
            whole = (disk.cells - disk.coarse_cells) // per_block
            first = disk.coarse_cells + rng.randrange(whole) * per_block
            count = per_block
        else:
            count = rng.choice((1, 3, 64, 150))
            first = min(self._block(disk), disk.coarse_cells - count)
        offset, length = disk.extent(first, count)
        request = self._begin(connection, "trim")
        request.is_fua = is_fua
        request.write = disk.begin_write(first, count, ZERO, is_fua)
        connection.trim(request, offset, length, is_fua)

    def _flush(self, connection):
        request = self._begin(connection, "flush")
        request.began = connection.disk.begin_flush()
        connection.flush(request)

    def _read(self, connection):
        disk = connection.disk
        if self.rng.random() < 0.3:
            first, count = self._fine_range(disk)
        else:
            count = self.rng.choice((1, 2, 32))
            first = min(self._block(disk), disk.coarse_cells - count)
        offset, length = disk.extent(first, count)
        request = self._begin(connection, "read")
        request.offset = offset
        request.began = disk.begin_read()
        connection.read(request, offset, length)

    # ------------------------------------------------------------ replies

    def _finished(self, request, error):
        """Called for every reply, from within libnbd, which would lose an exception."""
        try:
            self._take(request, error)
        except Exception as failure:  # pylint: disable=broad-except
            self.violations.append(f"taking a reply to a {request.kind} failed: {failure!r}")

    def _take(self, request, error):
        disk = request.disk
        if error and error not in GONE:
            key = request.kind, error
            self.errors[key] = self.errors.get(key, 0) + 1
        if request.kind == "read":
            if not error:
                content = bytes(request.buffer.to_bytearray())
                self.violations += disk.judge_read(content, request.offset, request.began)
            if request.began in disk.observers:
                disk.end_read(request.began)
            return
        issued = request.write.issue if request.write else request.began
        syncs = request.kind == "flush" or request.is_fua
        if syncs and self.first_failed_flush is not None and issued > self.first_failed_flush:
            if not error:
                self.violations.append(
                    f"disk {disk.name}: a {request.kind} at tick {issued} succeeded after the "
                    f"flush that failed at tick {self.first_failed_flush}"
                )
            elif error not in GONE:
                self.later_flushes_refused += 1
        if request.write:
            if request.write in disk.running:
                disk.end_write(request.write, succeeded=not error)
        elif not error:
            disk.end_flush(request.began)
        if request.kind == "flush" and error and error not in GONE:
            if self.first_failed_flush is None:
                self.first_failed_flush = disk.clock.tick()

    def _raise(self):
        if self.violations:
            raise CrashViolation(self.violations)
