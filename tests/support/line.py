"""A slow, lossy line between two networks of their own."""

import pathlib
import subprocess
import threading
from dataclasses import dataclass

from .network import Network

NEAR_ADDRESS, FAR_ADDRESS = "10.99.0.1", "10.99.0.2"

_SOURCE = pathlib.Path(__file__).with_name("line_emulator.c")


@dataclass
class Counters:
    """Of one direction."""

    packets: int
    bytes: int
    lost: int
    dropped: int


class Line:
    """A line between `near` and `far`, each a Network. Its rate, delay and loss hold each way.

    The default congestion control of this machine may be BBR. Programs that do not choose one themselves get
    `peer_congestion_control`. `capture` is a file for all packets; it is whole when the line is closed.
    """

    def __init__(self, folder, *, mbit=45.0, round_trip_ms=50.0, loss=0.001, queue_kb=None, seed=1,
                 peer_congestion_control="cubic", capture=None):
        program = pathlib.Path(folder) / "line_emulator"
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-o", program, _SOURCE], check=True)
        self.mbit = mbit
        self.asking = threading.Lock()
        # The bytes in flight in one round trip.
        queue_kb = queue_kb or mbit * round_trip_ms / 8
        self.near, self.far = Network(), Network()
        namespaces = [f"/proc/{network.process.pid}/ns/net" for network in (self.near, self.far)]
        arguments = [mbit, round_trip_ms / 2, loss, queue_kb, seed, *([capture] if capture else [])]
        self.process = subprocess.Popen(
            [program, *namespaces, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"
        for network, peer in ((self.near, FAR_ADDRESS), (self.far, NEAR_ADDRESS)):
            route = ["ip", "route", "replace", peer, "dev", "wan0", "congctl", peer_congestion_control]
            assert network.run(*route).returncode == 0

    def _ask(self, command):
        with self.asking:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            return self.process.stdout.readline()

    def cut(self):
        """All packets are lost from now on."""
        assert self._ask("cut") == "done\n"

    def restore(self):
        assert self._ask("restore") == "done\n"

    def counters(self):
        """Near to far, and far to near."""
        numbers = [int(word) for word in self._ask("counters").split()]
        return Counters(*numbers[:4]), Counters(*numbers[4:])

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        for network in (self.near, self.far):
            network.close()
