"""NBD servers over raw and qcow2 files that are written in place."""

import contextlib
import signal
import subprocess

from support.nbdserver import wait_until


@contextlib.contextmanager
def served(folder, *words):
    """nbdkit with these words; yields the URI of its only export. One thread: with more, nbdkit 1.32.4 to 1.33.9 abort
    when a client ends while two replies wait."""
    socket, ready = folder / "target.socket", folder / "target.ready"
    for left in (socket, ready):
        left.unlink(missing_ok=True)
    server = subprocess.Popen(
        ["nbdkit", "--foreground", "--exit-with-parent", "--threads=1", "--unix", socket, "--pidfile", ready,
         *map(str, words)], stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: ready.exists() or server.poll() is not None, "the target's server")
        yield f"nbd+unix:///?socket={socket}"
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0


@contextlib.contextmanager
def qemu_nbd(folder, image, *options, driver="qcow2"):
    """A qemu-nbd that stays; yields its URI."""
    socket, ready = folder / "qemu.socket", folder / "qemu.ready"
    for left in (socket, ready):
        left.unlink(missing_ok=True)
    server = subprocess.Popen(
        ["qemu-nbd", "-t", "-e", "4", "-f", driver, "-k", socket, "--pid-file", ready,
         *map(str, options), image], stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: ready.exists() or server.poll() is not None, "qemu-nbd")
        yield f"nbd+unix:///?socket={socket}"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
