"""The service tells systemd that it lives."""

import os
import socket
import subprocess

from support.cli import BUILT

PERIOD_US = 300_000


def test_the_service_notifies_the_watchdog(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(30)
        command = [BUILT / "coldrised", "--state", tmp_path / "state", "--socket", tmp_path / "socket",
                   "--listen", "127.0.0.1:0"]
        # The shell's process id is the service's.
        process = subprocess.Popen(
            ["sh", "-c", 'export WATCHDOG_PID=$$; exec "$@"', "sh", *map(str, command)],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": str(PERIOD_US)},
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            messages = [notified.recv(100) for _ in range(4)]
        finally:
            process.terminate()
            process.wait(timeout=30)
    assert messages == [b"READY=1\n", *[b"WATCHDOG=1\n"] * 3]
