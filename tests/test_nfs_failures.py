"""coldrise serve nfs: a full disk, and one that fails."""

import contextlib
import os

import pytest

from support import nfs3
from support.cli import Coldrise
from support.crash.loopfs import LoopFileSystem
from support.image import Image
from support.nbdserver import DEADLINE_S, wait_until
from support.network import Network
from support.nfsserver import NfsServer
from support.sources import tool

KIB, MIB = 1 << 10, 1 << 20


def repository_on(folder, tmp_path):
    """A repository with a published disk of 32 MiB; and the content of the disk."""
    coldrise = Coldrise.encrypted(tmp_path, folder)
    coldrise.init()
    image = Image(32 * MIB)
    image.fill(0, MIB, "stored")
    address = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    coldrise.publish(address, "trial")
    return coldrise, image


@pytest.fixture
def small(tmp_path):
    """A folder on a file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    tool("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder)
    yield folder
    tool("umount", "--lazy", folder)


@pytest.fixture
def powered(tmp_path):
    """A file system whose power can be cut."""
    system = LoopFileSystem(tmp_path, 256 * MIB)
    yield system
    system.close()


def test_a_full_disk_is_reported_and_loses_nothing(small, tmp_path, serve_on):
    coldrise, image = repository_on(small, tmp_path)
    server = serve_on(coldrise)
    with server.connect() as client:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        written = 0
        with pytest.raises(nfs3.Refused) as failed:
            for written in range(0, len(image), 64 * KIB):
                data = os.urandom(64 * KIB)
                client.write(disk, written, data, nfs3.FILE_SYNC)
                image.write(written, data)
        assert failed.value.status == nfs3.NOSPC
        assert written > MIB, "there was some room"
        assert client.read(disk, 0, written)[0][: 64 * KIB] == image.read(0, 64 * KIB)
        assert client.read_all(disk)[:written] == image.content[:written]
        assert client.space(server.root())[2] < 64 * MIB
        # The server writes its log a moment after it has answered.
        wait_until(lambda: "no space" in server.messages().lower(), "the log says why")
        tool("mount", "-o", "remount,size=200m", small)
        for at in range(written, len(image), 64 * KIB):
            data = os.urandom(64 * KIB)
            client.write(disk, at, data, nfs3.FILE_SYNC)
            image.write(at, data)
    server.stop()
    with serve_on(coldrise).connect() as client:
        assert client.read_all(disk) == image.content


def test_files_of_clients_survive_a_full_disk(small, tmp_path, serve_on):
    coldrise, _ = repository_on(small, tmp_path)
    server = serve_on(coldrise)
    with server.connect() as client:
        before = server.ganesha()
        session = client.walk(server.root(), "live/trial")
        lock = client.create(session, ".lck-1", nfs3.GUARDED)
        client.write(lock, 0, b"first" * 20, nfs3.FILE_SYNC)
        kept, names = {}, []
        with pytest.raises(nfs3.Refused) as failed:
            while True:
                name, data = f"file {len(names)}", os.urandom(512 * KIB)
                handle = client.create(session, name)
                client.write(handle, 0, data, nfs3.FILE_SYNC)
                names.append(name)
                kept[handle] = data
        assert failed.value.status == nfs3.NOSPC
        assert len(names) > 4, "there was some room"
        for handle, data in kept.items():
            assert client.read_all(handle) == data
        with pytest.raises(OSError), open(small / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4 * KIB))
        # Not even a name changes by half.
        shown = client.names(session)
        moved = nfs3.refused(client.rename, session, names[0], "moved")
        assert moved == nfs3.NOSPC and client.names(session) == shown
        assert nfs3.refused(client.write, lock, 0, b"second" * 20, nfs3.FILE_SYNC) == nfs3.NOSPC
        assert server.ganesha() == before, "nothing was lost: there is no reason to end"
        tool("mount", "-o", "remount,size=200m", small)
        # The refused data is still in memory, and is stored now.
        client.commit(lock)
        server.crash()
        assert client_sees(server, session, ".lck-1") == b"second" * 20
    server.stop()
    with serve_on(coldrise).connect() as client:
        for handle, data in kept.items():
            assert client.read_all(handle) == data


def client_sees(server, folder, name):
    with server.connect() as client:
        return client.read_all(client.lookup(folder, name))


def test_a_failed_sync_changes_the_write_verifier(powered, tmp_path):
    coldrise, image = repository_on(powered.mount_point, tmp_path)
    with contextlib.closing(Network()) as network:
        server = NfsServer(coldrise, network, tmp_path / "before.log")
        with server.connect() as client:
            disk = client.walk(server.root(), "live/trial/vda.raw")
            before = client.write(disk, 2 * MIB, b"flushed!" * KIB, nfs3.FILE_SYNC)[1]
            image.write(2 * MIB, b"flushed!" * KIB)
            client.write(disk, 4 * MIB, b"unstable" * KIB)
            session = client.walk(server.root(), "live/trial")
            small, large, growing = (client.create(session, name) for name in "slg")
            client.write(small, 0, b"s" * 84, nfs3.FILE_SYNC)
            client.rename(session, "s", "moved")
            client.write(large, 2 * MIB, b"l" * KIB, nfs3.FILE_SYNC)
            # It becomes a layer with a write that no client makes stable.
            client.write(growing, 0, b"g" * KIB, nfs3.FILE_SYNC)
            client.write(growing, 2 * MIB, b"G" * KIB)
            client.remove(session, "trial.vmx")
            powered.cut_power()
            # No answer, rather than one that is not true.
            with pytest.raises(OSError):
                client.commit(disk)
        # The repository can no longer be opened, so no other server starts.
        assert server.process.wait(timeout=DEADLINE_S) == 1
        assert "new write verifier" in server.messages()
        server.kill()
    powered.power_up()
    # Another network: the old one has the old file system mounted, too.
    with contextlib.closing(Network()) as network:
        server = NfsServer(coldrise, network, tmp_path / "after.log")
        with server.connect() as client:
            assert client.commit(disk) != before, "the client would not send it again"
            lost_or_not = client.read(disk, 4 * MIB, 8 * KIB)[0]
            assert lost_or_not in (bytes(8 * KIB), b"unstable" * KIB)
            client.write(disk, 4 * MIB, b"unstable" * KIB, nfs3.FILE_SYNC)
            image.write(4 * MIB, b"unstable" * KIB)
            assert client.read_all(disk) == image.content
            names = [name for name in client.names(session) if not name.startswith("vda")]
            assert names == ["g", "l", "moved"]
            assert client.read_all(small) == b"s" * 84
            assert client.read_all(large) == bytes(2 * MIB) + b"l" * KIB
            grown = client.read_all(growing)
            assert grown[:KIB] == b"g" * KIB and set(grown[KIB:]) <= {0, ord("G")}
        server.stop()
