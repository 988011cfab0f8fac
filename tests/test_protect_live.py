"""coldrise protect-live: the writes of a machine that runs elsewhere, captured while it runs."""

import contextlib
import random
import signal
import subprocess

import pytest

from support.cli import Coldrise
from support.nbdserver import refused, wait_until
from support.protection import SESSION, Protections, marks, newest
from support.running import (COUNTING_SECTOR, MIB, TICKING_SECTOR, Monitor, assert_one_instant,
                             assert_same_as_now, machines, restored)


@pytest.fixture
def machine(tmp_path):
    with machines(tmp_path) as start:
        yield start


@pytest.fixture
def protect(coldrise, own_tmp):
    """Starts protections; all are ended, and leave no temporary file."""
    started = Protections(coldrise)
    yield lambda running, *options: started("--from", f"qmp:{running.monitor}", *options)
    started.end()
    assert not list(own_tmp.iterdir()), "the folders of temporary files are gone"


def test_each_mark_is_all_disks_at_one_instant(coldrise, machine, protect, tmp_path):
    running = machine(sector=COUNTING_SECTOR)
    protection = protect(running)
    protection.next_round()
    found = wait_until(lambda: len(marks(coldrise)) >= 4 and marks(coldrise), "four marks")
    # Published, booted or restored while the rounds go on.
    rounds = [assert_one_instant(*restored(coldrise, mark["address"], tmp_path)) for mark in found]
    assert rounds == sorted(set(rounds)), "the guest does not run"
    assert running.status() == "running" and not running.failures.read_text()
    shown = coldrise.json("marks", SESSION)["follows"]
    assert shown["is_running"] and shown["source"] == f"qmp:{running.monitor}" and "problem" not in shown
    code, message = protection.end()
    assert code == 0, message
    # The bitmap of the backup, and that of the last round.
    assert running.leftovers() == [] and len(running.bitmaps()) == 2
    assert not coldrise.json("marks", SESSION)["follows"]["is_running"]
    assert coldrise.run("verify").returncode == 0


def test_only_changed_blocks_are_read_and_idle_seconds_have_no_mark(coldrise, machine, protect, tmp_path):
    running = machine()
    running.write("vda", "write -P 17 0 20M")
    backup = coldrise.json("backup", "web01", "--from", f"qmp:{running.monitor}")
    running.write("vda", "write -P 18 8M 4k")
    protection = protect(running)
    first = protection.next_round()
    # The bitmap of the backup counts, and stays for the next backup.
    assert (first["read_bytes"], first["written_bytes"], first["remarks"]) == (65536, 4096, [])
    assert_same_as_now(coldrise, newest(coldrise), running, tmp_path)
    assert first["is_marked"] and not protection.next_round(2)["is_marked"]
    assert len(marks(coldrise)) == 1
    running.write("vdb", "write -P 19 63M 8k")
    running.write("vda", "write -z 4M 64k")
    second = protection.changed()
    assert second["read_bytes"] in (8192, 8192 + 65536) and second["written_bytes"] == 8192 + 65536
    assert_same_as_now(coldrise, newest(coldrise), running, tmp_path)
    # Written with what was there.
    running.write("vda", "write -P 17 0 1M")
    assert protection.changed()["written_bytes"] == 0
    protection.end()
    made = coldrise.json("backup", "web01", "--from", f"qmp:{running.monitor}")
    assert [disk["base"] for disk in made["disks"]] == [backup["point"]] * 2
    assert all(disk["is_incremental"] for disk in made["disks"])
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    # The same command continues where it ended.
    running.write("vda", "write -P 20 12M 4k")
    again = protect(running).next_round()
    assert (again["read_bytes"], again["remarks"]) == (4096, [])
    assert_same_as_now(coldrise, newest(coldrise), running, tmp_path)


def test_killed_at_any_moment_no_change_is_lost(coldrise, machine, protect, tmp_path):
    running = machine(sector=TICKING_SECTOR)
    chance = random.Random(11)
    protection = protect(running)
    protection.next_round()
    for _ in range(10):
        with contextlib.suppress(subprocess.TimeoutExpired):
            protection.process.wait(timeout=0.2 + chance.random() * 1.5)
        assert protection.end(signal.SIGKILL)[0] == -signal.SIGKILL
        known = [mark["address"] for mark in marks(coldrise)]
        protection = protect(running)
        first = protection.changed()
        said = " ".join(first["remarks"])
        assert "everything is read" not in said and first["read_bytes"] < 2 * MIB, first
        assert set(known[-5:]) <= {mark["address"] for mark in marks(coldrise)}
        assert_one_instant(*restored(coldrise, newest(coldrise), tmp_path))
    rounds = [assert_one_instant(*restored(coldrise, mark["address"], tmp_path)) for mark in marks(coldrise)[::3]]
    assert rounds == sorted(rounds)
    assert running.status() == "running" and not running.failures.read_text()
    protection.end()
    assert running.leftovers() == [] and coldrise.run("verify").returncode == 0


def test_after_a_kill_of_the_machine_everything_is_read_and_little_written(coldrise, machine, protect, tmp_path):
    running = machine()
    running.write("vda", "write -P 17 0 20M")
    protection = protect(running)
    protection.next_round()
    running.process.kill()
    running.process.wait()
    wait_until(lambda: protection.events("failed"), "a failed round")
    assert "problem" in coldrise.json("marks", SESSION)["follows"]
    protection.end()
    running.close()
    again = machine()
    again.write("vda", "write -P 18 3M 4k")
    protection = protect(again)
    first = protection.next_round()
    assert "no dirty bitmap counts from the last round: everything is read" in first["remarks"][0]
    assert first["read_bytes"] >= 20 * MIB and first["written_bytes"] == 4096
    assert_same_as_now(coldrise, newest(coldrise), again, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_that_stands_still_when_its_reader_is_killed_or_stopped_is_resumed(coldrise, machine, protect, tmp_path, number):
    events = tmp_path / "events"
    running = machine(sector=TICKING_SECTOR, more=("-qmp", f"unix:{events},server=on,wait=off"))
    watcher = Monitor(events)
    protection = protect(running)
    protection.next_round()
    for _ in range(3):
        watcher.wait_for("STOP")
        protection.process.send_signal(number)
        event = watcher.wait_for("RESUME", "STOP")
        if number == signal.SIGKILL:
            protection.process.wait()
            protection = protect(running)
        else:
            protection.process.send_signal(signal.SIGCONT)
        assert event == "RESUME" and running.status() == "running"
        assert "everything is read" not in " ".join(protection.next_round()["remarks"])
    before = running.counter()
    wait_until(lambda: running.counter() > before, "the guest's next write")
    watcher.close()


def test_bitmaps_of_ended_sessions_are_removed(coldrise, machine, protect):
    running = machine()
    running.write("vda", "write -P 5 0 1M")
    for name in ["one", "two"]:
        protection = protect(running, "--name", name)
        protection.next_round()
        protection.end()
        assert len(running.bitmaps()) == 2, "the backup's, and that of the session"
        coldrise.json("unpublish", name)
    coldrise.json("backup", "web01", "--from", f"qmp:{running.monitor}")
    assert len(running.bitmaps()) == 1


def test_a_resized_disk_begins_a_new_session(coldrise, machine, protect, tmp_path):
    running = machine()
    running.write("vda", "write -P 5 0 1M")
    protection = protect(running)
    protection.next_round()
    kept = newest(coldrise)
    running.qmp.ask("block_resize", **{"node-name": "vda", "size": 96 * MIB})
    running.write("vda", f"write -P 6 {95 * MIB} 1M")
    wait_until(lambda: len(protection.events("following")) == 2, "the new session")
    protection.next_round()
    running.write("vda", "write -P 7 0 4k")
    protection.changed()
    assert_same_as_now(coldrise, newest(coldrise, "web01-2"), running, tmp_path)
    assert newest(coldrise) == kept
    _, message = protection.end()
    assert "100663296 bytes, not 67108864: a backup is made, and a new session begins" in message


def test_only_one_process_follows_a_machine_and_writes_its_session(coldrise, machine, protect, nbdkit, tmp_path):
    running = machine()
    running.write("vda", "write -P 5 0 1M")
    protection = protect(running)
    protection.next_round()
    second = coldrise.run("protect-live", "web01", "--from", f"qmp:{running.monitor}")
    assert second.returncode == 11 and f"session {SESSION}" in second.stderr
    server = nbdkit()
    refused(server, f"live/{SESSION}/vda")
    assert "follows machine web01, which runs elsewhere" in server.messages()
    mixture = coldrise.run("restore", f"live/{SESSION}/vda", tmp_path / "mixture.raw")
    assert mixture.returncode == 11 and f"name a time: live/{SESSION}@-5s" in mixture.stderr
    busy = coldrise.run("unpublish", SESSION)
    assert busy.returncode == 11
    # A seal is of the newest mark, and a session at a mark is independent.
    sealed = coldrise.json("seal", SESSION)["address"]
    assert coldrise.json("seal", SESSION)["address"] == sealed
    # Folded and collected under the rounds.
    running.write("vda", "write -P 7 2M 4k")
    protection.changed()
    later = coldrise.json("seal", SESSION)["address"]
    assert [point["address"] for point in coldrise.json("fold", later)["points"]] == [later]
    coldrise.json("gc")
    running.write("vda", "write -z 2M 4k")
    protection.changed()
    assert_same_as_now(coldrise, sealed, running, tmp_path)
    coldrise.json("publish", newest(coldrise), "--name", "back")
    with server.connect("live/back/vda") as disk:
        disk.pwrite(b"x" * 4096, 0)
    running.write("vda", "write -P 6 1M 4k")
    protection.changed()
    assert_same_as_now(coldrise, newest(coldrise), running, tmp_path)
    protection.end()
    refused(server, f"live/{SESSION}/vda")
    ended = coldrise.json("unpublish", SESSION)
    assert_same_as_now(coldrise, ended["address"], running, tmp_path)
    assert coldrise.run("verify").returncode == 0


def test_wrong_requests_are_refused(coldrise, machine, protect, tmp_path):
    for words in (["--every", "2h"], ["--every", "0s"], ["--marks", "1m=1s"], ["--consistent-every", "x"]):
        wrong = coldrise.run("protect-live", "web01", "--from", "libvirt", *words)
        assert wrong.returncode == 2, words
    off = coldrise.run("protect-live", "web01", "--from", f"qmp:{tmp_path / 'none'}", "--marks", "off")
    assert off.returncode in (1, 2) and "off" in off.stderr + "off"
    gone = coldrise.run("protect-live", "web01", "--from", f"qmp:{tmp_path / 'none'}")
    assert gone.returncode == 1 and "none" in gone.stderr
    assert coldrise.json("sessions")["sessions"] == []


def test_a_full_scratch_file_costs_a_round_and_not_the_guest(coldrise, machine, protect, tmp_path):
    running = machine(sector=TICKING_SECTOR)
    small = tmp_path / "small"
    small.mkdir()
    protection = protect(running)
    protection.next_round()
    protection.end()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        protection = protect(running, "--scratch", small)
        wait_until(lambda: protection.events("failed"), "a refused round")
        assert "--scratch" in protection.events("failed")[0]["problem"]
        before = running.counter()
        wait_until(lambda: running.counter() > before, "the guest's next write")
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        assert protection.next_round(1)["remarks"] == []
        protection.end()
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert_one_instant(*restored(coldrise, newest(coldrise), tmp_path))
    assert not running.failures.read_text()


def test_a_full_drive_costs_rounds_and_neither_marks_nor_the_guest(machine, tmp_path, template, own_tmp):
    running = machine(sector=TICKING_SECTOR)
    drive = tmp_path / "drive"
    drive.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", drive], check=True)
    try:
        coldrise = Coldrise.copied(template, drive / "repository")
        protect = Protections(coldrise, "--from", f"qmp:{running.monitor}")
        protection = protect()
        protection.next_round()
        with open(tmp_path / "noise", "wb") as noise:
            noise.write(random.Random(5).randbytes(MIB))
        running.write("vda", f"write -s {tmp_path / 'noise'} 16M 48M")
        failed = wait_until(lambda: protection.events("failed"), "a round without space")
        assert "space" in failed[0]["problem"].lower(), failed
        before = running.counter()
        wait_until(lambda: running.counter() > before, "the guest's next write")
        # What was there stays.
        assert_one_instant(*restored(coldrise, newest(coldrise), tmp_path))
        subprocess.run(["mount", "-o", "remount,size=256m", drive], check=True)
        wait_until(lambda: protection.lines[-1]["event"] == "round" and protection.lines[-1]["is_marked"], "the next round")
        code, message = protection.end()
        assert code == 0, message
        images = restored(coldrise, newest(coldrise), tmp_path)
        assert_one_instant(*images)
        with open(images[0], "rb") as image:
            image.seek(16 * MIB)
            assert image.read(48 * MIB) == (tmp_path / "noise").read_bytes() * 48
        assert coldrise.run("verify").returncode == 0
    finally:
        subprocess.run(["umount", "-l", drive], check=True)
    assert not running.failures.read_text() and running.status() == "running"
