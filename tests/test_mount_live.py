"""coldrise mount: writing sessions through their files."""

import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
import random
import struct
import subprocess

import nbd
import pytest

from support.image import Image
from support.mounted import data_ranges, refused, stored_bytes
from support.nbdserver import wait_until
from support.readers import qemu
from support.served import driver_of

KIB, MIB = 1 << 10, 1 << 20

WRITABLE = ["vda.raw", "vda.vhd", "vda.vhdx", "vda.vmdk", "vda.hosted.vmdk", "vda.qcow2",
            "vda.external.qcow2"]  # fmt: skip


def start_of_disk(path, image):
    """Where the disk begins in a file that shows all of it."""
    return path.read_bytes().index(image.read(0, 4 * KIB))


@pytest.mark.parametrize("file", WRITABLE)
def test_qemu_writes_to_one_file_are_visible_in_all(
    coldrise, live, image, mount, tmp_path, file
):
    folder = mount() / "live/trial"
    data = bytes([0xA7]) * (96 * KIB)
    qemu("qemu-io", "-f", driver_of(file), "-c", "write -P 0xa7 3M 96k", "-c", "flush",
         folder / file)  # fmt: skip
    image.write(3 * MIB, data)
    expected = image.save(tmp_path / "expected.raw")
    for other in WRITABLE:
        qemu("qemu-img", "compare", "-f", "raw", "-F", driver_of(other), expected, folder / other)
        stored = sum(length for _, length in data_ranges(folder / other))
        # In blocks of 512 bytes, of which one may be begun.
        wait_until(lambda: 0 <= stored_bytes(folder / other) - stored < 512,  # pylint: disable=W0640
                   f"what is stored of {other} to be told")  # fmt: skip
    if driver_of(file) in ("vhdx", "qcow2"):
        # QEMU's writes to the file's own headers are kept, too.
        qemu("qemu-img", "check", "-f", driver_of(file), folder / file)
    sealed = coldrise.json("seal", "trial")["address"]
    target = tmp_path / "restored.raw"
    coldrise.json("restore", f"{sealed}/vda", target)
    assert target.read_bytes() == image.content


def test_any_write_reaches_its_offset(live, image, mount):
    folder = mount() / "live/trial"
    starts = {file: start_of_disk(folder / file, image) for file in ["vda.raw", "vda.vhdx"]}
    order = random.Random(7)
    opened = {file: os.open(folder / file, os.O_RDWR) for file in starts}
    for turn in range(400):
        file = order.choice(list(starts))
        offset = order.randrange(len(image))
        length = min(order.choice([1, 511, 4 * KIB, 70 * KIB, 2 * MIB]), len(image) - offset)
        if turn % 5 == 0:
            # Zeroes to the byte, as programs that punch holes expect.
            mode = order.choice([FALLOC_PUNCH, FALLOC_ZERO]) | FALLOC_KEEP_SIZE
            fallocate(opened[file], mode, starts[file] + offset, length)
            image.zero(offset, length)
        else:
            data = order.randbytes(length)
            assert os.pwrite(opened[file], data, starts[file] + offset) == length
            image.write(offset, data)
        if turn % 50 == 0:
            os.fsync(opened[file])
    for file, start in starts.items():
        assert os.pread(opened[file], len(image), start) == image.content, file
        os.close(opened[file])


FALLOC_KEEP_SIZE, FALLOC_PUNCH, FALLOC_COLLAPSE, FALLOC_ZERO = 1, 2, 8, 16


def fallocate(descriptor, mode, offset, length):
    """fallocate(2), which Python does not have."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate(descriptor, mode, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def test_holes_are_filled_and_created(live, mount):
    raw = mount() / "live/trial/vda.raw"
    assert data_ranges(raw) == [(0, MIB), (5 * MIB, MIB), (8 * MIB, 512)]
    with open(raw, "r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), b"x" * 8 * KIB, 3 * MIB)
        fallocate(opened.fileno(), FALLOC_PUNCH | FALLOC_KEEP_SIZE, 5 * MIB, MIB)
        expected = [(0, MIB), (3 * MIB, 8 * KIB), (8 * MIB, 512)]
        assert data_ranges(raw) == expected
        wait_until(lambda: stored_bytes(raw) == MIB + 8 * KIB + 512, "the space to be told")


def test_a_disk_keeps_its_size(live, image, mount):
    raw = mount() / "live/trial/vda.raw"
    size = os.stat(raw).st_size
    os.truncate(raw, size)
    for length in (0, size - 1, size + 1):
        assert refused(os.truncate, raw, length) == "ENOTSUP"
    with open(raw, "r+b", buffering=0) as opened:
        descriptor = opened.fileno()
        assert refused(os.ftruncate, descriptor, 0) == "ENOTSUP"
        assert refused(os.pwrite, descriptor, b"x", size) == "EFBIG"
        assert refused(os.pwrite, descriptor, b"xx", size - 1) == "EFBIG"
        assert os.pread(descriptor, 10, size) == b""
        assert os.pread(descriptor, 100, size - 3) == image.read(size - 3, 3)
        # There is enough space in any case.
        os.posix_fallocate(descriptor, 0, size)
        fallocate(descriptor, FALLOC_KEEP_SIZE, size - 512, MIB)
        assert refused(fallocate, descriptor, 0, size, 512) == "EFBIG"
        assert refused(fallocate, descriptor, FALLOC_ZERO, size, 512) == "EFBIG"
        assert refused(fallocate, descriptor, FALLOC_COLLAPSE, 0, 4 * KIB) == "ENOTSUP"
    assert raw.read_bytes() == image.content


def test_a_descriptor_is_editable_text(coldrise, live, mount):
    mounted = mount()
    path = mounted / "live/trial/vda.vmdk"
    first = path.read_text(encoding="ascii")
    longer = first + "# " + "a remark of some length " * 100 + "\n"
    path.write_text(longer, encoding="ascii")
    assert os.stat(path).st_size == len(longer)
    assert path.read_text(encoding="ascii") == longer
    # It is this file's alone.
    assert (mounted / "live/trial/vda.hosted.vmdk").read_text(encoding="ascii") != longer
    mounted.stop()
    path = mount() / "live/trial/vda.vmdk"
    assert path.read_text(encoding="ascii") == longer
    with open(path, "a", encoding="ascii") as opened:
        opened.write("# more\n")
    assert path.read_text(encoding="ascii") == longer + "# more\n"
    os.truncate(path, len(first))
    assert path.read_text(encoding="ascii") == first
    qemu("qemu-io", "-f", "vmdk", "-c", "write 0 4k", path)
    assert refused(os.truncate, path, MIB) in ("EINVAL", "EFBIG")


def test_other_changes_are_refused(live, mount):
    mounted = mount()
    session = mounted / "live/trial"
    raw = session / "vda.raw"
    for call, *arguments in [
        (os.mkdir, mounted / "live/other"),
        (os.rmdir, session),
        (os.open, session / "vda.dynamic.vhd", os.O_CREAT | os.O_WRONLY),
        (os.unlink, raw),
        (os.rename, raw, session / "other"),
        (os.link, raw, session / "other"),
        (os.symlink, "vda.raw", session / "other"),
        (os.chmod, raw, 0o600),
        (os.chown, raw, 1, 1),
    ]:
        assert refused(call, *arguments) == "EPERM", call
    assert "live/trial/vda.raw: it is the session's disk" in mounted.messages()
    # Copying programs insist on it; the time is still that of the writes.
    os.utime(raw, (1, 1))
    assert os.stat(raw).st_mtime > 1e9


def test_a_configuration_is_read_only_in_a_session(coldrise, image, tmp_path, mount):
    (tmp_path / "a.json").write_text("{}\n", encoding="ascii")
    raw = image.save(tmp_path / "vda.raw")
    point = coldrise.json("backup", "web01", f"vda=raw:{raw}", "--config", tmp_path / "a.json")
    coldrise.publish(point["address"], "trial")
    mounted = mount()
    assert refused(os.open, mounted / "live/trial/machine.json", os.O_RDWR) == "EACCES"
    assert "machine.json: live/trial/machine.json: this file is read-only" in mounted.messages()


def test_files_of_a_session_share_it(live, image, mount):
    folder = mount() / "live/trial"
    start = start_of_disk(folder / "vda.vhd", image)
    with open(folder / "vda.raw", "r+b", buffering=0) as raw, \
            open(folder / "vda.vhd", "r+b", buffering=0) as vhd, \
            open(folder / "vda.raw", "rb", buffering=0) as reader:  # fmt: skip
        os.pwrite(raw.fileno(), b"from raw", 100)
        os.pwrite(vhd.fileno(), b"from vhd", start + 108)
        for file, offset in [(raw, 100), (vhd, start + 100), (reader, 100)]:
            assert os.pread(file.fileno(), 16, offset) == b"from rawfrom vhd"
        # Shared memory would not see writes through the other file.
        with pytest.raises(OSError) as error:
            mmap.mmap(raw.fileno(), 4 * KIB)
        assert error.value.errno == errno.ENODEV


def test_another_process_writes_the_session(live, mount, nbdkit):
    mounted = mount()
    raw = mounted / "live/trial/vda.raw"
    with nbdkit() as server:
        with server.connect(live) as handle:
            handle.pwrite(b"over NBD", 0)
            # Reads see it immediately; only the other one may write.
            with open(raw, "rb", buffering=0) as reader:
                assert os.pread(reader.fileno(), 8, 0) == b"over NBD"
                handle.pwrite(b"and more", 0)
                assert os.pread(reader.fileno(), 8, 0) == b"and more"
            assert refused(os.open, raw, os.O_RDWR) == "EBUSY"
            said = mounted.messages()
            assert "vda.raw" in said and f"nbdkit (process {server.process.pid})" in said
    with open(raw, "r+b", buffering=0) as writer:
        os.pwrite(writer.fileno(), b"mounted!", 0)
        server = nbdkit()
        with pytest.raises(nbd.Error):
            server.handle(live).connect_unix(str(server.socket))
    wait_until_written_elsewhere(server, live)


def wait_until_written_elsewhere(server, live):
    """The kernel closes a file some time after the program did."""

    def opens():
        try:
            with server.connect(live) as handle:
                return bytes(handle.pread(8, 0)) == b"mounted!"
        except nbd.Error:
            return False

    wait_until(opens, "the session to be free")


def test_synced_writes_survive_a_kill(coldrise, live, image, mount):
    mounted = mount()
    opened = os.open(mounted / "live/trial/vda.vhdx", os.O_RDWR)
    start = start_of_disk(mounted / "live/trial/vda.vhdx", image)
    os.pwrite(opened, b"synced", start + 4 * MIB)
    os.fsync(opened)
    mounted.kill()
    assert refused(os.pread, opened, 1, 0) in ("ENOTCONN", "ECONNABORTED")
    try:
        os.close(opened)
    except OSError:
        pass  # the server for its flush is gone
    # The dead mount does no harm.
    again = mount(folder=mounted.folder)
    image.write(4 * MIB, b"synced")
    assert (again / "live/trial/vda.raw").read_bytes() == image.content
    assert "ending a mount whose process was killed" in again.messages()


class Syncs:
    """Counts the syncs of a process that clients wait for, with strace."""

    def __init__(self, pid, path):
        self.path = path
        self.threads = pathlib.Path(f"/proc/{pid}/task")
        self.ahead = set()
        calls = "trace=fsync,fdatasync,sync_file_range,msync"
        self.strace = subprocess.Popen(["strace", "-f", "-p", str(pid), "-e", calls, "-o", path],
                                       stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert "attached" in self.strace.stderr.readline()

    def count(self):
        # The layer's own thread syncs its marks, about a second after others have written.
        for thread in self.threads.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (thread / "comm").read_text(encoding="utf-8") == "layer-ahead\n":
                    self.ahead.add(thread.name)
        lines = self.path.read_text(encoding="ascii").splitlines()
        return sum("= 0" in line and line.split()[0] not in self.ahead for line in lines)

    def stop(self):
        self.strace.terminate()
        self.strace.communicate(timeout=30)


def test_syncing_and_closing_sync_the_layer(live, mount, tmp_path):
    mounted = mount()
    raw = mounted / "live/trial/vda.raw"
    opened = os.open(raw, os.O_RDWR)
    syncs = Syncs(mounted.process.pid, tmp_path / "syncs")
    try:
        os.pwrite(opened, b"one", 0)
        before = syncs.count()
        os.fsync(opened)
        synced = syncs.count()
        assert synced > before
        os.close(os.dup(opened))
        assert syncs.count() == synced, "nothing was written since"
        os.pwrite(opened, b"two", 4 * KIB)
        before = syncs.count()
        os.close(os.dup(opened))
        assert syncs.count() > before
        before = syncs.count()
        with open(os.open(raw, os.O_RDWR | os.O_DSYNC), "r+b", buffering=0) as synchronous:
            os.pwrite(synchronous.fileno(), b"three", 0)
            assert syncs.count() > before
        before = syncs.count()
        os.pwritev(opened, [b"four"], 0, os.RWF_DSYNC)
        assert syncs.count() > before
    finally:
        syncs.stop()
        os.close(opened)


def test_locks_are_enforced_by_the_kernel(live, mount):
    path = mount() / "live/trial/vda.raw"
    with open(path, "r+b", buffering=0) as first, open(path, "r+b", buffering=0) as second:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 100, 1, 0)
        fcntl.fcntl(first.fileno(), fcntl.F_OFD_SETLK, lock)
        assert refused(fcntl.fcntl, second.fileno(), fcntl.F_OFD_SETLK, lock) == "EAGAIN"
    # So QEMU keeps a second QEMU away.
    path = path.with_name("vda.qcow2")
    with subprocess.Popen(["qemu-io", "-f", "qcow2", path], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as running:  # fmt: skip
        running.stdin.write("read 0 512\n")
        running.stdin.flush()
        while "read 512/512" not in running.stdout.readline():
            assert running.poll() is None
        done = subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write 0 512", path],
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode != 0 and 'Failed to get "write" lock' in done.stderr
        running.communicate("quit\n")


def test_qemu_without_the_page_cache(live, image, mount, tmp_path):
    """O_DIRECT, asynchronous: as machines run with cache=none."""
    path = mount() / "live/trial/vda.vhdx"
    node = f"driver=vhdx,cache.direct=on,file.driver=file,file.filename={path},file.aio=native"
    writes = [word for at in range(8) for word in ("-c", f"aio_write -P {at + 1} {at}M 64k")]
    qemu("qemu-io", "--image-opts", node, *writes, "-c", "aio_flush", "-c", "flush")
    for at in range(8):
        image.write(at * MIB, bytes([at + 1]) * (64 * KIB))
    expected = image.save(tmp_path / "expected.raw")
    qemu("qemu-img", "compare", "-f", "raw", "-F", "vhdx", expected, path)


def test_read_only_covers_sessions(live, image, mount):
    raw = mount("--read-only") / "live/trial/vda.raw"
    assert raw.read_bytes() == image.content
    assert refused(os.open, raw, os.O_RDWR) == "EROFS"
    assert os.stat(raw).st_mode & 0o777 == 0o444


def test_many_disks_of_one_session(coldrise, mount, tmp_path):
    images = {}
    for name in ["vda", "vdb", "vdc"]:
        images[name] = Image(2 * MIB)
        images[name].fill(0, 64 * KIB, name)
    paths = {name: disk.save(tmp_path / f"{name}.raw") for name, disk in images.items()}
    coldrise.publish(coldrise.backup("web01", **paths), "trial")
    folder = mount() / "live/trial"
    opened = {name: os.open(folder / f"{name}.raw", os.O_RDWR) for name in images}
    for name, descriptor in opened.items():
        os.pwrite(descriptor, name.encode(), MIB)
        images[name].write(MIB, name.encode())
    sealed = coldrise.json("seal", "trial")["address"]
    for name, descriptor in opened.items():
        os.pwrite(descriptor, b"later", MIB)
        os.close(descriptor)
        assert (folder.parents[1] / sealed / f"{name}.raw").read_bytes() == images[name].content
