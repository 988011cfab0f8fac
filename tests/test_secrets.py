"""Secrets stay out of arguments, the environment, logs and core dumps."""

import os
import pathlib
import resource
import signal

import pytest

from support.cli import Coldrise
from support.nbdserver import wait_until

pytestmark = pytest.mark.encrypted

SECRET = "correct horse battery"
WAITS_S = 30


@pytest.fixture
def guarded(tmp_path):
    """A repository whose passphrase a command prints that holds it."""
    passphrase = tmp_path / "passphrase"
    passphrase.write_text(SECRET + "\n", encoding="utf-8")
    Coldrise(tmp_path / "repository", passphrase).init()
    return Guarded(tmp_path / "repository")


class Guarded(Coldrise):
    def environment(self):
        return super().environment() | {"COLDRISE_PASSPHRASE_COMMAND": f"echo {SECRET}"}


def allow_core_dumps():
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def children(process):
    found = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    direct = [int(child) for child in found.split()]
    return direct + [below for child in direct for below in of_one_that_runs(children, child) or []]


def of_one_that_runs(look, process):
    """The findings of `look` for a process; `None` if it ended meanwhile."""
    try:
        return look(process)
    except (FileNotFoundError, ProcessLookupError):
        return None


def arguments(process):
    return pathlib.Path(f"/proc/{process}/cmdline").read_bytes()


def core_limit(process):
    limits = pathlib.Path(f"/proc/{process}/limits").read_text(encoding="ascii")
    (line,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
    return line.split()[4:6]


def assert_no_dump(process):
    """Ended by a signal that dumps, where dumps are allowed."""
    process.send_signal(signal.SIGABRT)
    _, status = os.waitpid(process.pid, 0)
    process.returncode = -signal.SIGABRT
    assert os.WIFSIGNALED(status) and not os.WCOREDUMP(status)


def test_the_passphrase_of_a_server_is_never_shown(guarded, tmp_path):
    log = open(tmp_path / "log", "wb")
    process = guarded.start("-v", "serve", "nbd", "--socket", tmp_path / "socket",
                            stdout=log, stderr=log, preexec_fn=allow_core_dumps)  # fmt: skip
    try:
        wait_until((tmp_path / "socket").exists, "the server")
        servers = wait_until(lambda: children(process.pid), "nbdkit")
        for server in [process.pid, *servers]:
            assert SECRET.encode() not in (of_one_that_runs(arguments, server) or b"")
            limited = (None, ["0", "0"])
            wait_until(lambda server=server: of_one_that_runs(core_limit, server) in limited, "the limit")
        assert process.poll() is None and children(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=WAITS_S)
        log.close()
    assert SECRET not in (tmp_path / "log").read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize("kind", ["nbdkit", "mount"])
def test_processes_with_keys_write_no_core_dump(nbdkit, mount, kind, monkeypatch, tmp_path):
    """A plugin in a server that knows nothing of keys, and the mount."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    monkeypatch.chdir(tmp_path)
    allow_core_dumps()
    try:
        server = nbdkit() if kind == "nbdkit" else mount()
        process = server.process
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert core_limit(process.pid) == ["0", "0"]
    assert_no_dump(process)
    server.log.close()
    if kind == "mount":
        server.clear()


def test_messages_never_show_a_passphrase(coldrise, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("hunter2-and-more\n", encoding="utf-8")
    other = Coldrise(coldrise.repository, wrong)
    for words in (["-v", "list"], ["--json", "verify"], ["-v", "key", "list"]):
        done = other.run(*words)
        assert done.returncode == 12
        assert "hunter2" not in done.stdout + done.stderr


def test_only_the_owner_reads_the_files_of_a_repository(coldrise, live, nbdkit):
    with nbdkit().connect(live) as handle:
        handle.pwrite(bytes(4096), 0)
        handle.flush()
        coldrise.json("seal", "trial")
    coldrise.json("fold")
    coldrise.json("gc")
    coldrise.json("repair")
    paths = [coldrise.repository, *coldrise.repository.rglob("*")]
    readable = {str(path): oct(path.lstat().st_mode) for path in paths if path.lstat().st_mode & 0o077}
    assert len(paths) > 20 and not readable
