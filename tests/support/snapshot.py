"""A guest whose shell is ready immediately: it continues from a snapshot.

    with running_guest(tmp_path, prepare="modprobe nfs") as guest:
        guest.check("uname -r")

A boot takes an emulated processor 14 seconds, a snapshot one. It is a copy of the disk, with the machine's memory in it, and is
kept next to the guest's image. The first user makes it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time

from . import guest as guests
from .guest import Guest, GuestError, image, kvm_works, qcow2_disk, raw_disk

UNUSED_SECONDS = 7 * 24 * 3600
NAME = "running"


@contextlib.contextmanager
def running_guest(folder, *, recipe="guest", prepare="true", data=None, prefix=(), **options):
    """Before the snapshot the guest has run `prepare`. `data` is a raw file for a second disk; the snapshot knows its size only.
    Under KVM, which boots in two seconds, no snapshot is made: it would depend on the processor."""
    folder, base = pathlib.Path(folder), image(recipe)
    disk = folder / "guest.qcow2"
    disks = [qcow2_disk(disk), *([raw_disk(data, name="data", read_only=True)] if data else [])]
    options = {"cpus": 1, **options}
    if kvm_works():
        with _booted(base, disk, disks, prepare, log=folder / "guest.log", prefix=prefix, **options) as guest:
            yield guest
        return
    with open(base.parent / "snapshots.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        snapshot = base.parent / f"{recipe}-running-{_key(base, prepare, data, options)}.qcow2"
        if snapshot.exists():
            _copy(snapshot, disk)
        else:
            _remove_unused(base.parent)
            _save(base, disk, disks, prepare, log=folder / "snapshot.log", **options)
            _copy(disk, f"{snapshot}.new")
            subprocess.run(["sync", f"{snapshot}.new"], check=True)
            os.replace(f"{snapshot}.new", snapshot)
        os.utime(snapshot)
    with Guest(disks, log=folder / "guest.log", prefix=prefix, extra=["-loadvm", NAME], **options) as guest:
        guest.take_over()
        yield guest


def _key(base, prepare, data, options):
    """Changes with all that is in the memory."""
    version = subprocess.run([guests.QEMU, "--version"], capture_output=True, text=True, check=True).stdout
    size = os.stat(data).st_size if data else 0
    sources = [pathlib.Path(file).read_text(encoding="utf-8") for file in (__file__, guests.__file__)]
    known = repr((base.name, base.stat().st_mtime_ns, version, prepare, size, sorted(options.items()), sources))
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _copy(source, target):
    subprocess.run(["cp", "--sparse=always", source, target], check=True)


def _remove_unused(cache):
    for path in cache.glob("*-running-*.qcow2*"):
        if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
            path.unlink()


@contextlib.contextmanager
def _booted(base, disk, disks, prepare, **options):
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", disk], check=True)
    with Guest(disks, **options) as guest:
        guest.wait_for_login()
        guest.login()
        guest.check(prepare)
        yield guest


def _save(base, disk, disks, prepare, **options):
    """Writes the running machine into its disk."""
    # Addresses of sockets are short.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as monitor:
        extra = ["-qmp", f"unix:{folder}/qmp,server=on,wait=off"]
        with _booted(base, disk, disks, prepare, extra=extra, **options) as guest:
            # Nor may it keep parts of the second disk.
            guest.check("sync; echo 3 > /proc/sys/vm/drop_caches")
            monitor.connect(f"{folder}/qmp")
            with monitor.makefile("rw", encoding="utf-8") as lines:
                for command, arguments in (("qmp_capabilities", {}), ("human-monitor-command", {"command-line": f"savevm {NAME}"}),
                                           ("quit", {})):
                    lines.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
                    lines.flush()
                    answer = next(line for line in map(json.loads, lines) if not {"QMP", "event"} & line.keys())
                    if answer.get("return", answer):
                        raise GuestError(f"QEMU refused {command}: {answer}")
            guest.process.wait(timeout=60)
