"""nbdkit with the coldrise plugin, and its clients."""

import contextlib
import signal
import socket
import subprocess
import time

import nbd

from .cli import NBDKIT_PLUGIN

DEADLINE_S = 30


def wait_until(condition, what):
    """Waits for a condition that must soon be true. The interval grows with the waiting time: a check
    costs processor time that all others wait for."""
    end, pause_s = time.monotonic() + DEADLINE_S, 0.005
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 0.05)
    raise AssertionError(f"{what}: not within {DEADLINE_S} s")


class Nbdkit:
    """One nbdkit process in the foreground on a Unix socket."""

    def __init__(self, coldrise, directory, *parameters, filters=(), options=(),
                 environment=None, wrap=lambda *command: command):
        directory.mkdir(parents=True, exist_ok=True)
        self.socket = directory / "socket"
        self.log_path = directory / "log"
        self.log = open(self.log_path, "w", encoding="utf-8")
        self.socket.unlink(missing_ok=True)
        command = ["nbdkit", "-f", "--exit-with-parent", "-U", self.socket]
        command += [f"--filter={name}" for name in filters]
        command += [*options, NBDKIT_PLUGIN, f"repo={coldrise.repository}"]
        if coldrise.passphrase_file is not None:
            command.append(f"passphrase-file={coldrise.passphrase_file}")
        self.process = subprocess.Popen(
            [str(word) for word in wrap(*command, *parameters)],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            wait_until(lambda: self.process.poll() is not None or self.answers(), "nbdkit")
        except AssertionError:
            self.kill()
            raise
        if self.process.poll() is not None:
            self.log.close()
            raise NbdkitFailed(self.process.returncode, self.messages())

    def answers(self):
        """True once a client is served. nbdkit listens, and writes its process id, before the
        plugin has opened the repository."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(DEADLINE_S)
            try:
                client.connect(str(self.socket))
                # A greeting, or the end if a filter refuses clients.
                client.recv(18, socket.MSG_WAITALL)
            except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
                return False
            return True

    def messages(self):
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def uri(self, name):
        return f"nbd+unix:///{name}?socket={self.socket}"

    def handle(self, name, strict=True):
        """A client that is not connected yet."""
        handle = nbd.NBD()
        handle.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
        handle.set_export_name(name)
        handle.set_full_info(True)
        if not strict:
            handle.set_strict_mode(0)
        return handle

    @contextlib.contextmanager
    def connect(self, name, strict=True):
        """A connected client of an export."""
        handle = self.handle(name, strict)
        handle.connect_unix(str(self.socket))
        try:
            yield handle
        finally:
            with contextlib.suppress(nbd.Error):
                handle.shutdown()

    def stop(self):
        """Ends the server as its users do; it must end without an error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=DEADLINE_S)
        self.log.close()
        assert code == 0, f"nbdkit ended with {code}: {self.messages()}"

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=DEADLINE_S)
        self.log.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.stop()
        else:
            self.kill()


class NbdkitFailed(Exception):
    """nbdkit ended before it served."""

    def __init__(self, code, messages):
        super().__init__(f"nbdkit ended with {code}: {messages}")
        self.code = code
        self.messages = messages


def refused(server, name):
    """Asserts that an export cannot be opened."""
    handle = server.handle(name)
    try:
        handle.connect_unix(str(server.socket))
    except nbd.Error:
        return
    raise AssertionError(f"{name!r} was opened")


def block_status(handle, offset=0, length=None):
    """All extents of a range as [(offset, length, flags)], joined."""
    end = (handle.get_size() if length is None else offset + length)
    found = []

    def collect(_context, at, entries, _error):
        for size, flags in zip(entries[::2], entries[1::2]):
            size = min(size, end - at)
            if size <= 0:
                break
            if found and found[-1][2] == flags and found[-1][0] + found[-1][1] == at:
                found[-1] = (found[-1][0], found[-1][1] + size, flags)
            else:
                found.append((at, size, flags))
            at += size

    at = offset
    while at < end:
        handle.block_status(end - at, at, collect)
        after = found[-1][0] + found[-1][1]
        assert after > at, "block status does not advance"
        at = after
    return found


def read_all(handle, piece=1 << 20):
    """The whole content of an export."""
    size = handle.get_size()
    return b"".join(
        bytes(handle.pread(min(piece, size - at), at)) for at in range(0, size, piece)
    )


