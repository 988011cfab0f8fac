"""coldrise mount: how it begins, how it ends, and for whom."""

import json
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import tempfile

import pytest

from support.cli import PROGRAM, Coldrise
from support.image import Image
from support.mounted import (
    Mounted, MountFailed, is_mounted, refused, stored_bytes, wait_until_unmounted,
)  # fmt: skip
from support.nbdserver import wait_until

MIB = 1 << 20


def fails(mount, *options, **keywords):
    """The exit code of a mount that has to be refused, and its words."""
    with pytest.raises(MountFailed) as failed:
        mount(*options, **keywords)
    return failed.value.code, failed.value.messages


def is_left_in_order(coldrise):
    """Nothing is leased, nothing is open."""
    assert list((coldrise.repository / "leases").glob("lease-*")) == []
    return not any(session["is_served"] for session in coldrise.json("sessions")["sessions"])


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGHUP", "umount", "fusermount3"])
def test_every_exit_is_clean(coldrise, live, image, mount, end):
    mounted = mount()
    assert str(mounted.folder) in mounted.said and "Ctrl-C" in mounted.said
    with open(mounted / "live/trial/vda.raw", "r+b", buffering=0) as raw:
        raw.write(b"not flushed yet")
    if end == "umount":
        subprocess.run(["umount", mounted.folder], check=True)
    elif end == "fusermount3":
        subprocess.run(["fusermount3", "-u", mounted.folder], check=True)
    else:
        mounted.ask_to_end(getattr(signal, end))
    assert "unmounted" in mounted.wait()
    assert is_left_in_order(coldrise)
    again = mount(folder=mounted.folder)
    image.write(0, b"not flushed yet")
    assert (again / "live/trial/vda.raw").read_bytes() == image.content


def test_a_second_signal_ends_a_mount_in_use(coldrise, live, mount):
    mounted = mount()
    opened = os.open(mounted / "live/trial/vda.raw", os.O_RDWR)
    os.pwrite(opened, b"still open", 0)
    mounted.ask_to_end()
    wait_until_unmounted(mounted.folder)
    # Programs with an open file continue for a while.
    os.pwrite(opened, b"and later!", 4096)
    assert mounted.process.poll() is None
    wait_until(lambda: "still open: live/trial/vda.raw" in mounted.messages(), "the message")
    mounted.ask_to_end()
    mounted.wait()
    assert "programs that still have a file open get errors" in mounted.messages()
    assert refused(os.pread, opened, 1, 0) in ("ENOTCONN", "ECONNABORTED")
    with pytest.raises(OSError):
        os.close(opened)
    assert is_left_in_order(coldrise)
    raw = (mount() / "live/trial/vda.raw").read_bytes()
    assert raw[:10] == b"still open" and raw[4096:4106] == b"and later!"


def test_a_mount_in_use_ends_when_its_files_are_closed(coldrise, live, mount):
    mounted = mount()
    with open(mounted / "live/trial/vda.raw", "r+b", buffering=0) as raw:
        mounted.ask_to_end()
        wait_until_unmounted(mounted.folder)
        raw.write(b"the last word")
    mounted.wait()
    assert "gets errors" not in mounted.messages()
    assert is_left_in_order(coldrise)


def test_a_folder_in_use_does_not_keep_the_mount_from_ending(coldrise, point, mount):
    mounted = mount()
    with subprocess.Popen(["sleep", "60"], cwd=mounted / "web01") as idle:
        mounted.ask_to_end()
        wait_until_unmounted(mounted.folder)
        idle.kill()
    mounted.wait()
    assert "a folder of it is still in use" in mounted.messages()


def test_a_lazy_unmount_serves_to_the_end(coldrise, live, image, mount):
    mounted = mount()
    with open(mounted / "live/trial/vda.raw", "rb", buffering=0) as raw:
        subprocess.run(["umount", "-l", mounted.folder], check=True)
        # The end of the first one does not touch the new mount there.
        with Mounted(coldrise, mounted.folder) as second:
            assert raw.read(100) == image.read(0, 100)
            mounted.ask_to_end()
            raw.close()
            mounted.process.communicate(timeout=30)
            assert mounted.process.returncode == 0
            assert os.listdir(second / "live") == ["trial"]


def test_a_killed_mount_does_not_block_the_next(coldrise, live, image, mount, nbdkit):
    first = mount()
    with open(first / "live/trial/vda.raw", "r+b", buffering=0) as raw:
        raw.write(b"written")
        os.fsync(raw.fileno())
        first.kill()
        assert first.is_mounted() and refused(os.listdir, first.folder) == "ENOTCONN"
        image.write(0, b"written")
        # Neither another front end, nor another mount, here or there.
        with nbdkit() as server, server.connect(live) as handle:
            assert bytes(handle.pread(7, 0)) == b"written"
        other = mount()
        assert (other / "live/trial/vda.raw").read_bytes() == image.content
        other.stop()
        here = mount(folder=first.folder)
        assert (here / "live/trial/vda.raw").read_bytes() == image.content
        here.stop()
        assert is_left_in_order(coldrise)
        with pytest.raises(OSError):
            raw.close()


def test_invalid_folders_are_refused(coldrise, point, mount, tmp_path):
    assert coldrise.run("mount").returncode == 2
    missing = coldrise.run("mount", tmp_path / "missing")
    assert missing.returncode == 1 and "make the directory first" in missing.stderr
    file = tmp_path / "file"
    file.write_bytes(b"")
    wrong = coldrise.run("mount", file)
    assert wrong.returncode == 1 and str(file) in wrong.stderr
    full = coldrise.run("--json", "mount", tmp_path)
    assert full.returncode == 1 and "is not empty" in full.stderr
    assert json.loads(full.stdout)["error"]["kind"] == "already_exists"
    mounted = mount()
    twice = coldrise.run("mount", mounted.folder)
    assert twice.returncode == 11 and f"umount {mounted.folder}" in twice.stderr
    elsewhere = Coldrise(tmp_path / "nothing").run("mount", tmp_path / "missing")
    assert elsewhere.returncode == 10
    # A dead mount of another program is not ours to end.
    assert os.listdir(mounted / "web01")


def test_special_names_are_handled(coldrise, point, image, mount, tmp_path):
    (tmp_path / "a b, c").mkdir()
    (tmp_path / "link").symlink_to("a b, c")
    mounted = mount(folder=tmp_path / "link/ä=x")
    assert (mounted / point / "vda.raw").read_bytes() == image.content
    path = mounted / point / "vda.external.qcow2"
    target = tmp_path / "copy.raw"
    node = json.dumps({"driver": "qcow2", "file": {"driver": "file", "filename": str(path)}})
    subprocess.run(["qemu-img", "convert", "-O", "raw", f"json:{node}", target], check=True)
    assert target.read_bytes() == image.content
    mounted.ask_to_end()
    assert mounted.process.wait(timeout=30) == 0
    mounted.log.close()


def test_mount_reports_its_events_in_json(coldrise, point, tmp_path):
    folder = tmp_path / "mnt"
    folder.mkdir()
    process = coldrise.start("--json", "mount", folder, stdout=subprocess.PIPE)
    try:
        mounted = json.loads(process.stdout.readline())
        assert mounted == {"event": "mounted", "directory": str(folder), "read_only": False}
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        last = json.loads(output.splitlines()[-1])
        assert last["directory"] == str(folder) and process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
        if is_mounted(folder):
            subprocess.run(["umount", "-l", folder], check=True)


def as_nobody(*command):
    return subprocess.run(command, user="nobody", group="nogroup", extra_groups=[],
                          capture_output=True, check=False, timeout=60)  # fmt: skip


def test_other_users_see_it_only_with_permission(point, image, mount):
    # The user "nobody" must be able to enter all parent folders.
    with tempfile.TemporaryDirectory(prefix="coldrise-mount-") as folder:
        os.chmod(folder, 0o755)
        closed = mount(folder=pathlib.Path(folder) / "closed")
        assert as_nobody("ls", closed.folder).returncode != 0
        opened = mount("--allow-other", folder=pathlib.Path(folder) / "opened")
        read = as_nobody("cat", opened / point / "vda.raw")
        assert read.stdout == image.content
        written = as_nobody("sh", "-c", f"echo >> {opened / point / 'vda.vmdk'}")
        assert written.returncode != 0 and b"Permission denied" in written.stderr
        closed.stop()
        opened.stop()


@pytest.fixture
def nobody():
    """A place where the user "nobody" can run the program and mount, with a repository of their own."""
    device = pathlib.Path("/dev/fuse")
    mode = stat.S_IMODE(device.stat().st_mode)
    with tempfile.TemporaryDirectory(prefix="coldrise-nobody-") as folder:
        place = pathlib.Path(folder)
        shutil.chown(place, "nobody", "nogroup")
        place.chmod(0o755)
        shutil.copy2(PROGRAM, place / "coldrise")
        # As udev makes it on every Debian.
        device.chmod(0o666)
        try:
            yield Nobody(place)
        finally:
            device.chmod(mode)


class Nobody(Coldrise):
    """The program as it runs for the user "nobody"."""

    def __init__(self, place):
        super().__init__(place / "repository")
        self.place = place
        self.options = {"user": "nobody", "group": "nogroup", "extra_groups": []}

    def environment(self):
        return super().environment() | {"HOME": str(self.place), "TMPDIR": str(self.place)}

    def run(self, *arguments, timeout_s=120):
        return subprocess.run([self.place / "coldrise", *map(str, arguments)], **self.options,
                              env=self.environment(), stdin=subprocess.DEVNULL, text=True,
                              capture_output=True, timeout=timeout_s, check=False)  # fmt: skip

    def start(self, *arguments, **keywords):
        return subprocess.Popen([self.place / "coldrise", *map(str, arguments)], text=True,
                                env=self.environment(), stdin=subprocess.DEVNULL,
                                **(self.options | keywords))  # fmt: skip


def test_users_other_than_root_mount_too(nobody):
    image = Image(2 * MIB)
    image.fill(0, 64 << 10, "content")
    raw = image.save(nobody.place / "vda.raw")
    nobody.json("init", "--no-encryption")
    nobody.publish(nobody.backup("web01", vda=raw), "trial")
    folder = nobody.place / "mnt"
    folder.mkdir()
    shutil.chown(folder, "nobody", "nogroup")

    with Mounted(nobody, folder) as mounted:
        assert "fusermount3 -u" in mounted.said
        path = mounted / "live/trial/vda.raw"
        # Root is another user, too.
        assert refused(os.stat, path) == "EACCES"
        assert as_nobody("cat", path).stdout == image.content
        done = as_nobody("sh", "-c", f"printf changed | dd of={path} conv=notrunc")
        assert done.returncode == 0, done.stderr
        assert as_nobody("stat", "-c", "%U", path).stdout == b"nobody\n"
    with Mounted(nobody, folder) as mounted:
        assert as_nobody("head", "-c7", mounted / "live/trial/vda.raw").stdout == b"changed"
        assert as_nobody("fusermount3", "-u", folder).returncode == 0
        mounted.wait()
    # A killed one's remains, too, are theirs to clear.
    mounted = Mounted(nobody, folder)
    mounted.kill()
    with Mounted(nobody, folder) as mounted:
        assert as_nobody("ls", folder).stdout == b"live\nweb01\n"


def test_missing_requirements_are_named(nobody, monkeypatch):
    nobody.json("init", "--no-encryption")
    folder = nobody.place / "mnt"
    folder.mkdir()
    not_theirs = nobody.run("mount", folder)
    assert not_theirs.returncode == 1 and "belong to this user" in not_theirs.stderr
    shutil.chown(folder, "nobody", "nogroup")
    others = nobody.run("mount", "--allow-other", folder)
    assert others.returncode == 1 and "user_allow_other" in others.stderr
    (nobody.place / "empty").mkdir()
    monkeypatch.setenv("PATH", str(nobody.place / "empty"))
    monkeypatch.setenv("FUSERMOUNT_PATH", str(nobody.place / "empty/fusermount3"))
    without = nobody.run("mount", folder)
    assert without.returncode == 1 and "apt install fuse3" in without.stderr
    assert stored_bytes(folder) >= 0 and not is_mounted(folder)
