"""Thousands of connections that ask nothing or never end asking: others are served, memory is bounded."""

import contextlib
import pathlib
import resource
import selectors
import socket
import ssl
import statistics
import time

import pytest

from support.service import Coldrised
from test_service_jobs import wait_for

KIB, MIB = 1 << 10, 1 << 20
# The bound of the listener, and of one address.
MOST, MOST_OF_ONE = 1024, 256


@pytest.fixture
def count(request):
    """The number of connections, which this process may open."""
    count = request.config.getoption("--idle-connections")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 500
    assert hard in (resource.RLIM_INFINITY, max(hard, wanted)), f"a process may open {hard} files, not {wanted}: ulimit -Hn"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield count
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory_bytes(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * KIB


def descriptors(process):
    return len(list(pathlib.Path(f"/proc/{process.pid}/fd").iterdir()))


class Crowd:
    """Clients that connect and then do nothing, from eight addresses; every second one after the TLS
    handshake."""

    def __init__(self, service):
        self.service = service
        self.sockets = []
        self.context = ssl.create_default_context(cafile=str(service.state / "tls" / "cert.pem"))

    def add(self, with_handshake):
        source = f"127.0.0.{2 + len(self.sockets) % 8}"
        raw = socket.create_connection(("127.0.0.1", self.service.port), timeout=30, source_address=(source, 0))
        self.sockets.append(self.context.wrap_socket(raw, server_hostname="localhost") if with_handshake else raw)

    def ask_slowly(self):
        """Sends the first byte of a login's body on the last connection."""
        self.sockets[-1].sendall(b"POST /api/v1/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
                                 b"Content-Type: application/json\r\n\r\n{")

    def open(self):
        """The number of clients whose connection the service has not closed."""
        alive = 0
        with selectors.DefaultSelector() as selector:
            for client in self.sockets:
                client.setblocking(False)
                selector.register(client, selectors.EVENT_READ)
            readable = {key.fileobj for key, _ in selector.select(timeout=0)}
        for client in self.sockets:
            if client not in readable:
                alive += 1
                continue
            try:
                # Tickets of TLS arrive before the end.
                while client.recv(65536):
                    pass
            except (BlockingIOError, ssl.SSLWantReadError):
                alive += 1
            except OSError:
                pass
        return alive

    def close(self):
        for client in self.sockets:
            client.close()


def test_idle_connections_do_not_block_others(tmp_path, coldrise, count):
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        viewer = service.token("viewer")

        def ask(over="https"):
            """The seconds of a new connection, its handshake and an answer."""
            started = time.monotonic()
            assert service.call("GET", "machines", token=viewer, over=over, timeout_s=30).status == 200
            return time.monotonic() - started

        wait_for(lambda: service.call("GET", "machines").status == 200, "the repository")
        for _ in range(20):
            ask()
        files, memory, peak = descriptors(service.process), memory_bytes(service.process), 0
        crowd, times, most = Crowd(service), [], 0
        started = time.monotonic()
        # One user keeps a connection, as a page does, and asks from time to time.
        kept = service.connection("https", timeout_s=30)
        try:
            for number in range(count):
                crowd.add(with_handshake=number % 2 == 0)
                if number % 100 == 99:
                    times.append(ask())
                    kept.request("GET", "/api/v1/me", headers={"Authorization": f"Bearer {viewer}"})
                    assert kept.getresponse().read()
                    peak = max(peak, memory_bytes(service.process))
                    most = max(most, descriptors(service.process) - files)
            took_s = time.monotonic() - started
            times.append(ask("unix"))
            print(f"{count} in {took_s:.1f} s; an answer took {statistics.median(times) * 1000:.0f} ms, at most "
                  f"{max(times) * 1000:.0f}; {most} files; {(peak - memory) / MIB:.1f} MiB, "
                  f"{(peak - memory) / min(most, MOST) / KIB:.0f} KiB per connection")
            assert statistics.median(times) < 1 and max(times) < 5
            assert most <= MOST + 50
            assert peak - memory < 128 * MIB
            # All are closed within the time limits, though the clients do not close.
            wait_for(lambda: crowd.open() == 0, "the connections end")
            assert descriptors(service.process) <= files + 20
        finally:
            kept.close()
            crowd.close()
        assert ask() < 5
        assert service.process.poll() is None and "accepting a connection" not in service.log


def test_a_crowd_at_one_address_leaves_room_at_others(tmp_path):
    """All from the address of the user: it has a quarter of the places, and takes one of those."""
    with Coldrised(tmp_path) as service:
        files = descriptors(service.process)
        sockets = []
        for _ in range(MOST_OF_ONE + 200):
            sockets.append(socket.create_connection(("127.0.0.1", service.port), timeout=30))
        wait_for(lambda: descriptors(service.process) <= files + MOST_OF_ONE + 10, "the longest idle are closed")
        assert service.call("GET", "/healthz", over="https", timeout_s=10).status == 200
        for client in sockets:
            client.close()


def test_endless_requests_do_not_block_others(tmp_path):
    """Without a token, from many addresses, each place busy with half a request."""
    with Coldrised(tmp_path) as service:
        viewer = service.token("viewer")
        headers = {"Authorization": f"Bearer {viewer}"}
        with contextlib.closing(service.connection("https", timeout_s=60)) as kept:
            # A known caller keeps its place, also while it waits.
            kept.request("GET", "/api/v1/events", headers=headers)
            stream = kept.getresponse()
            crowd, times = Crowd(service), []
            for number in range(MOST + 100):
                crowd.add(with_handshake=True)
                crowd.ask_slowly()
                if number >= MOST - 50 and number % 10 == 0:
                    started = time.monotonic()
                    assert service.call("GET", "me", token=viewer, over="https", timeout_s=10).status == 200
                    times.append(time.monotonic() - started)
            assert statistics.median(times) < 1, times
            service.token("viewer")
            service.post("jobs", {"name": "clean", "kind": "gc", "enabled": False})
            assert any(b'"job"' in line for line in iter(stream.readline, b"")), "the stream lives"
            crowd.close()
