"""A relay in front of a site's server. It cuts all connections after a number of bytes, or holds a copy in the middle of its content."""

import contextlib
import socket
import threading

from .nbdserver import DEADLINE_S

# The size of a read.
PIECE_BYTES = 4 << 10
# The kernel takes little more than this from the sender while a connection is held.
BUFFER_BYTES = 64 << 10
# A held connection still carries a piece now and then: a peer that takes nothing for 20 s counts as dead.
TRICKLE_S = 0.25
# A line has a connection for control, one for out-of-order requests, and several for content: these carry more than this.
NOT_BULK = 2
BULK_BYTES = 64 << 10


class Direction:
    """One direction of a connection."""

    def __init__(self, source, target, is_answer):
        self.source, self.target, self.is_answer = source, target, is_answer
        self.carried, self.is_new, self.is_bulk = 0, True, False


class CuttingProxy:
    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.target = (host, int(port))
        self.listener = self._socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(64)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.lock = threading.Condition()
        # Two of each connection.
        self.directions = []
        # Bytes until all is cut, and until content is held.
        self.left = self.room = None
        self.held, self.is_holding, self.has_ended = set(), False, False
        threading.Thread(target=self._accept, daemon=True).start()

    @staticmethod
    def _socket():
        made = socket.socket()
        # Those that are accepted inherit it.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        return made

    def cut_after(self, count):
        """`count`: in bytes, of both directions and all connections."""
        with self.lock:
            self.left = count

    def has_cut(self):
        return self.left is None

    def cut(self):
        """Cuts all connections now."""
        with self.lock:
            self._cut()

    def hold_after(self, count):
        """After `count` more bytes, as in cut_after, holds the connections that carry content until `go_on`. The others stay
        free: requests are answered, also out-of-order ones."""
        with self.lock:
            self.room, self.is_holding, self.has_ended = count, False, False
            self.held.clear()
            for direction in self.directions:
                direction.is_new = False
            self.lock.notify_all()

    def go_on(self):
        self.hold_after(None)

    def wait_for_hold(self):
        with self.lock:
            assert self.lock.wait_for(lambda: self.is_holding, DEADLINE_S), f"{self.room} bytes have not come"

    def is_held(self, within_s):
        """Whether all bytes that may pass have passed, after that time at most."""
        with self.lock:
            return self.lock.wait_for(lambda: self.is_holding, within_s)

    def wait_for_end(self):
        """Waits until the server has ended a connection that was made since hold_after, and is not held."""
        with self.lock:
            assert self.lock.wait_for(lambda: self.has_ended, DEADLINE_S), "the server has ended no connection"

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = self._socket()
                try:
                    far.connect(self.target)
                except ConnectionRefusedError:
                    near.close()
                    continue
                both = [Direction(near, far, False), Direction(far, near, True)]
                with self.lock:
                    self.directions += both
                for direction in both:
                    threading.Thread(target=self._pass_on, args=(direction,), daemon=True).start()

    def _pass_on(self, direction):
        with contextlib.suppress(OSError):
            while data := direction.source.recv(PIECE_BYTES):
                with self.lock:
                    if self.left is not None:
                        self.left -= len(data)
                        if self.left <= 0:
                            self.left = None
                            self._cut()
                            return
                    self._hold(direction, len(data))
                direction.target.sendall(data)
        with contextlib.suppress(OSError):
            direction.target.shutdown(socket.SHUT_WR)
        with self.lock:
            if direction in self.directions:
                self.directions.remove(direction)
                self.held.discard(direction)
                self.has_ended |= direction.is_answer and direction.is_new
                self.lock.notify_all()

    def _bulk(self):
        """The directions with content, when they are known: each has to carry some. Out-of-order requests come later."""
        bulk = {direction for direction in self.directions if direction.is_bulk}
        if not bulk:
            some = {direction for direction in self.directions if direction.carried >= BULK_BYTES}
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
        for direction in self.directions:
            with contextlib.suppress(OSError):
                direction.source.shutdown(socket.SHUT_RDWR)
            direction.source.close()
        self.directions.clear()
        self.held.clear()
        self.lock.notify_all()

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        self.go_on()
