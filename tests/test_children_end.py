"""The programs that coldrise starts end with it, at whatever moment it is killed."""

import pathlib
import random
import struct
import subprocess
import time

import pytest

from support.foreground import is_running
from support.nbdserver import wait_until
from support.ports import free_port
from test_check_boot import HALT, SAY, boot_record, small

SOURCE = pathlib.Path(__file__).parent / "support" / "held_prctl.c"
KILLS = 40
LONGEST_LIFE_S = 0.3
__all__ = ["small"]


@pytest.fixture
def held_prctl(tmp_path, monkeypatch):
    """Preloads the library that holds a child just before it is tied to its parent."""
    library = tmp_path / "held_prctl.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl"], check=True)
    calls = tmp_path / "calls"

    def hold(number):
        """A function that returns the process of that call, once it was made."""
        calls.write_bytes(struct.pack("=i", number).ljust(4096, b"\0"))
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setenv("HELD_PRCTL", str(calls))
        return lambda: struct.unpack_from("=i", calls.read_bytes(), 4 * (number + 1))[0]

    yield hold


def left(folder):
    """The running programs whose files are in this folder of temporary files."""
    word = f"TMPDIR={folder}".encode()
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if any(entry.startswith(word) for entry in (process / "environ").read_bytes().split(b"\0")):
                found.append(process)
        except OSError:
            pass
    return found


COMMANDS = {
    "nbdkit of a check": (1, ["check-boot", "web01/latest", "--memory", "64M"]),
    "QEMU of a check": (2, ["check-boot", "web01/latest", "--memory", "64M"]),
    "nbdkit": (1, ["serve", "nbd", "--socket", "SOCKET"]),
    "nfs-ganesha": (1, ["serve", "nfs", "--versions", "4", "--listen", "127.0.0.1:PORT"]),
    "qemu-img": (1, ["backup", "web02", "vda=qcow2:IMAGE"]),
    "qemu-nbd": (3, ["backup", "web02", "vda=qcow2:IMAGE"]),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_child_started_just_before_the_exit_ends(coldrise, small, own_tmp, held_prctl, tmp_path, case):
    number, words = COMMANDS[case]
    small(boot_record(SAY + HALT))
    image = tmp_path / "disk.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "1M"], check=True)
    places = {"SOCKET": str(own_tmp / "socket"), "IMAGE": str(image), "PORT": str(free_port())}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    held_process = held_prctl(number)
    process = coldrise.start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_until(lambda: process.poll() is not None or held_process(), f"the start of {case}")
    assert process.poll() is None, process.stderr.read()
    child = held_process()
    assert is_running(child)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not is_running(child), f"the end of {case}")
    wait_until(lambda: not left(own_tmp), "the end of the other children")


def test_checks_killed_at_random_moments_leave_nothing(coldrise, small, own_tmp):
    address = small(boot_record(SAY + HALT))
    moments = random.Random(7)
    for _ in range(KILLS):
        process = coldrise.start("check-boot", address, "--memory", "64M",
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0, LONGEST_LIFE_S))
        process.kill()
        process.wait(timeout=60)
    wait_until(lambda: not left(own_tmp), "the end of all children")
    coldrise.json("gc")
    assert coldrise.json("sessions") == {"sessions": []}
    # A folder without its lock may be a new one for an hour; a kill may come just before the rename of its lock.
    found = {path.name: sorted(entry.name for entry in path.iterdir()) for path in own_tmp.iterdir()}
    assert {name: entries for name, entries in found.items() if entries not in ([], ["scratch-lock.new"])} == {}
