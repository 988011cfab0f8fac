"""coldrise serve nfs: files that a hypervisor keeps in a session's folder next to the disks."""

import concurrent.futures
import os
import random
import threading

import pytest

from support import nfs3, nfs41
from support.nbdserver import wait_until
from support.nfs3 import EXCLUSIVE, FILE_SYNC, GUARDED, UNCHECKED, refused

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def folder(live, nfs):
    """A server, a client of it, and the session's folder."""
    server = nfs()
    with server.connect() as client:
        yield server, client, client.walk(server.root(), "live/trial")


def own(client, folder):
    """The names in a folder that do not belong to images."""
    return [name for name in client.names(folder) if not name.startswith(("vda.", "vda-flat"))]


def put(client, folder, name, data, how=UNCHECKED):
    handle = client.create(folder, name, how)
    if data:
        assert client.write(handle, 0, data, FILE_SYNC)[0] == FILE_SYNC
    return handle


def test_a_file_reads_back_what_was_written(folder):
    """In documents and, from 1 MiB on, in layers."""
    _, client, session = folder
    order = random.Random(5)
    for name, most in [("small", 40 * KIB), ("growing", 3 * MIB)]:
        handle, expected = client.create(session, name), bytearray()
        for _ in range(120):
            offset = order.randrange(most)
            if order.random() < 0.1:
                client.setattr(handle, size=offset)
                expected[offset:] = bytes(max(0, offset - len(expected)))
            else:
                data = order.randbytes(order.choice([1, 511, 4 * KIB, 20 * KIB]))
                client.write(handle, offset, data, order.choice([0, 1, 2]))
                expected.extend(bytes(max(0, offset - len(expected))))
                expected[offset : offset + len(data)] = data
            assert client.getattr(handle)["size"] == len(expected)
            at = order.randrange(most)
            found, is_end = client.read(handle, at, 64 * KIB)
            assert found == expected[at : at + 64 * KIB]
            assert is_end == (at + 64 * KIB >= len(expected))
        client.commit(handle)
        assert client.read_all(handle) == expected


def test_exclusive_creation_has_one_winner(folder):
    _, client, session = folder
    made = client.create(session, "exclusive", EXCLUSIVE, verifier=b"client 1")
    again = client.create(session, "exclusive", EXCLUSIVE, verifier=b"client 1")
    assert again == made, "the answer was lost, and the client asks again"
    other = refused(client.create, session, "exclusive", EXCLUSIVE, verifier=b"client 2")
    assert other == nfs3.EXIST
    assert refused(client.create, session, "exclusive", GUARDED) == nfs3.EXIST
    client.setattr(made, mode=0o640, touch=True)
    late = refused(client.create, session, "exclusive", EXCLUSIVE, verifier=b"client 1")
    assert late == nfs3.EXIST
    client.write(made, 0, b"content", FILE_SYNC)
    assert client.create(session, "exclusive", UNCHECKED) == made
    assert client.read_all(made) == b"content"
    assert client.create(session, "exclusive", UNCHECKED, size=0) == made
    assert client.getattr(made)["size"] == 0, "recreated, it is empty"
    sized = client.create(session, "mode", GUARDED, mode=0o751)
    assert client.getattr(sized)["mode"] & 0o111 == 0o111


def test_folders_hold_files_and_move(folder):
    server, client, session = folder
    snapshots = client.mkdir(session, "snapshots")
    inner = client.mkdir(snapshots, "inner")
    deep = put(client, inner, "deep", b"deep down")
    assert client.getattr(inner)["type"] == nfs3.FOLDER
    assert refused(client.mkdir, session, "snapshots") == nfs3.EXIST
    assert refused(client.rmdir, session, "snapshots") == nfs3.NOTEMPTY
    assert refused(client.create, deep, "x") == nfs3.NOTDIR
    put(client, session, "file", b"1")
    assert refused(client.rename, session, "file", "snapshots") in (nfs3.ISDIR, nfs3.EXIST)
    assert refused(client.rename, session, "snapshots", "x", inner) in (nfs3.INVAL, nfs3.NOTEMPTY)
    client.rename(session, "file", "moved", inner)
    client.rename(session, "snapshots", "kept")
    assert client.names(inner) == ["deep", "moved"]
    assert client.walk(session, "kept/inner/deep") == deep
    with server.connect() as other:
        assert other.read_all(deep) == b"deep down"
        assert dict((name, fileid) for name, fileid, _ in other.list(inner))[".."] == (
            other.getattr(snapshots)["fileid"]
        )
    client.remove(inner, "deep")
    client.remove(inner, "moved")
    client.rmdir(snapshots, "inner")
    client.rmdir(session, "kept")
    assert refused(client.getattr, inner) == nfs3.STALE
    assert own(client, session) == ["trial.vmx"]


def test_images_of_the_session_cannot_be_removed_or_replaced(folder):
    server, client, session = folder
    put(client, session, "file", b"1")
    assert refused(client.remove, session, "vda.raw") == nfs3.ACCES
    assert refused(client.rename, session, "vda.raw", "vdb.raw") == nfs3.ACCES
    assert refused(client.rename, session, "file", "vda.vmdk") == nfs3.ACCES
    # Also the names of images that only points show.
    for name in ["vda", "vda.dynamic.vhd"]:
        assert refused(client.create, session, name) == nfs3.ACCES, name
    assert refused(client.create, session, "vda.raw", GUARDED) == nfs3.EXIST
    assert refused(client.symlink, session, "link", "file") == nfs3.PERM
    live, machine = (client.walk(server.root(), name) for name in ("live", "web01"))
    assert refused(client.create, live, "file") == nfs3.ACCES
    assert refused(client.mkdir, machine, "folder") == nfs3.ROFS
    for name in ["n" * 256, "n" * 300]:
        assert refused(client.create, session, name) == nfs3.NAMETOOLONG
    client.create(session, "n" * 255)
    assert refused(client.remove, session, "none") == nfs3.NOENT
    assert refused(client.rename, session, "none", "some") == nfs3.NOENT
    # The server writes its log a moment after it has answered.
    wait_until(lambda: "belongs to a disk" in server.messages(), "the log says why")
    assert client.names(live) == ["trial"]


def test_acknowledged_writes_survive_a_kill(folder):
    server, client, session = folder
    order = random.Random(3)
    kept, names = {}, []
    for round_number in range(3):
        for number in range(15):
            name = f"file {round_number}.{number}"
            size = order.choice([84, 5000, 300 * KIB, 2 * MIB])
            data = order.randbytes(size)
            handle = put(client, session, name, b"")
            for at in range(0, size, 256 * KIB):
                client.write(handle, at, data[at : at + 256 * KIB], FILE_SYNC)
            kept[handle] = data
            names.append(name)
        gone = names.pop(order.randrange(len(names)))
        handle = client.lookup(session, gone)
        client.remove(session, gone)
        del kept[handle]
        moved = order.randrange(len(names))
        client.rename(session, names[moved], f"moved {round_number}")
        names[moved] = f"moved {round_number}"
        # Not acknowledged as stable.
        loose = client.create(session, "loose")
        client.write(loose, 0, b"new" * 30)
        server.crash()
        client = server.connect()
        assert own(client, session) == sorted([*names, "loose", "trial.vmx"])
        for handle, data in kept.items():
            assert client.read_all(handle) == data
        assert client.read_all(loose) in (b"", b"new" * 30)
        assert refused(client.create, session, "loose", GUARDED) == nfs3.EXIST
        client.remove(session, "loose")


def test_times_and_modes_are_kept(folder):
    _, client, session = folder
    handle = put(client, session, "file", b"x")
    before = client.getattr(session)["mtime"]
    client.setattr(handle, mode=0o700)
    assert client.getattr(handle)["mode"] & 0o777 == 0o766, "everybody reads and writes"
    first = client.getattr(handle)["mtime"]
    client.write(handle, 0, b"y")
    assert client.getattr(handle)["mtime"] > first
    put(client, session, "other", b"")
    assert client.getattr(session)["mtime"] > before


def test_a_different_mode_is_a_change(live, nfs):
    server = nfs("--versions", "4")
    with nfs41.Client(server.network, "one") as client:
        file = client.open("coldrise/live/trial/file", create=nfs41.GUARDED)
        file.write(b"x")
        seen = [file.change()]
        for mode in (0o740, 0o741, 0o742, 0o742):
            file.set_mode(mode)
            seen.append(file.change())
        assert seen == sorted(set(seen)), "each is later than the one before"


def revealed(coldrise, words):
    """Files of the repository that hold one of these words, by name or content."""
    found = []
    for folder, _, names in os.walk(coldrise.repository):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                continue
            try:
                with open(path, "rb") as file:
                    content = file.read() + path.encode()
            except FileNotFoundError:
                # The running server has removed it.
                continue
            found += [path for word in words if word in content]
    return found


@pytest.mark.encrypted
def test_repository_files_reveal_neither_names_nor_content(coldrise, folder):
    server, client, session = folder
    small = put(client, session, "telling-name.log", b"telling-content " * 9)
    large = put(client, session, "telling-name.vswp", b"telling-content " * 10)
    client.setattr(large, size=4 * MIB)
    client.write(large, 3 * MIB, b"telling-content " * 10, FILE_SYNC)
    client.mkdir(session, "telling-folder")
    coldrise.json("seal", "trial")
    words = [b"telling-name", b"telling-content", b"telling-folder"]
    assert revealed(coldrise, words) == []
    assert client.read_all(small) == b"telling-content " * 9
    server.stop()
    assert revealed(coldrise, words) == []


def test_a_discarded_session_removes_all_its_files(coldrise, live, nfs):
    server = nfs("--idle", "4")
    live_folder = coldrise.repository / "live"
    with server.connect() as client:
        session = client.walk(server.root(), "live/trial")
        handle = put(client, session, "log", b"x" * 100)
        large = client.create(session, "vm.vswp", size=2 * MIB)
        with server.in_use(handle):
            busy = coldrise.run("unpublish", "trial", "--discard")
        assert busy.returncode == 11, "a client could still write"
        wait_until(
            lambda: coldrise.run("unpublish", "trial", "--discard").returncode == 0,
            "the idle session to be given back",
        )
        for gone in (handle, large, session):
            assert refused(client.getattr, gone) == nfs3.STALE
    assert [path for path in live_folder.iterdir() if path.is_dir()] == []


def test_a_sealed_point_carries_small_files(coldrise, folder):
    server, client, session = folder
    put(client, session, "vm.vmx", b'memsize = "96"\n')
    put(client, session, "vm.nvram", b"n" * 8700)
    put(client, session, ".lck-0123456789abcdef", b"l" * 84)
    put(client, session, "vm-1234.vswp", b"swap")
    client.create(session, "vda-000001-sesparse.vmdk", size=3 * MIB)
    client.create(session, "large.log", size=2 * MIB)
    inner = client.mkdir(session, "logs")
    put(client, inner, "vmware.log", b"log" * 1000)
    unflushed = client.create(session, "vm.vmsd")
    client.write(unflushed, 0, b"state")

    done = coldrise.run("--json", "seal", "trial")
    assert done.returncode == 0
    assert "LACKS WHAT THE MACHINE WROTE" in done.stderr
    sealed = coldrise.json("seal", "trial")
    left = {file["path"]: file["is_snapshot"] for file in sealed["left_out"]}
    assert left == {"large.log": False, "vda-000001-sesparse.vmdk": True}

    point = client.walk(server.root(), sealed["address"])
    names = client.names(point)
    assert {"vm.vmx", "vm.nvram", "vm.vmsd", "logs", "trial.vmx", "vda.vmdk"} <= set(names)
    assert not [name for name in names if "lck" in name or "swp" in name or "large" in name]
    logs = client.lookup(point, "logs")
    assert client.read_all(client.lookup(logs, "vmware.log")) == b"log" * 1000
    carried = client.lookup(point, "vm.vmx")
    assert refused(client.write, carried, 0, b"x") == nfs3.ROFS
    assert refused(client.create, point, "new") == nfs3.ROFS
    assert refused(client.remove, point, "vm.vmx") == nfs3.ROFS
    # The session continues, and the point stays.
    client.write(client.lookup(session, "vm.vmx"), 0, b"MEMSIZE", FILE_SYNC)
    assert client.read_all(carried) == b'memsize = "96"\n'
    server.crash()
    with server.connect() as after:
        assert after.read_all(carried) == b'memsize = "96"\n'

        coldrise.publish(sealed["address"], "next")
        begun = after.walk(server.root(), "live/next")
        assert own(after, begun) == [
            "logs", "next.vmx", "vm.nvram", "vm.vmsd", "vm.vmx",
        ]  # fmt: skip
        assert after.read_all(after.walk(begun, "logs/vmware.log")) == b"log" * 1000
        changed = after.lookup(begun, "vm.vmx")
        after.write(changed, 0, b"CHANGED", FILE_SYNC)
        assert after.read_all(carried) == b'memsize = "96"\n'


def test_a_folder_starts_with_a_vmx(coldrise, image, nfs, tmp_path):
    raw = image.save(tmp_path / "vda.raw")
    stored = 'displayName = "Web"\nscsi0:0.present = "TRUE"\nscsi0:0.fileName = "web_3.vmdk"\n'
    (tmp_path / "web.vmx").write_text(stored, encoding="utf-8")
    disk, config = f"vda=raw:{raw}", tmp_path / "web.vmx"
    known = coldrise.json("backup", "web01", disk, "--config", config)["address"]
    (tmp_path / "b.json").write_text('{"cpus": 3, "firmware": "uefi"}', encoding="utf-8")
    described = coldrise.json("backup", "db01", disk, "--config", tmp_path / "b.json")["address"]
    coldrise.publish(known, "first")
    coldrise.publish(described, "second")
    server = nfs()
    with server.connect() as client:
        root = server.root()

        def text(path):
            return client.read_all(client.walk(root, path)).decode()

        assert text("live/first/first.vmx") == stored.replace("web_3.vmdk", "vda.vmdk")
        made = text("live/second/second.vmx").splitlines()
        assert {'numvcpus = "3"', 'firmware = "efi"', 'sata0:0.fileName = "vda.vmdk"'} <= set(made)
        assert "web01.vmx" not in client.names(client.walk(root, "live/first"))
        assert text(f"{known}/web01.vmx") == stored

        # The hypervisor's files are kept, under the next session's name.
        session = client.walk(root, "live/first")
        put(client, session, "first.vmx~", b'displayName = "changed"\n')
        client.rename(session, "first.vmx~", "first.vmx")
        sealed = coldrise.json("seal", "first")["address"]
        coldrise.publish(sealed, "third")
        assert text("live/third/third.vmx") == 'displayName = "changed"\n'
        assert "first.vmx" not in client.names(client.walk(root, "live/third"))
    server.stop()
    # Nothing was written to a disk, and still the files are kept.
    server = nfs()
    with server.connect() as client:
        session = client.walk(server.root(), "live/third")
        client.write(client.lookup(session, "third.vmx"), 0, b"DISPLAY", nfs3.FILE_SYNC)
    server.stop()
    ended = coldrise.json("unpublish", "third")
    assert ended["address"] and ended["left_out"] == []
    assert coldrise.json("unpublish", "second")["address"] is None, "nothing has changed"


def test_only_one_of_many_hosts_creates_a_lock(folder):
    server, _, session = folder
    hosts, rounds = 6, 12
    start = threading.Barrier(hosts)

    def try_to_lock(number):
        won = []
        with server.connect() as client:
            for turn in range(rounds):
                start.wait()
                try:
                    handle = client.create(session, f".lck-{turn}", GUARDED)
                except nfs3.Refused as error:
                    assert error.status == nfs3.EXIST
                    continue
                client.write(handle, 0, bytes([number]) * 84, FILE_SYNC)
                won.append(turn)
        return won

    with concurrent.futures.ThreadPoolExecutor(hosts) as pool:
        won = list(pool.map(try_to_lock, range(hosts)))
    assert sorted(turn for turns in won for turn in turns) == list(range(rounds))
    with server.connect() as client:
        for number, turns in enumerate(won):
            for turn in turns:
                lock = client.lookup(session, f".lck-{turn}")
                assert client.read(lock, 0, 0x200) == (bytes([number]) * 84, True)
