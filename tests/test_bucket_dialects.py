"""Object stores that speak less of S3: what is not needed is not used, and what is needed is looked for by `bucket init`."""

import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import threading

import pytest

from support.bucket import Bucket
from support.cli import Coldrise
from support.dialect_proxy import Answer, DialectProxy, refusal
from support.image import Image
from support.nbdserver import DEADLINE_S
from support.s3 import S3Server

MIB = 1 << 20
FAILED, BUSY = 1, 11


def plain(request, ask):
    return ask(request)


@pytest.fixture
def bucket(coldrise, tmp_path):
    with contextlib.closing(S3Server(tmp_path / "s3")) as server:
        server.proxy.close()
        server.proxy = DialectProxy(server.port, plain)
        yield Bucket(tmp_path, coldrise, server)


def a_backup(coldrise, tmp_path, seed):
    image = Image(4 * MIB)
    image.write(0, random.Random(seed).randbytes(3 * MIB))
    coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    return image.content


def use_all_of_it(bucket, coldrise, tmp_path):
    """From `init` to a prune and a restore."""
    bucket.init()
    a_backup(coldrise, tmp_path, 1)
    bucket.copy()
    content = a_backup(coldrise, tmp_path, 2)
    bucket.copy()
    assert bucket.json("verify", "--mend")["damaged"] == []
    assert bucket.json("prune", "--keep-last", "1")["tidied"]["removed_packs"] > 0
    bucket.json("restore", "web01/latest", tmp_path / "direct.raw")
    assert (tmp_path / "direct.raw").read_bytes() == content


# Statuses with which stores refuse If-None-Match, and one that ignores it.
@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument"), (405, ""), (412, "PreconditionFailed"), (None, "")]
)
def test_conditional_requests_are_not_needed(bucket, coldrise, tmp_path, status, code):
    def dialect(request, ask):
        conditions = [name for name in request.headers if name.startswith("if-")]
        if conditions and status:
            return refusal(status, code)
        kept = {name: value for name, value in request.headers.items() if name not in conditions}
        return ask(dataclasses.replace(request, headers=kept))

    bucket.server.proxy.dialect = dialect
    use_all_of_it(bucket, coldrise, tmp_path)
    again = bucket.program.run("bucket", "init", bucket.url)
    assert again.returncode == FAILED and "a repository, or the remains of one, is there already" in again.stderr, again
    assert bucket.json("verify")["damaged"] == []


def test_a_frequently_busy_store_is_retried(bucket, coldrise, tmp_path):
    """Every seventh request is refused for now."""
    requests = bucket.server.proxy.requests

    def dialect(request, ask):
        return refusal(503, "SlowDown") if len(requests) % 7 == 0 else ask(request)

    bucket.server.proxy.dialect = dialect
    use_all_of_it(bucket, coldrise, tmp_path)


def without_etag(request, ask):
    answer = ask(request)
    answer.headers.pop("etag", None)
    return answer


def chunked(request, ask):
    answer = ask(request)
    answer.is_chunked = request.is_read() and answer.status < 300
    return answer


stored = {}


def ignores_range(request, ask):
    if request.method == "PUT":
        stored[request.path] = request.body
    answer = ask(request)
    if answer.status == 206:
        del answer.headers["content-range"]
        return Answer(200, answer.headers, stored[request.path])
    return answer


def sends_whole_objects_as_such(request, ask):
    """A range that has the whole object in it is answered with 200."""
    answer = ask(request)
    if answer.status == 206 and request.range()[0] == 0 and request.range()[1] >= len(answer.body):
        del answer.headers["content-range"]
        answer.status = 200
    return answer


def without_new_lists(request, ask):
    return refusal(501, "NotImplemented") if request.is_list() else ask(request)


def in_lists(pattern, text=b""):
    def dialect(request, ask):
        answer = ask(request)
        if request.is_list():
            answer.body = re.sub(pattern, text, answer.body, flags=re.DOTALL)
        return answer

    return dialect


def other_content(request, ask):
    answer = ask(request)
    if request.is_read() and answer.status < 300:
        answer.body = bytes(len(answer.body))
    return answer


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        (without_etag, "cannot be used, because its answers to PUT have no ETag"),
        (chunked, "cannot be used, because its answers to GET have no Content-Length"),
        (ignores_range, "cannot be used, because it sends whole objects where a range is asked for"),
        (sends_whole_objects_as_such, "cannot be used, because it sends whole objects where a range is asked for"),
        (without_new_lists, "cannot be used, because it does not support this request"),
        (in_lists(rb"<NextContinuationToken>.*</NextContinuationToken>"), "cannot be used, because it lists only the first page"),
        (in_lists(rb"<Contents>.*</Contents>"), "cannot be used, because a new object is missing from its listing"),
        (in_lists(rb"<LastModified>.*?</LastModified>"), "cannot be used, because its answer is not understood"),
        (other_content, "cannot be used, because a new object cannot be read back"),
    ],
)
def test_an_unusable_store_is_refused_immediately(bucket, dialect, words):
    bucket.server.proxy.dialect = dialect
    refused = bucket.program.run("--json", "bucket", "init", bucket.url)
    assert refused.returncode == FAILED and words in refused.stdout + refused.stderr, refused
    assert "Generic" not in refused.stdout + refused.stderr
    assert json.loads(refused.stdout)["error"]["kind"] == "unsupported", refused
    assert not [request for request in bucket.server.proxy.requests if "repository." in request.path]
    assert bucket.server.objects() == []


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented")])
def test_a_key_without_delete_permission_is_enough(bucket, coldrise, tmp_path, status, code):
    def dialect(request, ask):
        return refusal(status, code) if request.method == "DELETE" else ask(request)

    bucket.server.proxy.dialect = dialect
    made = bucket.program.run("bucket", "init", bucket.url)
    assert made.returncode == 0 and "bucket prune and bucket forget will not: deleting the object busy/" in made.stderr, made
    content = a_backup(coldrise, tmp_path, 1)
    bucket.copy()
    left = [name for name in bucket.server.objects() if "busy/" in name]
    assert len(left) == 3, left
    # With a key that may, a prune removes what is left.
    bucket.server.proxy.dialect = plain
    bucket.json("prune", "--keep-last", "1")
    assert [name for name in bucket.server.objects() if "busy/" in name] == []
    bucket.json("restore", "web01/latest", tmp_path / "direct.raw")
    assert (tmp_path / "direct.raw").read_bytes() == content


class Stop:
    """Holds the first request that stores repository.json."""

    def __init__(self):
        self.has_come, self.may_go = threading.Event(), threading.Event()

    def __call__(self, request, ask):
        if request.method == "PUT" and request.path.endswith("/repository.json") and not self.has_come.is_set():
            self.has_come.set()
            assert self.may_go.wait(DEADLINE_S)
        return ask(request)


def other_init(bucket):
    """Of a host with another passphrase."""
    passphrase_file = bucket.folder / "other-passphrase"
    passphrase_file.write_text("another\n", encoding="utf-8")
    return bucket.use(Coldrise(bucket.folder / "none", passphrase_file))


def test_two_inits_do_not_mix(bucket):
    bucket.server.proxy.dialect = stop = Stop()
    first = bucket.program.start("--json", "bucket", "init", bucket.url, stdout=subprocess.PIPE)
    assert stop.has_come.wait(DEADLINE_S)
    refused = other_init(bucket).run("bucket", "init", bucket.url)
    assert refused.returncode == BUSY and "another coldrise bucket init" in refused.stderr, refused
    stop.may_go.set()
    made, _ = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0
    refused = other_init(bucket).run("bucket", "init", bucket.url)
    assert refused.returncode == FAILED and "a repository is there already" in refused.stderr, refused
    there = bucket.server.data / bucket.server.bucket / "site a"
    assert sorted(path.name for path in there.rglob("*") if path.is_file()) == ["repository.copy.json", "repository.json"]
    texts = [(there / name).read_text(encoding="utf-8") for name in ("repository.json", "repository.copy.json")]
    assert texts[0] == texts[1] and json.loads(made)["id"] in texts[0]


def test_many_concurrent_inits(bucket):
    words = ["--json", "bucket", "init", bucket.url]
    inits = [bucket.program.start(*words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(6)]
    outputs = [init.communicate(timeout=DEADLINE_S)[0] for init in inits]
    made = [json.loads(text)["id"] for init, text in zip(inits, outputs, strict=True) if init.returncode == 0]
    assert {init.returncode for init in inits} <= {0, FAILED, BUSY} and len(made) <= 1, outputs
    left = [name for name in bucket.server.objects() if "repository." in name]
    assert len(left) == 2 * len(made), left
    made = made or [bucket.init()["id"]]
    text = (bucket.server.data / bucket.server.bucket / "site a/repository.json").read_text(encoding="utf-8")
    assert made[0] in text


def test_leftovers_of_a_killed_init_are_removed(bucket, coldrise, tmp_path):
    bucket.server.proxy.dialect = stop = Stop()
    first = bucket.program.start("bucket", "init", bucket.url)
    assert stop.has_come.wait(DEADLINE_S)
    first.kill()
    first.wait()
    refused = bucket.program.run("bucket", "init", bucket.url)
    assert refused.returncode == BUSY and "killed in the last 15 minutes" in refused.stderr, refused
    [claim] = (bucket.server.data / bucket.server.bucket).rglob("busy/*")
    os.utime(claim, (0, 0))
    use_all_of_it(bucket, coldrise, tmp_path)
    assert [name for name in bucket.server.objects() if "busy/" in name] == []
