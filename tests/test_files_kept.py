"""coldrise files: machines that stay for the next command. A program in QEMU's place answers in no time."""

import os
import signal
import subprocess

from support import filesystems
from support.nbdserver import wait_until
from test_files import MIB, files, background_of, machines, programs, runtime
from test_files_hostile import FRAMES, machine

__all__ = ["machine", "runtime"]


def test_a_helper_machine_is_reused_by_the_next_command(coldrise, machine, runtime):
    machine(FRAMES)
    reader, writer = os.pipe()
    # Longer than the next command takes on a busy host.
    coldrise.start("files", "ls", "web01/latest/vda:", "--stay", "5s", stdout=subprocess.DEVNULL,
                   pass_fds=[writer]).wait()
    os.close(writer)
    # The machine inherits no descriptors of the command: this would wait for its end.
    assert os.read(reader, 1) == b""
    os.close(reader)
    process, before = background_of(runtime, b"/vda"), machines(runtime)
    assert len(before) == 1
    files(coldrise, "ls", "web01/latest/vda:")
    # It needed no other one.
    assert machines(runtime) == before and background_of(runtime, b"/vda") == process
    sessions = coldrise.json("sessions")["sessions"]
    assert len(sessions) == 1 and "-files-" in sessions[0]["session"], sessions
    wait_until(lambda: process not in programs(runtime), "the end of a machine that nobody uses")
    assert not machines(runtime)


def test_machines_do_not_pile_up(coldrise, machine, runtime, tmp_path):
    machine(FRAMES)
    disks = ["vda", "vdb", "vdc", "vdd"]
    point = coldrise.backup("db01", **{disk: filesystems.empty(tmp_path / disk, MIB) for disk in disks})

    def kept():
        return {process: words[-3] for process, words in programs(runtime).items() if b"keep" in words}

    # The first of these was used before all others, and ends for the fifth.
    for address in (point, *(f"{point}/{disk}" for disk in disks)):
        files(coldrise, "ls", f"{address}:")
        assert len(machines(runtime)) <= 4
    wait_until(lambda: len(kept()) == 4, "the end of a background process")
    assert point.encode() not in kept().values(), kept()
    for process in kept():
        os.kill(process, signal.SIGTERM)
    wait_until(lambda: not programs(runtime), "the end of all")
