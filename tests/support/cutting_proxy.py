"""A relay in front of a site's server. It cuts all connections after a number of bytes, or holds a copy in the middle of its content."""

import dataclasses

from .nbdserver import DEADLINE_S
from .relay import Relay

# A held connection still carries a piece now and then: a peer that takes nothing for 20 s counts as dead.
TRICKLE_S = 0.25
# A line has a connection for control, one for out-of-order requests, and several for content: these carry more than this.
NOT_BULK = 2
BULK_BYTES = 64 << 10


@dataclasses.dataclass(eq=False)
class Direction:
    """One direction of a connection."""

    is_answer: bool
    carried: int = 0
    is_new: bool = True
    is_bulk: bool = False


class CuttingProxy(Relay):
    piece_bytes = 4 << 10
    # The kernel takes little more than this from the sender while a connection is held.
    buffer_bytes = 64 << 10

    def __init__(self, address):
        # Those that count, by source: two of each connection.
        self.directions = {}
        self.held, self.has_ended = set(), False
        host, _, port = address.rpartition(":")
        super().__init__(host, int(port))

    def hold_after(self, count):
        """Holds only the connections that carry content. The others stay free: requests are answered, also out-of-order ones."""
        with self.lock:
            self.room, self.is_holding, self.has_ended = count, False, False
            self.held.clear()
            for direction in self.directions.values():
                direction.is_new = False
            self.lock.notify_all()

    def wait_for_end(self):
        """Waits until the server has ended a connection that was made since hold_after, and is not held."""
        with self.lock:
            assert self.lock.wait_for(lambda: self.has_ended, DEADLINE_S), "the server has ended no connection"

    def _begin(self, near, far):
        self.directions |= {near: Direction(False), far: Direction(True)}

    def _copy(self, source, target):
        super()._copy(source, target)
        with self.lock:
            # None: it was cut.
            if direction := self.directions.pop(source, None):
                self.held.discard(direction)
                self.has_ended |= direction.is_answer and direction.is_new
                self.lock.notify_all()

    def _pass_on(self, data, source, target):
        with self.lock:
            self._count_down(len(data))
            if source not in self.directions:
                raise ConnectionError
            self._hold(self.directions[source], len(data))
        target.sendall(data)

    def _bulk(self):
        """The directions with content, when they are known: each has to carry some. Out-of-order requests come later."""
        bulk = {direction for direction in self.directions.values() if direction.is_bulk}
        if not bulk:
            some = {direction for direction in self.directions.values() if direction.carried >= BULK_BYTES}
            bulk = some if len(some) >= len(self.directions) // 2 - NOT_BULK else set()
            for direction in bulk:
                direction.is_bulk = True
        return bulk

    def _hold(self, direction, count):
        direction.carried += count
        if self.room is None:
            return
        self.room -= count
        if not self.is_holding:
            if direction.carried > 4 * BULK_BYTES:
                self.lock.wait_for(self._bulk, TRICKLE_S)
            if self.room <= 0 and self._bulk():
                self.held, self.is_holding = self._bulk(), True
            self.lock.notify_all()
        if direction in self.held:
            self.lock.wait_for(lambda: direction not in self.held, TRICKLE_S)

    def _cut(self):
        self.directions.clear()
        self.held.clear()
        super()._cut()
