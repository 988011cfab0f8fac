"""Requests that the service refuses early: folders of others, endless requests."""

import contextlib
import gzip
import os
import pathlib
import shutil
import socket
import ssl
import subprocess

import pytest

from support.service import COLDRISED, Coldrised

OTHER_USER = 65534


@pytest.fixture
def service(tmp_path):
    with Coldrised(tmp_path) as service:
        yield service


# --------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777], ids=oct)
def test_a_state_folder_that_others_can_write_is_refused(tmp_path, mode):
    service = Coldrised(tmp_path)
    service.state.mkdir()
    service.state.chmod(mode)
    with pytest.raises(AssertionError, match=f"mode {mode:04o}.*chmod 700"):
        service.start(timeout_s=20)
    assert service.process.wait(timeout=10) == 2
    assert list(service.state.iterdir()) == []
    service.state.chmod(0o750)
    service.start().stop()
    service.short.cleanup()


def test_a_folder_of_runs_that_others_can_write_is_refused(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    service = Coldrised(tmp_path, options=["--runs", runs])
    with pytest.raises(AssertionError, match="--runs .*mode 0777.*chmod 700"):
        service.start(timeout_s=20)
    runs.chmod(0o755)
    service.start().stop()
    service.short.cleanup()


def test_a_state_folder_of_another_user_is_refused(tmp_path):
    folder = pathlib.Path("/tmp") / f"coldrised-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        words = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
        copy = folder / "coldrised"
        copy.write_bytes(COLDRISED.read_bytes())
        copy.chmod(0o755)
        (folder / "state").mkdir(mode=0o755)
        done = subprocess.run([*words, copy, "--state", folder / "state", "--socket", folder / "socket"],
                              capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and "user 0 owns this folder" in done.stderr, done.stderr
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("mode, is_refused", [(0o777, True), (0o1777, False), (0o755, False)],
                         ids=["0777", "sticky", "0755"])
def test_a_socket_that_others_could_replace_is_refused(tmp_path, mode, is_refused):
    service = Coldrised(tmp_path)
    folder = service.socket.parent
    folder.chmod(mode)
    if is_refused:
        with pytest.raises(AssertionError, match="other users can replace files"):
            service.start(timeout_s=20)
        assert service.process.wait(timeout=10) == 2 and not service.socket.exists()
    else:
        service.start().stop()
    service.short.cleanup()


# -------------------------------------------------------------------------------- requests


def memory_bytes(service):
    status = pathlib.Path(f"/proc/{service.process.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))


def raw(service):
    plain = socket.create_connection(("127.0.0.1", service.port), timeout=30)
    return service.trust().wrap_socket(plain, server_hostname="localhost")


def feed(stream, bytes_count):
    """Sends headers without end. Returns what was taken before the service closed."""
    sent = 0
    with contextlib.suppress(OSError, ssl.SSLError):
        stream.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        while sent < bytes_count:
            stream.sendall(b"X-%06d: " % sent + b"x" * 2000 + b"\r\n")
            sent += 2000
    return sent


def test_endless_headers_are_cut_off(service):
    with raw(service) as stream:
        feed(stream, 1 << 20)
        with contextlib.suppress(OSError, ssl.SSLError):
            assert b" 431 " in stream.recv(4096).splitlines()[0]


@pytest.mark.parametrize("count, size, status", [
    (40, 750, 200), (80, 10, 431), (40, 2000, 431), (1, 80_000, 431),
], ids=["large", "many", "too large", "one too large"])
def test_the_size_of_a_head_is_limited(service, count, size, status):
    headers = {f"X-{number}": "x" * size for number in range(count)}
    # The service may close before the client has sent all of it.
    with contextlib.suppress(OSError, ssl.SSLError) if status == 431 else contextlib.nullcontext():
        assert service.call("GET", "/healthz", headers=headers, over="https").status == status
    assert service.call("GET", "/healthz", over="https").status == 200


def test_connections_that_send_headers_without_end_take_little_memory(service):
    """Each stops just below the limit, where the service has to wait for more."""
    service.call("GET", "/healthz", over="https")
    before = memory_bytes(service)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stream = stack.enter_context(raw(service))
            feed(stream, 30_000)
        grown = memory_bytes(service) - before
    assert grown < 200 * (160 << 10), f"{grown >> 20} MiB"


def test_problems_name_what_is_missing(service):
    """The words and exit codes of the command line."""
    unknown = service.call("GET", "machines", over="https")
    assert (unknown.status, unknown.json["kind"], unknown.json["exit_code"]) == (401, "unauthorized", 1)
    denied = service.call("GET", "users", token=service.token("viewer"), over="https")
    assert (denied.status, denied.json["kind"], denied.json["exit_code"]) == (403, "forbidden", 1)
    scoped = service.call("GET", "audit", token=service.token("admin", ["web*"]), over="https")
    assert (scoped.status, scoped.json["kind"]) == (403, "forbidden")
    wrong = service.call("POST", "login", {"user": "x", "password": "y"}, over="https")
    assert (wrong.status, wrong.json["kind"]) == (401, "unauthorized")


@pytest.mark.parametrize("count, size, status", [
    (1, 20_000, 200), (1, 40_000, 431), (50, 10, 200), (80, 10, 431),
], ids=["large", "too large", "some", "many"])
def test_heads_over_http2_are_limited(service, count, size, status):
    """Python has no HTTP/2."""
    headers = [word for number in range(count) for word in ("--header", f"X-{number}: {'x' * size}")]
    words = ["curl", "--silent", "--http2", "--cacert", service.state / "tls" / "cert.pem", "--output",
             os.devnull, "--write-out", "%{http_version} %{http_code}", *headers,
             f"https://localhost:{service.port}/healthz"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"2 {status}", done.stderr


def test_too_many_headers_are_reported(service):
    refused = service.call("GET", "/healthz", headers={f"X-{number}": "x" for number in range(80)}, over="https")
    assert refused.status == 431 and "64 headers" in refused.json["detail"]


def test_an_invalid_field_is_named(service):
    answer = service.call("POST", "tokens", {"name": "ci", "role": "viewer", "machines": ["web*", 5]})
    assert answer.status == 400
    assert answer.json["detail"] == "machines[1]: invalid type: integer `5`, expected a string"
    missing = service.call("POST", "tokens", {"name": "ci"})
    assert missing.json["detail"] == "missing field `role`"
    array = service.call("POST", "tokens", [])
    assert array.status == 400 and "struct" not in array.json["detail"], array.body
    text = service.call("POST", "runs", "backup")
    assert text.json["detail"] == 'invalid type: string "backup", expected an object'


def test_an_unknown_parameter_is_named(service):
    answer = service.call("GET", "machines/web01/points?limt=5")
    assert answer.status == 400
    assert answer.json["detail"] == "unknown parameter `limt`, expected one of `after`, `before`, `limit`"
    missing = service.call("GET", "schedule/preview?count=1")
    assert missing.status == 400 and missing.json["detail"] == "missing parameter `calendar`"
    number = service.call("GET", "runs?count=many")
    assert number.status == 400 and number.json["detail"] == "count: not a whole number"


def test_long_answers_are_compressed_if_accepted(service):
    plain = service.call("GET", "openapi.json", over="https")
    packed = service.call("GET", "openapi.json", headers={"Accept-Encoding": "gzip"}, over="https")
    assert (plain.headers["Content-Encoding"], packed.headers["Content-Encoding"]) == (None, "gzip")
    assert gzip.decompress(packed.body) == plain.body and len(packed.body) < len(plain.body) / 3
    short = service.call("GET", "users", headers={"Accept-Encoding": "gzip"})
    assert short.status == 200 and short.headers["Content-Encoding"] is None
