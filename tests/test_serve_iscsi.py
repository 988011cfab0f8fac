"""coldrise serve iscsi: disks through libiscsi, as QEMU uses it."""

import os
import pathlib
import signal
import subprocess

import pytest
from support.foreground import ServerFailed
from support.mounted import is_mounted
from support.nbdserver import block_status, wait_until
from support.shares import ShareServer

KIB, MIB = 1 << 10, 1 << 20
USER, SECRET = "hypervisor", "123456789012"


@pytest.fixture
def iscsi(coldrise, tmp_path, own_tmp):
    """Starts servers; every one must end without an error."""
    servers = []

    def start(*arguments):
        servers.append(ShareServer(coldrise, tmp_path, "iscsi", *arguments))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def uri(server, target=0, lun=1, login=""):
    return f"iscsi://{login}127.0.0.1:{server.port}/{server.ready['targets'][target]['name']}/{lun}"


def qemu_io(address, *commands, options=()):
    words = [word for command in commands for word in ("-c", command)]
    return subprocess.run(["qemu-io", "-f", "raw", "-t", "none", "-d", "unmap", *options, *words, address],
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip


def does(address, *commands, options=()):
    done = qemu_io(address, *commands, options=options)
    # qemu-io's exit code does not report a wrong pattern.
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr


def test_a_session_is_written_flushed_and_trimmed(coldrise, live, image, iscsi, nbdkit):
    server = iscsi("trial")
    does(uri(server), "write -P 0x31 1M 1M", "read -P 0x31 1M 1M", "flush",
         "write -P 0x32 512 512", "flush", "read -P 0x32 512 512",
         "discard 1M 512k", "read -P 0 1M 512k", "read -P 0x31 1536k 512k")  # fmt: skip
    server.stop()
    image.write(MIB, bytes(512 * KIB) + b"\x31" * (512 * KIB))
    image.write(512, b"\x32" * 512)
    with nbdkit().connect(live) as nbd:
        assert b"".join(bytes(nbd.pread(MIB, at)) for at in range(0, 8 * MIB, MIB)) == image.read(0, 8 * MIB)
        # The trim freed its space.
        assert block_status(nbd, MIB, 512 * KIB)[0][2] & 1


def test_a_point_is_readable_and_never_written(point, image, iscsi, tmp_path):
    server = iscsi("web01/latest")
    assert server.ready["targets"][0]["address"] == point and server.ready["targets"][0]["is_read_only"]
    image.save(tmp_path / "same.raw")
    subprocess.run(["qemu-img", "compare", "-f", "raw", "-F", "raw", tmp_path / "same.raw", uri(server)],
                   check=True, capture_output=True, timeout=60)  # fmt: skip
    done = qemu_io(uri(server), "write -P 1 0 4k")
    assert done.returncode == 1 and "write protected" in done.stderr
    # Nothing reads as a failure.
    assert server.messages() == ""


def test_targets_and_their_disks(coldrise, image, tmp_path, iscsi):
    first, second = image.save(tmp_path / "vda.raw"), tmp_path / "vdb.raw"
    second.write_bytes(b"\x07" * MIB)
    two = coldrise.backup("db01", vda=first, vdb=second)
    coldrise.publish(two, "both")
    server = iscsi("both", f"{two}/vdb")
    targets = server.ready["targets"]
    assert [target["disks"] for target in targets] == [["vda", "vdb"], ["vdb"]]
    does(uri(server, 0, 2), "read -P 7 0 1M", "write -P 8 0 4k")
    does(uri(server, 1, 1), "read -P 7 0 1M", options=["-r"])
    found = subprocess.run(["iscsi-ls", f"iscsi://127.0.0.1:{server.port}"], capture_output=True,
                           text=True, check=True, timeout=60).stdout  # fmt: skip
    assert all(target["name"] in found for target in targets)


def test_chap_admits_initiators_with_the_secret(live, iscsi, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n", encoding="utf-8")
    server = iscsi("trial", "--chap-user", USER, "--chap-secret-file", secret)
    assert qemu_io(uri(server), "read 0 4k").returncode != 0
    assert qemu_io(uri(server, login=f"{USER}%999999999999@"), "read 0 4k").returncode != 0
    does(uri(server, login=f"{USER}%{SECRET}@"), "read 0 4k", "write -P 1 0 4k")
    visible = pathlib.Path(f"/proc/{server.child()}/cmdline").read_text() + server.messages()
    assert SECRET not in visible and SECRET not in str(server.ready)


def test_initiators_are_limited(live, iscsi):
    server = iscsi("trial", "--allow", "10.0.0.0/8", "--allow", "192.0.2.1")
    assert qemu_io(uri(server), "read 0 4k").returncode != 0
    server.stop()
    does(uri(iscsi("trial", "--allow", "127.0.0.0/8")), "read 0 4k")


def test_writes_survive_the_kill_of_tgtd(coldrise, live, iscsi, nbdkit):
    server = iscsi("trial")
    does(uri(server), "write -P 0x41 0 64k", "flush")
    server.crash()
    does(uri(server), "read -P 0x41 0 64k", "write -P 0x42 64k 64k")
    assert "is started again" in server.messages()
    # While one process serves the session, no other writes it.
    assert coldrise.json("sessions")["sessions"][0]["is_served"]
    server.stop()
    with nbdkit().connect(live) as nbd:
        assert bytes(nbd.pread(128 * KIB, 0)) == b"\x41" * (64 * KIB) + b"\x42" * (64 * KIB)


def test_the_server_exits_and_leaves_nothing(coldrise, live, iscsi, own_tmp):
    server = iscsi("trial")
    process, folder = server.child(), server.folder()
    with subprocess.Popen(["qemu-io", "-f", "raw", uri(server)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as client:  # fmt: skip
        client.stdin.write(b"write -P 1 0 4k\n")
        client.stdin.flush()
        assert b"wrote 4096" in client.stdout.readline()
        server.stop(signal.SIGINT)
        client.kill()
    assert not os.path.exists(f"/proc/{process}")
    assert not is_mounted(folder / "mount") and list(own_tmp.iterdir()) == []
    assert not coldrise.json("sessions")["sessions"][0]["is_served"]


def test_the_next_start_removes_leftovers_of_a_kill(coldrise, live, iscsi, own_tmp):
    server = iscsi("trial")
    process, folder = server.child(), server.folder()
    does(uri(server), "write -P 0x51 0 64k", "flush")
    server.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{process}"), "the end of tgtd")
    assert is_mounted(folder / "mount")
    does(uri(iscsi("live/trial")), "read -P 0x51 0 64k")
    assert not is_mounted(folder / "mount") and not folder.exists()


def test_wrong_settings_are_reported(coldrise, live, iscsi, nbdkit, tmp_path):
    def fails(*arguments):
        with pytest.raises(ServerFailed) as failed:
            iscsi(*arguments)
        return failed.value.code, failed.value.messages

    code, messages = fails("nothing")
    assert code == 1 and "nothing" in messages
    code, messages = fails("live/trial/vdx")
    assert code == 1 and "no such disk" in messages
    short = tmp_path / "short"
    short.write_text("short\n", encoding="utf-8")
    code, messages = fails("trial", "--chap-user", USER, "--chap-secret-file", short)
    assert code == 2 and "12 to 16" in messages
    refused = coldrise.run("serve", "iscsi", "trial", "--listen", "0.0.0.0:3260")
    assert refused.returncode == 2 and "--chap-user" in refused.stderr
    long = tmp_path / "long"
    long.write_text(SECRET, encoding="utf-8")
    words = ["serve", "iscsi", "trial", "--chap-user", USER, "--chap-secret-file", long]
    refused = coldrise.run(*words, "--listen", "192.0.2.7:3260")
    assert refused.returncode == 2 and "192.0.2.7 is not an address of this host" in refused.stderr
    with nbdkit().connect(live) as nbd:
        nbd.pwrite(b"x" * 512, 0)
        code, messages = fails("trial")
        assert code == 1 and "live/trial" in messages and "process" in messages
