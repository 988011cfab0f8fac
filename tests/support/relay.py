"""A relay on the loopback in front of a server: it cuts all connections, or holds them, after a number of bytes."""

import contextlib
import socket
import threading

from .nbdserver import DEADLINE_S


class Relay:
    """What all relays have in common. A subclass says in `_pass_on` what happens to a piece of data."""

    # The size of a read.
    piece_bytes = 64 << 10
    # How much the kernel takes from a sender while a connection is held; None: as it likes.
    buffer_bytes = None

    def __init__(self, host, port):
        self.target = (host, port)
        self.listener = self._socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(128)
        self.port = self.listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.lock = threading.Condition()
        # Both ends of each connection.
        self.sockets = set()
        # Bytes until all is cut, and until it is held.
        self.left = self.room = None
        self.is_holding = False
        # Connections that came while the server was stopped.
        self.refused = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _socket(self):
        made = socket.socket()
        if self.buffer_bytes is not None:
            # Those that are accepted inherit it.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.buffer_bytes)
        return made

    def cut_after(self, count):
        """All connections break once, after `count` bytes of both directions and all connections."""
        with self.lock:
            self.left = count

    def has_cut(self):
        return self.left is None

    def cut(self):
        """All connections break now."""
        with self.lock:
            self._cut()

    def hold_after(self, count):
        """After `count` more bytes, as in cut_after, holds the connections until `release`: they stay open."""
        with self.lock:
            self.room, self.is_holding = count, False
            self.lock.notify_all()

    def release(self):
        """Forwards everything that is held."""
        self.hold_after(None)

    def wait_for_hold(self):
        with self.lock:
            assert self.lock.wait_for(lambda: self.is_holding, DEADLINE_S), f"{self.room} bytes have not come"

    def is_held(self, within_s=0):
        """Whether all bytes that may pass have passed, after that time at most."""
        with self.lock:
            return self.lock.wait_for(lambda: self.is_holding, within_s)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = self._socket()
                try:
                    far.connect(self.target)
                except OSError:
                    # A server that is stopped refuses connections, and so does this one.
                    near.close()
                    far.close()
                    self.refused += 1
                    continue
                for end in (near, far):
                    # Else the rest of a message waits for the receipt of its beginning, which is late.
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(near, far), daemon=True).start()

    def _serve(self, near, far):
        with near, far:
            with self.lock:
                self.sockets |= {near, far}
                self._begin(near, far)
            answers = threading.Thread(target=self._answers, args=(far, near), daemon=True)
            answers.start()
            self._requests(near, far)
            answers.join()
            with self.lock:
                self.sockets -= {near, far}

    def _begin(self, near, far):
        """A connection begins; the lock is held."""

    def _requests(self, near, far):
        """Passes on one direction until it ends."""
        self._copy(near, far)

    def _answers(self, far, near):
        """The other one."""
        self._copy(far, near)

    def _copy(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(self.piece_bytes):
                self._pass_on(data, source, target)
        # The sender has ended its direction, or the connection was cut.
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _pass_on(self, data, source, target):
        raise NotImplementedError

    def _count_down(self, count):
        """For `cut_after`: raises an error if these bytes are the last ones. The lock is held."""
        if self.left is not None:
            self.left -= count
            if self.left <= 0:
                self.left = None
                self._cut()
                raise ConnectionError

    def _cut(self):
        for end in self.sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.lock.notify_all()

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        self.release()
