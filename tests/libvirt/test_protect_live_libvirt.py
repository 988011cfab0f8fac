"""coldrise protect-live --from libvirt: the writes of a domain, captured while it runs."""

import os
import signal

import pytest

from support.nbdserver import wait_until
from support.protection import SESSION, Protections, marks, newest
from support.running import COUNTING_SECTOR, MIB, assert_one_instant, assert_same_as_now, restored


@pytest.fixture
def protect(coldrise, libvirt, scratch):
    """Starts protections; all are ended."""
    started = Protections(coldrise, "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch)
    yield started
    started.end()


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_each_mark_is_all_disks_at_one_instant(coldrise, domain, protect, tmp_path, mode):
    running = domain(sector=COUNTING_SECTOR)
    protection = protect(*mode)
    protection.next_round()
    found = wait_until(lambda: len(marks(coldrise)) >= 4 and marks(coldrise), "four marks")
    rounds = [assert_one_instant(*restored(coldrise, mark["address"], tmp_path)) for mark in found]
    assert rounds == sorted(set(rounds)), "the guest does not run"
    running.goes_on()
    protection.end()
    # That of the backup, and that of the last round.
    assert len(running.checkpoints()) == 2 and not running.has_job()


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_only_changes_are_read_and_a_kill_loses_none(coldrise, domain, live, protect, tmp_path, mode):
    running = domain()
    running.write("vda", "write -P 17 0 20M")
    backup = live(*mode)
    running.write("vda", "write -P 18 8M 4k")
    protection = protect(*mode)
    first = protection.next_round()
    # The checkpoint of the backup counts, and stays for the next backup. A bit of libvirt's bitmaps stands for 64 KiB.
    assert (first["read_bytes"], first["written_bytes"], first["remarks"]) == (65536, 4096, [])
    assert_same_as_now(coldrise, newest(coldrise), running, tmp_path)
    for number in range(4):
        running.write("vdb", f"write -P {number} {number}M 64k")
        second = protection.changed()
        assert second["read_bytes"] <= 2 * 65536 and second["remarks"] == []
        running.write("vda", f"write -P {number} {30 + number}M 64k")
        assert protection.end(signal.SIGKILL)[0] == -signal.SIGKILL
        running.goes_on()
        protection = protect(*mode)
        again = protection.next_round()
        assert not [text for text in again["remarks"] if "everything is read" in text], again
        assert again["read_bytes"] <= 4 * 65536
        assert_same_as_now(coldrise, newest(coldrise), running, tmp_path)
    protection.end()
    made = live(*mode)
    assert [disk["base"] for disk in made["disks"]] == [backup["point"]] * 2
    assert all(disk["is_incremental"] for disk in made["disks"])
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    assert coldrise.run("verify").returncode == 0


def test_a_domain_that_is_shut_off_is_read_once_more_and_waited_for(coldrise, libvirt, domain, protect, tmp_path):
    running = domain(persistent=True)
    running.write("vda", "write -P 1 0 4M")
    protection = protect()
    protection.next_round()
    running.write("vda", "write -P 2 1M 64k")
    libvirt.virsh("destroy", "web01", "--graceful")
    off = wait_until(lambda: [line for line in protection.events("round") if line["is_off"]], "a round of the domain that is off")
    count = len(marks(coldrise))
    protection.next_round(2)
    assert len(marks(coldrise)) == count and off[0]["is_marked"]
    libvirt.virsh("start", "web01", "--paused")
    running.write("vdb", "write -P 3 5M 64k")
    wait_until(lambda: not protection.changed()["is_off"], "a round of the running domain")
    assert_same_as_now(coldrise, newest(coldrise), running, tmp_path)
    assert coldrise.json("marks", SESSION)["follows"]["is_running"]


def test_a_killed_machine_is_read_whole_and_little_is_written(coldrise, libvirt, domain, protect, tmp_path):
    running = domain(persistent=True)
    running.write("vda", "write -P 1 0 4M")
    protection = protect()
    protection.next_round()
    # What is not flushed is lost with QEMU.
    running.write("vda", "flush")
    os.kill(running.process(), signal.SIGKILL)
    wait_until(lambda: running.libvirt.state("web01").startswith("shut off"), "the end of the domain")
    libvirt.virsh("start", "web01", "--paused")
    def whole():
        return [line for line in protection.events("round") if "everything is read" in "".join(line["remarks"])]
    assert wait_until(whole, "a round that reads everything")[0]["read_bytes"] >= 4 * MIB
    running.write("vda", "write -P 2 1M 4k")
    changed = wait_until(lambda: [line for line in protection.events("round") if line["written_bytes"]], "the change")
    assert changed[0]["written_bytes"] == 4096 and len(whole()) == 1
    assert_same_as_now(coldrise, newest(coldrise), running, tmp_path)
