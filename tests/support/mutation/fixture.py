"""A small repository with one of everything, its versions, and its expected content."""

import errno
import os
import random
import shutil
import stat

from support.cli import Coldrise
from support.image import Image
from support.mounted import Mounted
from support.nbdserver import Nbdkit, read_all, wait_until

KIB, MIB = 1 << 10, 1 << 20
MARKS = "1s=30d"


class Fixture:
    """`repository` is what is mutated; `versions` are what it was after each step.

    `expected` maps export names to contents, `marked` those of times of sessions: to read one makes a
    point. `marks` are the lists of these times, by session. `files` maps paths in the mount to the contents of files of clients, those that sealed points carry among them.
    """

    def __init__(self, directory, is_encrypted):
        self.directory = directory
        self.is_encrypted = is_encrypted
        self.coldrise = Coldrise.encrypted(directory) if is_encrypted else Coldrise(directory / "repository")
        self.versions = []
        self.numbers = random.Random(5)
        self._build()
        self.marks = {}
        self.expected, self.files, self.marked = self._serve_all()

    @property
    def repository(self):
        return self.coldrise.repository

    def names(self):
        """Points and sessions: `web01/20261120T100000Z`, `live/trial`."""
        return sorted({owner_of(export) for export in self.expected})

    def _keep(self):
        version = self.directory / f"version{len(self.versions)}"
        copy_repository(self.repository, version)
        self.versions.append(version)

    def _build(self):
        coldrise = self.coldrise
        coldrise.init("--chunk-size", "64K", *([] if self.is_encrypted else ["--no-encryption"]))
        web, small = Image(12 * MIB + 512), Image(1 * MIB)
        # Over 8 MiB: such a file of chunks is ingested whole.
        web.fill(0, 9 * MIB, "web")
        small.fill(64 * KIB, 512 * KIB, "small")
        self._backup("web01", vda=web, vdb=small)
        database = Image(2 * MIB)
        database.fill(0, 1 * MIB, "database")
        first = self._backup("db01", vda=database)
        web.fill(2 * MIB, 300 * KIB, "more")
        second = self._backup("web01", vda=web, vdb=small)

        # One point is folded; two stay over layers, one of them not yet in the catalog.
        coldrise.publish(first, "folded")
        self._write("folded", "vda", 2 * MIB)
        coldrise.json("unpublish", "folded")
        coldrise.json("fold")
        self._keep()
        coldrise.publish(second, "trial")
        for disk, size in (("vda", 12 * MIB), ("vdb", MIB)):
            self._write("trial", disk, size)
        self._change_files("first")
        self._keep()
        coldrise.json("seal", "trial")
        self._keep()
        database.fill(512 * KIB, 64 * KIB, "again")
        self._backup("db01", vda=database)
        self._write("trial", "vda", 12 * MIB)
        self._change_files("second")
        coldrise.json("seal", "trial")
        self._keep()
        self._write("trial", "vda", 12 * MIB)
        self._change_files("third")
        self._keep()
        self._write("trial", "vda", 12 * MIB)
        self._change_files("fourth")
        self._mark(small)
        # A session left by a crash, with everything flushed.
        coldrise.json("publish", first, "--name", "crashed", "--marks", MARKS)
        self._write("crashed", "vda", 2 * MIB, is_killed=True)

    def _backup(self, machine, **disks):
        paths = {name: image.save(self.directory / f"{name}.raw") for name, image in disks.items()}
        address = self.coldrise.backup(machine, **paths)
        self._keep()
        return address

    def _write(self, session, disk, size, is_killed=False):
        server = Nbdkit(self.coldrise, self.directory / "server")
        numbers = self.numbers
        try:
            with server.connect(f"live/{session}/{disk}") as handle:
                for _ in range(12):
                    length = numbers.randrange(1, 64 * KIB)
                    offset = numbers.randrange(size - length)
                    if numbers.random() < 0.25:
                        handle.zero(length, offset)
                    else:
                        handle.pwrite(numbers.randbytes(length), offset)
                handle.flush()
                if is_killed:
                    self._overwrite([handle], session, 2)
                if is_killed:
                    layers = (self.repository / "layers").iterdir()
                    newest = max(layers, key=lambda path: path.stat().st_mtime_ns)
                    # A new layer has two, its writer makes two: the next says what was flushed.
                    wait_until(lambda: mark_number(newest) >= 5, "the layer's mark")
                    server.kill()
        finally:
            if not is_killed:
                server.stop()

    def _mark(self, disk):
        """A session of two disks that goes back to times in which the same blocks had other content: in a sealed layer, and in
        the one above. A point shows one of these times."""
        point = self._backup("duo", vda=disk, vdb=disk)
        self.coldrise.json("publish", point, "--name", "marked", "--marks", MARKS)
        server = Nbdkit(self.coldrise, self.directory / "server")
        try:
            with server.connect("live/marked/vda") as vda, server.connect("live/marked/vdb") as vdb:
                self._overwrite([vda, vdb], "marked", 3)
                self._keep()
                self.coldrise.json("seal", list_marks(self.coldrise, "marked")[1]["address"])
                self._overwrite([vda, vdb], "marked", 3)
        finally:
            server.stop()

    def _overwrite(self, handles, session, count):
        """Makes this number of marks between which the same blocks are written."""
        for _ in range(count):
            before = len(list_marks(self.coldrise, session))
            for handle in handles:
                handle.pwrite(self.numbers.randbytes(40 * KIB), 100 * KIB)
                handle.zero(8 * KIB, self.numbers.randrange(25, 34) * 4 * KIB)
                handle.flush()
            wait_until(lambda before=before: len(list_marks(self.coldrise, session)) > before, "a mark")
        # After a kill the marks of before the last but one flush count.
        for handle in [*handles, *handles]:
            handle.pwrite(self.numbers.randbytes(4 * KIB), 100 * KIB)
            handle.flush()

    def _change_files(self, text):
        mounted = Mounted(self.coldrise, self.directory / "mount")
        try:
            folder = mounted / "live/trial"
            (folder / "inner").mkdir(exist_ok=True)
            (folder / "inner/notes.txt").write_text(text * 50, encoding="utf-8")
            (folder / f"{text}.log").write_bytes(self.numbers.randbytes(3000))
            with open(folder / "large.bin", "ab") as file:
                file.write(self.numbers.randbytes(2 * MIB))
        finally:
            mounted.stop()

    def _serve_all(self):
        """Serves a copy: serving a session writes to it."""
        copy = self.directory / "served"
        copy_repository(self.repository, copy)
        coldrise = Coldrise(copy, self.coldrise.passphrase_file)
        exports = []
        for machine in coldrise.json("list")["machines"]:
            for point in machine["points"]:
                exports += [f"{point['address']}/{disk['disk']}" for disk in point["disks"]]
        for session in coldrise.json("sessions")["sessions"]:
            exports += [f"live/{session['session']}/{disk['disk']}" for disk in session["disks"]]
        expected = self._contents(coldrise, exports)
        files = {}
        mounted = Mounted(coldrise, self.directory / "mount")
        try:
            for path in client_files(mounted.folder):
                files[path] = (mounted / path).read_bytes()
        finally:
            mounted.stop()
        times = []
        for session, disks in (("marked", ("vda", "vdb")), ("crashed", ("vda",))):
            self.marks[session] = list_marks(coldrise, session)
            times += [f"{mark['address']}/{disk}" for mark in self.marks[session] for disk in disks]
        marked = self._contents(coldrise, times)
        shutil.rmtree(copy)
        assert len(expected) == 20 and len(files) >= 10, (sorted(expected), sorted(files))
        assert len(self.marks["marked"]) >= 6 and len(self.marks["crashed"]) >= 2, self.marks
        assert len(set(marked.values())) == len(marked)
        return expected, files, marked

    def _contents(self, coldrise, exports):
        contents = {}
        with Nbdkit(coldrise, self.directory / "server") as server:
            for export in exports:
                with server.connect(export) as handle:
                    contents[export] = read_all(handle)
        return contents


def owner_of(export):
    """The point or session of a disk; for a time of a session, the session."""
    return export.rpartition("/")[0].partition("@")[0]


def list_marks(coldrise, session):
    return coldrise.json("marks", session)["marks"]


def mark_number(layer):
    """The offset of the newest mark; see "Layer files" in docs/on-disk-format.md."""
    with open(layer, "rb") as file:
        return max(int.from_bytes(os.pread(file.fileno(), 8, at), "little") for at in (4096, 8192))


def client_files(folder):
    """The files other than disks, by their paths in the mount."""
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.relpath(os.path.join(parent, name), folder)
            # The name of a disk's file begins with the disk's name.
            if not name.startswith(("vda", "vdb")):
                found.append(path)
    return sorted(found)


def copy_repository(source, target):
    """Holes stay holes: most of a layer is one. Database files are never rewritten, so they are
    shared."""
    shutil.copytree(source, target, copy_function=_copy, ignore=_sockets)


def _sockets(folder, names):
    return [name for name in names if stat.S_ISSOCK(os.lstat(os.path.join(folder, name)).st_mode)]


def _copy(source, target):
    if source.endswith(".sst"):
        os.link(source, target)
        return
    with open(source, "rb") as file, open(target, "wb") as copy:
        size = os.fstat(file.fileno()).st_size
        at = 0
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO, error
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            while start < at:
                start += os.copy_file_range(file.fileno(), copy.fileno(), at - start, start, start)
        copy.truncate(size)
