"""coldrise move of recovered machines: their disks go to production storage while they run, or stay where they are."""

import json
import pathlib
import signal
import subprocess

import pytest

from support import counting_machine
from support.block_device import block_device
from support.counting_machine import MIB, count
from support.nbdserver import wait_until
from support.running import COUNTER_OFFSET, counter_in_use
from support.stopped import stopped
from support.virsh import AWAY, changed_virsh, killed_at, on, skip


def copies(libvirt):
    return "cur=" in libvirt.virsh("blockjob", "web01", "vda", "--info", "--raw")


@pytest.fixture
def slow_move(coldrise, libvirt):
    """A move that copies for longer than any test takes."""
    def start():
        process = coldrise.start("move", "live/web01-1", libvirt.images, "--rate", "32K", stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE)
        wait_until(lambda: copies(libvirt), "the copy")
        return process

    return start


def test_a_recovered_machine_moves_while_it_runs(coldrise, libvirt, recover, grows, slow_move, tmp_path):
    running = recover()
    grows()
    # Cancelled: the machine stays where it is.
    process = slow_move()
    wait_until(lambda: "is being moved" in coldrise.run("sessions").stdout, "the note")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130 and not list(libvirt.images.iterdir())
    grows()
    # Killed: the next one cleans up and moves.
    process = slow_move()
    wait_until(lambda: list(libvirt.images.iterdir()), "the target")
    process.kill()
    process.wait()
    assert "interrupted" in coldrise.run("sessions").stdout
    settled = coldrise.run("move", "live/web01-1")
    assert settled.returncode == 0 and "withdrawn" in settled.stdout, settled.stderr
    assert not list(libvirt.images.iterdir())
    moved = coldrise.json("move", "live/web01-1", libvirt.images)
    target = libvirt.images / "web01-vda.qcow2"
    assert moved["disks"][0]["is_moved"] and moved["disks"][0]["target"] == str(target)
    assert running.end()["state"] == "moved"
    assert libvirt.state("web01").startswith("running") and str(target) in libvirt.virsh("domblklist", "web01")
    assert target.stat().st_blocks * 512 < 8 * MIB
    sealed = count(coldrise, moved["address"], tmp_path)

    wait_until(lambda: counter_in_use(target, 512) > sealed, "the machine writes to its new disk")
    for command in (["recover", "live/web01-1", "--to", "libvirt"], ["recover", "live/web01-1", "--undo"],
                    ["boot", "live/web01-1"]):
        refused = coldrise.run(*command)
        assert refused.returncode == 11 and str(target) in refused.stderr


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
def test_an_unreachable_libvirt_at_the_switch_leaves_no_machine_suspended(coldrise, libvirt, recover, grows, clock, tmp_path,
                                                                        is_long):
    """A short absence is waited for; after a longer one the machine stays suspended, and the next move resumes it."""
    recover()
    mark, refused, back = tmp_path / "suspended", tmp_path / "refused", tmp_path / "back"
    # After the suspend libvirt does not answer: for three requests, or for the whole move.
    still = f"[ ! -e {back} ]" if is_long else f"[ ! -e {refused} -o $(stat -c %s {refused} || echo 0) -lt 3 ]"
    refuse = f"echo >> {refused}; {skip(clock, 12) if is_long else ':'}; {AWAY}"
    with changed_virsh(tmp_path, f"if [ -e {mark} ] && {still} 2>/dev/null; then {refuse}; fi", on(" suspend ", f": > {mark}")):
        with clock.of(coldrise):
            failed = coldrise.run("move", "live/web01-1", libvirt.images)
        assert failed.returncode == 1 and "not moved" in failed.stderr and mark.exists(), failed.stderr
        back.touch()
        if is_long:
            assert "may stay suspended" in failed.stderr and "coldrise move" in failed.stderr, failed.stderr
            assert libvirt.state("web01").startswith("paused")
            settled = coldrise.run("move", "live/web01-1")
            assert "was interrupted" in settled.stderr, settled.stderr
    assert libvirt.state("web01").startswith("running") and not list(libvirt.images.iterdir())
    assert not copies(libvirt)
    grows()
    coldrise.json("move", "live/web01-1", libvirt.images)


def test_a_moved_machine_that_could_not_be_resumed_is_named(coldrise, libvirt, recover, clock, tmp_path):
    recover()
    away = tmp_path / "away"
    # From the moment in which the machine is to run on.
    refuse = f"{on(' resume ', f': > {away}')}\nif [ -e {away} ]; then {skip(clock, 12)}; {AWAY}; fi"
    with clock.of(coldrise), changed_virsh(tmp_path, refuse):
        moved = coldrise.run("move", "live/web01-1", libvirt.images)
    assert moved.returncode == 3 and "may be suspended" in moved.stdout, (moved.returncode, moved.stdout, moved.stderr)
    assert libvirt.state("web01").startswith("paused")
    for command in ("sessions", "doctor"):
        assert "coldrise move live/web01-1 resumes it" in coldrise.run(command).stdout, command
    # Only the session knows of it.
    refused = coldrise.run("unpublish", "web01-1")
    assert refused.returncode == 11 and "coldrise move live/web01-1 resumes it" in refused.stderr, refused.stderr
    coldrise.json("move", "live/web01-1")
    assert libvirt.state("web01").startswith("running")
    assert "may be suspended" not in coldrise.run("doctor").stdout


def test_an_undo_ends_a_move_that_copies(coldrise, libvirt, recover, slow_move, clock):
    running = recover(clock=clock)
    process = slow_move()
    coldrise.json("recover", "live/web01-1", "--undo")
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1 and "session web01-1 was ended meanwhile" in message, message
    assert "as before" not in message and not list(libvirt.images.iterdir())
    assert running.end()["state"] == "off" and coldrise.json("sessions")["sessions"] == []
    assert not any("live/web01-1" in line or "unpublish" in line for line in running.said().splitlines()), running.said()


def test_the_end_of_a_moved_session_is_detected(coldrise, libvirt, recover):
    running = recover()
    # So that it does not see the note of the move.
    with stopped(running.process.pid):
        coldrise.json("move", "live/web01-1", libvirt.images)
        wait_until(lambda: coldrise.run("unpublish", "web01-1").returncode == 0, "the session closes")
    assert running.end()["state"] == "moved" and libvirt.state("web01").startswith("running")


STEPS = [("blockcopy", "before", False), ("blockcopy", "after", False), ("suspend", "after", False),
         ("--pivot", "before", True), ("--pivot", "after", True), ("resume", "before", True), ("resume", "after", True)]


@pytest.mark.parametrize("request_word, moment, is_moved", STEPS)
def test_after_a_killed_move_the_valid_side_is_named(coldrise, libvirt, recover, grows, tmp_path, request_word, moment,
                                                          is_moved):
    recover()
    grows()
    acknowledged = count(coldrise, "live/web01-1", tmp_path)
    target = libvirt.images / "web01-vda.qcow2"
    with killed_at(tmp_path, moment, request_word):
        killed = coldrise.run("move", "live/web01-1", libvirt.images)
    assert killed.returncode == -signal.SIGKILL
    assert any(word in coldrise.run("doctor").stdout for word in ("move", "moved"))
    settled = coldrise.run("move", "live/web01-1")
    assert libvirt.state("web01").startswith("running"), settled.stderr
    if not is_moved:
        assert not target.exists()
        assert count(coldrise, "live/web01-1", tmp_path) >= acknowledged
        grows()
        return
    assert settled.returncode == 0 and str(target) in settled.stdout
    assert str(target) in libvirt.virsh("domblklist", "web01")
    before = counter_in_use(target, 512)
    assert before >= acknowledged
    wait_until(lambda: counter_in_use(target, 512) > before, "the machine writes to its new disk")


def writes(libvirt):
    """The number of writes to the first disk."""
    return int(libvirt.virsh("domblkstat", "web01", "vda").split("wr_req")[1].split()[0])


@pytest.fixture
def busy(coldrise, libvirt, recover, tmp_path):
    """A machine that writes the same places again and again, faster than a slow copy follows."""
    running = recover(counting_machine.store_busy(coldrise, tmp_path))
    wait_until(lambda: writes(libvirt) > 100, "the guest writes")
    return running


def test_a_machine_of_two_disks_runs_if_requested(coldrise, libvirt, busy, recover):
    busy.kill()
    wait_until(lambda: libvirt.state("web01") == "paused (I/O error)", "the pause")
    doctor, listed = coldrise.run("doctor").stdout, coldrise.run("sessions").stdout
    for output in (doctor, listed):
        assert "nothing serves the disks of web01" in output and "recover live/web01-1 --to libvirt" in output, output
    again = recover("live/web01-1")
    assert libvirt.state("web01").startswith("running"), again.said()
    before = writes(libvirt)
    wait_until(lambda: writes(libvirt) > before + 100, "the guest writes")
    assert libvirt.state("web01").startswith("running") and "paused by an error" not in again.said()
    assert "nothing serves" not in coldrise.run("doctor").stdout
    again.process.send_signal(signal.SIGTERM)
    assert again.end()["state"] == "paused"
    libvirt.virsh("destroy", "web01")
    undone = coldrise.run("recover", "live/web01-1", "--undo")
    assert "web01 did not run on it" in undone.stdout, undone.stdout


# Two of those areas in a second for each disk, slower than the guest writes on the busiest host.
SLOW = "256K"


def test_a_machine_that_writes_too_fast_is_paused_for_the_rest(coldrise, libvirt, busy):
    done = coldrise.run("--json", "move", "live/web01-1", libvirt.images, "--rate", SLOW)
    assert done.returncode == 0, done.stderr
    moved = json.loads(done.stdout.splitlines()[-1])
    assert "is paused for the last" in done.stderr and moved["held_ms"] < 10000
    assert all(disk["is_moved"] for disk in moved["disks"]) and busy.end()["state"] == "moved"
    assert libvirt.state("web01").startswith("running")
    target = libvirt.images / "web01-vda.qcow2"
    before = counter_in_use(target, COUNTER_OFFSET)
    wait_until(lambda: counter_in_use(target, COUNTER_OFFSET) > before, "the machine writes to its new disk")


def test_a_move_killed_while_it_holds_the_machine_is_settled(coldrise, libvirt, busy, tmp_path):
    with killed_at(tmp_path, "after", "suspend"):
        killed = coldrise.run("move", "live/web01-1", libvirt.images, "--rate", SLOW)
    # Immediately: QEMU still copies the rest for some seconds.
    shown = libvirt.virsh("dumpxml", "web01")
    assert killed.returncode == -signal.SIGKILL
    assert libvirt.state("web01") == "paused (user)" and "may be suspended" in coldrise.run("sessions").stdout
    # It was not yet switched: suspended for the rest of the copy.
    assert "ready='yes'" not in shown.partition("<mirror")[2].partition("</disk>")[0]
    withdrawn = coldrise.json("move", "live/web01-1")
    assert not any(disk["is_moved"] for disk in withdrawn["disks"]) and not list(libvirt.images.iterdir())
    before = writes(libvirt)
    wait_until(lambda: writes(libvirt) > before, "the machine goes on in the session")


def test_a_machine_suspended_by_its_owner_stays_suspended(coldrise, libvirt, recover, tmp_path):
    recover()
    libvirt.virsh("suspend", "web01")
    with killed_at(tmp_path, "before", "--pivot"):
        killed = coldrise.run("move", "live/web01-1", libvirt.images)
    assert killed.returncode == -signal.SIGKILL
    moved = coldrise.json("move", "live/web01-1")
    assert [disk["is_moved"] for disk in moved["disks"]] == [True]
    assert libvirt.state("web01") == "paused (user)"


def test_a_machine_moves_to_a_larger_block_device(coldrise, libvirt, recover, grows, tmp_path):
    recover()
    grows()
    with block_device(tmp_path / "device", 40 * MIB) as device:
        refused = coldrise.run("move", "live/web01-1", f"vda={device}")
        assert refused.returncode == 1 and "is not empty" in refused.stderr
        moved = coldrise.json("move", "live/web01-1", f"vda={device}", "--force")
        assert moved["disks"][0]["is_moved"] and device in libvirt.virsh("domblklist", "web01")
        # The disk keeps its size, and data behind its end is not changed.
        assert int(libvirt.virsh("domblkinfo", "web01", "vda").split()[1]) == 32 * MIB
        sealed = count(coldrise, moved["address"], tmp_path)
        wait_until(lambda: counter_in_use(pathlib.Path(device), 512) > sealed, "the machine writes to its new disk")
        libvirt.virsh("destroy", "web01")
        stored = tmp_path / "stored.raw"
        coldrise.json("restore", f"{moved['address']}/vda", stored)
        with open(device, "rb") as file:
            found = file.read()
        # The first sectors have the counter.
        assert found[1024:32 * MIB] == stored.read_bytes()[1024:] and found[32 * MIB:] == b"\xff" * (8 * MIB)
