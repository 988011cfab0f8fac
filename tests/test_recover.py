"""coldrise recover: a machine of the backup under libvirt, and its move to production."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest

from support import counting_machine
from support.block_device import block_device
from support.counting_machine import CODE, MIB, UUID, XML, count
from support.killed_at import killed_at
from support.libvirt import QEMU_USER, Libvirt
from support.nbdserver import wait_until
from support.running import COUNTER_OFFSET, counter_in_use
from support.stopped import stopped


# Of a copy that is ended: 4 MiB last longer than a few programs take to start on a busy machine.
SLOW = "128K"


@pytest.fixture(scope="module")
def libvirt():
    libvirt = Libvirt()
    yield libvirt
    libvirt.close()


@pytest.fixture
def address(coldrise, tmp_path):
    return counting_machine.store(coldrise, tmp_path)


class Recovery:
    """A running `coldrise recover`."""

    def __init__(self, coldrise, libvirt, socket, address, *options):
        self.messages = open(socket.with_suffix(".err"), "w+", encoding="utf-8")
        self.process = coldrise.start("recover", address, "--to", "libvirt", "--json", "--connect",
                                      libvirt.uri, "--socket", socket, "--socket-owner", QEMU_USER,
                                      *options, stdout=subprocess.PIPE, stderr=self.messages)
        line = self.process.stdout.readline()
        assert line, self.said()
        self.event = json.loads(line)

    def said(self):
        self.messages.seek(0)
        return self.messages.read()

    def end(self):
        """The final answer."""
        answer = self.process.stdout.read()
        self.process.wait(timeout=60)
        assert self.process.returncode == 0, self.said()
        return json.loads(answer.splitlines()[-1])


@pytest.fixture
def recover(coldrise, libvirt, own_tmp, address):
    """Recovers; the folder of the socket can be entered by QEMU's user."""
    own_tmp.chmod(0o755)

    def start(what=address, *options):
        return Recovery(coldrise, libvirt, own_tmp / "nbd", what, *options)

    yield start
    for name in libvirt.domains():
        libvirt.virsh("destroy", name)


def wrapped_virsh(folder, lines):
    """A PATH with a virsh that runs these lines first."""
    program = folder / "bin" / "virsh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n{lines}\nexec /usr/bin/virsh "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


def grows(coldrise, folder):
    before = count(coldrise, "live/web01-1", folder)
    wait_until(lambda: count(coldrise, "live/web01-1", folder) > before, "the machine writes")


def test_a_machine_is_recovered_survives_its_server_and_is_undone(coldrise, libvirt, recover, address,
                                                                  tmp_path):
    running = recover()
    assert running.event["domain"] == "web01" and libvirt.state("web01").startswith("running")
    assert "hostdev" in running.said() and "hdc is empty" in running.said()
    grows(coldrise, tmp_path)
    # No machine runs twice.
    for what in (address, "live/web01-1"):
        done = coldrise.run("recover", what, "--to", "libvirt", "--connect", libvirt.uri)
        assert done.returncode in (1, 11), done.stderr
    # The server of the disks is killed: the machine is paused, and goes on without an error.
    for _ in range(2):
        children = subprocess.run(["pgrep", "-P", str(running.process.pid), "nbdkit"], text=True,
                                  capture_output=True, check=True)
        os.kill(int(children.stdout), signal.SIGKILL)
        wait_until(lambda: libvirt.state("web01") != "running (booted)", "the pause")
        wait_until(lambda: libvirt.state("web01").startswith("running"), "the machine goes on")
        grows(coldrise, tmp_path)
    # So is the whole command.
    running.process.kill()
    running.process.wait()
    wait_until(lambda: libvirt.state("web01") == "paused (I/O error)", "the pause")
    # The session is not taken away from a machine that waits for it.
    refused = coldrise.run("unpublish", "web01-1")
    assert refused.returncode == 11 and "--undo" in refused.stderr and "web01" in refused.stderr
    running = recover("live/web01-1")
    grows(coldrise, tmp_path)
    # Ended in order, the machine is suspended.
    running.process.send_signal(signal.SIGTERM)
    assert running.end()["state"] == "paused" and libvirt.state("web01") == "paused (user)"
    running = recover("live/web01-1")
    grows(coldrise, tmp_path)
    undone = coldrise.json("recover", "live/web01-1", "--undo")
    assert running.end()["state"] == "off" and libvirt.domains() == []
    assert undone["address"] == f"{address}+1" and count(coldrise, undone["address"], tmp_path) > 0
    assert coldrise.json("sessions")["sessions"] == []


def start_other(libvirt, uuid):
    """Another machine of the name, with its own disk; its owner has paused it."""
    disk = libvirt.folder / "other.raw"
    disk.write_bytes(CODE.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - 512))
    xml = libvirt.folder / "other.xml"
    xml.write_text(f"""<domain type='qemu'><name>web01</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
        <os><type arch='x86_64' machine='pc'>hvm</type></os><devices><disk type='file' device='disk'>
        <driver name='qemu' type='raw'/><source file='{disk}'/><target dev='vda' bus='virtio'/></disk></devices>
        </domain>""", encoding="utf-8")
    libvirt.virsh("create", xml)
    libvirt.virsh("suspend", "web01")


@pytest.mark.parametrize("uuid", [UUID + "1", UUID + "9"], ids=["the original one", "another one"])
def test_another_machine_of_the_name_is_left_alone(coldrise, libvirt, recover, uuid):
    running = recover()
    running.process.kill()
    running.process.wait()
    libvirt.virsh("destroy", "web01")
    # Somebody gets the machine up again by hand, from its own disks.
    start_other(libvirt, uuid)
    refused = coldrise.run("recover", "live/web01-1", "--to", "libvirt", "--connect", libvirt.uri)
    assert refused.returncode == 11 and "is another machine" in refused.stderr, refused.stderr
    assert "--undo" in refused.stderr and libvirt.state("web01") == "paused (user)"
    undone = coldrise.run("recover", "live/web01-1", "--undo")
    assert undone.returncode == 0 and "left alone" in undone.stderr, undone.stderr
    assert libvirt.state("web01") == "paused (user)" and coldrise.json("sessions")["sessions"] == []


def test_a_served_machine_whose_name_another_one_takes_is_off(coldrise, libvirt, recover):
    running = recover()
    # Stopped, so that it does not see the end.
    with stopped(running.process.pid):
        libvirt.virsh("destroy", "web01")
        start_other(libvirt, UUID + "1")
        running.process.send_signal(signal.SIGTERM)
    assert running.end()["state"] == "off" and libvirt.state("web01") == "paused (user)"


def test_who_comes_second_leaves_nothing(coldrise, libvirt, own_tmp, address, tmp_path, monkeypatch):
    """The name is taken between the check and the start."""
    other = libvirt.folder / "second.xml"
    other.write_text("""<domain type='qemu'><name>web01</name><memory unit='MiB'>32</memory>
        <os><type arch='x86_64' machine='pc'>hvm</type></os></domain>""", encoding="utf-8")
    path = wrapped_virsh(tmp_path, f"""case "$*" in *" create "*) /usr/bin/virsh --quiet --connect '{libvirt.uri}' create {other} >/dev/null;; esac""")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", path)
        done = coldrise.run("recover", address, "--to", "libvirt", "--connect", libvirt.uri, "--socket", own_tmp / "nbd",
                            "--socket-owner", QEMU_USER)
    assert done.returncode == 11 and "is another machine" in done.stderr, done.stderr
    assert coldrise.json("sessions")["sessions"] == [] and libvirt.state("web01").startswith("running")
    libvirt.virsh("destroy", "web01")


def test_a_recovered_machine_moves_while_it_runs(coldrise, libvirt, recover, tmp_path):
    running = recover()
    grows(coldrise, tmp_path)
    folder = libvirt.folder / "images"
    folder.mkdir(exist_ok=True)
    # Cancelled: the machine stays where it is.
    process = coldrise.start("move", "live/web01-1", folder, "--rate", SLOW, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    wait_until(lambda: "cur=" in libvirt.virsh("blockjob", "web01", "vda", "--info", "--raw"), "the copy")
    wait_until(lambda: "is being moved" in coldrise.run("sessions").stdout, "the note")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130 and not list(folder.iterdir())
    grows(coldrise, tmp_path)
    # Killed: the next one cleans up and moves.
    process = coldrise.start("move", "live/web01-1", folder, "--rate", SLOW, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    wait_until(lambda: "cur=" in libvirt.virsh("blockjob", "web01", "vda", "--info", "--raw"), "the copy")
    wait_until(lambda: list(folder.iterdir()), "the target")
    process.kill()
    process.wait()
    assert "interrupted" in coldrise.run("sessions").stdout
    settled = coldrise.run("move", "live/web01-1")
    assert settled.returncode == 0 and "withdrawn" in settled.stdout, settled.stderr
    assert not list(folder.iterdir())
    moved = coldrise.json("move", "live/web01-1", folder)
    target = folder / "web01-vda.qcow2"
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
    libvirt.virsh("destroy", "web01")


@pytest.mark.parametrize("seconds", [3, 36])
def test_a_libvirt_that_is_away_for_the_switch_leaves_nothing_suspended(coldrise, libvirt, recover, tmp_path, monkeypatch, seconds):
    """A short absence is waited for; after a longer one the machine stands still, and the next move lets it run on."""
    recover()
    folder = libvirt.folder / f"away-{seconds}"
    folder.mkdir()
    program = tmp_path / "bin" / "virsh"
    program.parent.mkdir()
    mark, away = tmp_path / "suspended", tmp_path / "away"
    # For some seconds after the machine was suspended nobody answers: from the first question on, which may come late.
    program.write_text(f"""#!/bin/sh
refuse() {{ echo 'error: failed to connect to the hypervisor' >&2; exit 1; }}
if [ -e {mark} ]; then
    if [ ! -e {away} ]; then : > {away}; refuse; fi
    if [ $(($(date +%s) - $(stat -c %Y {away}))) -lt {seconds} ]; then refuse; fi
fi
/usr/bin/virsh "$@"
code=$?
case "$*" in *" suspend "*) : > {mark};; esac
exit $code
""", encoding="utf-8")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        failed = coldrise.run("move", "live/web01-1", folder)
        assert failed.returncode == 1 and "not moved" in failed.stderr and mark.exists(), failed.stderr
        if seconds > 30:
            assert "may stay suspended" in failed.stderr and "coldrise move" in failed.stderr, failed.stderr
            wait_until(lambda: time.time() - away.stat().st_mtime > seconds, "libvirt is back")
            assert libvirt.state("web01").startswith("paused")
            settled = coldrise.run("move", "live/web01-1")
            assert "was interrupted" in settled.stderr, settled.stderr
    assert libvirt.state("web01").startswith("running") and not list(folder.iterdir())
    assert "cur=" not in libvirt.virsh("blockjob", "web01", "vda", "--info", "--raw")
    grows(coldrise, tmp_path)
    coldrise.json("move", "live/web01-1", folder)
    libvirt.virsh("destroy", "web01")


def test_a_libvirt_that_does_not_know_its_machines_yet_ends_nothing(coldrise, libvirt, recover, tmp_path, monkeypatch):
    """As after a restart of libvirtd."""
    starting, asked = tmp_path / "starting", tmp_path / "asked"
    path = wrapped_virsh(tmp_path, f"""if [ -e {starting} ]; then : > {asked}; echo "error: failed to get domain 'web01'" >&2; exit 1; fi""")
    monkeypatch.setenv("PATH", path)
    running = recover()
    starting.touch()
    wait_until(asked.exists, "the next look")
    time.sleep(2)
    starting.unlink()
    grows(coldrise, tmp_path)
    assert running.process.poll() is None
    libvirt.virsh("destroy", "web01")
    running.process.wait(timeout=60)
    assert "web01" not in libvirt.domains()


def test_a_state_that_libvirt_does_not_tell_is_not_off(coldrise, libvirt, recover, tmp_path, monkeypatch):
    """A libvirtd that ends between two questions."""
    running = recover()
    running.process.kill()
    running.process.wait()
    path = wrapped_virsh(tmp_path, """case "$*" in *" domstate "*) echo "error: Disconnected from qemu:///system due to end of file" >&2; exit 1;; esac""")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", path)
        refused = coldrise.run("recover", "live/web01-1", "--undo")
        assert refused.returncode not in (0, 2) and "Disconnected" in refused.stderr, refused.stderr
        assert "is off" not in coldrise.run("doctor").stdout
    assert [session["session"] for session in coldrise.json("sessions")["sessions"]] == ["web01-1"]
    coldrise.json("recover", "live/web01-1", "--undo")
    assert libvirt.domains() == []


def test_a_moved_machine_that_could_not_be_resumed_is_named(coldrise, libvirt, recover, tmp_path, monkeypatch):
    recover()
    folder = libvirt.folder / "held"
    folder.mkdir()
    away = tmp_path / "away"
    # From the moment in which the machine is to run on.
    path = wrapped_virsh(tmp_path, f"""case "$*" in *" resume "*) : > {away};; esac
if [ -e {away} ]; then echo 'error: failed to connect to the hypervisor' >&2; exit 1; fi""")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", path)
        moved = coldrise.run("move", "live/web01-1", folder)
    assert moved.returncode == 3 and "may stand still" in moved.stdout, (moved.returncode, moved.stdout, moved.stderr)
    assert libvirt.state("web01").startswith("paused")
    for command in ("sessions", "doctor"):
        assert "coldrise move live/web01-1 lets it run on" in coldrise.run(command).stdout, command
    # Only the session knows of it.
    refused = coldrise.run("unpublish", "web01-1")
    assert refused.returncode == 11 and "coldrise move live/web01-1 lets it run on" in refused.stderr, refused.stderr
    coldrise.json("move", "live/web01-1")
    assert libvirt.state("web01").startswith("running")
    assert "may stand still" not in coldrise.run("doctor").stdout
    libvirt.virsh("destroy", "web01")


def test_an_undo_ends_a_move_that_copies(coldrise, libvirt, recover):
    running = recover()
    folder = libvirt.folder / "undone"
    folder.mkdir()
    process = coldrise.start("move", "live/web01-1", folder, "--rate", SLOW, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    wait_until(lambda: "cur=" in libvirt.virsh("blockjob", "web01", "vda", "--info", "--raw"), "the copy")
    coldrise.json("recover", "live/web01-1", "--undo")
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1 and "session web01-1 was ended meanwhile" in message, message
    assert "as before" not in message and not list(folder.iterdir())
    assert running.end()["state"] == "off" and coldrise.json("sessions")["sessions"] == []
    assert not any("live/web01-1" in line or "unpublish" in line for line in running.said().splitlines()), running.said()


def test_the_end_of_a_moved_session_is_seen(coldrise, libvirt, recover):
    running = recover()
    folder = libvirt.folder / "ended"
    folder.mkdir()
    # So that it does not see the note of the move.
    with stopped(running.process.pid):
        coldrise.json("move", "live/web01-1", folder)
        wait_until(lambda: coldrise.run("unpublish", "web01-1").returncode == 0, "the session closes")
    assert running.end()["state"] == "moved" and libvirt.state("web01").startswith("running")
    libvirt.virsh("destroy", "web01")


def test_a_machine_that_never_started_is_named_and_undone(coldrise, libvirt, own_tmp, address, tmp_path):
    with killed_at(tmp_path, "before", " create "):
        killed = coldrise.run("recover", address, "--to", "libvirt", "--connect", libvirt.uri, "--socket", own_tmp / "nbd",
                              "--socket-owner", QEMU_USER)
    assert killed.returncode == -signal.SIGKILL and libvirt.domains() == []
    wait_until(lambda: not coldrise.json("sessions")["sessions"][0]["is_served"], "the server of the disk ends")
    for told in (coldrise.run("doctor").stdout, coldrise.run("sessions").stdout):
        assert "web01 is off" in told and "recover live/web01-1 --undo" in told, told
    coldrise.json("recover", "live/web01-1", "--undo")
    assert "is off" not in coldrise.run("doctor").stdout


def test_a_socket_that_another_server_has_leaves_nothing(coldrise, libvirt, own_tmp, address):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(own_tmp / "nbd"))
        other.listen()
        refused = coldrise.run("recover", address, "--to", "libvirt", "--connect", libvirt.uri, "--socket", own_tmp / "nbd",
                               "--socket-owner", QEMU_USER)
    assert refused.returncode == 11 and "listens" in refused.stderr, refused
    assert coldrise.json("sessions")["sessions"] == [] and libvirt.domains() == []


def test_a_recovery_ends_that_was_undone_before_libvirt_ended(coldrise, libvirt, recover, tmp_path, monkeypatch):
    path = wrapped_virsh(tmp_path, f"""if [ -e {tmp_path}/away ]; then echo 'error: failed to connect to the hypervisor' >&2; exit 1; fi""")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", path)
        running = recover()
    with stopped(running.process.pid):
        coldrise.json("recover", "live/web01-1", "--undo")
        (tmp_path / "away").touch()
    assert running.end()["state"] == "off" and coldrise.json("sessions")["sessions"] == []


def test_a_machine_that_ends_before_its_undo_is_undone(coldrise, libvirt, recover, tmp_path, monkeypatch):
    running = recover()
    path = wrapped_virsh(tmp_path, """case "$*" in *" destroy "*) /usr/bin/virsh "$@" >/dev/null;; esac""")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", path)
        coldrise.json("recover", "live/web01-1", "--undo")
    assert running.end()["state"] == "off" and coldrise.json("sessions")["sessions"] == []


def test_a_failed_start_leaves_nothing(coldrise, libvirt, own_tmp, tmp_path):
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(MIB))
    configuration = tmp_path / "web01.xml"
    configuration.write_text(XML.replace("machine='pc'", "machine='pc-i440fx-0.1'"), encoding="utf-8")
    address = coldrise.json("backup", "web01", f"vda=raw:{disk}", "--config", configuration)["address"]
    done = coldrise.run("recover", address, "--to", "libvirt", "--connect", libvirt.uri, "--socket",
                        own_tmp / "nbd", "--socket-owner", QEMU_USER)
    assert done.returncode == 1 and "pc-i440fx-0.1" in done.stderr
    assert coldrise.json("sessions")["sessions"] == [] and libvirt.domains() == []
    far = coldrise.run("recover", address, "--to", "libvirt", "--connect", "qemu+ssh://host/system")
    assert far.returncode == 2 and "on this host" in far.stderr


@pytest.mark.parametrize("stored", ["<domain><os>", "<domain/>", '<!DOCTYPE d [<!ENTITY a "b">]><domain><os>&a;</os></domain>'])
def test_a_configuration_that_is_none_is_said_and_can_be_left_alone(coldrise, libvirt, recover, tmp_path, stored):
    disk = tmp_path / "other.raw"
    disk.write_bytes(CODE.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - 512))
    configuration = tmp_path / "db01.xml"
    configuration.write_text(stored, encoding="utf-8")
    done = coldrise.run("backup", "db01", f"vda=raw:{disk}", "--config", configuration)
    assert done.returncode == 0 and "plain hardware" in done.stderr
    refused = coldrise.run("recover", "db01/latest", "--to", "libvirt", "--connect", libvirt.uri)
    assert refused.returncode == 2 and "--default-hardware" in refused.stderr
    assert coldrise.json("sessions")["sessions"] == []
    running = recover("db01/latest", "--default-hardware")
    assert libvirt.domains() == ["db01"]
    libvirt.virsh("destroy", "db01")
    assert running.end()["state"] == "off"
    # The socket of a server that was killed goes with its session.
    running = recover("live/db01-1")
    running.process.kill()
    running.process.wait()
    libvirt.virsh("destroy", "db01")
    socket = running.process.args[running.process.args.index("--socket") + 1]
    assert os.path.exists(socket)
    wait_until(lambda: coldrise.run("unpublish", "db01-1").returncode == 0, "the end of the server")
    assert not os.path.exists(socket)


def test_a_machine_without_xml_gets_the_hardware_of_boot(coldrise, libvirt, recover, tmp_path):
    running = recover()
    disk = tmp_path / "other.raw"
    disk.write_bytes(CODE.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - 512))
    bare = coldrise.backup("db01", vda=disk)
    socket = tmp_path.parent / "db01.nbd"
    assert len(str(socket)) < 108
    for folder in (tmp_path.parent, *tmp_path.parent.parents[:2]):
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    beside = Recovery(coldrise, libvirt, socket, bare)
    assert sorted(libvirt.domains()) == ["db01", "web01"] and "hardware of coldrise boot" in beside.said()
    # The same machine again, beside itself.
    twin = Recovery(coldrise, libvirt, socket.with_name("twin.nbd"), "web01/latest", "--new-uuid")
    assert twin.event["domain"] == "web01-recovered" and UUID not in libvirt.virsh("domuuid", "web01-recovered")
    for recovered in (running, beside, twin):
        libvirt.virsh("destroy", recovered.event["domain"])
        assert recovered.end()["state"] == "off"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_recover_killed_around_the_start_goes_on(coldrise, libvirt, recover, address, own_tmp, tmp_path, moment):
    with killed_at(tmp_path, moment, "create"):
        killed = coldrise.run("recover", address, "--to", "libvirt", "--connect", libvirt.uri, "--socket", own_tmp / "nbd",
                              "--socket-owner", QEMU_USER)
    assert killed.returncode == -signal.SIGKILL
    assert libvirt.domains() == (["web01"] if moment == "after" else [])
    # The session is named, with what to do.
    assert "web01-1" in coldrise.run("sessions").stdout
    recover("live/web01-1")
    assert libvirt.domains() == ["web01"]
    grows(coldrise, tmp_path)
    coldrise.json("recover", "live/web01-1", "--undo", "--discard")


STEPS = [("blockcopy", "before", False), ("blockcopy", "after", False), ("suspend", "after", False),
         ("--pivot", "before", True), ("--pivot", "after", True), ("resume", "before", True), ("resume", "after", True)]


@pytest.mark.parametrize("request_word, moment, is_moved", STEPS)
def test_after_a_killed_move_one_side_counts_and_is_named(coldrise, libvirt, recover, tmp_path, request_word, moment,
                                                          is_moved):
    recover()
    grows(coldrise, tmp_path)
    acknowledged = count(coldrise, "live/web01-1", tmp_path)
    folder = libvirt.folder / "images"
    folder.mkdir(exist_ok=True)
    target = folder / "web01-vda.qcow2"
    target.unlink(missing_ok=True)
    with killed_at(tmp_path, moment, request_word):
        killed = coldrise.run("move", "live/web01-1", folder)
    assert killed.returncode == -signal.SIGKILL
    assert any(word in coldrise.run("doctor").stdout for word in ("move", "moved"))
    settled = coldrise.run("move", "live/web01-1")
    assert libvirt.state("web01").startswith("running"), settled.stderr
    if not is_moved:
        assert not target.exists()
        assert count(coldrise, "live/web01-1", tmp_path) >= acknowledged
        grows(coldrise, tmp_path)
        coldrise.json("recover", "live/web01-1", "--undo", "--discard")
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
    running.folder = libvirt.folder / "busy"
    running.folder.mkdir(exist_ok=True)
    wait_until(lambda: writes(libvirt) > 100, "the guest writes")
    yield running
    subprocess.run(["rm", "-r", running.folder], check=True)


def test_a_machine_of_two_disks_runs_when_that_is_said(coldrise, libvirt, busy, recover):
    busy.process.kill()
    busy.process.wait()
    wait_until(lambda: libvirt.state("web01") == "paused (I/O error)", "the pause")
    doctor, listed = coldrise.run("doctor").stdout, coldrise.run("sessions").stdout
    for told in (doctor, listed):
        assert "nothing serves the disks of web01" in told and "recover live/web01-1 --to libvirt" in told, told
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


def test_a_machine_that_writes_too_fast_is_held_for_the_rest(coldrise, libvirt, busy):
    done = coldrise.run("--json", "move", "live/web01-1", busy.folder, "--rate", "256K")
    assert done.returncode == 0, done.stderr
    moved = json.loads(done.stdout.splitlines()[-1])
    assert "stands still" in done.stderr and moved["held_ms"] < 10000
    assert all(disk["is_moved"] for disk in moved["disks"]) and busy.end()["state"] == "moved"
    assert libvirt.state("web01").startswith("running")
    target = busy.folder / "web01-vda.qcow2"
    before = counter_in_use(target, COUNTER_OFFSET)
    wait_until(lambda: counter_in_use(target, COUNTER_OFFSET) > before, "the machine writes to its new disk")


def test_a_move_killed_while_it_holds_the_machine_is_settled(coldrise, libvirt, busy, tmp_path):
    with killed_at(tmp_path, "after", "suspend"):
        killed = coldrise.run("move", "live/web01-1", busy.folder, "--rate", "256K")
    # At once: QEMU copies the rest, some seconds of it.
    shown = libvirt.virsh("dumpxml", "web01")
    assert killed.returncode == -signal.SIGKILL
    assert libvirt.state("web01") == "paused (user)" and "may stand still" in coldrise.run("sessions").stdout
    # It was not yet switched: suspended for the rest of the copy.
    assert "ready='yes'" not in shown.partition("<mirror")[2].partition("</disk>")[0]
    withdrawn = coldrise.json("move", "live/web01-1")
    assert not any(disk["is_moved"] for disk in withdrawn["disks"]) and not list(busy.folder.iterdir())
    before = writes(libvirt)
    wait_until(lambda: writes(libvirt) > before, "the machine goes on in the session")


def test_a_machine_that_its_owner_suspended_stays_so(coldrise, libvirt, recover, tmp_path):
    recover()
    libvirt.virsh("suspend", "web01")
    folder = libvirt.folder / "suspended"
    folder.mkdir()
    with killed_at(tmp_path, "before", "--pivot"):
        killed = coldrise.run("move", "live/web01-1", folder)
    assert killed.returncode == -signal.SIGKILL
    moved = coldrise.json("move", "live/web01-1")
    assert [disk["is_moved"] for disk in moved["disks"]] == [True]
    assert libvirt.state("web01") == "paused (user)"


def test_a_machine_moves_to_a_larger_block_device(coldrise, libvirt, recover, tmp_path):
    recover()
    grows(coldrise, tmp_path)
    with block_device(tmp_path / "device", 40 * MIB) as device:
        refused = coldrise.run("move", "live/web01-1", f"vda={device}")
        assert refused.returncode == 1 and "is not empty" in refused.stderr
        moved = coldrise.json("move", "live/web01-1", f"vda={device}", "--force")
        assert moved["disks"][0]["is_moved"] and device in libvirt.virsh("domblklist", "web01")
        # The disk keeps its size, and what lies behind it is left alone.
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
