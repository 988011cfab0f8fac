"""Strangers at the port for copies: they take a bounded share of everything, and a copy continues meanwhile."""

import contextlib
import json
import os
import pathlib
import random
import resource
import socket
import ssl

import pytest

from support.copies import content
from support.nbdserver import wait_until

KIB, MIB = 1 << 10, 1 << 20
# As server/line says.
MOST = 256
# Addresses of the strangers: more than it takes to fill all places.
ADDRESSES = 40


@pytest.fixture
def count(request):
    """The number of connections, which this process may open."""
    count = request.config.getoption("--stranger-connections")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count + 500, hard)), hard))
    yield count
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def status(process, name):
    """A number of /proc/PID/status, such as VmRSS in KiB."""
    text = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0])


def descriptors(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


class Crowd:
    """Connections of strangers: silent ones, some that talk nonsense, and some that begin TLS."""

    HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32))

    def __init__(self, address):
        host, port = address.split(":")
        self.target, self.sockets = (host, int(port)), []

    def add(self):
        number = len(self.sockets)
        source = (f"127.0.0.{2 + number % ADDRESSES}", 0)
        stranger = socket.create_connection(self.target, timeout=30, source_address=source)
        self.sockets.append(stranger)
        with contextlib.suppress(OSError):
            match number % 4:
                case 1:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                case 2:
                    stranger.sendall(self.HELLO)
                case 3 if number % 32 == 3:
                    self.handshake(stranger)
        # TLS has closed its own.
        with contextlib.suppress(OSError):
            stranger.setblocking(False)

    @staticmethod
    def handshake(stranger):
        """Whole TLS, with no key that is known here."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        stranger.settimeout(2)
        with contextlib.suppress(OSError), context.wrap_socket(stranger, do_handshake_on_connect=False,
                                                              suppress_ragged_eofs=False) as tls:
            tls.do_handshake()
            assert tls.recv(1) == b"", "a stranger was answered"

    def open(self):
        """How many are not closed by the other side."""
        alive = 0
        for stranger in self.sockets:
            try:
                alive += stranger.fileno() >= 0 and stranger.recv(4096) != b""
            except BlockingIOError:
                alive += 1
            except OSError:
                pass
        return alive

    def close(self):
        for stranger in self.sockets:
            stranger.close()


def test_strangers_are_bounded_and_a_copy_continues(coldrise, site, count, tmp_path):
    far = site()
    far.put_gate()
    far.pair(coldrise)
    path = tmp_path / "vda.raw"
    path.write_bytes(random.Random(29).randbytes(12 * MIB))
    coldrise.json("backup", "web01", f"vda=raw:{path}")
    copy = far.held(coldrise, 2 * MIB, "--to", "far")
    before_kib, threads = status(far.process, "VmRSS"), status(far.process, "Threads")
    with contextlib.closing(Crowd(far.address)) as crowd:
        most_open = most_kib = most_threads = 0
        for number in range(count):
            crowd.add()
            if number % 200 == 199:
                most_open = max(most_open, descriptors(far.process))
                most_kib = max(most_kib, status(far.process, "VmRSS"))
                most_threads = max(most_threads, status(far.process, "Threads"))
        print(f"{count} strangers: {crowd.open()} open, {most_open} descriptors, {most_threads - threads} threads and "
              f"{(most_kib - before_kib) >> 10} MiB more")
        wait_until(lambda: crowd.open() <= MOST, "the end of those beyond the limit")
        # The socket, its copy, and files that copies have open at this moment.
        assert most_open <= 2 * MOST + 300
        # The line's own, too.
        assert most_threads - threads <= MOST + 32
        # It includes the memory of the copy.
        assert most_kib - before_kib < 160 * KIB
        far.gate.release()
        said, warned = copy.communicate(timeout=120)
        assert copy.returncode == 0, warned
        assert "trying again" not in warned
        assert json.loads(said.splitlines()[-1])["points"] == 1
        # A site that was here before gets in while they hold all places.
        for _ in range(min(count, 600)):
            crowd.add()
        again = coldrise.json("copy", "--to", "far")
        assert again["points"] == 0
    assert content(far.program, "web01/latest/vda", tmp_path) == path.read_bytes()
    assert far.program.json("verify")["is_clean"]
    assert "panicked" not in far.log_path.read_text()
