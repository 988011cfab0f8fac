"""serve nbd --socket: whose the socket is."""

import contextlib
import os
import pathlib
import pwd
import signal
import stat
import subprocess
import tempfile

import pytest

from support.nbdserver import wait_until

NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def path():
    """A path for a socket in a folder that all users can enter."""
    with tempfile.TemporaryDirectory(prefix="coldrise-socket-") as folder:
        os.chmod(folder, 0o755)
        yield pathlib.Path(folder) / "nbd"


@contextlib.contextmanager
def served(coldrise, path, *options):
    process = coldrise.start("serve", "nbd", "--socket", path, *options, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)
    try:
        assert process.stdout.readline().startswith("ready")
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def greeted(path, user):
    """Whether a process of that user is served."""
    script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(18)"
    done = subprocess.run(["/usr/bin/python3", "-c", script, path], user=user, group="nogroup",
                          extra_groups=[], capture_output=True, timeout=30, check=False)
    assert done.returncode == 0 or b"PermissionError" in done.stderr
    return done.returncode == 0


def shape(path):
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def test_only_its_user_connects_to_a_socket(coldrise, point, path):
    with served(coldrise, path):
        assert shape(path) == (os.getuid(), os.getgid(), 0o600)
        assert not greeted(path, "nobody")


def test_a_socket_is_given_to_another_user(coldrise, point, path):
    with served(coldrise, path, "--socket-owner", "nobody") as process:
        assert shape(path) == (NOBODY.pw_uid, os.getgid(), 0o600)
        assert greeted(path, "nobody") and not greeted(path, "daemon")
        # As one that was started again has it.
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (first,) = children.read_text(encoding="ascii").split()
        path.unlink()
        os.kill(int(first), signal.SIGKILL)
        wait_until(lambda: path.exists() and shape(path)[0] == NOBODY.pw_uid, "the socket")
        assert greeted(path, "nobody")


def test_a_socket_is_given_to_a_group(coldrise, point, path):
    with served(coldrise, path, "--socket-owner", "root:nogroup"):
        assert shape(path) == (0, NOBODY.pw_gid, 0o660)
        assert greeted(path, "nobody")
    with served(coldrise, path, "--socket-owner", f"0:{NOBODY.pw_gid}", "--socket-mode", "600"):
        assert shape(path) == (0, NOBODY.pw_gid, 0o600)
        assert not greeted(path, "nobody")
    with served(coldrise, path, "--socket-mode", "666"):
        assert shape(path) == (0, 0, 0o666)
        assert greeted(path, "daemon")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--socket-owner", "nobody-at-all"], "nobody-at-all"),
        (["--socket-owner", "root:no-such-group"], "no-such-group"),
        (["--socket-owner", ":nogroup"], ":nogroup"),
        (["--socket-mode", "abc"], "abc"),
        (["--socket-mode", "1777"], "1777"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(coldrise, point, path, options, named):
    refused = coldrise.run("serve", "nbd", "--socket", path, *options)
    assert refused.returncode == 2 and named in refused.stderr
    assert not path.exists()


@pytest.mark.parametrize("option", ["--socket", "--tls-psk", "--tls-certificates"])
def test_a_missing_socket_folder_is_reported_before_nbdkit_starts(coldrise, point, option, tmp_path):
    missing = tmp_path / "missing"
    place = ["--socket", missing / "socket" if option == "--socket" else tmp_path / "socket"]
    options = [] if option == "--socket" else [option, missing]
    refused = coldrise.run("serve", "nbd", *place, *options)
    assert refused.returncode == 1 and f"{missing} does not exist" in refused.stderr
    assert "nbdkit" not in refused.stderr


def test_a_port_has_no_owner(coldrise, point):
    for options in (["--socket-owner", "nobody"], ["--socket-mode", "660"]):
        for place in ([], ["--listen", "127.0.0.1:10809"]):
            refused = coldrise.run("serve", "nbd", *place, *options, timeout_s=10)
            assert refused.returncode == 2 and options[0] in refused.stderr
