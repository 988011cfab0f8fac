"""Sources of backups: slow servers, images in foreign formats."""

import contextlib
import json
import signal
import subprocess
import tempfile
import pathlib

from support.nbdserver import wait_until

EXTENSIONS = {"raw": "raw", "qcow2": "qcow2", "vmdk": "vmdk", "vpc": "vhd", "vhdx": "vhdx"}


def tool(*arguments):
    """Runs a program that must succeed; returns its output."""
    done = subprocess.run([*map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def convert(raw, target, driver, *options):
    """The raw image in another format."""
    words = [word for option in options for word in ("-o", option)]
    tool("qemu-img", "convert", "-f", "raw", "-O", driver, *words, raw, target)
    return target


def is_same_disk(first, first_driver, second, second_driver):
    """Whether two images hold the same disk; zeroes behind the shorter one do not count."""
    done = subprocess.run(
        ["qemu-img", "compare", "-f", first_driver, "-F", second_driver, first, second],
        capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


@contextlib.contextmanager
def slow_server(image, megabytes_per_second=2):
    """An NBD server that serves a raw image slowly; yields its URI and its process. The first
    two seconds are fast."""
    with tempfile.TemporaryDirectory(prefix="coldrise-slow-") as folder:
        socket = pathlib.Path(folder) / "socket"
        ready = pathlib.Path(folder) / "ready"
        server = subprocess.Popen(
            ["nbdkit", "--foreground", "--exit-with-parent", "--unix", socket, "--pidfile", ready,
             "--filter=rate", "file", image, f"rate={megabytes_per_second * 8}M"],
            stdin=subprocess.DEVNULL)
        try:
            wait_until(lambda: ready.exists() or server.poll() is not None, "the slow server")
            assert server.poll() is None
            yield f"nbd+unix:///?socket={socket}", server
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            server.wait(timeout=30)


GATED_READ = """
if [ $4 -ge {free} ]; then while [ ! -e {gate} ]; do sleep 0.02; done; else sleep 0.1; fi
exec dd if={image} skip=$4 count=$3 iflag=skip_bytes,count_bytes bs=1M status=none
"""


@contextlib.contextmanager
def gated_server(image, free):
    """An NBD server that serves the first `free` bytes of a raw image, slowly enough for
    progress reports, and the rest once the gate is open; yields its URI, its process and the
    gate: a file that the test creates."""
    with tempfile.TemporaryDirectory(prefix="coldrise-gated-") as folder:
        socket, ready, gate = (pathlib.Path(folder) / name for name in ("socket", "ready", "gate"))
        read = GATED_READ.format(free=free, gate=gate, image=image)
        server = subprocess.Popen(
            ["nbdkit", "--foreground", "--exit-with-parent", "--unix", socket, "--pidfile", ready,
             "eval", f"get_size=echo {image.stat().st_size}", f"pread={read}", "thread_model=echo serialize_requests"],
            stdin=subprocess.DEVNULL)
        try:
            wait_until(lambda: ready.exists() or server.poll() is not None, "the gated server")
            assert server.poll() is None
            yield f"nbd+unix:///?socket={socket}", server, gate
        finally:
            gate.touch()
            server.terminate()
            server.wait(timeout=30)


class RunningBackup:
    """A backup that has begun to read."""

    def __init__(self, coldrise, machine, *sources):
        self.process = coldrise.start("--json", "backup", machine, *sources,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if self.lines[-1].get("event") == "progress" and self.lines[-1]["read_bytes"] > 0:
                return
        raise AssertionError(f"the backup ended early: {self.process.stderr.read()}")

    def end(self, number=None):
        """Sends a signal, if one is given, and waits for the end; returns the exit code, the
        last object and the messages."""
        if number is not None:
            self.process.send_signal(number)
        output, messages = self.process.communicate(timeout=60)
        self.lines += [json.loads(line) for line in output.splitlines()]
        return self.process.returncode, self.lines[-1], messages
