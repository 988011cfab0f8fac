"""coldrise files: file systems of all kinds, read by a machine of our own."""

import datetime
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tarfile
import tempfile
import zipfile

import pytest

from support import bitlocker, filesystems
from support.cli import PROGRAM, Coldrise
from support.nbdserver import wait_until

MIB = 1 << 20
KEY = "open sesame"
RECOVERY_KEY = "235818-357951-253979-013365-241120-245575-342914-591910"


def programs(folder):
    """The running programs with this folder of runtime files: background processes, nbdkit, QEMU is their child."""
    word = f"XDG_RUNTIME_DIR={folder}".encode()
    found = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if word in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            pass
    return found


def machines(repository):
    """The running QEMUs of a folder of temporary files."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if b"org.coldrise.files" in words and bytes(repository) in words:
                found.append(int(process.name))
        except OSError:
            pass
    return found


def background_of(folder, disk):
    """The process that keeps the machine of one disk."""
    kept = {pid: words for pid, words in programs(folder).items() if b"keep" in words}
    return next(pid for pid, words in kept.items() if any(word.endswith(disk) for word in words))


@pytest.fixture(scope="module")
def runtime():
    """A folder in which machines stay; they are ended afterwards."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="files-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield folder
    for process in programs(folder):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_until(lambda: not machines(folder), "the end of the machines")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def points(runtime, tmp_path_factory):
    """A repository with machine web01, whose disks hold one file system of each kind."""
    folder = tmp_path_factory.mktemp("points")
    tree = folder / "tree"
    (tree / "etc/deep").mkdir(parents=True)
    (tree / "etc/fstab").write_text("before the power cut\n" + "#" * 100)
    (tree / "etc/deep/a.conf").write_text("alpha")
    (tree / "etc/long").write_bytes(os.urandom(3 * MIB + 5))
    (tree / "etc" / ("n" * 200)).write_text("long name")
    for name in (b"a\nb", b"esc\x1b[2J", b"\xff\xfe", b"back\\slash", b"..x"):
        (tree / "etc/deep").joinpath(os.fsdecode(name)).write_text("strange")
    (tree / "etc/deep/inside").symlink_to("../long")
    (tree / "etc/out").symlink_to("/etc/passwd")
    (tree / "etc/deep/up").symlink_to("../../../../etc/passwd")
    (tree / "etc/tool").write_text("#!")
    (tree / "etc/tool").chmod(0o4755)
    small = folder / "small"
    small.mkdir()
    (small / "hello.txt").write_text("hello\n")
    hello = small / "hello.txt"
    root = filesystems.ext4(folder / "root", tree, 48 * MIB, "-L", "root")
    filesystems.leave_in_journal(root, "/etc/fstab", b"after the power cut\n")
    parts = [root, filesystems.xfs(folder / "xfs"), filesystems.btrfs(folder / "btrfs", small),
             filesystems.ntfs(folder / "ntfs", hello), filesystems.fat(folder / "fat", hello)]
    inner = filesystems.ext4(folder / "inner", small, 8 * MIB)
    windows = filesystems.ntfs(folder / "windows", hello, 8 * MIB)
    disks = {
        "vda": filesystems.partitioned(folder / "vda.raw", parts),
        "vdb": filesystems.lvm(folder / "vdb.raw", inner, "vg0", "home"),
        "disk3": filesystems.luks(folder / "disk3.raw", inner, KEY),
        "vdd": filesystems.mirror(folder / "vdd.raw", inner),
        "vde": filesystems.empty(folder / "vde.raw", MIB),
        "vdf": bitlocker.volume(folder / "vdf.raw", windows, RECOVERY_KEY, KEY),
        "vdg": bitlocker.volume(folder / "vdg.raw", windows),
    }
    coldrise = Coldrise.encrypted(folder)
    coldrise.init()
    coldrise.first = coldrise.backup("web01", **disks)
    (folder / "key").write_text(KEY + "\n")
    coldrise.folder = folder
    yield coldrise


def files(coldrise, *words, status=0):
    done = coldrise.run("--json", "files", *words, timeout_s=300)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def names(listed):
    return [entry["path"] for entry in listed["entries"]]


def content(coldrise, address, *options):
    done = subprocess.run([PROGRAM, "files", "get", address, "-", *options], env=coldrise.environment(),
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_file_systems_are_listed(points):
    listed = files(points, "ls", "web01/latest:")["file_systems"]
    found = {system["name"]: (system["format"], system["label"], system["is_readable"]) for system in listed}
    assert found == {
        "vda1": ("ext4", "root", True), "vda2": ("xfs", "things", True), "vda3": ("btrfs", "pool", True),
        "vda4": ("ntfs", "", True), "vda5": ("vfat", "EFI", True), "vdb": ("lvm", "", False),
        "disk3": ("luks", "", False), "vdd": ("md", "", False), "vde": ("empty", "", False),
        "vg0-home": ("ext4", "", True), "md0": ("ext4", "", True), "vdf": ("bitlocker", "", False), "vdg": ("ntfs", "", True),
    }
    notes = {system["name"]: system["note"] for system in listed}
    assert "--key-file" in notes["disk3"] and "zeroes" in notes["vde"]
    assert {system["name"]: system["size_bytes"] for system in listed}["vda1"] == 48 * MIB


def test_each_kind_of_file_system_is_read(points):
    for place in ("vda3", "vda4", "vda5", "vg0-home", "md0"):
        assert content(points, f"web01/latest:{place}/hello.txt") == b"hello\n", place
    assert names(files(points, "ls", "web01/latest:vda2/")) == []


def test_the_journal_is_replayed_and_the_point_stays(points):
    assert content(points, "web01/latest:/etc/fstab").startswith(b"after the power cut\n")
    restored = points.folder / "restored.raw"
    points.json("restore", "web01/latest/vda", restored)
    assert restored.read_bytes() == (points.folder / "vda.raw").read_bytes()
    restored.unlink()


def test_an_encrypted_disk_needs_its_key(points, runtime):
    error = files(points, "ls", "web01/latest:disk3/", status=1)["error"]
    assert error["kind"] == "unsupported" and "--key-file" in error["message"]
    others = set(machines(runtime))
    wrong = points.folder / "wrong"
    wrong.write_text("wrong")
    assert "encrypted" in files(points, "ls", "web01/latest/disk3:/", "--key-file", wrong, status=1)["error"]["message"]
    key = points.folder / "key"
    assert content(points, "web01/latest/disk3:/hello.txt", "--key-file", str(key)) == b"hello\n"
    # Nothing that is open stays.
    assert set(machines(runtime)) == others


def test_bitlocker_is_opened_with_a_recovery_key_or_a_password(points, tmp_path):
    error = files(points, "ls", "web01/latest:vdf/", status=1)["error"]
    assert error["kind"] == "unsupported" and "recovery key or password with --key-file" in error["message"]
    saved = tmp_path / "BitLocker Recovery Key.TXT"
    saved.write_text(f"Identifier:\r\n\r\n\t64311DEA-4587-4029-924A-BA299647998E\r\n\r\nRecovery Key:\r\n\r\n\t{RECOVERY_KEY}\r\n",
                     encoding="utf-16")
    assert content(points, "web01/latest/vdf:/hello.txt", "--key-file", saved) == b"hello\n"
    # The password opens it beside the LUKS disk, which has the same one.
    listed = files(points, "ls", "web01/latest:", "--key-file", points.folder / "key")["file_systems"]
    assert {system["name"]: system["format"] for system in listed}.items() >= {"vdf": "ntfs", "disk3": "ext4"}.items()
    wrong = tmp_path / "wrong"
    for key, words in ((RECOVERY_KEY.replace("013365", "013376"), "No key available with this passphrase"),
                       (RECOVERY_KEY.replace("013365", "013356"), "group 4 of the recovery key is mistyped")):
        wrong.write_text(key)
        error = files(points, "ls", "web01/latest/vdf:/", "--key-file", wrong, status=1)["error"]
        assert error["kind"] == "unsupported" and words in error["message"], error


def test_bitlocker_with_suspended_protection_needs_no_key(points):
    assert content(points, "web01/latest:vdg/hello.txt") == b"hello\n"


def test_names_are_bytes_and_harmless(points):
    listed = files(points, "ls", "web01/latest:/etc/deep")
    found = {entry["path"]: entry["path_hex"] for entry in listed["entries"]}
    assert found["a\\nb"] == b"a\nb".hex() and found["esc\\x1b[2J"] == b"esc\x1b[2J".hex()
    assert found["\\xff\\xfe"] == "fffe" and "back\\\\slash" in found and found["..x"] is None
    text = points.run("files", "ls", "web01/latest:/etc/deep").stdout
    assert "\x1b" not in text and text.count("\n") == len(found) + 1
    assert content(points, b"web01/latest:/etc/deep/\xff\xfe") == b"strange"


def test_find_and_paths(points):
    found = names(files(points, "find", "web01/latest:/", "*.conf"))
    assert found == ["/etc/deep/a.conf"]
    assert names(files(points, "find", "web01/latest:/", "etc/deep/*")) != []
    # A link leads to this machine's root, not to this host's.
    assert files(points, "get", "web01/latest:/etc/out", "/dev/null", "--force", status=1)["error"]["kind"] == "not_found"
    assert content(points, "web01/latest:/etc/deep/../../../../etc/deep/a.conf") == b"alpha"
    assert content(points, "web01/latest:/etc/deep/inside") == (points.folder / "tree/etc/long").read_bytes()
    error = files(points, "ls", "web01/latest:vdz/", status=1)["error"]
    assert error["kind"] == "unsupported" and "vda1 (ext4)" in error["message"] and "may be in disk3" in error["message"]


def test_a_folder_archive_contains_no_escaping_paths(points, tmp_path):
    copied = files(points, "get", "web01/latest:/etc", tmp_path)
    target = tmp_path / "etc.tar"
    assert copied["target"] == str(target) and copied["left_out_links"] == 2 and target.stat().st_mode & 0o777 == 0o600
    with tarfile.open(target, errors="surrogateescape") as archive:
        members = {os.fsencode(member.name): member for member in archive}
        assert all(name == b"etc" or name.startswith(b"etc/") for name in members)
        assert not any(b".." in name.split(b"/") for name in members)
        assert members[b"etc/deep/inside"].linkname == "../long" and b"etc/out" not in members
        assert members[b"etc/tool"].mode == 0o755 and members[b"etc/deep/a\nb"].size == 7
        long = archive.extractfile(members[b"etc/long"]).read()
        assert long == (points.folder / "tree/etc/long").read_bytes()
        assert archive.extractfile(members[b"etc/" + b"n" * 200]).read() == b"long name"
    listed = subprocess.run(["tar", "-tf", target], capture_output=True, check=True).stdout
    assert len(listed.splitlines()) == len(members)
    exact = content(points, "web01/latest:/etc", "--exact")
    with tarfile.open(fileobj=io.BytesIO(exact)) as archive:
        assert archive.getmember("etc/out").linkname == "/etc/passwd"
        assert archive.getmember("etc/tool").mode == 0o4755
    assert files(points, "get", "web01/latest:/etc", target, status=1)["error"]["kind"] == "already_exists"
    limited = files(points, "get", "web01/latest:/etc", tmp_path / "x", "--max-size", "1M", status=1)
    assert "--max-size" in limited["error"]["message"] and not (tmp_path / "x").exists()


def test_a_failed_copy_keeps_the_existing_file(points, tmp_path):
    target = tmp_path / "precious.zip"
    target.write_bytes(b"last week's")
    failed = files(points, "get", "web01/latest:/etc", target, "--force", "--max-size", "1M", status=1)
    assert "--max-size" in failed["error"]["message"] and target.read_bytes() == b"last week's"
    assert list(tmp_path.iterdir()) == [target]
    # As a killed one leaves it.
    part = tmp_path / ".precious.zip.coldrise-part"
    part.mkdir()
    (part / "precious.zip").write_bytes(b"half")
    files(points, "get", "web01/latest:/etc", target, "--force")
    assert list(tmp_path.iterdir()) == [target] and zipfile.is_zipfile(target)


def test_a_full_drive_is_named(points, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", small], check=True)
    try:
        failed = files(points, "get", "web01/latest:/etc", small / "etc.tar", status=1)
        assert f"writing {small / 'etc.tar'}" in failed["error"]["message"], failed
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_pipe_without_a_reader_is_refused(points, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused = files(points, "get", "web01/latest:/etc", pipe, "--force", status=2)["error"]["message"]
    assert f"{pipe} is a pipe" in refused and "give -" in refused, refused


def test_a_file_extension_selects_the_archive_format(points, tmp_path):
    refused = files(points, "get", "web01/latest:/etc", tmp_path / "etc.tar.GZ", status=2)
    assert ".tar.zst" in refused["error"]["message"] and list(tmp_path.iterdir()) == []
    copied = files(points, "get", "web01/latest:/etc", tmp_path / "ETC.ZIP")
    assert copied["format"] == "zip" and zipfile.is_zipfile(tmp_path / "ETC.ZIP")
    copied = files(points, "get", "web01/latest:/etc/long", tmp_path / "long.zip")
    assert copied["format"] == "zip"
    with zipfile.ZipFile(tmp_path / "long.zip") as archive:
        assert archive.namelist() == ["long"] and archive.read("long") == (points.folder / "tree/etc/long").read_bytes()
    # As it is.
    copied = files(points, "get", "web01/latest:/etc/long", tmp_path / "copy")
    assert copied["format"] is None and (tmp_path / "copy").read_bytes() == (points.folder / "tree/etc/long").read_bytes()


def test_a_zip_of_a_folder_is_portable(points, tmp_path):
    target = tmp_path / "etc.zip"
    copied = files(points, "get", "web01/latest:/etc", target)
    assert copied["is_archive"] and copied["left_out_links"] == 2
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        members = {member.filename: member for member in archive.infolist()}
        assert len(members) == len(archive.infolist())
        # Nothing that Windows takes for a folder, a drive or an end.
        assert not any(c in name for name in members for c in "\\:\x1b\n") and "etc/deep/..x" in members
        assert {"etc/deep/%FF%FE", "etc/deep/back%5Cslash", "etc/deep/a%0Ab", "etc/" + "n" * 200} <= set(members)
        assert archive.read("etc/long") == (points.folder / "tree/etc/long").read_bytes()
        assert archive.read("etc/deep/inside") == b"../long"
        assert members["etc/deep/inside"].external_attr >> 16 == 0o120777 and members["etc/deep/"].is_dir()
        assert members["etc/tool"].external_attr >> 16 == 0o100755 and members["etc/tool"].flag_bits & 0x800
        modified = (points.folder / "tree/etc/tool").stat().st_mtime
        moment = datetime.datetime(*members["etc/tool"].date_time, tzinfo=datetime.UTC)
        assert abs(moment.timestamp() - modified) <= 2
    files(points, "get", "web01/latest:/etc", tmp_path / "etc.tar.zst")
    packed = subprocess.run(["zstd", "-dc", tmp_path / "etc.tar.zst"], capture_output=True, check=True).stdout
    assert packed == content(points, "web01/latest:/etc")
    assert zipfile.ZipFile(io.BytesIO(content(points, "web01/latest:/etc/deep", "--format", "zip"))).namelist()


def test_points_are_compared(points, tmp_path):
    shutil.copytree(points.folder / "tree", tmp_path / "tree", symlinks=True)
    (tmp_path / "tree/etc/long").write_text("short")
    (tmp_path / "tree/etc/new").write_text("new")
    (tmp_path / "tree/etc/deep/a.conf").unlink()
    second = points.backup("web01", vda=filesystems.ext4(tmp_path / "root", tmp_path / "tree"))
    compared = files(points, "diff", f"{points.first}:/etc", f"{second}:")
    changes = {change["path"]: change["change"] for change in compared["changes"]}
    assert changes == {"deep/a.conf": "removed", "long": "changed", "new": "added"}
    assert (compared["from"], compared["to"], compared["is_equal"]) == (points.first, second, False)
    same = files(points, "diff", f"{second}:/etc/deep", f"{second}:/etc/deep")
    assert same["is_equal"] and same["changes"] == []
    files(points, "ls", f"{second}:", "--once")
    points.json("forget", second)


def test_killed_commands_and_background_processes_leave_nothing(points, runtime):
    address = f"{points.first}/vde:"

    def sessions():
        return {session["session"] for session in points.json("sessions")["sessions"]}

    others, before = set(machines(runtime)), sessions()
    command = points.start("files", "ls", address, stdout=subprocess.DEVNULL)
    wait_until(lambda: set(machines(runtime)) - others, "the machine")
    # Immediately: a command that has its answer leaves the machine for the next one. Its session exists before it.
    command.kill()
    command.wait()
    wait_until(lambda: set(machines(runtime)) <= others, "the machine's end")
    wait_until(lambda: sessions() <= before, "the session's end")

    files(points, "ls", address)
    os.kill(background_of(runtime, b"/vde"), signal.SIGKILL)
    wait_until(lambda: set(machines(runtime)) <= others, "the machine's end")
    # The next one works, and removes what the killed one left.
    files(points, "ls", address, "--once")
    wait_until(lambda: sessions() <= before, "the session's end")
