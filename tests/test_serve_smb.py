"""coldrise serve smb: a Hyper-V host's use of a disk on a share, and the end of the server."""

import json
import os
import pathlib
import random
import signal

import pytest
from support.foreground import ServerFailed
from support.mounted import is_mounted
from support.nbdserver import read_all, wait_until
from support.shares import (
    PASSWORD, READ, SHARE_READ, SHARE_WRITE, USER, Dialects, ShareServer, SmbClient,
)  # fmt: skip
from smbprotocol.exceptions import (
    AccessDenied, LogonFailure, NotSupported, SharingViolation, SMBException, SMBResponseException,
)  # fmt: skip

KIB, MIB = 1 << 10, 1 << 20
DISK = r"live\trial\vda.vhdx"


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "smb-password"
    path.write_text(PASSWORD + "\n", encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.fixture
def smb(coldrise, tmp_path, password_file, own_tmp):
    """Starts servers; every one must end without an error."""
    servers = []

    def start(*options):
        servers.append(ShareServer(coldrise, tmp_path, "smb", "--password-file", password_file, *options))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def disk_start(coldrise, mount, image):
    """Where the disk begins in its VHDX file."""
    return (mount() / "live/trial/vda.vhdx").read_bytes().index(image.read(0, 4 * KIB))


def test_a_disk_is_written_as_hyper_v_writes_it(coldrise, live, image, smb, mount, nbdkit):
    start = disk_start(coldrise, mount, image)
    server = smb()
    pieces = random.Random(1)
    with SmbClient(server.port) as client:
        disk = client.open(DISK)
        for _ in range(120):
            length = pieces.choice([512, 4 * KIB, 64 * KIB])
            at = pieces.randrange(0, (len(image) - length) // 512) * 512
            content = pieces.randbytes(length)
            disk.write(content, start + at, write_through=True, unbuffered=True)
            image.write(at, content)
            assert disk.read(start + at, length) == content
        # Hyper-V zeroes so, and asks so when it moves a disk.
        client.zero(disk, start + 5 * MIB + 512, 300 * KIB)
        image.write(5 * MIB + 512, bytes(300 * KIB))
        assert disk.read(start + 5 * MIB, 512 * KIB) == image.read(5 * MIB, 512 * KIB)
        stored = client.allocated(disk, 0, start + len(image))
        for offset in range(0, len(image), 64 * KIB):
            if any(image.read(offset, min(64 * KIB, len(image) - offset))):
                at = start + offset
                assert any(low <= at < low + length for low, length in stored), offset
        # Hyper-V refuses sparse files.
        assert not disk.file_attributes & 0x200
        disk.flush()
        disk.close()
    server.stop()
    with nbdkit().connect(live) as nbd:
        assert read_all(nbd) == image.content


def test_two_hosts_cannot_write_one_disk(live, image, smb):
    server = smb()
    with SmbClient(server.port) as client, SmbClient(server.port) as other:
        disk = client.open(DISK)
        with pytest.raises(SharingViolation):
            other.open(DISK)
        # A backup program reads while the machine runs, and sees what it writes.
        reader = other.open(DISK, READ, SHARE_READ | SHARE_WRITE)
        disk.write(b"seen" * 128, 0, write_through=True)
        assert reader.read(0, 512) == b"seen" * 128
        # Not through another file either: the first one's cache would miss it.
        with pytest.raises(AccessDenied):
            other.open(r"live\trial\vda.vhd")
        raw = other.open(r"live\trial\vda.raw", READ, SHARE_READ | SHARE_WRITE)
        assert raw.read(0, 512) == image.read(0, 512)
        reader.close()
        disk.close()

        def opens():
            try:
                return other.open(r"live\trial\vda.vhd")
            except AccessDenied:
                return None

        # The kernel tells of a close a moment later.
        wait_until(opens, "the other file").close()


def test_nbd_writes_between_two_opens_are_read(coldrise, live, smb, nbdkit):
    server = smb()
    with SmbClient(server.port) as client:
        disk = client.open(r"live\trial\vda.raw")
        disk.write(b"a" * 4096, 0)
        assert disk.read(0, 4096) == b"a" * 4096
        disk.close()
        wait_until(lambda: not coldrise.json("sessions")["sessions"][0]["is_served"], "the session")
        with nbdkit() as other, other.connect(live) as nbd:
            nbd.pwrite(b"b" * 4096, 0)
        disk = client.open(r"live\trial\vda.raw")
        assert disk.read(0, 4096) == b"b" * 4096


def test_points_are_read_only(point, image, smb):
    server = smb("--read-only")
    path = point.replace("/", "\\") + r"\vda.raw"
    with SmbClient(server.port) as client:
        assert client.open(path, READ).read(0, 64 * KIB) == image.read(0, 64 * KIB)
        with pytest.raises((AccessDenied, SMBResponseException)):
            client.open(path)


def test_only_the_password_is_accepted(live, smb):
    server = smb()
    for user, password in [(USER, "wrong"), ("root", "wrong"), ("guest", ""), ("nobody", PASSWORD)]:
        with pytest.raises((LogonFailure, AccessDenied)):
            SmbClient(server.port, user, password)
    with pytest.raises((NotSupported, SMBException)):
        SmbClient(server.port, dialect=Dialects.SMB_3_0_2)
    with SmbClient(server.port) as client:
        assert client.session.encrypt_data
    assert PASSWORD not in pathlib.Path(f"/proc/{server.child()}/cmdline").read_text()


def test_writes_survive_the_kill_of_smbd(live, image, smb, nbdkit):
    server = smb()
    with SmbClient(server.port) as client:
        client.open(r"live\trial\vda.raw").write(b"kept" * 1024, MIB, write_through=True)
        server.crash()
    assert "is started again" in server.messages()
    with SmbClient(server.port) as client:
        disk = client.open(r"live\trial\vda.raw")
        assert disk.read(MIB, 4096) == b"kept" * 1024
        disk.write(b"more" * 1024, 2 * MIB, write_through=True)
    # While a client is connected, and without its close.
    server.stop()
    with nbdkit().connect(live) as nbd:
        assert bytes(nbd.pread(4096, MIB)) == b"kept" * 1024
        assert bytes(nbd.pread(4096, 2 * MIB)) == b"more" * 1024


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_exits_and_leaves_nothing(coldrise, live, smb, own_tmp, number):
    server = smb()
    process, folder = server.child(), server.folder()
    with SmbClient(server.port) as client:
        client.open(DISK).write(b"x" * 512, 0)
        server.stop(number)
    assert not os.path.exists(f"/proc/{process}")
    assert not is_mounted(folder / "mount") and list(own_tmp.iterdir()) == []
    assert not coldrise.json("sessions")["sessions"][0]["is_served"]


def test_doctor_removes_leftovers_of_a_kill(coldrise, live, smb, nbdkit, own_tmp):
    server = smb()
    process, folder = server.child(), server.folder()
    with SmbClient(server.port) as client:
        client.open(r"live\trial\vda.raw").write(b"kept" * 128, 0, write_through=True)
        server.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{process}"), "the end of smbd")
    assert is_mounted(folder / "mount")
    found = json.loads(coldrise.run("--json", "doctor").stdout.splitlines()[-1])["findings"]
    said = [finding["message"] for finding in found if finding["check"] == "killed commands"]
    assert said and "1 mount" in said[0]
    assert not is_mounted(folder / "mount") and not folder.exists()
    with nbdkit().connect(live) as nbd:
        assert bytes(nbd.pread(512, 0)) == b"kept" * 128


def test_serve_prints_advice_for_hyper_v(coldrise, live, smb):
    ready = smb().ready
    assert ready["share"] == r"\\127.0.0.1\coldrise" and ready["user"] == USER
    assert any(r"-VHDPath \\127.0.0.1\coldrise\live\trial\vda.vhdx" in line for line in ready["hyper_v"])
    assert any(line.startswith("Move-VMStorage -VMName trial ") for line in ready["hyper_v"])


def test_sessions_that_end_automatically_are_not_proposed(coldrise, point, live, smb):
    coldrise.publish(point, "web01-files-1-throwaway")
    assert not any("throwaway" in line for line in smb().ready["hyper_v"])


def test_wrong_settings_are_reported(coldrise, live, smb, password_file, tmp_path, monkeypatch):
    first = smb()

    def fails(*options):
        with pytest.raises(ServerFailed) as failed:
            smb(*options)
        return failed.value.code, failed.value.messages

    done = coldrise.run("serve", "smb", "--password-file", password_file, "--listen", f"127.0.0.1:{first.port}")
    assert done.returncode == 11 and "another server listens" in done.stderr
    done = coldrise.run("serve", "smb", "--password-file", password_file, "--listen", "192.0.2.7:445")
    assert done.returncode == 2 and "192.0.2.7 is not an address of this host" in done.stderr and "PANIC" not in done.stderr
    code, messages = fails("--user", "root")
    assert code == 2 and "not root" in messages
    password_file.write_text("\n", encoding="utf-8")
    code, messages = fails()
    assert code == 2 and "first line" in messages
    password_file.write_text(PASSWORD, encoding="utf-8")
    password_file.chmod(0o644)
    assert "chmod 600" in fails("--user", "root")[1]
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    code, messages = fails()
    assert "apt install samba" in messages
    (tools / "smbd").write_text("#!/bin/sh\necho Version 4.9.5-Debian\n", encoding="utf-8")
    (tools / "smbd").chmod(0o755)
    code, messages = fails()
    assert "4.17" in messages and "4.9.5" in messages
