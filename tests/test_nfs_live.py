"""coldrise serve nfs: sessions, written."""

import concurrent.futures
import errno
import os
import random

import pytest

from support import nfs3
from support.libnfs import Libnfs
from support.nbdserver import read_all, wait_until
from support.served import driver_of

pytestmark = pytest.mark.encrypted

KIB, MIB = 1 << 10, 1 << 20

WRITABLE = ["vda.raw", "vda-flat.vmdk", "vda.vhd", "vda.vhdx", "vda.qcow2"]


def restored(coldrise, address, path):
    coldrise.json("restore", address, path)
    return path.read_bytes()


@pytest.mark.parametrize("file", WRITABLE)
def test_qemu_writes_to_one_file_are_sealed(coldrise, live, image, nfs, tmp_path, file):
    server = nfs()
    driver = "raw" if file == "vda-flat.vmdk" else driver_of(file)
    command = ["qemu-io", "-f", driver, "-c", "write -P 0xa7 3M 96k", "-c", "flush"]
    done = server.network.run(*command, server.uri(f"live/trial/{file}"))
    assert done.returncode == 0 and b"rror" not in done.stderr, done.stdout + done.stderr
    image.write(3 * MIB, bytes([0xA7]) * (96 * KIB))
    with server.connect() as client:
        assert client.read_all(client.walk(server.root(), "live/trial/vda.raw")) == image.content
    sealed = coldrise.json("seal", "trial")["address"]
    assert restored(coldrise, f"{sealed}/vda", tmp_path / "restored.raw") == image.content


def test_any_write_reaches_its_offset(coldrise, live, image, nfs, nbdkit):
    server = nfs("--idle", "1")
    order = random.Random(11)
    with server.connect() as client:
        folder = client.walk(server.root(), "live/trial")
        disks = [client.lookup(folder, name) for name in ("vda.raw", "vda-flat.vmdk")]
        for _ in range(300):
            offset = order.randrange(len(image))
            length = min(order.choice([1, 511, 4 * KIB, 70 * KIB, MIB]), len(image) - offset)
            data = order.randbytes(length)
            client.write(order.choice(disks), offset, data, order.choice([0, 1, 2]))
            image.write(offset, data)
            at = order.randrange(len(image))
            found, _ = client.read(order.choice(disks), at, 64 * KIB)
            assert found == image.read(at, len(found))
        client.commit(disks[0])
        for disk in disks:
            assert client.read_all(disk) == image.content
    server.stop()
    with nbdkit().connect(live) as nbd:
        assert read_all(nbd) == image.content


def test_many_clients_write_one_disk(live, image, nfs):
    """Each has every n-th sector, so that they share blocks, in either file."""
    server = nfs()
    root, count = server.root(), 12
    sectors = len(image) // 512

    def write_own(number):
        order = random.Random(number)
        written = {}
        with server.connect() as client:
            folder = client.walk(root, "live/trial")
            disks = [client.lookup(folder, name) for name in ("vda.raw", "vda-flat.vmdk")]
            for _ in range(150):
                at = order.randrange(sectors // count) * count + number
                data = order.randbytes(512)
                client.write(order.choice(disks), at * 512, data, order.choice([0, 2]))
                written[at] = data
                assert client.read(order.choice(disks), at * 512, 512)[0] == data
            client.commit(disks[0])
        return written

    with concurrent.futures.ThreadPoolExecutor(max_workers=count) as pool:
        for written in pool.map(write_own, range(count)):
            for at, data in written.items():
                image.write(at * 512, data)
    server.crash()
    with server.connect() as client:
        assert client.read_all(client.walk(root, "live/trial/vda.raw")) == image.content


def test_flushed_writes_survive_a_crash(live, image, nfs):
    server = nfs()
    root = server.root()
    with server.connect() as client:
        disk = client.walk(root, "live/trial/vda.raw")
        text = client.walk(root, "live/trial/vda.vmdk")
        descriptor = client.read_all(text)
        verifiers = set()
        committed, verifier = client.write(disk, MIB, b"a" * 8192, nfs3.FILE_SYNC)
        assert committed == nfs3.FILE_SYNC
        verifiers.add(verifier)
        committed, verifier = client.write(disk, 2 * MIB, b"b" * 5000)
        assert committed == nfs3.UNSTABLE
        verifiers.add(verifier)
        verifiers.add(client.commit(disk))
        changed = descriptor.replace(b"CID=", b"CID=0", 1)[: len(descriptor)]
        client.write(text, 0, changed, nfs3.DATA_SYNC)
        assert len(verifiers) == 1, "nothing happened between"
    image.write(MIB, b"a" * 8192)
    image.write(2 * MIB, b"b" * 5000)
    for _ in range(2):
        server.crash()
        with server.connect() as client:
            # The handles that clients have go on.
            assert client.read_all(disk) == image.content
            assert client.read_all(text) == changed
            assert client.walk(root, "live/trial/vda.raw") == disk
            verifier = client.commit(disk)
            assert verifier not in verifiers, "clients would not send again what was lost"
            verifiers.add(verifier)
    assert "started again" in server.messages()


def test_file_limits_are_enforced(live, image, nfs):
    server = nfs()
    with server.connect() as client:
        folder = client.walk(server.root(), "live/trial")
        disk = client.lookup(folder, "vda.raw")
        end = len(image)
        client.write(disk, end - 100, b"z" * 100, nfs3.FILE_SYNC)
        image.write(end - 100, b"z" * 100)
        refused = nfs3.refused
        assert refused(client.write, disk, end - 100, b"y" * 101) == nfs3.FBIG
        assert refused(client.write, disk, end + MIB, b"y", nfs3.FILE_SYNC) == nfs3.FBIG
        assert refused(client.setattr, disk, size=MIB) == nfs3.PERM
        assert client.getattr(disk)["size"] == end
        # Requests without an effect are accepted: copy programs need them.
        client.setattr(disk, size=end)
        client.setattr(disk, mode=0o600, touch=True)
        assert client.read_all(disk) == image.content
        # It is the session's own: test_nfs_files.py tests the other files of clients.
        assert refused(client.remove, folder, "vda.raw") == nfs3.ACCES
        assert refused(client.rename, folder, "vda.raw", "vdb.raw") == nfs3.ACCES
        assert client.names(client.walk(server.root(), "live")) == ["trial"]


def test_a_descriptor_size_change_is_visible_immediately(live, nfs):
    server = nfs()
    with server.connect() as client, server.connect() as other:
        text = client.walk(server.root(), "live/trial/vda.vmdk")
        length = other.getattr(text)["size"]
        client.write(text, length, b"# a note\n", nfs3.FILE_SYNC)
        assert other.getattr(text)["size"] == length + 9
        assert other.read(text, length, 100) == (b"# a note\n", True)
        client.setattr(text, size=length)
        assert other.getattr(text)["size"] == length
        assert other.read(text, length, 100) == (b"", True)


def test_sessions_are_added_and_removed_under_a_running_server(coldrise, point, nfs):
    server = nfs("--idle", "1")
    with server.connect() as client:
        live = client.walk(server.root(), "live")
        assert client.names(live) == []
        assert nfs3.refused(client.lookup, live, "trial") == nfs3.NOENT
        coldrise.publish(point, "trial")
        assert client.names(live) == ["trial"]
        disk = client.walk(live, "trial/vda.raw")
        unused = [client.walk(live, f"trial/{name}") for name in ("vda-flat.vmdk", "vda.vhd")]
        client.write(disk, 0, b"first", nfs3.FILE_SYNC)
        with server.in_use(disk):
            busy = coldrise.run("unpublish", "trial", "--discard")
        assert busy.returncode == 11, "a client could still write"

        def is_ended():
            return coldrise.run("unpublish", "trial", "--discard").returncode == 0

        wait_until(is_ended, "the idle session to be given back")
        assert nfs3.refused(client.read, disk, 0, 512) == nfs3.STALE
        assert nfs3.refused(client.write, disk, 0, b"x") == nfs3.STALE
        # Another session of the same name is another disk.
        coldrise.publish(point, "trial")
        assert nfs3.refused(client.getattr, disk) == nfs3.STALE
        assert nfs3.refused(client.write, disk, 0, b"x") == nfs3.STALE
        # Also for handles without use meanwhile.
        assert nfs3.refused(client.getattr, unused[0]) == nfs3.STALE
        assert nfs3.refused(client.write, unused[1], 0, b"x") == nfs3.STALE
        fresh = client.walk(live, "trial/vda.raw")
        assert fresh != disk
        assert client.read(fresh, 0, 5)[0] != b"first"


def test_a_handle_of_an_ended_session_is_stale_after_a_restart(coldrise, point, live, nfs):
    server = nfs()
    with server.connect() as client:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        client.write(disk, 0, b"first", nfs3.FILE_SYNC)
    server.stop()
    coldrise.json("unpublish", "trial", "--discard")
    coldrise.publish(point, "trial")
    with nfs().connect() as client:
        assert nfs3.refused(client.read, disk, 0, 5) == nfs3.STALE
        assert nfs3.refused(client.write, disk, 0, b"x", nfs3.FILE_SYNC) == nfs3.STALE


def test_a_seal_is_visible_immediately_and_writing_continues(coldrise, live, image, nfs):
    server = nfs()
    with server.connect() as client:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        machine = client.walk(server.root(), "web01")
        points = client.names(machine)
        client.write(disk, 0, b"sealed" * 700)
        address = coldrise.json("seal", "trial")["address"]
        client.write(disk, 0, b"after!" * 700, nfs3.FILE_SYNC)
        name = address.split("/")[1]
        wait_until(lambda: name in client.names(machine), "the sealed point")
        assert set(client.names(machine)) == {*points, name}
        image.write(0, b"sealed" * 700)
        assert client.read_all(client.walk(server.root(), f"{address}/vda.raw")) == image.content
        assert client.read(disk, 0, 6)[0] == b"after!"


def test_only_one_process_writes_a_session(live, image, nfs, nbdkit):
    server = nfs()
    other = nbdkit()
    with server.connect() as client:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        with other.connect(live) as nbd:
            nbd.pwrite(b"nbd" * 2000, MIB)
            # Reads are still coherent.
            assert client.read(disk, MIB, 6000)[0] == b"nbd" * 2000
            assert nfs3.refused(client.write, disk, 0, b"x") == nfs3.ACCES
            # The server writes its log a moment after it has answered.
            wait_until(lambda: "nbdkit" in server.messages(), "the log says who has it")
            nbd.pwrite(b"NBD" * 2000, MIB)
            assert client.read(disk, MIB, 6000)[0] == b"NBD" * 2000
        other.stop()
        client.write(disk, MIB, b"nfs" * 2000, nfs3.FILE_SYNC)
        assert client.read(disk, MIB, 6000)[0] == b"nfs" * 2000


def test_clients_of_version_4_read_and_write(coldrise, point, live, image, nfs):
    server = nfs("--idle", "1")
    disk = "/live/trial/vda.raw"
    with Libnfs(server.network, version=4) as client:
        assert "vda-flat.vmdk" in client.list("/live/trial")
        assert client.refused("open", "/live/new", os.O_RDWR | os.O_CREAT) == errno.EACCES
        assert client.refused("open", f"/{point}/vda.raw", os.O_RDWR) == errno.EROFS
        client.open(disk, os.O_RDWR)
        # Larger writes are beyond this client in version 4.
        client.write(b"version 4" * 100, 3 * MIB)
        client.flush()
        assert client.read(900, 3 * MIB) == b"version 4" * 100
        image.write(3 * MIB, b"version 4" * 100)
        # Open files stay open, however long they are idle: another session, used later and not open, is idle for long enough.
        coldrise.publish(point, "second")
        with server.connect() as other:
            other.write(other.walk(server.root(), "live/second/vda.raw"), 0, b"x", nfs3.FILE_SYNC)
            wait_until(lambda: coldrise.run("unpublish", "second", "--discard").returncode == 0, "the end of the idle session")
        assert coldrise.run("unpublish", "trial", "--discard").returncode == 11
        client.close_file()
        sealed = coldrise.json("seal", "trial")["address"]
        # Files that a client closes are closed immediately.
        coldrise.json("unpublish", "trial", "--discard")
    with server.connect() as client:
        assert client.read_all(client.walk(server.root(), f"{sealed}/vda.raw")) == image.content


def test_a_read_only_server_writes_nothing(live, nfs):
    server = nfs("--read-only")
    with server.connect() as client:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        assert nfs3.refused(client.write, disk, 0, b"x") in (nfs3.ROFS, nfs3.ACCES)
        assert client.read(disk, 0, 512)[0]


def test_the_free_space_matches_the_repository(coldrise, live, nfs):
    server = nfs()
    with server.connect() as client:
        root = server.root()

        def agree():
            # Other tests write and remove gigabytes on the same drive: a moment in which none did that.
            before = os.statvfs(coldrise.repository)
            total, free, available = client.space(root)
            after = os.statvfs(coldrise.repository)
            assert total == before.f_blocks * before.f_frsize
            assert 0 < available <= free
            return all(abs(free - found.f_bfree * found.f_frsize) < 64 * MIB for found in (before, after))

        wait_until(agree, "the same free space")
