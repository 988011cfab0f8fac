"""A host that reboots during a backup, a recovery or a move; one behind a slow line; a machine that migrates from host to host."""

import contextlib
import subprocess

from support.counting_machine import count
from support.domain import Domain
from support.line import Line
from support.nbdserver import wait_until
from support.running import MIB, TICKING_SECTOR, assert_one_instant, assert_same_as_now, restored
from support.ssh_host import SshHost
from test_hosts import backup, host, hv1, hv2, running_hosts
from test_recover_hosts import address, grows, recover, sockets

__all__ = ["address", "backup", "grows", "host", "hv1", "hv2", "recover", "running_hosts"]


def test_a_host_reboots_during_a_backup(coldrise, host, backup, tmp_path):
    running = Domain(host.libvirt, "web01", persistent=True)
    running.write("vda", "write -P 1 0 4M")
    first = backup()
    running.write("vda", "write -P 2 8M 16M")
    with coldrise.start("backup", "web01", "--from", "libvirt", "--on", "hv1", "--rate", "1M", stderr=subprocess.PIPE) as process:
        wait_until(running.has_job, "the backup's job")
        host.reboot()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "host hv1" in said, said
    assert [len(one["points"]) for one in coldrise.json("list")["machines"]] == [1]
    host.libvirt.virsh("start", "web01", "--paused")
    made = backup()
    assert not any(disk["is_incremental"] for disk in made["disks"]) and "everything is read" in str(made["instant"]["remarks"]), made
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    assert len(running.checkpoints()) == 1 and made["address"] != first["address"]
    running.write("vdb", "write -P 3 1M 1M")
    assert [disk["read_bytes"] for disk in backup()["disks"]] == [0, MIB]


def test_a_host_reboots_during_a_recovery_and_a_move(coldrise, host, recover, address, tmp_path):
    def now():
        return count(coldrise, "live/web01-1", tmp_path)

    def runs(what, *options):
        """Its guest counts from 1 at each start. Returns the command and the count that it has reached."""
        before, running = now() if not options else 0, recover(what, *options)
        wait_until(lambda: now() not in (0, before), "the machine writes")
        return running, now()

    running, acknowledged = runs(address, "--on", "hv1")
    host.reboot()
    # The machine has ended with its host, and the session has what it wrote.
    assert running.end()["state"] == "off", running.said()
    assert now() >= acknowledged
    running, acknowledged = runs("live/web01-1")
    target = host.libvirt.images / "web01-vda.qcow2"
    process = coldrise.start("move", "live/web01-1", host.libvirt.images, "--rate", "32K", stderr=subprocess.PIPE)
    wait_until(target.exists, "the copy")
    host.reboot()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "not moved" in said, said
    assert running.end()["state"] == "off" and now() >= acknowledged
    settled = coldrise.run("move", "live/web01-1")
    assert settled.returncode == 0 and "withdrawn" in settled.stdout and not target.exists(), settled.stderr
    running, acknowledged = runs("live/web01-1")
    undone = coldrise.json("recover", "live/web01-1", "--undo")
    assert running.end()["state"] == "off" and count(coldrise, undone["address"], tmp_path) >= acknowledged
    assert coldrise.json("sessions")["sessions"] == []
    wait_until(lambda: not sockets(coldrise), "the end of the program on the host")


def test_a_machine_of_a_host_behind_a_slow_and_lossy_line(coldrise, recover, grows, address, tmp_path):
    with contextlib.closing(Line(tmp_path)) as line, contextlib.closing(SshHost(line=line)) as far:
        coldrise.wrap = line.near.command
        far.add_to(coldrise)
        running = recover(address, "--on", "hv1")
        grows()
        acknowledged = count(coldrise, "live/web01-1", tmp_path)
        far.stop()
        wait_until(lambda: far.libvirt.state("web01") == "paused (I/O error)", "the pause")
        far.start()
        wait_until(lambda: far.libvirt.state("web01").startswith("running"), "the machine runs on")
        grows()
        assert count(coldrise, "live/web01-1", tmp_path) > acknowledged
        undone = coldrise.json("recover", "live/web01-1", "--undo")
        assert running.end()["state"] == "off" and count(coldrise, undone["address"], tmp_path) > acknowledged
        assert sum(counters.lost for counters in line.counters()) > 0


def test_a_machine_is_found_after_a_live_migration(coldrise, host, hv2, tmp_path):
    running = Domain(host.libvirt, "web01", sector=TICKING_SECTOR)
    running.write("vda", "write -P 1 24M 20M")
    everywhere = ("backup", "web01", "--from", "libvirt", "--on", "hv1,hv2")
    coldrise.json(*everywhere)
    # The images lie in a file system that both hosts have, and QEMU takes its bitmaps along.
    host.libvirt.virsh("migrate", "--live", "--unsafe", "--p2p", "--tunnelled", "web01", hv2.libvirt.uri.replace("qemu:", "qemu+unix:"))
    assert host.libvirt.domains() == [] and hv2.libvirt.domains() == ["web01"]
    running.libvirt = hv2.libvirt
    running.goes_on()
    made = coldrise.json(*everywhere)
    assert all(disk["is_incremental"] for disk in made["disks"]) and not made["instant"]["remarks"], made
    assert sum(disk["read_bytes"] for disk in made["disks"]) < 16 * MIB
    assert_one_instant(*restored(coldrise, made["address"], tmp_path))
    assert len(running.checkpoints()) == 1 and not running.has_job()
    hv2.libvirt.clear()
