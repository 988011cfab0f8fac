"""Operations on a repository whose file operations can be made to fail."""

import os
import random
import shutil

import nbd

from support.cli import Coldrise
from support.nbdserver import Nbdkit, NbdkitFailed
from support.sources import convert, tool

KIB, MIB = 1 << 10, 1 << 20


class SteeredColdrise(Coldrise):
    """The program, with failing file operations."""

    def __init__(self, coldrise, faults):
        super().__init__(coldrise.repository, coldrise.passphrase_file)
        self.faults = faults

    def environment(self):
        return super().environment() | self.faults.environment()


class Command:
    """One command line; `again` lists the allowed exit codes of a second run after a complete or
    partial first one."""

    def __init__(self, name, *arguments, again=(0,)):
        self.name = name
        self.arguments = arguments
        self.again = again

    def prepare(self, coldrise, scene):
        """Runs before the file operations count."""

    def settle(self, coldrise, scene):
        """Runs right after the operation."""

    def words(self, scene):
        return [argument(scene) if callable(argument) else argument for argument in self.arguments]

    def run(self, coldrise, faults, scene):
        """Exit code, messages."""
        done = SteeredColdrise(coldrise, faults).run("--json", *self.words(scene))
        return done.returncode, done.stderr + done.stdout

    def repeat(self, coldrise, scene):
        done = coldrise.run("--json", *self.words(scene))
        assert done.returncode in self.again, f"again: {done.returncode}: {done.stderr}{done.stdout}"


class Fold(Command):
    """A session whose layers could not be moved releases them at its end."""

    def repeat(self, coldrise, scene):
        super().repeat(coldrise, scene)
        for session in ("trial", "crashed"):
            coldrise.json("unpublish", session)
        coldrise.json("fold")


class Init(Command):
    """Creates a repository in a new folder."""

    def prepare(self, coldrise, scene):
        shutil.rmtree(coldrise.repository)

    def repeat(self, coldrise, scene):
        is_there = (coldrise.repository / "repository.json").exists()
        assert coldrise.run("list").returncode == (0 if is_there else 10)
        done = coldrise.run("--json", *self.words(scene))
        assert done.returncode == int(is_there), f"again: {done.stderr}{done.stdout}"


class Damaged(Command):
    """Two flipped bits in the largest file of chunks; the scene's image heals them."""

    def prepare(self, coldrise, scene):
        files = (coldrise.repository / "db").glob("*.sst")
        path = max(files, key=lambda file: file.stat().st_size)
        content = bytearray(path.read_bytes())
        content[1 * MIB] ^= 3
        # The fixture shares it.
        path.unlink()
        path.write_bytes(content)


class DamagedCounters(Command):
    """Only the end of the newest file with the store's counters is readable."""

    def prepare(self, coldrise, scene):
        def is_of_counters(path):
            return b"default" in path.read_bytes()[-4000:]

        files = (coldrise.repository / "db").glob("*.sst")
        path = max(filter(is_of_counters, files), key=lambda file: file.name)
        content = bytearray(path.read_bytes())
        content[10:30] = bytes(byte ^ 0x5A for byte in content[10:30])
        # The fixture shares it.
        path.unlink()
        path.write_bytes(content)


class LostList(Command):
    """The list of the database's files is missing."""

    def prepare(self, coldrise, scene):
        for path in (coldrise.repository / "db").glob("MANIFEST-*"):
            path.unlink()

    def settle(self, coldrise, scene):
        done = coldrise.run("repair")
        assert done.returncode == 0, f"repaired: {done.stderr}{done.stdout}"


class LostEnds(LostList):
    """The largest file of chunks, and one with documents, are truncated."""

    def prepare(self, coldrise, scene):
        files = list((coldrise.repository / "db").glob("*.sst"))
        of_documents = (path for path in files if b"catalog" in path.read_bytes()[-4000:])
        for path in (max(files, key=lambda file: file.stat().st_size), next(of_documents)):
            content = path.read_bytes()
            # The fixture shares it.
            path.unlink()
            path.write_bytes(content[:-60])


class Rekeying(Command):
    """Afterwards one of two passphrases opens the repository."""

    def prepare(self, coldrise, scene):
        if self.name == "key remove":
            coldrise.json("key", "add", "night", "--new-passphrase-file", scene.passphrase)

    def settle(self, coldrise, scene):
        if coldrise.run("list").returncode == 12:
            coldrise.passphrase_file = scene.passphrase


class WithBitmap(Command):
    """Backs up an image whose bitmap has the changes since the machine's newest backup."""

    def prepare(self, coldrise, scene):
        coldrise.json("backup", "mail01", f"vda=qcow2:{scene.before}")

    def repeat(self, coldrise, scene):
        super().repeat(coldrise, scene)
        restored = scene.directory / "restored.raw"
        coldrise.json("restore", "mail01/latest/vda", restored, "--force")
        assert restored.read_bytes() == scene.written, "a backup with a bitmap lacks something"


class Marks(Command):
    """Sets a mark on a point, such as its protection."""

    def __init__(self, name, mark):
        super().__init__(name, name, lambda scene: scene.db_point())
        self.mark = mark

    def repeat(self, coldrise, scene):
        super().repeat(coldrise, scene)
        assert coldrise.json("show", scene.db_point())[self.mark]


class Writes(Command):
    """Writes and flushes over NBD. Flushed data must be there afterwards."""

    def run(self, coldrise, faults, scene):
        scene.flushed = {}
        environment = os.environ | faults.environment()
        try:
            server = Nbdkit(coldrise, scene.directory / "steered", environment=environment)
        except NbdkitFailed as failed:
            return failed.code, failed.messages
        numbers, has_failed = random.Random(3), None
        offsets = [numbers.randrange(3 * MIB) // 4096 * 4096 for _ in range(6)]
        places = [(offset, 8 * KIB) for offset in offsets]
        # More than the layer has space for: it must grow.
        places += [(offset * MIB, 2 * MIB) for offset in (4, 6, 8)]
        try:
            with server.connect("live/trial/vda") as handle:
                for offset, length in places:
                    content = numbers.randbytes(length)
                    try:
                        handle.pwrite(content, offset)
                        handle.flush()
                    except nbd.Error as error:
                        if handle.aio_is_dead():
                            raise
                        if "flush" in str(error):
                            has_failed = str(error)
                        scene.uncertain[offset] = content
                        continue
                    assert has_failed is None, f"a flush succeeded after one that failed: {has_failed}"
                    scene.flushed[offset] = content
        except nbd.Error:
            pass  # refused, or killed
        try:
            server.stop()
        except AssertionError:
            pass  # the exit code tells
        return server.process.returncode, server.messages()

    def repeat(self, coldrise, scene):
        with Nbdkit(coldrise, scene.directory / "again") as server:
            with server.connect("live/trial/vda") as handle:
                for offset, content in scene.flushed.items():
                    newer = any(abs(offset - other) < 8 * KIB for other in scene.uncertain)
                    read = handle.pread(len(content), offset)
                    overwritten = [o for o in scene.flushed if o != offset and abs(o - offset) < 8 * KIB]
                    assert newer or overwritten or read == content, f"a flushed write is gone at {offset}"
                handle.pwrite(b"again", 0)
                handle.flush()


class Scene:
    """The images that the operations read, and the results of one run."""

    def __init__(self, fixture, directory):
        self.directory = directory
        self.fixture = fixture
        directory.mkdir(parents=True, exist_ok=True)
        latest = max(e for e in fixture.expected if e.startswith("web01/") and e.endswith("/vda")
                     and "+" not in e)  # fmt: skip
        self.latest, _, _ = latest.rpartition("/")
        web = bytearray(fixture.expected[latest])
        self.known = self._save("known", web)
        web[3 * MIB : 3 * MIB + 200 * KIB] = random.Random("next").randbytes(200 * KIB)
        self.changed = self._save("changed", web)
        self.large = self._save("large", random.Random("large").randbytes(9 * MIB))
        self.before, self.tracked, self.written = self._tracked(bytes(web[: 2 * MIB]))
        self.passphrase = directory / "another"
        self.passphrase.write_text("battery staple\n", encoding="utf-8")
        self.flushed, self.uncertain = {}, {}

    def _save(self, name, content):
        path = self.directory / f"{name}.raw"
        path.write_bytes(content)
        return path

    def _tracked(self, content):
        """A qcow2 image, one with a bitmap of later writes, and the content of the latter."""
        raw = self._save("tracked", content)
        before, after = self.directory / "before.qcow2", self.directory / "tracked.qcow2"
        convert(raw, before, "qcow2")
        shutil.copyfile(before, after)
        tool("qemu-img", "bitmap", "--add", "-g", "65536", after, "since")
        tool("qemu-io", "-f", "qcow2", "-c", f"write -P 7 {MIB} {300 * KIB}", after)
        changed = bytes([7]) * (300 * KIB)
        return before, after, content[:MIB] + changed + content[MIB + len(changed) :]

    def db_point(self):
        """A point without a published session."""
        points = {e.rpartition("/")[0] for e in self.fixture.expected if e.startswith("db01/")}
        return max(point for point in points if "+" not in point)


OPERATIONS = [
    Init("init", "init"),
    Command("backup", "backup", "mail01", lambda scene: f"vda=raw:{scene.large}"),
    Command("incremental", "backup", "web01", lambda scene: f"vda=raw:{scene.changed}"),
    WithBitmap("bitmap", "backup", "mail01", lambda scene: f"vda=qcow2:{scene.tracked}",
               "--bitmap", "since"),
    Command("publish", "publish", lambda scene: scene.latest, "--name", "other", again=(0, 1)),
    Writes("writes"),
    Command("seal", "seal", "trial"),
    Command("unpublish", "unpublish", "trial", again=(0, 1)),
    Fold("fold", "fold"),
    Command("forget", "forget", lambda scene: scene.db_point(), again=(0, 1)),
    Command("prune", "prune", "--keep-last", "1"),
    Command("prune gc", "prune", "--keep-last", "1", "--gc"),
    Marks("protect", "is_protected"),
    Marks("quarantine", "quarantine"),
    Command("gc", "gc"),
    Command("key add", "key", "add", "night", "--new-passphrase-file",
            lambda scene: scene.passphrase, again=(0, 1)),
    Rekeying("key rotate", "key", "rotate", "--new-passphrase-file",
             lambda scene: scene.passphrase),
    Rekeying("key remove", "key", "remove", "initial", again=(0, 1)),
    Damaged("repair", "repair", "--from", lambda scene: f"raw:{scene.known}"),
    DamagedCounters("repair counters", "repair"),
    LostList("repair list", "repair"),
    LostEnds("repair ends", "repair"),
    Command("verify", "verify"),
]  # fmt: skip
