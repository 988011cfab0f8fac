"""serve nbd: idle connections use up the limit of open files."""

import contextlib
import json
import os
import pathlib
import resource
import socket
import struct
import subprocess
import time

import pytest

from support import hostile_nbd
from support.nbdserver import wait_until

LIMIT, IDLE = 256, 300
# Fewer than are open; poll() itself needs two.
EXHAUSTED = 3
LOG_MAX = 64 << 10
BLOCK = 4096
ADVICE = "raise the limit of open files"
# In seconds. Without the workaround none arrives.
ANSWER_S = 20


@contextlib.contextmanager
def served(coldrise, path, log, *options):
    """nbdkit's process id. The server may open LIMIT files, and must end on request."""
    with open(log, "w", encoding="utf-8") as file:
        process = coldrise.start(
            "--json", "serve", "nbd", "--socket", path, *options, stdout=subprocess.PIPE, stderr=file,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
        )  # fmt: skip
    try:
        assert json.loads(process.stdout.readline())["event"] == "ready"
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (nbdkit,) = children.read_text(encoding="ascii").split()
        yield int(nbdkit)
    finally:
        process.terminate()
        process.communicate(timeout=30)
    # A server that does not exit is killed, and the log reports it.
    assert process.returncode == 0 and "was killed" not in log.read_text(encoding="utf-8")
    assert log.stat().st_size < LOG_MAX


def descriptors(nbdkit):
    """The number of its open files."""
    return len(os.listdir(f"/proc/{nbdkit}/fd"))


def cpu_s(nbdkit):
    fields = pathlib.Path(f"/proc/{nbdkit}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_client(path):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(ANSWER_S)
    client.connect(str(path))
    return client


def is_greeted(client):
    """Whether the server sends its greeting, and does not close the connection."""
    try:
        return len(client.recv(18, socket.MSG_WAITALL)) == 18
    except ConnectionResetError:
        return False


def write(stream, number):
    stream.sendall(hostile_nbd.request(hostile_nbd.WRITE, BLOCK, 0, number) + bytes([number]) * BLOCK)
    assert struct.unpack(">IIQ", hostile_nbd.receive(stream, 16))[1:] == (0, number)


@pytest.mark.parametrize("idle_clients_leave", [True, False])
def test_idle_connections_leave_descriptors_for_the_others(
    coldrise, point, live, tmp_path, tls, idle_clients_leave
):
    options, context = tls
    path, log = tmp_path / "socket", tmp_path / "log"
    with contextlib.ExitStack() as idle, served(coldrise, path, log, *options) as nbdkit:
        earlier = idle.enter_context(hostile_nbd.opened(path, live, context))
        write(earlier, 1)
        before = descriptors(nbdkit)

        clients = [idle.enter_context(idle_client(path)) for _ in range(IDLE)]
        greeted = [is_greeted(client) for client in clients]
        assert 20 < sum(greeted) < IDLE / 2
        assert greeted == sorted(greeted, reverse=True), "refused after the limit only"
        assert descriptors(nbdkit) == before + 3 * sum(greeted)
        with idle_client(path) as refused:
            assert not is_greeted(refused)
        write(earlier, 2)
        coldrise.json("seal", "trial")
        write(earlier, 3)
        text = log.read_text(encoding="utf-8")
        assert ADVICE in text and text.count(ADVICE) <= 2, text[:1000]

        if idle_clients_leave:
            for client in clients:
                client.close()
            # The seal has added a layer's file.
            wait_until(lambda: descriptors(nbdkit) <= before + 3, "the end of the idle connections")
            hostile_nbd.opened(path, f"{point}/vda", context).close()
            write(earlier, 4)


def test_without_a_free_descriptor_the_server_waits(coldrise, live, tmp_path):
    path, log = tmp_path / "socket", tmp_path / "log"
    with contextlib.ExitStack() as clients, served(coldrise, path, log) as nbdkit:
        earlier = clients.enter_context(hostile_nbd.opened(path, live))
        write(earlier, 1)
        resource.prlimit(nbdkit, resource.RLIMIT_NOFILE, (EXHAUSTED, LIMIT))
        clients.enter_context(idle_client(path))
        # Addresses of sockets are short.
        (control,) = (coldrise.repository / "live").glob("*/control")
        folder = os.open(control.parent, os.O_RDONLY)
        clients.callback(os.close, folder)
        idle_client(f"/proc/self/fd/{folder}/control").close()
        wait_until(lambda: ADVICE in log.read_text(encoding="utf-8"), "the log")
        began, used = time.monotonic(), cpu_s(nbdkit)
        while time.monotonic() < began + 1:
            write(earlier, 2)
            time.sleep(0.05)
        assert cpu_s(nbdkit) - used < 0.3
        resource.prlimit(nbdkit, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        hostile_nbd.connect(path).close()
        coldrise.json("seal", "trial")
        resource.prlimit(nbdkit, resource.RLIMIT_NOFILE, (EXHAUSTED, LIMIT))
