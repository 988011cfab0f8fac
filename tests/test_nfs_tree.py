"""coldrise serve nfs: the tree of restore points, read."""

import pytest

from support import nfs3
from support.nbdserver import wait_until
from support.served import driver_of

MIB = 1 << 20

POINT_FILES = ["vda-flat.vmdk", "vda.dynamic.vhd", "vda.dynamic.vhdx", "vda.external.qcow2",
               "vda.hosted.vmdk", "vda.qcow2", "vda.raw", "vda.sparse.qcow2", "vda.sparse.vmdk",
               "vda.vhd", "vda.vhdx", "vda.vmdk"]  # fmt: skip


def test_machines_points_and_files_are_listed(point, live, nfs):
    machine, name = point.split("/")
    server = nfs()
    root = server.root()
    with server.connect() as client:
        assert client.names(root) == ["live", machine]
        folder = client.lookup(root, machine)
        assert client.names(folder) == [name, "latest"]
        assert client.readlink(client.lookup(folder, "latest")) == name
        files = client.walk(folder, name)
        assert client.names(files) == POINT_FILES
        assert client.names(client.walk(root, "live")) == ["trial"]
        shown = client.getattr(files)
        assert (shown["type"], shown["mode"]) == (nfs3.FOLDER, 0o555)
        shown = client.getattr(client.lookup(files, "vda.raw"))
        assert (shown["type"], shown["mode"], shown["size"]) == (nfs3.FILE, 0o444, 8 * MIB + 512)
        assert 2 * MIB <= shown["used"] < 3 * MIB, "holes take no space"
        for fileid in [entry[1] for entry in client.list(files)]:
            assert fileid > 0
        for name, (attributes, handle) in client.list_plus(files).items():
            assert attributes == client.getattr(handle), name
            assert handle == client.lookup(files, name)
        for missing in ["nothing", "..x", "x" * 200, "\u00fc"]:
            assert nfs3.refused(client.lookup, root, missing) == nfs3.NOENT


def test_a_machine_whose_points_are_in_quarantine_is_an_empty_folder(point, coldrise, nfs):
    machine, _ = point.split("/")
    server = nfs()
    root = server.root()
    with server.connect() as client:
        assert machine in client.names(root)
        coldrise.json("quarantine", point)
        wait_until(lambda: client.names(client.lookup(root, machine)) == [], "no point is listed")
        assert machine in client.names(root)
        assert client.getattr(client.lookup(root, machine))["type"] == nfs3.FOLDER
        coldrise.json("release", point)
        wait_until(lambda: "latest" in client.names(client.lookup(root, machine)), "the point is listed again")


def test_a_folder_of_a_point_can_be_mounted(point, image, nfs):
    server = nfs()
    folder = server.root(f"/coldrise/{point}")
    with server.connect() as client:
        assert client.read_all(client.lookup(folder, "vda.raw")) == image.content
    # nfs-ganesha does not list its exports to strangers.
    assert nfs3.refused(server.root, "/coldrise/web02") == nfs3.ACCES


@pytest.mark.parametrize("file", POINT_FILES)
def test_a_file_reads_as_the_nbd_export(point, nfs, nbdkit, file):
    server = nfs()
    with server.connect() as client, nbdkit().connect(f"{point}/{file}") as nbd:
        found = client.read_all(client.walk(server.root(), f"{point}/{file}"), piece=700_001)
        assert len(found) == nbd.get_size()
        assert found == nbd.pread(len(found), 0)


# Images of two files: QEMU finds the second only next to a local file.
OF_TWO_FILES = {"vda.vmdk", "vda.hosted.vmdk", "vda.external.qcow2"}


@pytest.mark.parametrize("file", sorted(set(POINT_FILES) - OF_TWO_FILES))
def test_qemu_reads_the_disk_from_every_image(point, image, nfs, tmp_path, file):
    expected = image.save(tmp_path / "expected.raw")
    server = nfs()
    driver = "raw" if file == "vda-flat.vmdk" else driver_of(file)
    command = ["qemu-img", "compare", "-f", "raw", "-F", driver, expected]
    done = server.network.run(*command, server.uri(f"{point}/{file}"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_reads_stop_at_the_end_of_the_file(point, image, nfs):
    server = nfs()
    with server.connect() as client:
        disk = client.walk(server.root(), f"{point}/vda.raw")
        end = len(image)
        # ESXi reads whole blocks at the end of short files, and needs to see the end.
        assert client.read(disk, end - 512, 512) == (image.read(end - 512, 512), True)
        assert client.read(disk, end - 512, 4096) == (image.read(end - 512, 512), True)
        assert client.read(disk, end - 513, 512) == (image.read(end - 513, 512), False)
        assert client.read(disk, end, 512) == (b"", True)
        assert client.read(disk, end + (1 << 40), 512) == (b"", True)
        text = client.walk(server.root(), f"{point}/vda.vmdk")
        found, is_end = client.read(text, 0, 0x200)
        assert (len(found), is_end) == (client.getattr(text)["size"], True)


def test_points_cannot_be_changed(point, nfs):
    server = nfs()
    root = server.root()
    with server.connect() as client:
        folder = client.walk(root, point)
        disk = client.lookup(folder, "vda.raw")
        before = client.read_all(disk)
        refused = nfs3.refused
        assert refused(client.write, disk, 0, b"x") == nfs3.ROFS
        assert refused(client.write, disk, 0, b"x", nfs3.FILE_SYNC) == nfs3.ROFS
        assert refused(client.setattr, disk, size=0) == nfs3.ROFS
        assert refused(client.setattr, disk, mode=0o777) == nfs3.ROFS
        assert refused(client.create, folder, "new") == nfs3.ROFS
        assert refused(client.create, folder, "vda.raw", how=1) == nfs3.EXIST
        assert refused(client.mkdir, root, "web02") == nfs3.ROFS
        assert refused(client.remove, folder, "vda.raw") == nfs3.ROFS
        assert refused(client.rename, folder, "vda.raw", "vdb.raw") == nfs3.ROFS
        assert client.read_all(disk) == before


def test_handles_and_cookies_outlive_the_server(coldrise, point, live, nfs):
    paths = ["live", "live/trial", "live/trial/vda.vmdk", "web01", "web01/latest", point]
    paths += [f"{point}/{file}" for file in POINT_FILES]
    server = nfs()
    root = server.root()
    with server.connect() as client:
        handles = {path: client.walk(root, path) for path in paths}
        shown = {path: client.getattr(handle) for path, handle in handles.items()}
        entries = client.list(handles[point])
    assert all(len(handle) <= 56 for handle in handles.values()), "ESXi takes no longer ones"
    server.stop()
    server = nfs()
    assert server.root() == root
    with server.connect() as client:
        for path, handle in handles.items():
            # By the handle first: the server has looked up nothing yet.
            found = client.getattr(handle)
            assert (found["fileid"], found["size"]) == (shown[path]["fileid"], shown[path]["size"])
            assert client.walk(root, path) == handle
        assert client.list(handles[point]) == entries
        middle = len(entries) // 2
        behind = client.list(handles[point], after=entries[middle - 1][2])
        assert behind == entries[middle:]


def test_forged_handles_are_rejected(point, nfs):
    server = nfs()
    with server.connect() as client:
        good = client.walk(server.root(), f"{point}/vda.raw")
        # nfs-ganesha puts 5 bytes before it, the last of them its length.
        end = 5 + good[4]
        forged = [good[: end - 1], good[:7], b"", bytes(64), b"\xff" * len(good)]
        for at in range(5, end):
            forged.append(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        for handle in forged:
            status = nfs3.refused(client.getattr, handle)
            assert status in (nfs3.STALE, nfs3.BADHANDLE), handle
        assert client.getattr(good)["type"] == nfs3.FILE


def test_many_points_are_listed_once_each(coldrise, point, live, nfs):
    count = 150
    points = [coldrise.json("seal", "trial")["address"].split("/")[1]]
    server = nfs()
    with server.connect() as client:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        for number in range(1, count):
            client.write(disk, 4096 * number, bytes([number]) * 4096, nfs3.FILE_SYNC)
            points.append(coldrise.json("seal", "trial")["address"].split("/")[1])
        machine = client.walk(server.root(), "web01")
        expected = sorted({point.split("/")[1], "latest", *points})
        assert len(expected) >= count + 1
        for limit in (700, 1 << 16):
            entries = client.list(machine, limit)
            entries = [entry for entry in entries if entry[0] not in (".", "..")]
            assert sorted(name for name, _, _ in entries) == expected
            assert len({fileid for _, fileid, _ in entries}) == len(entries)
            assert len({cookie for _, _, cookie in entries}) == len(entries)
        # A point that is sealed between two parts of a listing repeats and hides no other.
        begun = client.list(machine, limit=700, calls=2)
        client.write(disk, 0, bytes([count]) * 4096, nfs3.FILE_SYNC)
        added = coldrise.json("seal", "trial")["address"].split("/")[1]
        rest = client.list(machine, limit=700, after=begun[-1][2])
        names = [name for name, _, _ in begun + rest if name not in (".", "..", added)]
        assert len(begun) < count and sorted(names) == expected
        wait_until(lambda: client.names(machine) == sorted([*expected, added]), "the sealed point")
