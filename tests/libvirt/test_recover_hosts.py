"""coldrise recover --on: machines that run on another host from their backup, which come back when the host does."""

import contextlib
import glob
import json
import os
import signal
import socket
import subprocess

import pytest

from support import counting_machine
from support.counting_machine import MIB, count
from support.domain import Domain
from support.nbdserver import wait_until
from support.recovery import Recovery
from support.running import TICKING_SECTOR, counter_in_use
from support.ssh_host import SshHost
from test_recover_move import copies


@pytest.fixture(scope="module")
def hv1():
    started = SshHost()
    yield started
    started.close()


@pytest.fixture
def host(hv1, coldrise):
    """Known to the repository."""
    if hv1.sshd.poll() is not None:
        hv1.start()
    hv1.add_to(coldrise)
    yield hv1
    hv1.libvirt.clear()
    hv1.keys.write_text("", encoding="utf-8")


@pytest.fixture
def address(coldrise, tmp_path):
    return counting_machine.store(coldrise, tmp_path)


@pytest.fixture
def recover(coldrise, tmp_path):
    started = []

    def start(what, *options):
        started.append(Recovery(coldrise, tmp_path / "recover.err", what, *options))
        return started[-1]

    yield start
    for running in started:
        with contextlib.suppress(ProcessLookupError):
            running.kill()


@pytest.fixture
def grows(coldrise, tmp_path):
    def check():
        before = count(coldrise, "live/web01-1", tmp_path)
        wait_until(lambda: count(coldrise, "live/web01-1", tmp_path) > before, "the machine writes")

    return check


def connects(path):
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as near:
        near.connect(str(path))
        near.settimeout(60)
        return near.recv(10) == b'{"QMP": {"'
    return False


def sockets(coldrise):
    """On the host, which has this machine's /run: of this repository."""
    repository = json.loads((coldrise.repository / "repository.json").read_text(encoding="utf-8"))["id"]
    return glob.glob(f"/run/coldrise-machines/web01-*-{repository[:8]}*")


def test_a_machine_survives_lost_connections_of_its_host(coldrise, host, recover, grows, address, tmp_path):
    libvirt = host.libvirt
    running = recover(address, "--on", "hv1")
    assert running.event.get("host") == "hv1", (running.event, running.said())
    assert libvirt.state("web01").startswith("running")
    grows()
    assert sockets(coldrise)
    kept = coldrise.run("host", "remove", "hv1")
    assert kept.returncode == 11 and "machines of live/web01-1 were recovered on host hv1" in kept.stderr, kept.stderr
    # Twice: what the first connection has left is in nobody's way. The second time the host has a new key.
    for has_new_key in (False, True):
        host.stop()
        wait_until(lambda: libvirt.state("web01") == "paused (I/O error)", "the pause")
        wait_until(lambda: coldrise.json("host", "list")["hosts"][0]["last_check"]["error"], "the failed login")
        if has_new_key:
            host.new_key()
        host.start()
        if has_new_key:
            coldrise.json("host", "remove", "hv1", "--force")
            host.add_to(coldrise)
        wait_until(lambda: libvirt.state("web01").startswith("running"), "the machine runs on")
        assert coldrise.json("host", "list")["hosts"][0]["last_check"]["error"] is None
        grows()
    assert "Broken pipe" not in running.said(), running.said()
    # The command is killed; meanwhile the session is not taken away.
    running.kill()
    wait_until(lambda: libvirt.state("web01") == "paused (I/O error)", "the pause")
    wait_until(lambda: not sockets(coldrise), "the end of the program on the host")
    wait_until(lambda: "(host hv1)" in coldrise.run("sessions").stdout, "the end of the session's server")
    paused = coldrise.run("move", "live/web01-1", libvirt.images)
    assert paused.returncode == 11 and "web01 is paused" in paused.stderr, paused.stderr
    refused = coldrise.run("unpublish", "web01-1")
    assert refused.returncode == 11 and "--undo" in refused.stderr, refused.stderr
    running = recover("live/web01-1")
    grows()
    # Ctrl-C reaches all its programs at once, in any order. Before it, a slow host may have taken more than one attempt.
    before = running.said()
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.end()["state"] == "paused" and "resuming it" not in running.said().removeprefix(before), running.said()
    running = recover("live/web01-1")
    acknowledged = count(coldrise, "live/web01-1", tmp_path)
    undone = coldrise.json("recover", "live/web01-1", "--undo")
    assert running.end()["state"] == "off" and libvirt.domains() == []
    assert count(coldrise, undone["address"], tmp_path) >= acknowledged
    assert coldrise.json("sessions")["sessions"] == []
    wait_until(lambda: not sockets(coldrise), "the end of the program on the host")


def test_a_host_that_is_gone_keeps_no_session(coldrise, host, recover, grows, address, tmp_path):
    running = recover(address, "--on", "hv1")
    grows()
    running.kill()
    host.stop()
    kept = coldrise.run("unpublish", "web01-1")
    assert kept.returncode == 11 and "may run on session web01-1" in kept.stderr, kept.stderr
    failed = coldrise.run("recover", "live/web01-1", "--undo")
    assert failed.returncode == 1 and "--undo --without-server" in failed.stderr, failed.stderr
    undone = coldrise.json("recover", "live/web01-1", "--undo", "--without-server")
    assert undone["machine_ended"] is False and count(coldrise, undone["address"], tmp_path) > 0
    # It comes back nevertheless: the next recovery there removes what was left.
    host.start()
    assert host.libvirt.domains() == ["web01"]
    running = recover(address, "--on", "hv1")
    assert "removed web01 of the ended session web01-1" in running.said()
    coldrise.json("recover", f"live/{running.event['session']}", "--undo")
    running.end()
    wait_until(lambda: not sockets(coldrise), "the end of the program on the host")


def test_invalid_options_are_refused_before_anything_is_published(coldrise, host, address):
    for options, said in (
        (["--on", "hv9"], "there is no host hv9"),
        (["--on", "hv1", "--connect", "qemu:///session"], "qemu:///system"),
        (["--on", "hv1", "--socket-owner", "no-such-user"], "host hv1: there is no user"),
        (["--on", "hv1", "--socket", "/tmp/a b.nbd"], "cannot contain spaces or colons"),
        (["--on", "hv1", "--network", "lost"], "virsh net-list"),
        (["--host", "esx1"], "--on"),
    ):
        done = coldrise.run("recover", address, "--to", "libvirt", *options)
        assert done.returncode not in (0, 101) and said in done.stderr, done.stderr
        assert coldrise.json("sessions")["sessions"] == [], options


def test_a_machine_of_a_host_that_forbids_forwarding(coldrise, host, recover, grows, address):
    assert "does not forward sockets" not in coldrise.run("host", "check", "hv1").stdout
    host.stop()
    host.start("DisableForwarding yes")
    checked = coldrise.run("host", "check", "hv1")
    assert checked.returncode == 0 and "does not forward sockets" in checked.stdout and "AllowTcpForwarding yes" in checked.stdout
    running = recover(address, "--on", "hv1")
    grows()
    host.stop()
    wait_until(lambda: host.libvirt.state("web01") == "paused (I/O error)", "the pause")
    host.start("DisableForwarding yes")
    wait_until(lambda: host.libvirt.state("web01").startswith("running"), "the machine runs on")
    grows()
    coldrise.json("recover", "live/web01-1", "--undo")
    running.end()
    wait_until(lambda: not sockets(coldrise), "the end of the program on the host")
    host.stop()
    host.start()


def test_a_machine_moves_to_files_of_its_host(coldrise, host, recover, grows, address, tmp_path):
    running = recover(address, "--on", "hv1")
    grows()
    target = host.libvirt.images / "web01-vda.qcow2"
    # The connection is lost while the disks are copied: the session has all writes, and nothing stays.
    process = coldrise.start("move", "live/web01-1", host.libvirt.images, "--rate", "32K", stderr=subprocess.PIPE)
    wait_until(lambda: copies(host.libvirt), "the copy")
    host.stop()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "not moved" in said, said
    host.start()
    settled = coldrise.run("move", "live/web01-1")
    assert settled.returncode == 0 and "withdrawn" in settled.stdout, settled.stderr
    assert not target.exists()
    wait_until(lambda: host.libvirt.state("web01").startswith("running"), "the machine runs on")
    grows()
    for refused, word in (("relative.qcow2", "absolute path"), ("/dev/no-such-device", "no device"), ("/images/new\nline", "control"),
                          ("/nonexistent/x.qcow2", "does not exist")):
        done = coldrise.run("move", "live/web01-1", f"vda={refused}")
        assert done.returncode not in (0, 101) and word in done.stderr, done.stderr
    grows()
    moved = coldrise.json("move", "live/web01-1", host.libvirt.images)
    assert moved["disks"][0]["target"] == str(target) and running.end()["state"] == "moved"
    assert str(target) in host.libvirt.virsh("domblklist", "web01")
    sealed = count(coldrise, moved["address"], tmp_path)
    wait_until(lambda: counter_in_use(target, 512) > sealed, "the machine writes to its new disk")
    again = coldrise.run("move", "live/web01-1", "/nonexistent")
    assert again.returncode != 0 and str(target) in again.stderr, again.stderr


def test_a_disk_is_attached_to_a_machine_of_a_host(coldrise, host, address):
    running = Domain(host.libvirt, "db01", sector=TICKING_SECTOR)
    there = ["libvirt:db01", "--on", "hv1"]
    process = coldrise.start("--json", "attach", address, "--to", *there, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = process.stdout.readline()
    assert line and json.loads(line)["event"] == "ready", process.stderr.read()
    assert "vdz" in host.libvirt.virsh("domblklist", "db01")
    done = coldrise.run("detach", "web01-vda", "--from", *there)
    assert done.returncode == 0 and "vdz" not in host.libvirt.virsh("domblklist", "db01"), done.stderr
    assert process.wait(timeout=60) == 0
    running.goes_on()
    for command in (["attach", address, "--to", "qmp:/x", "--on", "hv1"], ["attach", address, "--to", "libvirt:no", "--on", "hv1"]):
        assert coldrise.run(*command).returncode in (1, 2, 4), command


def test_disks_of_a_host_are_rolled_back(coldrise, host, tmp_path):
    path, content = host.libvirt.images / "db01.raw", bytearray(os.urandom(4 * MIB))
    path.write_bytes(content)
    good = coldrise.json("backup", "db01", f"vda=raw:{path}")["address"]
    bad = bytes(content[:MIB]) + b"encrypted" * 1000 + bytes(content[MIB + 9000:])
    path.write_bytes(bad)
    rollback = ["rollback", good, "--onto", path, "--on", "hv1"]
    holder = ["qemu-system-x86_64", "-S", "-display", "none", "-drive", f"file={path},format=raw,if=virtio",
              "-qmp", f"unix:{tmp_path}/held,server=on,wait=off"]
    with subprocess.Popen(holder) as held:
        wait_until(lambda: connects(tmp_path / "held"), "the lock of QEMU")
        refused = coldrise.run(*rollback)
        held.terminate()
    assert refused.returncode == 11 and "is in use (open in QEMU)" in refused.stderr, refused.stderr
    assert path.read_bytes() == bad
    done = coldrise.json(*rollback)
    assert done["disks"][0]["target"] == f"hv1:{path}" and 0 < done["differing_bytes"] < MIB
    assert path.read_bytes() == content
    coldrise.json("rollback", done["safety_point"], "--onto", path, "--on", "hv1")
    assert path.read_bytes() == bad
    short = host.libvirt.images / "short.raw"
    short.write_bytes(bytes(MIB))
    for target, said in ((short, f"hv1:{short}"), ("relative.raw", "absolute path"), ("/nonexistent/x.raw", "No such file"), (tmp_path / "x.qcow2", "qcow2 image")):
        refused = coldrise.run("rollback", good, "--onto", target, "--on", "hv1")
        assert refused.returncode not in (0, 101) and said in refused.stderr, refused.stderr
