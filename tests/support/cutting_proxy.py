"""A relay in front of a server, which cuts all connections once, after so many bytes."""

import contextlib
import socket
import threading


class CuttingProxy:
    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.lock = threading.Lock()
        self.left, self.sockets = None, []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, count):
        """`count`: in bytes, of both directions and all connections."""
        with self.lock:
            self.left = count

    def has_cut(self):
        return self.left is None

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
                with self.lock:
                    self.sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1024):
                with self.lock:
                    if self.left is not None:
                        self.left -= len(data)
                        if self.left <= 0:
                            self.left = None
                            self._cut()
                            return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

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
        with self.lock:
            self._cut()
