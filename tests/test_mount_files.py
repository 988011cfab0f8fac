"""coldrise mount: ordinary files next to the disks of a session."""

import errno
import os
import subprocess

import pytest

from support import nfs3

MIB = 1 << 20


@pytest.fixture
def session(live, mount):
    return mount().folder / "live/trial"


def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    raise AssertionError(f"{call.__name__}{arguments} was allowed")


def test_programs_store_files_in_a_session(session, tmp_path):
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "inner/large").write_bytes(os.urandom(3 * MIB))
    (source / "text").write_text("a line\n", encoding="utf-8")
    os.utime(source / "text", (1_000_000_000, 1_000_000_000))
    (source / "text").chmod(0o640)
    subprocess.run(["cp", "-r", "--preserve=mode,timestamps", source, session / "copy"], check=True)
    subprocess.run(["diff", "-r", source, session / "copy"], check=True)
    found = os.stat(session / "copy/text")
    assert (found.st_mode & 0o777, int(found.st_mtime)) == (0o640, 1_000_000_000)

    os.rename(session / "copy/text", session / "copy/inner/moved")
    assert os.listdir(session / "copy") == ["inner"]
    assert fails(os.rmdir, session / "copy") == errno.ENOTEMPTY
    assert fails(os.unlink, session / "copy/inner") == errno.EISDIR
    assert fails(os.rmdir, session / "copy/inner/moved") == errno.ENOTDIR
    subprocess.run(["rm", "-r", session / "copy"], check=True)
    assert not (session / "copy").exists()


def test_open_files_show_new_writes(session):
    path = session / "log"
    with open(path, "xb", buffering=0) as writer, open(path, "rb", buffering=0) as reader:
        assert fails(os.open, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) == errno.EEXIST
        writer.write(b"first")
        assert reader.read() == b"first" and path.stat().st_size == 5
        writer.truncate(2 * MIB)
        assert path.stat().st_size == 2 * MIB
        os.rename(path, session / "log.old")
        writer.write(b" and more")
        assert os.pread(reader.fileno(), 14, 0) == b"first and more"
        os.unlink(session / "log.old")
        assert fails(os.pread, reader.fileno(), 1, 0) == errno.ENOENT


def test_the_sessions_own_files_stay(session):
    (session / "file").write_text("x", encoding="utf-8")
    assert fails(os.unlink, session / "vda.raw") == errno.EPERM
    assert fails(os.rename, session / "file", session / "vda.raw") == errno.EPERM
    assert fails(os.symlink, "file", session / "link") == errno.EPERM
    assert fails(os.mkdir, session.parent / "other") == errno.EPERM
    assert fails(open, session.parent.parent / "web01/new", "w") == errno.EROFS


def test_a_server_and_a_mount_see_the_same(coldrise, live, mount, nfs):
    """The one writes, the other reads."""
    session = mount().folder / "live/trial"
    # Idle files are closed after a minute: the server writes the session until it ends.
    server = nfs()
    with server.connect() as client:
        folder = client.walk(server.root(), "live/trial")
        handle = client.create(folder, "from nfs")
        client.write(handle, 0, b"1" * 3000, nfs3.FILE_SYNC)
        assert (session / "from nfs").read_bytes() == b"1" * 3000
        assert fails(open, session / "new", "w") == errno.EBUSY
        client.write(handle, 2 * MIB, b"2", nfs3.FILE_SYNC)
        assert (session / "from nfs").stat().st_size == 2 * MIB + 1
        assert (session / "from nfs").read_bytes()[-2:] == b"\0" + b"2"
    server.stop()
    (session / "from the mount").write_bytes(b"3")
    sealed = coldrise.json("seal", "trial")["address"]
    point = session.parent.parent / sealed
    assert (point / "from the mount").read_bytes() == b"3"
    assert not (point / "from nfs").exists(), "it was too large"
    assert fails(os.unlink, point / "from the mount") == errno.EROFS
    assert os.stat(point / "from the mount").st_mode & 0o222 == 0
