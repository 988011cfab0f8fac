"""Objects in a real S3 server: all operations, and failures of the server or of the connection to it."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time

import pytest
from support.certificates import self_signed
from support.cli import PROGRAM
from support.nbdserver import wait_until
from support.s3 import S3Server
from support.stopped import sleeps

OBJECTS = PROGRAM.parent / "examples" / "objects"
MIB = 1 << 20


class Client:
    """The example `objects`, for one server."""

    def __init__(self, server, folder):
        self.server, self.folder = server, folder
        self.kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}

    def words(self, *words, prefix="site", patience=30):
        return [OBJECTS, "--patience", str(patience), self.server.url(prefix), *map(str, words)]

    def run(self, *words, env=None, **options):
        env = self.server.env() if env is None else env
        return subprocess.run(self.words(*words, **options), env=self.kept | env, capture_output=True, timeout=120)

    def answer(self, *words, **options):
        done = self.run(*words, **options)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def refusal(self, *words, **options):
        """The kind of the error, and its text."""
        done = self.run(*words, **options)
        assert done.returncode != 0, done.stdout[:1000]
        kind, _, text = done.stderr.decode().strip().partition(": ")
        return kind, text

    def file(self, length):
        path = self.folder / f"{length}"
        path.write_bytes(random.Random(length).randbytes(length))
        return path

    def names(self, listed="packs/", **options):
        return [line.split()[0] for line in self.answer("list", listed, **options).decode().splitlines()]


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "s3"
    folder.mkdir()
    with contextlib.closing(S3Server(folder)) as server:
        yield server.start()


@pytest.fixture
def client(server, tmp_path):
    return Client(server, tmp_path)


def test_objects_are_returned_unchanged(client):
    small, large = client.file(5), client.file(64 * MIB)
    begun_ms = time.time() * 1000
    client.answer("put", "packs/small", small)
    client.answer("put", "packs/large", large)
    client.answer("put", "config", client.file(0))
    assert client.answer("get", "packs/small", 5) == small.read_bytes()
    assert client.answer("get", "packs/large", 64 * MIB) == large.read_bytes()
    assert client.answer("get", "config", 5) == b""
    assert client.refusal("get", "packs/small", 4)[0] == "corrupt"
    assert client.refusal("get", "packs/none", 4)[0] == "not_found"
    # Replaced completely.
    client.answer("put", "packs/small", client.file(3))
    assert client.answer("get", "packs/small", 5) == client.file(3).read_bytes()
    lines = [line.split() for line in client.answer("list", "packs/").decode().splitlines()]
    assert [line[:2] for line in lines] == [["packs/large", str(64 * MIB)], ["packs/small", "3"]]
    assert all(begun_ms - 2000 < int(line[2]) < time.time() * 1000 + 2000 for line in lines)
    for _ in range(2):
        client.answer("delete", "packs/small")
    assert client.names() == ["packs/large"]
    assert client.server.objects() == ["site/config", "site/packs/large"]
    logged = [name for name, _, _ in client.server.logged()]
    assert logged[:3] == ["PutObject"] * 3 and logged[-3:] == ["DeleteObject", "DeleteObject", "ListObjectsV2"]
    assert [status for name, _, status in client.server.logged() if name == "PutObject"] == [200] * 4


def test_ranges_end_with_the_object(client):
    content = client.file(MIB + 7)
    client.answer("put", "packs/a", content)
    for offset, length in [(0, 1), (5, MIB), (MIB, 7), (MIB, 100), (MIB + 7, 1), (9 * MIB, 5), (3, 0)]:
        expected = content.read_bytes()[offset : offset + length]
        assert client.answer("range", "packs/a", offset, length) == expected, (offset, length)
    assert client.refusal("range", "packs/none", 0, 5)[0] == "not_found"


def test_long_lists_and_prefixes(client):
    assert client.names() == []
    client.answer("fill", "packs/", 1050)
    client.answer("fill", "packs/", 3, prefix="sites")
    client.answer("put", "packs2", client.file(1))
    assert client.names() == [f"packs/{number:06}" for number in range(1050)]
    assert client.names("packs/", prefix="sites") == [f"packs/{number:06}" for number in range(3)]
    assert client.names("site/packs/", prefix="")[-1] == "site/packs/001049"
    assert len([line for line in client.server.proxy.requests if "list-type" in line]) == 6


def test_wrong_settings_of_an_object_store_are_refused(client, server):
    server.bucket = "other"
    for words in [("list", "packs/"), ("get", "a", 5), ("put", "a", client.file(5)), ("delete", "a")]:
        kind, text = client.refusal(*words)
        assert kind == "no_repository", text
        assert "s3://other/site: " in text and text.endswith("create the bucket other, or correct its name")
    server.bucket = "vault"
    kind, text = client.refusal("list", "packs/", env=server.env(AWS_SECRET_ACCESS_KEY="wrong"))
    assert kind == "unauthorized" and "AWS_SECRET_ACCESS_KEY" in text, text
    kind, text = client.refusal("get", "a", 5, env=server.env(AWS_ACCESS_KEY_ID="unknown"))
    assert kind == "unauthorized" and text.endswith("check AWS_ACCESS_KEY_ID"), text
    kind, text = client.refusal("get", "a", 5, env=server.env(AWS_REGION="eu-central-1"))
    assert kind == "invalid_input" and "AWS_REGION" in text, text
    begun = time.monotonic()
    for missing in [{}, {"AWS_SECRET_ACCESS_KEY": "x"}, {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": ""}]:
        kind, text = client.refusal("get", "a", 5, env=missing)
        assert kind == "unauthorized" and "no credentials for s3://vault/site: set AWS_" in text, text
    # Three starts of a program, and nothing is tried again for 30 s.
    assert time.monotonic() - begun < 20
    # A program that speaks another protocol.
    endpoint = f"https://127.0.0.1:{server.port}"
    kind, text = client.refusal("get", "a", 5, env=server.env(AWS_ENDPOINT_URL=endpoint), patience=1)
    assert kind == "io" and endpoint in text, text


def test_tls_with_a_private_authority(tmp_path):
    folder = tmp_path / "s3"
    folder.mkdir()
    key, certificate = self_signed(folder, "s3")
    with contextlib.closing(S3Server(folder, certificate=certificate, key=key)) as server:
        client = Client(server.start(), tmp_path)
        kind, text = client.refusal("put", "a", client.file(5))
        assert kind == "io" and "is not trusted" in text and "AWS_CA_BUNDLE" in text, text
        env = server.env(AWS_CA_BUNDLE=str(certificate))
        client.answer("put", "a", client.file(8 * MIB), env=env)
        assert client.answer("get", "a", 8 * MIB, env=env) == client.file(8 * MIB).read_bytes()


def test_a_dead_server_times_out(client, server):
    client.answer("put", "a", client.file(5))
    server.stop()
    begun = time.monotonic()
    done = client.run("get", "a", 5, env=server.env(direct=True), patience=1)
    # Without its patience it would be 30 s. The start of the program counts, too.
    assert time.monotonic() - begun < 15
    assert done.returncode == 1
    text = done.stderr.decode()
    assert re.search(r"gave up after \d+ attempts in [12] s: reading the object a in s3://vault/site", text), text
    assert f"http://127.0.0.1:{server.port} cannot be reached" in text
    # One that returns in time is waited for. The proxy knows of the attempts; it closes their connections immediately.
    words = client.words("get", "a", 5)
    with subprocess.Popen(words, env=client.kept | server.env(), stdout=subprocess.PIPE) as process:
        wait_until(lambda: server.proxy.refused >= 2, "two attempts")
        server.start()
        assert process.communicate(timeout=60)[0] == client.file(5).read_bytes()


@pytest.mark.parametrize("at", [1, 100_000, 5 * MIB, 8 * MIB + 500])
def test_interrupted_transfers_are_retried(client, server, at):
    content = client.file(8 * MIB)
    server.proxy.cut_after(at)
    client.answer("put", "packs/a", content)
    assert server.proxy.has_cut()
    before = server.proxy.passed
    server.proxy.cut_after(at)
    assert client.answer("get", "packs/a", 8 * MIB) == content.read_bytes()
    assert server.proxy.has_cut()
    # Received data was not read again; data in flight was.
    assert server.proxy.passed - before < 8 * MIB + MIB


def test_a_request_to_a_busy_server_is_retried(client, server):
    content = client.file(3 * MIB)
    for words in [("put", "packs/a", content), ("get", "packs/a", 3 * MIB), ("list", "packs/"), ("delete", "packs/a")]:
        before = len(server.proxy.requests)
        server.proxy.answer_busy(3)
        client.answer(*words)
        assert len(server.proxy.requests) == before + 4
    assert server.objects() == []
    server.proxy.answer_busy(1000)
    kind, text = client.refusal("list", "packs/", patience=1)
    assert kind == "io" and "SlowDown" in text and "gave up after" in text, text


def test_sigint_ends_a_put_into_a_black_hole(client, server):
    server.proxy.hold_after(MIB)
    words = client.words("put", "packs/a", client.file(8 * MIB), patience=120)
    with subprocess.Popen(words, env=client.kept | server.env(), stderr=subprocess.PIPE) as process:
        server.proxy.wait_for_hold()
        # It has filled the buffers of the kernel.
        wait_until(lambda: sleeps(process.pid), "the put waits")
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=20)[1].decode()
    # A wait for progress would take a third of its patience.
    assert time.monotonic() - begun < 10
    assert process.returncode == 130 and text.startswith("interrupted: storing the object packs/a"), text
    server.proxy.release()


def test_a_silent_server_times_out(client, server):
    server.proxy.hold()
    begun = time.monotonic()
    kind, text = client.refusal("put", "packs/a", client.file(8 * MIB), patience=2)
    # With the start of the program; else it would be 30 s.
    assert 1.9 < time.monotonic() - begun < 15
    assert kind == "io" and "no byte moved for 0.7 s" in text, text


def test_slow_bytes_are_waited_for(client, server):
    """The last bytes of a put are in socket buffers, where their progress is invisible."""
    server.proxy.delay(0.1)
    begun = time.monotonic()
    client.answer("put", "packs/a", client.file(3 * MIB), patience=6)
    assert client.answer("get", "packs/a", 3 * MIB, patience=6) == client.file(3 * MIB).read_bytes()
    assert time.monotonic() - begun > 6
