"""A machine boots at the other site before the copy of its point has ended."""

import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
import threading

import nbd
import pytest

from support.copies import addresses, content
from support.counting_machine import XML
from support.far_site import FarSite, finish
from support.libvirt import QEMU_USER, Libvirt
from support.line import Line
from support.nbdserver import DEADLINE_S, Nbdkit, read_all, wait_until
from support.sources import RunningBackup, gated_server

KIB, MIB = 1 << 10, 1 << 20
POINT = "20261101T100000Z"
ADDRESS = f"web01/{POINT}"


@pytest.fixture
def far(site, coldrise, clock):
    """A site that is dialled through a gate."""
    made = site()
    made.environment = clock.environment()
    made.put_gate()
    made.pair(coldrise)
    yield made
    # A copy that is held would take its time to end.
    for process in coldrise.started:
        process.kill()


@pytest.fixture
def served(tmp_path, clock):
    """Serves the sessions of a site over NBD."""
    servers = []

    def start(program):
        environment = os.environ | clock.environment()
        servers.append(Nbdkit(program, tmp_path / f"served{len(servers)}", environment=environment))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def back_up(coldrise, tmp_path, point=POINT, size=12 * MIB, seed=3, first=0):
    """A point of a disk with content, zeroes and a hole, behind a first disk with this many bytes of content."""
    disk = bytearray(random.Random(seed).randbytes(size))
    disk[MIB : 2 * MIB] = bytes(MIB)
    disk[5 * MIB : 5 * MIB + 65536] = bytes(65536)
    path = tmp_path / "vda.raw"
    path.write_bytes(disk)
    disks = [f"vda=raw:{path}"]
    if first:
        (tmp_path / "boot.raw").write_bytes(random.Random(seed + 100).randbytes(first))
        disks.insert(0, f"boot=raw:{tmp_path}/boot.raw")
    coldrise.json("backup", "web01", *disks, "--time", point)
    return disk


def copied(coldrise):
    return coldrise.json("copy", "--to", "far")


def shown(program, address=ADDRESS):
    """The output of `show` while it arrives; None before."""
    done = program.run("--json", "show", address)
    if done.returncode != 0:
        return None
    shown = json.loads(done.stdout)
    return shown if shown.get("kind") == "coming" else None


def lose_source(far, copy, address=ADDRESS):
    copy.kill()
    copy.communicate()
    wait_until(lambda: not shown(far.program, address)["is_reachable"], "the end of the line")
    far.gate.release()


def fails(handle, offset, clock):
    """A read fails, but not before it has waited for the line for 10 s."""
    failed = []

    def read():
        try:
            handle.pread(65536, offset)
        except nbd.Error as error:
            failed.append(error.errno == "EIO" or error.errnum == errno.EIO)

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        clock.skip(10)
        reader.join(0.2)
    return failed == [True]


@pytest.mark.parametrize("first", [0, 4 * MIB])
def test_a_session_over_an_incomplete_point_reads_as_its_source(coldrise, far, served, clock, tmp_path, first):
    disk = back_up(coldrise, tmp_path, size=16 * MIB, first=first)
    copy = far.held(coldrise, first + 9 * MIB if first else 2 * MIB, "--to", "far")
    incoming = shown(far.program)
    assert incoming["size_bytes"] == first + len(disk) and incoming["is_reachable"]
    if first:
        far.let_note(clock)
    # It is not a restore point: only publish and boot see it.
    assert addresses(far.program) == set()
    listed = far.program.json("list")["coming"]
    assert [point["address"] for point in listed] == [ADDRESS]
    assert "coming" in far.program.run("list").stdout
    assert far.program.run("restore", f"{ADDRESS}/vda", tmp_path / "no").returncode != 0
    published = far.program.run("publish", "web01/latest", "--name", "early")
    assert published.returncode == 0 and "is still being copied" in published.stderr, published.stderr
    assert "rerror=stop" in published.stdout
    server = served(far.program)
    with server.connect("live/early/vda") as handle:
        far.beside_hold(lambda: handle.pwrite(b"\x5a" * 5000, 7 * MIB + 300))
        handle.flush()
        disk[7 * MIB + 300 : 7 * MIB + 5300] = b"\x5a" * 5000
        # Its captured writes are not sealed before the point is complete.
        for command in (["seal", "early"], ["unpublish", "early"]):
            refused = far.program.run(*command)
            assert refused.returncode == 11, refused.stderr
        assert far.beside_hold(lambda: read_all(handle)) == disk
        far.program.json("gc", "--max-unused", "0")
        # A second read is local, and the same.
        assert read_all(handle) == disk
        assert shown(far.program)["percent_here"] < 100
        far.gate.release()
        finish(copy)
        assert addresses(far.program) == {ADDRESS} and shown(far.program) is None
        sealed = far.program.json("seal", "early")["address"]
        assert read_all(handle) == disk
    server.stop()
    assert content(far.program, f"{sealed}/vda", tmp_path) == disk
    far.program.json("gc", "--max-unused", "0")
    assert content(far.program, f"{sealed}/vda", tmp_path) == disk
    assert far.program.json("verify")["is_clean"]
    far.program.json("unpublish", "early")
    assert list((far.program.repository / "begun").iterdir()) == []


def test_commands_report_that_a_point_is_incomplete(coldrise, far, tmp_path):
    earlier, unknown = "20261031T100000Z", "20261130T100000Z"
    disk = tmp_path / "other.raw"
    disk.write_bytes(random.Random(8).randbytes(MIB))
    far.program.json("backup", "web02", f"vda=raw:{disk}", "--time", earlier)
    back_up(coldrise, tmp_path)
    far.held(coldrise, 2 * MIB, "--to", "far")
    commands = [["forget"], ["forget", "--dry-run"], ["protect"], ["unprotect"], ["quarantine"], ["release"], ["verify"],
                ["diff", f"web02/{earlier}"], ["check-boot"]]
    for command in commands:
        refused = far.program.run(*command, ADDRESS)
        assert refused.returncode == 1, (command, refused)
        assert f"{ADDRESS} is incomplete" in refused.stderr, (command, refused.stderr)
        assert "wait for the end of the copy" in refused.stderr and "coldrise list" in refused.stderr
        # It is the kind of error that any other point gives.
        assert far.program.run(*command, f"web01/{unknown}").returncode == 1
    for address in (f"{ADDRESS}/vda", "web01/latest/vda"):
        refused = far.program.run("restore", address, tmp_path / "no")
        assert refused.returncode == 1 and "is incomplete" in refused.stderr, refused.stderr
    answer = json.loads(far.program.run("--json", "protect", ADDRESS).stdout)
    assert answer["error"]["kind"] == "not_found"
    # Other points, and machines without incoming data, are neither here nor in transit.
    for address in (f"web01/{unknown}", "web01/latest~1", f"web03/{unknown}"):
        refused = far.program.run("protect", address)
        assert refused.returncode == 1 and "being copied" not in refused.stderr, refused.stderr
    assert shown(far.program)["percent_here"] < 100


def test_a_point_that_will_not_arrive_is_dropped(coldrise, far, tmp_path):
    back_up(coldrise, tmp_path, first=4 * MIB)
    copy = far.held(coldrise, 6 * MIB, "--to", "far")
    lose_source(far, copy)
    coldrise.json("forget", ADDRESS)
    copied(coldrise)
    assert shown(far.program)["percent_here"] > 0
    far.program.json("publish", ADDRESS, "--name", "early")
    refused = far.program.run("forget", ADDRESS)
    assert refused.returncode == 11 and "unpublish early --discard" in refused.stderr, refused
    far.program.json("unpublish", "early", "--discard")
    refused = far.program.run("restore", ADDRESS, tmp_path / "none")
    assert f"coldrise forget {ADDRESS}" in refused.stderr, refused
    # All or none: while a backup has the machine, the other point stays, too.
    kept = far.program.backup("web01", vda=tmp_path / "vda.raw")
    with gated_server(tmp_path / "vda.raw", 4 * MIB) as (uri, _, _):
        backing_up = RunningBackup(far.program, "web01", f"vda={uri}")
        refused = far.program.run("forget", kept, ADDRESS)
        assert refused.returncode == 11 and "is running" in refused.stderr, refused
        assert ADDRESS in far.program.json("forget", "--dry-run", kept, ADDRESS)["points"]
        backing_up.process.kill()
        backing_up.process.communicate()
    assert kept in addresses(far.program) and shown(far.program)
    assert far.program.json("forget", "--dry-run", ADDRESS)["points"] == [ADDRESS] and shown(far.program)
    assert sorted(far.program.json("forget", kept, ADDRESS, ADDRESS)["points"]) == sorted([kept, ADDRESS])
    assert "coming" not in far.program.json("list") and shown(far.program) is None
    # It is not an existing point, and the space of the received data is returned.
    assert far.program.run("forget", ADDRESS).returncode == 1
    far.program.json("gc", "--max-unused", "0")
    assert far.program.json("verify")["is_clean"]
    # The same with the whole machine.
    disk = back_up(coldrise, tmp_path, seed=5)
    lose_source(far, far.held(coldrise, 6 * MIB, "--to", "far"))
    kept = far.program.backup("web01", vda=tmp_path / "vda.raw")
    assert shown(far.program)
    assert sorted(far.program.json("forget", "--all", "web01")["points"]) == sorted([kept, ADDRESS])
    assert "coming" not in far.program.json("list")
    # A later copy brings it from the beginning.
    copied(coldrise)
    assert content(far.program, f"{ADDRESS}/vda", tmp_path) == disk


def test_fetched_content_is_not_sent_again(coldrise, far, served, tmp_path):
    # More than the names in flight. Its pieces compress to a tenth.
    pieces = random.Random(3)
    disk = b"".join(pieces.randbytes(6 * KIB) + bytes(58 * KIB) for _ in range(144 * MIB // (64 * KIB)))
    (tmp_path / "vda.raw").write_bytes(disk)
    coldrise.json("backup", "web01", f"vda=raw:{tmp_path}/vda.raw", "--time", POINT)
    copy = far.held(coldrise, MIB, "--to", "far")
    far.program.json("publish", ADDRESS, "--name", "early")
    with served(far.program).connect("live/early/vda") as handle:
        for at in range(136 * MIB, 144 * MIB, MIB):
            assert far.beside_hold(lambda at=at: handle.pread(MIB, at)) == disk[at : at + MIB]
    far.gate.release()
    sent_bytes = finish(copy)["line"]["sent_bytes"]
    random_bytes = len(disk) * 6 // 64
    # The fetched part is 5.6 percent.
    assert random_bytes < sent_bytes < 1.04 * random_bytes
    assert content(far.program, f"{ADDRESS}/vda", tmp_path) == disk


@pytest.mark.parametrize("prefix", ["", "north-"])
def test_local_parts_are_read_without_the_source(coldrise, site, served, clock, tmp_path, prefix):
    first = back_up(coldrise, tmp_path, point="20261101T090000Z")
    far = site()
    far.put_gate()
    far.pair(coldrise, "far", *(["--prefix", prefix] if prefix else []))
    copied(coldrise)
    # 5 of 12 MiB are others, and a part that was zeroes has content.
    second = first.copy()
    second[6 * MIB : 11 * MIB] = random.Random(5).randbytes(5 * MIB)
    second[MIB : MIB + 65536] = random.Random(6).randbytes(65536)
    path = tmp_path / "vda.raw"
    path.write_bytes(second)
    coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", POINT)
    copy = far.held(coldrise, MIB, "--to", "far")
    address = f"{prefix}{ADDRESS}"
    # The newest restore point is the latest one.
    latest = far.program.json("show", f"{prefix}web01/latest")
    assert latest["address"] == f"{prefix}web01/20261101T090000Z"
    far.program.json("publish", address, "--name", "early")
    server = served(far.program)
    with server.connect("live/early/vda") as handle:
        fetched = far.beside_hold(lambda: handle.pread(256 * KIB, 8 * MIB))
        assert fetched == second[8 * MIB : 8 * MIB + 256 * KIB]
        far.beside_hold(lambda: handle.pwrite(b"mine", 10 * MIB))
        handle.flush()
        lose_source(far, copy, address)
        output = far.program.run("sessions").stdout
        assert "early" in output and "the other site is not connected" in output, output
        # Content of the base, fetched content, new writes.
        assert handle.pread(4 * MIB, 2 * MIB) == second[2 * MIB : 6 * MIB]
        assert handle.pread(256 * KIB, 8 * MIB) == second[8 * MIB : 8 * MIB + 256 * KIB]
        assert handle.pread(4096, 10 * MIB)[:4] == b"mine"
        assert fails(handle, 10 * MIB + 512 * KIB, clock)
        far.program.json("gc", "--max-unused", "0")
        assert handle.pread(256 * KIB, 8 * MIB) == second[8 * MIB : 8 * MIB + 256 * KIB]
    server.stop()
    refused = far.program.run("publish", address, "--name", "again")
    assert refused.returncode == 0 and "the other site is not connected" in refused.stderr
    far.program.json("unpublish", "again", "--discard")
    # The copy is resumed, and the session uses what it brings.
    copied(coldrise)
    assert far.program.json("seal", "early")["address"].startswith(address)
    second[10 * MIB : 10 * MIB + 4] = b"mine"
    assert content(far.program, f"{address}+1/vda", tmp_path) == second
    assert far.program.json("verify")["is_clean"]


def test_the_receiver_is_killed_and_restarted(coldrise, far, served, tmp_path):
    disk = back_up(coldrise, tmp_path, size=16 * MIB)
    copy = far.held(coldrise, 2 * MIB, "--to", "far")
    far.program.json("publish", ADDRESS, "--name", "early")
    server = served(far.program)
    with server.connect("live/early/vda") as handle:
        assert far.beside_hold(lambda: handle.pread(MIB, 8 * MIB)) == disk[8 * MIB : 9 * MIB]
        far.beside_hold(lambda: handle.pwrite(b"mine", 4 * MIB))
        handle.flush()
    # The front end, first.
    server.kill()
    disk[4 * MIB : 4 * MIB + 4] = b"mine"
    with served(far.program).connect("live/early/vda") as handle:
        assert far.beside_hold(lambda: read_all(handle)) == disk
        assert shown(far.program)["percent_here"] < 100
        far.stop(signal.SIGKILL)
        far.gate.release()
        far.start()
        # The source reconnects automatically after a second. A read waits for it.
        assert read_all(handle) == disk
        finish(copy)
    far.program.json("unpublish", "early")
    assert content(far.program, f"{ADDRESS}+1/vda", tmp_path) == disk


def test_a_session_stays_when_another_point_begins(coldrise, far, served, clock, tmp_path):
    disk = back_up(coldrise, tmp_path)
    copy = far.held(coldrise, 2 * MIB, "--to", "far")
    far.program.json("publish", ADDRESS, "--name", "early")
    server = served(far.program)
    with server.connect("live/early/vda") as handle:
        assert far.beside_hold(lambda: handle.pread(MIB, 6 * MIB)) == disk[6 * MIB : 7 * MIB]
        lose_source(far, copy)
        coldrise.json("forget", ADDRESS)
        other = back_up(coldrise, tmp_path, point="20261102T100000Z", seed=4)
        copied(coldrise)
        assert content(far.program, "web01/latest/vda", tmp_path) == other
        far.program.json("gc", "--max-unused", "0")
        assert handle.pread(MIB, 6 * MIB) == disk[6 * MIB : 7 * MIB]
        assert fails(handle, 11 * MIB, clock)
    server.stop()
    assert far.program.run("unpublish", "early").returncode == 0
    assert far.program.json("verify")["is_clean"]


# Both read 16 sectors to 0x1000.
PLACE = bytes.fromhex("1000100000100000").ljust(0x10, b"\0")
# 16-bit code: reads at every MiB of the first 8 MiB, writes "kept" to the second sector, and reports it.
#   xor ax,ax; mov ds,ax; mov es,ax; mov [0x500],dl
#   next: mov si,0x7c60; mov ah,0x42; mov dl,[0x500]; int 0x13; add dword [0x7c68],2048; cmp dword [0x7c68],0x4000; jb next
#   mov dword [0x1000],"kept"; mov dword [0x7c68],1; mov byte [0x7c62],1; mov ax,0x4300; mov dl,[0x500]; mov si,0x7c60; int 0x13
#   mov dx,0x3f8; mov si,0x7c70; say: lodsb; test al,al; jz halt; out dx,al; jmp say; halt: hlt; jmp halt
BOOTER = bytes.fromhex("31c08ed88ec088160005" "be607c" "b442" "8a160005" "cd13" "668106687c00080000" "66813e687c00400000" "72e1"
                       "66c70600106b657074" "66c706687c01000000" "c606627c01" "b80043" "8a160005" "be607c" "cd13"
                       "baf803" "be707c" "ac" "84c0" "7403" "ee" "ebf8" "f4" "ebfd").ljust(0x60, b"\0") + PLACE + b"kept\n\0"  # fmt: skip
# 16-bit code: in a loop, read at every 128 KiB of the first 16 MiB.
#   xor ax,ax; mov ds,ax; mov es,ax; mov [0x500],dl
#   next: mov si,0x7c60; mov ah,0x42; mov dl,[0x500]; int 0x13; add dword [0x7c68],256; and dword [0x7c68],0x7fff; jmp next
READER = bytes.fromhex("31c08ed88ec088160005" "be607c" "b442" "8a160005" "cd13" "668106687c00010000" "668126687cff7f0000"
                       "ebe1").ljust(0x60, b"\0") + PLACE  # fmt: skip


def back_up_machine(coldrise, tmp_path, code, size, *options):
    disk = tmp_path / "vda.raw"
    disk.write_bytes(code.ljust(510, b"\0") + b"\x55\xaa" + random.Random(7).randbytes(size - 512))
    coldrise.json("backup", "web01", f"vda=raw:{disk}", *options, "--time", POINT)


def test_a_machine_boots_over_a_slow_line_before_any_data_arrived(coldrise, tmp_path):
    # For 50 s of the line.
    back_up_machine(coldrise, tmp_path, BOOTER, 48 * MIB)
    with contextlib.closing(Line(tmp_path, mbit=8)) as line:
        coldrise.wrap = line.near.command
        with contextlib.closing(FarSite(tmp_path, line=line)) as far:
            far.pair(coldrise)
            copy = coldrise.start("copy", "--to", "far", "--retry", "0s")
            wait_until(lambda: shown(far.program), "the announcement")
            boot = far.program.start("boot", "web01/latest", "--name", "early", "--memory", "32M", "--cpus", "1",
                                     stdout=subprocess.PIPE)
            assert any("kept" in said for said in boot.stdout)
            assert shown(far.program)["percent_here"] < 100 and addresses(far.program) == set()
            boot.kill()
            boot.communicate()
            with Nbdkit(far.program, tmp_path) as server, server.connect("live/early/vda") as handle:
                assert handle.pread(4, 512) == b"kept"
            copy.kill()


def test_a_machine_is_recovered_from_an_incomplete_point_and_waits_for_missing_data(coldrise, far, clock, own_tmp, tmp_path):
    xml = tmp_path / "web01.xml"
    xml.write_text(XML, encoding="utf-8")
    back_up_machine(coldrise, tmp_path, READER, 16 * MIB, "--config", xml)
    # It would take a minute, also for the machine: of what it reads, some is missing when the source is lost.
    copy = coldrise.start("copy", "--to", "far", "--rate", "256K", "--retry", "0s", stderr=subprocess.PIPE)
    wait_until(lambda: shown(far.program), "the announcement")
    far.program.more = clock.environment()
    own_tmp.chmod(0o755)
    with contextlib.closing(Libvirt()) as libvirt, open(tmp_path / "said", "w+", encoding="utf-8") as said:
        def reads():
            return int(dict(line.split()[1:] for line in libvirt.virsh("domblkstat", "web01", "vda").splitlines())["rd_req"])

        recovery = far.program.start("--json", "recover", "web01/latest", "--to", "libvirt", "--connect", libvirt.uri, "--socket",
                                     own_tmp / "nbd", "--socket-owner", QEMU_USER, stdout=subprocess.PIPE, stderr=said)
        try:
            event = recovery.stdout.readline()
            said.seek(0)
            assert event and "is still being copied" in said.read()
            session = json.loads(event)["session"]
            begun = reads()
            wait_until(lambda: reads() > begun, "what is missing is fetched")
            refused = far.program.run("recover", f"live/{session}", "--undo")
            assert refused.returncode == 11 and "--discard" in refused.stderr, refused.stderr
            assert libvirt.domains() == ["web01"]
            lose_source(far, copy)

            def waits():
                # For the line, and then for an administrator.
                clock.skip(10)
                return "I/O error" in libvirt.state("web01")

            wait_until(waits, "the machine waits")
            copied(coldrise)
            # It continues automatically, and completes the failed reads.
            before = reads()
            wait_until(lambda: reads() > before + 64 and libvirt.state("web01").startswith("running"), "the machine goes on")
            assert far.program.json("recover", f"live/{session}", "--undo")["machine_ended"]
            clock.end_of(recovery)
        finally:
            far.program.end()
    assert far.program.json("verify")["is_clean"]


@pytest.mark.encrypted
def test_only_key_holders_get_an_answer(coldrise, tmp_path):
    back_up(coldrise, tmp_path)
    with contextlib.closing(FarSite(tmp_path, is_encrypted=True)) as far:
        far.put_gate()
        far.pair(coldrise)
        far.held(coldrise, 2 * MIB, "--to", "far")
        (path,) = (far.program.repository / "begun").glob("*.socket")
        assert path.stat().st_mode & 0o077 == 0
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(DEADLINE_S)
            # Addresses of sockets have at most 107 bytes.
            folder = os.open(path.parent, os.O_RDONLY)
            client.connect(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)
            client.sendall(json.dumps({"nonce": [0] * 16}).encode() + b"\n")
            assert json.loads(client.makefile().readline())["proof"]
            client.sendall(bytes(32))
            assert client.recv(1) == b""
        for stored in (far.program.repository / "begun").glob("*"):
            if not stored.is_socket():
                assert b"web01" not in stored.read_bytes()
