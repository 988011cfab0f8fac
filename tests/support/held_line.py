"""A relay in front of a site's server that holds all its connections, or cuts them."""

from .relay import Relay


class HeldLine(Relay):
    piece_bytes = 4 << 10
    # The kernel takes little more than this from the sender while the line is held.
    buffer_bytes = 64 << 10

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        super().__init__(host, int(port))

    def hold(self):
        """Nothing passes until `release`, and the connections stay open."""
        with self.lock:
            self.is_holding = True

    def _pass_on(self, data, source, target):
        with self.lock:
            self.lock.wait_for(lambda: not self.is_holding)
            self._count_down(len(data))
        target.sendall(data)
