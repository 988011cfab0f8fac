"""Servers under measurement: started, awaited, and always ended.

Each runs in the foreground in its own process group. It is ended by its pid and, only
if that fails, by its group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Mapping, Sequence
from urllib.parse import quote

from .commands import spell
from .figures import Failure

START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0


def nbd_uri(socket_path: Path, export: str = "") -> str:
    """NBD URI of an export on a Unix socket. Slashes in an export name stay unescaped:
    libnbd takes everything after the first one as the name."""
    return f"nbd+unix:///{quote(export, safe='/~+')}?socket={quote(str(socket_path), safe='/')}"


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _own_group() -> None:
    """Runs in the child before exec. The kernel ends the child when this process dies, so
    that even a killed benchmark leaves no server."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _processor_s(process: int) -> float:
    """Processor time of a running process and of its children, in seconds."""
    total, waiting = 0.0, [process]
    while waiting:
        pid = waiting.pop()
        total += time.clock_gettime((~pid << 3) | 2)
        for task in Path(f"/proc/{pid}/task").iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                waiting += map(int, (task / "children").read_text().split())
    return total


class Server:
    """A server on a Unix socket, as a context manager. Inside the `with` it accepts
    connections; after it the process has ended and the socket is removed."""

    def __init__(
        self,
        argv: Sequence[object],
        socket_path: Path,
        *,
        env: Mapping[str, str] | None = None,
        wait_for_line: str | None = None,
    ) -> None:
        self.argv = [str(word) for word in argv]
        self.socket_path = socket_path
        self._env = {**os.environ, **(env or {})}
        self._wait_for_line = wait_for_line
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise Failure(f"{spell(self.argv)}: is not running")
        return self._process.pid

    def uri(self, export: str = "") -> str:
        return nbd_uri(self.socket_path, export)

    def __enter__(self) -> "Server":
        self.socket_path.unlink(missing_ok=True)
        try:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=self._env,
                preexec_fn=_own_group,
            )
        except FileNotFoundError as error:
            raise Failure(f"{self.argv[0]}: not installed ({error})") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def kill(self) -> None:
        """Kills the server and its children."""
        os.killpg(self.pid, signal.SIGKILL)

    def processor_s(self) -> float:
        """Processor time that the server and its running children have used, in seconds."""
        return _processor_s(self.pid)

    def said(self) -> str:
        """The last lines of the server's output. Reads them without moving the file offset,
        which the server shares."""
        length = os.fstat(self._output.fileno()).st_size
        start = max(0, length - 4000)
        return os.pread(self._output.fileno(), 4000, start).decode(errors="replace").strip()

    def _is_ready(self) -> bool:
        if self._wait_for_line is not None:
            return any(line.startswith(self._wait_for_line) for line in self.said().splitlines())
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket_path))
            except OSError:
                return False
        return True

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise Failure(
                    f"{spell(self.argv)}: ended with {self._process.returncode}: {self.said()}"
                )
            if time.monotonic() > deadline:
                raise Failure(f"{spell(self.argv)}: not ready after {START_LIMIT_S:g} s: {self.said()}")
            # Short, so that it does not distort the time to the first byte.
            time.sleep(0.001)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.socket_path.unlink(missing_ok=True)
        self._output.close()


def nbdkit_file(image: Path, socket_path: Path, *, read_only: bool = False) -> Server:
    """nbdkit's file plugin on a raw image."""
    options = ["--readonly"] if read_only else []
    return Server(
        ["nbdkit", "--foreground", "--exit-with-parent", "--unix", socket_path, *options, "file", image],
        socket_path,
    )


def nbdkit_folder(folder: Path, socket_path: Path) -> Server:
    """nbdkit's file plugin on the files of a folder; a file's name is its export's."""
    return Server(
        ["nbdkit", "--foreground", "--exit-with-parent", "--unix", socket_path, "file", f"dir={folder}"], socket_path
    )


def nbdkit_memory(size_bytes: int, socket_path: Path) -> Server:
    """nbdkit's memory plugin: an empty disk."""
    return Server(
        ["nbdkit", "--foreground", "--exit-with-parent", "--unix", socket_path, "memory", str(size_bytes)], socket_path
    )


def nbdkit_luks(image: Path, socket_path: Path, passphrase: str) -> Server:
    """nbdkit's file plugin on a LUKS image, with the luks filter."""
    return Server(
        ["nbdkit", "--foreground", "--exit-with-parent", "--unix", socket_path, "--filter=luks",
         "file", image, f"passphrase={passphrase}"],
        socket_path,
    )


def qemu_nbd_luks(image: Path, socket_path: Path, passphrase: str) -> Server:
    """qemu-nbd on a LUKS image."""
    return Server(
        ["qemu-nbd", "--persistent", "--shared", "0", "--socket", socket_path,
         "--object", f"secret,id=key,data={passphrase}",
         "--image-opts", f"driver=luks,key-secret=key,file.filename={image}"],
        socket_path,
    )


def qemu_nbd(
    image: Path,
    socket_path: Path,
    *,
    image_format: str = "qcow2",
    read_only: bool = True,
    bitmap: str | None = None,
) -> Server:
    """qemu-nbd on an image. `--persistent` keeps it across connections, so the probe
    for readiness does not end it."""
    options = ["--read-only"] if read_only else []
    if bitmap is not None:
        options += ["--bitmap", bitmap]
    return Server(
        ["qemu-nbd", "--persistent", "--shared", "0", "--socket", socket_path, "--format", image_format]
        + options
        + [image],
        socket_path,
    )
