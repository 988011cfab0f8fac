"""The content that a mutated repository serves, and the answers of verify about it."""

import json
import random
import re
import shutil

import nbd

from support.cli import Coldrise
from support.mounted import Mounted, MountFailed
from support.nbdserver import Nbdkit, NbdkitFailed

from .fixture import client_files, copy_repository, owner_of

PIECE = 256 << 10
# The allowed errors after damage: docs and server/block/src/error.rs list all.
EXIT_CODES = {0, 1, 10, 12}


class Verdict:
    """`broken` lists the broken promises."""

    def __init__(self):
        self.broken = []
        self.outcome = None


class Judge:
    """Judges one mutation after the other, each on a copy of the repository."""

    def __init__(self, fixture, directory):
        self.fixture = fixture
        self.directory = directory
        directory.mkdir()
        self.source = directory / "new.raw"
        self.content = random.Random(9).randbytes(1 << 20)
        # State of the present mutation.
        self.may_be_old = self.is_unlisted = self.is_layer = False

    def judge(self, mutation, with_files, with_repair):
        verdict = Verdict()
        # A client's file in a session may be an older version of itself: see "Limits" in
        # docs/on-disk-format.md.
        self.may_be_old = mutation.kind == "roll back to" and "/files/" in mutation.path
        self.is_layer = mutation.path.startswith("layers/")
        copy = self.directory / "repository"
        copy_repository(self.fixture.repository, copy)
        try:
            mutation.apply(copy)
            coldrise = Coldrise(copy, self.fixture.coldrise.passphrase_file)
            self._judge(coldrise, verdict, with_files)
            if with_repair:
                self._go_on(coldrise, verdict)
        finally:
            shutil.rmtree(copy)
        return verdict

    def _judge(self, coldrise, verdict, with_files):
        self.is_unlisted = False
        named, is_clean, is_open = self._verify(coldrise, verdict)
        unreadable, was_served = self._read_disks(coldrise, verdict, self.fixture.expected)
        if with_files and not self.may_be_old:
            files = self._read_files(coldrise, verdict)
            # A damaged catalog cannot be listed; points are found by name.
            unreadable |= set() if self.is_unlisted else files
        if with_files:
            self._judge_marks(coldrise, verdict, is_open and is_clean)
        if not is_open and was_served:
            verdict.broken.append("verify gave up, and points are served")
        if is_open:
            for name in sorted(unreadable - named):
                verdict.broken.append(f"verify does not name {name}, which cannot be read")
            for name in sorted(named - unreadable):
                if self.is_layer:
                    continue  # a layer above may hide the damaged block from this disk
                looked = with_files and not self.may_be_old and not self.is_unlisted
                if looked or not self._has_files(name):
                    verdict.broken.append(f"verify names {name}, which is read")
        if not is_open:
            verdict.outcome = "found at open"
        elif not is_clean:
            verdict.outcome = "found by verify"
        else:
            verdict.outcome = "harmless"

    def _judge_marks(self, coldrise, verdict, is_clean):
        """A session is written, then each of its marks is read: a point is made of it, so this comes after the rest."""
        listed = self._list_marks(coldrise, verdict)
        unreadable, _ = self._read_disks(coldrise, verdict, self.fixture.marked, self._overwrite, mark_of)
        still = self._list_marks(coldrise, verdict)
        if is_clean:
            for mark in sorted(unreadable & (listed | still)):
                verdict.broken.append(f"verify names nothing, and {mark} is listed and cannot be read")

    def _list_marks(self, coldrise, verdict):
        """The listed marks of before the damage."""
        found = set()
        for session, known in self.fixture.marks.items():
            done = coldrise.run("--json", "marks", session)
            if done.returncode:
                if done.returncode not in EXIT_CODES or "panicked" in done.stderr:
                    verdict.broken.append(f"marks {session}: exit code {done.returncode}: {done.stderr[-2000:]}")
                continue
            listed = json.loads(done.stdout.strip().splitlines()[-1])["marks"]
            for mark in listed:
                if mark["marked_at_ms"] > known[-1]["marked_at_ms"]:
                    continue  # made by the judge
                if mark not in known:
                    verdict.broken.append(f"MADE UP: {mark['address']}")
                found.add(mark["address"])
        return found

    def _overwrite(self, server):
        """Blocks that marks do not need any more are given to these writes."""
        for session in self.fixture.marks:
            try:
                with server.connect(f"live/{session}/vda") as handle:
                    for _ in range(2):
                        handle.pwrite(self.content[:PIECE], 0)
                        handle.flush()
            except nbd.Error:
                pass

    def _go_on(self, coldrise, verdict):
        """After a repair a backup of a new machine works and can be restored."""
        self.source.write_bytes(self.content)
        target = self.directory / "restored.raw"
        for arguments in (("repair", "--quarantine"), ("backup", "new", f"vda=raw:{self.source}"),
                          ("restore", "new/latest/vda", target)):  # fmt: skip
            done = coldrise.run("--json", *arguments)
            allowed = {0, 1} if arguments[0] == "repair" else {0}
            failed = '"error"' in done.stdout or "panicked" in done.stderr
            if done.returncode not in allowed or failed:
                verdict.broken.append(f"{arguments[0]} after a repair: {done.returncode}: {done.stderr}")
                return
        if target.read_bytes() != self.content:
            verdict.broken.append("WRONG BYTES: a machine that was backed up after a repair")
        target.unlink()

    def _has_files(self, name):
        return any(path.startswith(f"{name}/") for path in self.fixture.files)

    def _verify(self, coldrise, verdict):
        done = coldrise.run("--json", "verify")
        what = f"verify: exit code {done.returncode}: {done.stderr[-2000:]}"
        if done.returncode not in EXIT_CODES or "panicked" in done.stderr or not done.stdout:
            verdict.broken.append(what)
            return set(), False, False
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        if "error" in answer:
            if answer["error"]["kind"] == "internal":
                verdict.broken.append(what)
            return set(), False, False
        texts = [disk["disk"] for disk in answer["affected"]]
        for part in ("damaged_documents", "damaged_layers"):
            texts += [damage["what"] for damage in answer[part]]
        self.is_unlisted = "the catalog" in texts
        named = {name for name in self.fixture.names() if is_named(name, texts)}
        return named, answer["is_clean"], True

    def _read_disks(self, coldrise, verdict, expected, first=lambda server: None, named_by=owner_of):
        """The owners of incompletely readable disks; whether any disk was served."""
        unreadable, was_served = set(), False
        try:
            server = Nbdkit(coldrise, self.directory / "server")
        except NbdkitFailed as failed:
            if failed.code != 1 or "panicked" in failed.messages:
                verdict.broken.append(f"nbdkit ended with {failed.code}: {failed.messages[-2000:]}")
            return set(self.fixture.names()), False
        first(server)
        for export, content in expected.items():
            found = self._read(server, export, content, verdict)
            was_served |= found > 0
            if found < len(content):
                unreadable.add(named_by(export))
        code = server.process.poll()
        messages = server.messages()
        if code is not None or "defect" in messages:
            verdict.broken.append(f"nbdkit: {code}: {messages[-2000:]}")
            server.kill()
        else:
            server.stop()
        return unreadable, was_served

    def _read(self, server, export, content, verdict):
        """Number of correctly read bytes."""
        right = 0
        try:
            with server.connect(export) as handle:
                if handle.get_size() != len(content):
                    verdict.broken.append(f"{export} has another size")
                    return right
                for at in range(0, len(content), PIECE):
                    length = min(PIECE, len(content) - at)
                    try:
                        read = handle.pread(length, at)
                    except nbd.Error:
                        continue
                    if read != content[at : at + length]:
                        verdict.broken.append(f"WRONG BYTES: {export} at {at}")
                        return right
                    right += length
        except nbd.Error:
            pass
        return right

    def _read_files(self, coldrise, verdict):
        """The names of points and sessions with an unreadable client file."""
        unreadable = set()
        try:
            mounted = Mounted(coldrise, self.directory / "mount")
        except MountFailed as failed:
            if "panicked" in str(failed) or failed.args and "defect" in str(failed):
                verdict.broken.append(f"the mount ended: {failed}")
            return set()
        try:
            for path, content in self.fixture.files.items():
                try:
                    read = (mounted / path).read_bytes()
                except OSError:
                    unreadable.add(owner(path))
                    continue
                if read != content:
                    verdict.broken.append(f"WRONG BYTES: {path} in the mount")
            extra = set(client_files(mounted.folder)) - set(self.fixture.files)
            for path in sorted(extra):
                verdict.broken.append(f"MADE UP: {path} in the mount")
        finally:
            if mounted.process.poll() is not None:
                verdict.broken.append(f"the mount died: {mounted.messages()[-2000:]}")
                mounted.clear()
            else:
                mounted.stop()
            if "defect" in mounted.messages():
                verdict.broken.append(f"the mount: {mounted.messages()[-2000:]}")
        return unreadable


def mark_of(export):
    return export.rpartition("/")[0]


def owner(path):
    return "/".join(path.split("/")[:2])


def is_named(name, texts):
    """Matches whole words: `web01/T+1` does not name `web01/T`."""
    pattern = re.compile(rf"(?<![\w/]){re.escape(name)}(?![\w+.-])")
    return any(pattern.search(text) for text in texts)
