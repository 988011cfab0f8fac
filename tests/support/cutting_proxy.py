"""A relay in front of a server, which cuts all connections once, or holds what they carry, after so many bytes."""

import contextlib
import socket
import threading

from .nbdserver import DEADLINE_S

# What a connection may carry while others are held: questions, and signs of life.
QUIET_BYTES = 64 << 10


class CuttingProxy:
    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.lock = threading.Condition()
        self.left, self.sockets = None, []
        # Bytes until all is held.
        self.room = None
        self.has_ended = False
        threading.Thread(target=self._accept, daemon=True).start()

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
        """After `count` more bytes, as in cut_after, connections are held until `go_on`, but those that have carried
        little: so the line stays alive."""
        self._set_room(count)

    def go_on(self):
        self._set_room(None)

    def _set_room(self, count):
        with self.lock:
            self.room = count
            self.lock.notify_all()

    def wait_for_hold(self):
        with self.lock:
            assert self.lock.wait_for(lambda: self.room <= 0, DEADLINE_S), f"{self.room} bytes have not come"

    def wait_for_end(self):
        """Waits until the server has ended a connection that was made since hold_after, and is not held."""
        with self.lock:
            assert self.lock.wait_for(lambda: self.has_ended, DEADLINE_S), "the server has ended no connection"

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                try:
                    far = socket.create_connection(self.target)
                except ConnectionRefusedError:
                    near.close()
                    continue
                with self.lock:
                    self.sockets += [near, far]
                for ends in ((near, far, False), (far, near, self.room is not None)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, target, is_watched):
        carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1024):
                carried += len(data)
                with self.lock:
                    if self.left is not None:
                        self.left -= len(data)
                        if self.left <= 0:
                            self.left = None
                            self._cut()
                            return
                    if self.room is not None:
                        self.room -= len(data)
                        self.lock.notify_all()
                    self.lock.wait_for(lambda: self.room is None or self.room > 0 or carried <= QUIET_BYTES)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
            if is_watched:
                with self.lock:
                    self.has_ended = True
                    self.lock.notify_all()

    def _cut(self):
        for end in self.sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.sockets.clear()

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        self.go_on()
