"""serve nbd: connected clients when the server ends, by a planned stop or without its parent."""

import contextlib
import json
import signal
import ssl
import struct
import subprocess
import time

import pytest

from support import hostile_nbd
from support.nbdserver import wait_until

BLOCK = 4096
WRITE = hostile_nbd.WRITE
OUTSTANDING = 8
AREA = 4 << 20
# Maximum time of a stop, in seconds. An idle client would delay it indefinitely.
STOP_S = 5


@contextlib.contextmanager
def served(coldrise, path, *options):
    process = coldrise.start("--json", "serve", "nbd", "--socket", path, *options,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert json.loads(process.stdout.readline())["event"] == "ready"
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def replies(stream):
    """(error, cookie) of each reply, until the connection ends."""
    with contextlib.suppress(EOFError, ConnectionResetError, ssl.SSLEOFError):
        while True:
            magic, error, cookie = struct.unpack(">IIQ", hostile_nbd.receive(stream, 16))
            assert magic == 0x67446698
            yield error, cookie


def content(number):
    return struct.pack(">Q", number) * (BLOCK // 8)


def write_until_disconnected(stream, after, end_server):
    """Writes blocks 0, 1, …; calls `end_server` after `after` replies. Returns the errors and
    the acknowledged blocks."""
    errors, written = [], []

    def send(number):
        offset = number * BLOCK % AREA
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            stream.sendall(hostile_nbd.request(WRITE, BLOCK, offset, number) + content(number))

    for number in range(OUTSTANDING):
        send(number)
    for error, number in replies(stream):
        if error:
            errors.append(error)
        else:
            written.append(number)
        if len(written) + len(errors) == after:
            end_server()
        send(len(written) + len(errors) + OUTSTANDING - 1)
    return errors, written


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_an_idle_client_is_disconnected_immediately(coldrise, live, tmp_path, tls, ending):
    options, context = tls
    path = tmp_path / "socket"
    with served(coldrise, path, *options) as process:
        stream = hostile_nbd.opened(path, live, context)
        block = content(7)
        stream.sendall(hostile_nbd.request(WRITE, BLOCK, 0) + block)
        answers = replies(stream)
        assert next(answers) == (0, 1)
        began = time.monotonic()
        process.send_signal(ending)
        assert not list(answers)
        assert process.wait(timeout=30) == (0 if ending == signal.SIGTERM else -ending)
        took = time.monotonic() - began
        assert took < STOP_S, f"the end took {took:.1f} s"
    stream.close()
    # The socket and the session are free for the next server, with what was acknowledged.
    with next_server(coldrise, path, options):
        assert read(path, live, context, 0) == block


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_busy_client_sees_no_errors_and_loses_nothing(coldrise, live, tmp_path, tls, ending):
    options, context = tls
    path = tmp_path / "socket"
    with served(coldrise, path, *options) as process:
        stream = hostile_nbd.opened(path, live, context)
        errors, written = write_until_disconnected(stream, 300, lambda: process.send_signal(ending))
        process.wait(timeout=30)
    stream.close()
    assert not errors and len(written) >= 300
    with next_server(coldrise, path, options):
        for number in written[-20:]:
            assert read(path, live, context, number * BLOCK % AREA) == content(number)


@contextlib.contextmanager
def next_server(coldrise, path, options):
    """A new server on the same socket: it is refused while the old one listens."""
    def started():
        # A start takes its time on a busy machine: the start time of the accepted one counts.
        attempted = time.monotonic()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(served(coldrise, path, *options))
            except (json.JSONDecodeError, KeyError):
                # Nothing, or the error as JSON.
                return None
            return stack.pop_all(), attempted

    began = time.monotonic()
    server, attempted = wait_until(started, "the next server")
    with server:
        assert attempted - began < STOP_S + 1
        yield


def read(path, name, context, offset):
    stream = hostile_nbd.opened(path, name, context)
    stream.sendall(hostile_nbd.request(hostile_nbd.READ, BLOCK, offset))
    assert struct.unpack(">IIQ", hostile_nbd.receive(stream, 16))[1] == 0
    found = hostile_nbd.receive(stream, BLOCK)
    stream.close()
    return found
