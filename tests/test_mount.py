"""coldrise mount: the content of a mounted repository."""

import concurrent.futures
import contextlib
import os
import random
import stat
import subprocess
import time

import pytest

from support.image import Image
from support.mounted import data_ranges, refused, stored_bytes
from support.nbdserver import wait_until
from support.readers import qemu
from support.served import FILES, PAIRS, SINGLE, driver_of

KIB, MIB = 1 << 10, 1 << 20

# In a session: the writable files.
LIVE = ["vda-flat.vmdk", "vda.external.qcow2", "vda.hosted.vmdk", "vda.qcow2", "vda.raw",
        "vda.vhd", "vda.vhdx", "vda.vmdk"]  # fmt: skip
CONFIGURATION = "<domain type='kvm'>\n  <name>web01</name>\n</domain>\n"


@pytest.fixture
def configured(coldrise, image, tmp_path):
    """A point whose machine has a configuration."""
    path = tmp_path / "web01.xml"
    path.write_text(CONFIGURATION, encoding="utf-8")
    raw = image.save(tmp_path / "vda.raw")
    return coldrise.json("backup", "web01", f"vda=raw:{raw}", "--config", path)["address"]


def is_folder_like(path, mode):
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == mode


def test_the_tree(coldrise, configured, mount):
    coldrise.publish(configured, "trial")
    machine, name = configured.split("/")
    root = mount().folder
    assert sorted(os.listdir(root)) == ["live", "web01"]
    assert sorted(os.listdir(root / machine)) == [name, "latest"]
    assert sorted(os.listdir(root / configured)) == sorted([*FILES, "domain.xml"])
    assert sorted(os.listdir(root / "live/trial")) == sorted([*LIVE, "domain.xml", "trial.vmx"])
    assert os.readlink(root / machine / "latest") == name
    assert (root / configured / "domain.xml").read_text(encoding="utf-8") == CONFIGURATION
    assert (root / "live/trial/domain.xml").read_text(encoding="utf-8") == CONFIGURATION

    for path, mode in [("", 0o555), (machine, 0o555), (configured, 0o555), ("live", 0o755),
                       ("live/trial", 0o755)]:  # fmt: skip
        assert is_folder_like(root / path, mode), path
    for file in FILES:
        found = os.stat(root / configured / file)
        assert stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o444
        assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
        assert int(found.st_mtime * 1000) == coldrise.json("show", configured)["created_at_ms"]
    for file in LIVE:
        assert stat.S_IMODE(os.stat(root / "live/trial" / file).st_mode) == 0o644
    assert stat.S_IMODE(os.stat(root / "live/trial/domain.xml").st_mode) == 0o444
    for absent in ["web02", "Live", "web01/20200101T000000Z", "web01/latest~1", "live/other",
                   f"{configured}/vda", f"{configured}/vda.iso", "live/trial/vda.sparse.vmdk",
                   ".git", "web01/\udcff"]:  # fmt: skip
        assert refused(os.stat, root / absent) == "ENOENT", absent
    space = os.statvfs(root)
    real = os.statvfs(coldrise.repository)
    assert space.f_blocks * space.f_frsize == real.f_blocks * real.f_frsize
    assert 0 < space.f_bavail <= space.f_bfree <= space.f_blocks


@pytest.mark.parametrize("name, content, shown", [
    ("a.vmx", 'memsize = "96"\n', "web01.vmx"),
    ("a.json", '{"cpus": 2}\n', "machine.json"),
])
def test_configurations_use_the_names_of_their_programs(
    coldrise, image, tmp_path, mount, name, content, shown
):
    (tmp_path / name).write_text(content, encoding="utf-8")
    raw = image.save(tmp_path / "vda.raw")
    done = coldrise.json("backup", "web01", f"vda=raw:{raw}", "--config", tmp_path / name)
    assert (mount() / done["address"] / shown).read_text(encoding="utf-8") == content


def test_numbers_and_places_of_files_stay(coldrise, configured, mount, tmp_path):
    coldrise.publish(configured, "trial")
    mounted = mount()

    def numbers(root):
        found = {}
        for folder, folders, files in os.walk(root):
            for name in [*folders, *files]:
                found[os.path.relpath(os.path.join(folder, name), root)] = os.lstat(
                    os.path.join(folder, name)).st_ino  # fmt: skip
            for entry in os.scandir(folder):
                # The attributes in a listing, without a request for the file.
                assert entry.inode() == os.lstat(entry.path).st_ino
                assert entry.is_dir(follow_symlinks=False) == os.path.isdir(entry.path) or (
                    entry.is_symlink()
                )
        return found

    first = numbers(mounted.folder)
    assert len(set(first.values())) == len(first) == len(FILES) + len(LIVE) + 8
    # The kernel forgets what it knew.
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as caches:
        caches.write("2")
    assert numbers(mounted.folder) == first
    assert numbers(mount().folder) == first


@pytest.mark.parametrize("file", [*SINGLE, *PAIRS])
def test_qemu_reads_every_image(point, tmp_path, mount, file):
    path = mount() / "web01/latest" / file
    qemu("qemu-img", "compare", "-f", "raw", "-F", driver_of(file), tmp_path / "vda.raw", path)
    if driver_of(file) in ("vhdx", "vmdk", "qcow2"):
        qemu("qemu-img", "check", "-f", driver_of(file), path)


def test_a_data_file_is_named_by_its_full_path(point, mount):
    mounted = mount()
    found = qemu("qemu-img", "info", "-f", "qcow2", mounted / "web01/latest/vda.external.qcow2")
    assert f"data file: {mounted / point / 'vda.raw'}" in found


@pytest.mark.parametrize("file", FILES)
def test_sizes_and_holes_are_true(point, mount, file):
    path = mount() / point / file
    content = path.read_bytes()
    assert os.stat(path).st_size == len(content)
    stored = data_ranges(path)
    # A block is 512 bytes, and one may be begun.
    assert 0 <= stored_bytes(path) - sum(length for _, length in stored) < 512
    at = 0
    for offset, length in stored:
        assert not any(content[at:offset]), "a hole that holds something"
        at = offset + length
    assert not any(content[at:])
    # 2 MiB of the disk; a qcow2 has tables.
    assert stored_bytes(path) < 11 * MIB


def test_holes_match_those_of_the_disk(point, image, mount, tmp_path):
    raw = mount() / point / "vda.raw"
    stored = [(0, MIB), (5 * MIB, MIB), (8 * MIB, 512)]
    assert data_ranges(raw) == stored
    assert stored_bytes(raw) == 2 * MIB + 512
    copy = tmp_path / "copy.raw"
    subprocess.run(["cp", "--sparse=auto", raw, copy], check=True)
    assert copy.read_bytes() == image.content
    assert stored_bytes(copy) <= 2 * MIB + 8 * KIB
    mapped = qemu("qemu-img", "map", "--output=json", "-f", "raw", raw)
    assert mapped.count('"data": true') == len(stored)


def test_many_concurrent_readers(coldrise, point, image, mount):
    folder = mount() / point
    starts = {}
    for file in ["vda.raw", "vda.vhdx", "vda.vhd", "vda-flat.vmdk"]:
        starts[file] = (folder / file).read_bytes().index(image.read(0, 4 * KIB))

    def read(seed):
        pieces = random.Random(seed)
        for _ in range(60):
            file = pieces.choice(list(starts))
            offset = pieces.randrange(len(image))
            length = min(pieces.choice([1, 513, 4 * KIB, 300 * KIB]), len(image) - offset)
            with open(folder / file, "rb", buffering=0) as opened:
                got = os.pread(opened.fileno(), length, starts[file] + offset)
            assert got == image.read(offset, length), (file, offset, length)

    with concurrent.futures.ThreadPoolExecutor(16) as readers:
        list(readers.map(read, range(32)))
    # Everything was closed again.
    assert len(list((coldrise.repository / "leases").glob("lease-*"))) == 1


def test_new_entries_are_visible_immediately(coldrise, point, image, mount, tmp_path):
    root = mount().folder
    assert sorted(os.listdir(root / "web01")) == [point.split("/")[1], "latest"]
    wait_for_another_second(point)
    image.write(MIB, b"new")
    second = coldrise.backup("web01", vda=image.save(tmp_path / "second.raw"))
    assert os.readlink(root / "web01/latest") == second.split("/")[1]
    assert (root / "web01/latest/vda.raw").read_bytes() == image.content
    other = coldrise.backup("web02", vda=tmp_path / "second.raw")
    assert os.listdir(root / other)

    assert os.listdir(root / "live") == []
    coldrise.publish(second, "trial")
    assert os.listdir(root / "live") == ["trial"]
    sealed = coldrise.json("seal", "trial")["address"]
    assert os.readlink(root / "web01/latest") == sealed.split("/")[1]
    assert (root / sealed / "vda.raw").read_bytes() == image.content
    assert os.listdir(root / "live/trial")
    coldrise.json("unpublish", "trial", "--discard")
    assert os.listdir(root / "live") == []
    assert refused(os.stat, root / "live/trial") == "ENOENT"


def test_a_backup_with_the_name_of_a_removed_one_is_read_whole(coldrise, image, mount, tmp_path):
    def back_up():
        path = image.save(tmp_path / "again.raw")
        coldrise.json("backup", "web09", f"vda=raw:{path}", "--time", "20200101T000000Z")

    back_up()
    root = mount().folder
    file = root / "web09/20200101T000000Z/vda.raw"
    with open(file, "rb") as opened:
        assert opened.read(MIB) == image.content[:MIB]
        coldrise.json("forget", "web09/20200101T000000Z")
        image.write(0, random.Random(9).randbytes(len(image)))
        back_up()
        # The first file, if it can still be read, has none of the second's bytes.
        with contextlib.suppress(OSError):
            assert opened.read(MIB) != image.content[MIB : 2 * MIB]

    def is_read():
        with contextlib.suppress(OSError):
            return file.read_bytes() == image.content

    wait_until(is_read, "the new point")


def wait_for_another_second(point):
    """Points are named by the second."""
    while time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) <= point.split("/")[1]:
        time.sleep(0.01)


def test_points_are_immutable(point, mount):
    root = mount().folder
    raw = root / point / "vda.raw"
    for call, *arguments in [
        (os.mkdir, root / "new"),
        (os.mkdir, root / "web01/new"),
        (os.open, root / point / "new", os.O_CREAT | os.O_WRONLY),
        (os.open, raw, os.O_RDWR),
        (os.open, raw, os.O_WRONLY | os.O_TRUNC),
        (os.truncate, raw, 0),
        (os.unlink, raw),
        (os.rmdir, root / point),
        (os.rename, raw, root / point / "other"),
        (os.rename, root / "web01", root / "web02"),
        (os.link, raw, root / point / "other"),
        (os.symlink, "vda.raw", root / point / "other"),
        (os.unlink, root / "web01/latest"),
        (os.chmod, raw, 0o644),
        (os.chown, raw, 1, 1),
        (os.utime, raw),
        (os.mknod, root / point / "fifo", stat.S_IFIFO | 0o600),
    ]:
        assert refused(call, *arguments) == "EROFS", (call, arguments)
    assert refused(os.listxattr, raw) == "ENOTSUP"
    assert refused(os.getxattr, raw, "user.x") == "ENOTSUP"
    assert refused(os.setxattr, raw, "user.x", b"") == "ENOTSUP"


def test_disk_names_take_precedence_over_image_names(coldrise, mount, tmp_path):
    disks = {}
    for name in ["vda", "vda.vhdx", "domain.xml"]:
        disks[name] = Image(MIB)
        disks[name].fill(0, 4 * KIB, name)
    paths = {name: disk.save(tmp_path / name) for name, disk in disks.items()}
    (tmp_path / "web.xml").write_text(CONFIGURATION, encoding="utf-8")
    sources = [f"{name}=raw:{path}" for name, path in paths.items()]
    point = coldrise.json("backup", "web01", *sources, "--config", tmp_path / "web.xml")["address"]
    folder = mount() / point
    names = os.listdir(folder)
    # No image of vda is called like the other disk.
    assert "vda.vhdx" not in names and "vda.vhd" in names
    for name, disk in disks.items():
        assert (folder / f"{name}.raw").read_bytes() == disk.content
