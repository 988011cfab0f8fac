"""coldrise recover: a machine of the backup under libvirt."""

import os
import signal
import socket

import pytest

from support.counting_machine import CODE, MIB, UUID, XML, count
from support.foreground import child_called
from support.nbdserver import wait_until
from support.stopped import stopped
from support.virsh import AWAY, changed_virsh, killed_at, on


def test_a_machine_is_recovered_survives_its_server_and_is_undone(coldrise, libvirt, recover, grows, address, clock, tmp_path):
    running = recover(clock=clock)
    assert running.event["domain"] == "web01" and libvirt.state("web01").startswith("running")
    assert "hostdev" in running.said() and "hdc is empty" in running.said()
    grows()
    # No machine runs twice.
    for what in (address, "live/web01-1"):
        done = coldrise.run("recover", what, "--to", "libvirt", "--connect", libvirt.uri)
        assert done.returncode in (1, 11), done.stderr

    def runs_on():
        clock.skip(1)
        return libvirt.state("web01").startswith("running")

    # The server of the disks is killed: the machine is paused, and continues without an error.
    for _ in range(2):
        server = child_called(running.process.pid, "nbdkit")
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: libvirt.state("web01") != "running (booted)", "the pause")
        wait_until(runs_on, "the machine goes on")
        grows()
    # So is the whole command.
    running.kill()
    wait_until(lambda: libvirt.state("web01") == "paused (I/O error)", "the pause")
    # The session is not taken away from a machine that waits for it.
    refused = coldrise.run("unpublish", "web01-1")
    assert refused.returncode == 11 and "--undo" in refused.stderr and "web01" in refused.stderr
    running = recover("live/web01-1")
    grows()
    # Ended in order, the machine is suspended.
    running.process.send_signal(signal.SIGTERM)
    assert running.end()["state"] == "paused" and libvirt.state("web01") == "paused (user)"
    running = recover("live/web01-1", clock=clock)
    grows()
    undone = coldrise.json("recover", "live/web01-1", "--undo")
    assert running.end()["state"] == "off" and libvirt.domains() == []
    assert undone["address"] == f"{address}+1" and count(coldrise, undone["address"], tmp_path) > 0
    assert coldrise.json("sessions")["sessions"] == []


def start_other(libvirt, uuid):
    """Another machine of the name, with its own disk; its owner has paused it."""
    disk = libvirt.images / "other.raw"
    disk.write_bytes(CODE.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - 512))
    xml = libvirt.images / "other.xml"
    xml.write_text(f"""<domain type='qemu'><name>web01</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
        <os><type arch='x86_64' machine='pc'>hvm</type></os><devices><disk type='file' device='disk'>
        <driver name='qemu' type='raw'/><source file='{disk}'/><target dev='vda' bus='virtio'/></disk></devices>
        </domain>""", encoding="utf-8")
    libvirt.virsh("create", xml)
    libvirt.virsh("suspend", "web01")


@pytest.mark.parametrize("uuid", [UUID + "1", UUID + "9"], ids=["the original one", "another one"])
def test_another_machine_with_that_name_is_left_alone(coldrise, libvirt, recover, uuid):
    recover().kill()
    libvirt.virsh("destroy", "web01")
    # A user starts the machine again by hand, from its own disks.
    start_other(libvirt, uuid)
    refused = coldrise.run("recover", "live/web01-1", "--to", "libvirt", "--connect", libvirt.uri)
    assert refused.returncode == 11 and "is another machine" in refused.stderr, refused.stderr
    assert "--undo" in refused.stderr and libvirt.state("web01") == "paused (user)"
    undone = coldrise.run("recover", "live/web01-1", "--undo")
    assert undone.returncode == 0 and "left alone" in undone.stderr, undone.stderr
    assert libvirt.state("web01") == "paused (user)" and coldrise.json("sessions")["sessions"] == []


def test_a_served_machine_replaced_under_its_name_counts_as_off(libvirt, recover):
    running = recover()
    # Stopped, so that it does not see the end.
    with stopped(running.process.pid):
        libvirt.virsh("destroy", "web01")
        start_other(libvirt, UUID + "1")
        running.process.send_signal(signal.SIGTERM)
    assert running.end()["state"] == "off" and libvirt.state("web01") == "paused (user)"


def test_a_name_taken_before_the_start_leaves_nothing(coldrise, libvirt, tried, address, tmp_path):
    other = libvirt.images / "second.xml"
    other.write_text("""<domain type='qemu'><name>web01</name><memory unit='MiB'>32</memory>
        <os><type arch='x86_64' machine='pc'>hvm</type></os></domain>""", encoding="utf-8")
    with changed_virsh(tmp_path, on(" create ", f"/usr/bin/virsh --quiet --connect '{libvirt.uri}' create {other} >/dev/null")):
        done = tried(address)
    assert done.returncode == 11 and "is another machine" in done.stderr, done.stderr
    assert coldrise.json("sessions")["sessions"] == [] and libvirt.state("web01").startswith("running")


def test_a_starting_libvirt_ends_no_recovery(libvirt, recover, grows, clock, tmp_path):
    """As after a restart of libvirtd: for seconds, and two looks."""
    starting, asked = tmp_path / "starting", tmp_path / "asked"
    unknown = f"echo >> {asked}; echo \"error: failed to get domain 'web01'\" >&2; exit 1"
    with changed_virsh(tmp_path, f"if [ -e {starting} ]; then {unknown}; fi"):
        running = recover(clock=clock)
        starting.touch()
        for looks in (1, 2):
            clock.skip(1)
            wait_until(lambda: asked.exists() and asked.stat().st_size >= looks, "the next look")
        starting.unlink()
        grows()
        assert running.process.poll() is None
        libvirt.virsh("destroy", "web01")
        assert running.end()["state"] == "off" and libvirt.domains() == []


def test_an_unknown_libvirt_state_does_not_count_as_off(coldrise, libvirt, recover, tmp_path):
    """A libvirtd that ends between two questions."""
    recover().kill()
    ends = "echo 'error: Disconnected from qemu:///system due to end of file' >&2; exit 1"
    with changed_virsh(tmp_path, on(" domstate ", ends)):
        refused = coldrise.run("recover", "live/web01-1", "--undo")
        assert refused.returncode not in (0, 2) and "Disconnected" in refused.stderr, refused.stderr
        assert "is off" not in coldrise.run("doctor").stdout
    assert [session["session"] for session in coldrise.json("sessions")["sessions"]] == ["web01-1"]
    coldrise.json("recover", "live/web01-1", "--undo")
    assert libvirt.domains() == []


def test_a_machine_that_never_started_is_named_and_undone(coldrise, libvirt, tried, address, tmp_path):
    with killed_at(tmp_path, "before", " create "):
        killed = tried(address)
    assert killed.returncode == -signal.SIGKILL and libvirt.domains() == []
    wait_until(lambda: not coldrise.json("sessions")["sessions"][0]["is_served"], "the server of the disk ends")
    for output in (coldrise.run("doctor").stdout, coldrise.run("sessions").stdout):
        assert "web01 is off" in output and "recover live/web01-1 --undo" in output, output
    coldrise.json("recover", "live/web01-1", "--undo")
    assert "is off" not in coldrise.run("doctor").stdout


def test_a_socket_in_use_by_another_server_leaves_nothing(coldrise, libvirt, entered_tmp, tried, address):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(entered_tmp / "nbd"))
        other.listen()
        refused = tried(address)
    assert refused.returncode == 11 and "listens" in refused.stderr, refused
    assert coldrise.json("sessions")["sessions"] == [] and libvirt.domains() == []


def test_a_recovery_undone_before_libvirt_stopped_ends(coldrise, recover, tmp_path):
    with changed_virsh(tmp_path, f"if [ -e {tmp_path}/away ]; then {AWAY}; fi"):
        running = recover()
        with stopped(running.process.pid):
            coldrise.json("recover", "live/web01-1", "--undo")
            (tmp_path / "away").touch()
        assert running.end()["state"] == "off"
    assert coldrise.json("sessions")["sessions"] == []


def test_a_machine_that_ends_before_its_undo_is_undone(coldrise, recover, clock, tmp_path):
    running = recover(clock=clock)
    with changed_virsh(tmp_path, on(" destroy ", "/usr/bin/virsh \"$@\" >/dev/null")):
        coldrise.json("recover", "live/web01-1", "--undo")
    assert running.end()["state"] == "off" and coldrise.json("sessions")["sessions"] == []


def test_a_failed_start_leaves_nothing(coldrise, libvirt, tried, tmp_path):
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(MIB))
    configuration = tmp_path / "web01.xml"
    configuration.write_text(XML.replace("machine='pc'", "machine='pc-i440fx-0.1'"), encoding="utf-8")
    address = coldrise.json("backup", "web01", f"vda=raw:{disk}", "--config", configuration)["address"]
    done = tried(address)
    assert done.returncode == 1 and "pc-i440fx-0.1" in done.stderr
    assert coldrise.json("sessions")["sessions"] == [] and libvirt.domains() == []
    far = coldrise.run("recover", address, "--to", "libvirt", "--connect", "qemu+ssh://host/system")
    assert far.returncode == 2 and "on this host" in far.stderr


def other_machine(tmp_path):
    disk = tmp_path / "other.raw"
    disk.write_bytes(CODE.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - 512))
    return disk


@pytest.mark.parametrize("stored", ["<domain><os>", "<domain/>", '<!DOCTYPE d [<!ENTITY a "b">]><domain><os>&a;</os></domain>'])
def test_an_unusable_configuration_is_replaced_by_default_hardware(coldrise, libvirt, recover, clock, tmp_path, stored):
    configuration = tmp_path / "db01.xml"
    configuration.write_text(stored, encoding="utf-8")
    done = coldrise.run("backup", "db01", f"vda=raw:{other_machine(tmp_path)}", "--config", configuration)
    assert done.returncode == 0 and "plain hardware" in done.stderr
    refused = coldrise.run("recover", "db01/latest", "--to", "libvirt", "--connect", libvirt.uri)
    assert refused.returncode == 2 and "--default-hardware" in refused.stderr
    assert coldrise.json("sessions")["sessions"] == []
    running = recover("db01/latest", "--default-hardware", clock=clock)
    assert libvirt.domains() == ["db01"]
    libvirt.virsh("destroy", "db01")
    assert running.end()["state"] == "off"


def test_the_socket_of_a_killed_server_is_removed_with_its_session(coldrise, libvirt, recover, entered_tmp):
    recover().kill()
    libvirt.virsh("destroy", "web01")
    assert (entered_tmp / "nbd").exists()
    wait_until(lambda: coldrise.run("unpublish", "web01-1").returncode == 0, "the end of the server")
    assert not (entered_tmp / "nbd").exists()


def test_a_machine_without_xml_gets_the_hardware_of_boot(coldrise, libvirt, recover, clock, tmp_path):
    running = recover(clock=clock)
    beside = recover(coldrise.backup("db01", vda=other_machine(tmp_path)), name="db01", clock=clock)
    assert sorted(libvirt.domains()) == ["db01", "web01"] and "hardware of coldrise boot" in beside.said()
    # The same machine again, in parallel.
    twin = recover("web01/latest", "--new-uuid", name="twin", clock=clock)
    assert twin.event["domain"] == "web01-recovered" and UUID not in libvirt.virsh("domuuid", "web01-recovered")
    for recovered in (running, beside, twin):
        libvirt.virsh("destroy", recovered.event["domain"])
        assert recovered.end()["state"] == "off"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_recovery_killed_near_the_start_resumes(coldrise, libvirt, recover, tried, grows, address, tmp_path, moment):
    with killed_at(tmp_path, moment, "create"):
        killed = tried(address)
    assert killed.returncode == -signal.SIGKILL
    assert libvirt.domains() == (["web01"] if moment == "after" else [])
    # The session is named, with what to do.
    assert "web01-1" in coldrise.run("sessions").stdout
    recover("live/web01-1")
    assert libvirt.domains() == ["web01"]
    grows()
    coldrise.json("recover", "live/web01-1", "--undo", "--discard")
