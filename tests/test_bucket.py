"""Copies in a bucket of a real S3 server: they are restored unchanged, despite any disturbance."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess

import pytest

from support.bucket import Bucket
from support.cli import Coldrise
from support.copies import addresses, check, content, make_history
from support.garage import GarageServer
from support.image import Image
from support.nbdserver import Nbdkit, read_all, wait_until
from support.s3 import S3Server
from support.wallclock import BothClocks

KIB, MIB = 1 << 10, 1 << 20
FAILED, INCOMPLETE, NO_REPOSITORY, BUSY, WRONG_PASSPHRASE, INTERRUPTED = 1, 3, 10, 11, 12, 130


def incoming(program, address):
    """What `show` says while it is coming; None before."""
    done = program.run("--json", "show", address)
    return json.loads(done.stdout) if done.returncode == 0 and '"coming"' in done.stdout else None


@pytest.fixture
def bucket(coldrise, tmp_path):
    with contextlib.closing(S3Server(tmp_path / "s3")) as server:
        yield Bucket(tmp_path, coldrise, server)


@pytest.fixture
def any_bucket(coldrise, tmp_path, request):
    """For tests that do not look at what the server has stored."""
    garage = request.config.getoption("garage")
    (tmp_path / "s3").mkdir()
    with contextlib.closing(GarageServer(tmp_path / "s3", garage) if garage else S3Server(tmp_path / "s3")) as server:
        yield Bucket(tmp_path, coldrise, server)


@pytest.mark.encrypted
def test_a_repository_and_a_disk_are_restored_from_a_bucket(any_bucket, coldrise, nbdkit, tmp_path):
    bucket = any_bucket
    history = make_history(coldrise, nbdkit, tmp_path)
    bucket.init()
    copied = bucket.copy()
    points = copied["machines"][0]["points"]
    assert len(points) == 4 and points[0]["base"] is None and points[1]["base"] == points[0]["point"]
    assert points[1]["read_bytes"] <= 4 * 16 * KIB
    assert bucket.copy()["points"] == 0
    assert bucket.points() == addresses(coldrise)
    for point, disks in history.items():
        for disk, expected in disks.items():
            target = tmp_path / "direct.raw"
            bucket.program.json("bucket", "restore", bucket.url, f"web01/{point}/{disk}", target, "--force")
            assert target.read_bytes() == expected, (point, disk)
    shutil.rmtree(coldrise.repository)
    new = bucket.restored()
    check(new, history, tmp_path)
    assert new.json("verify")["is_clean"]
    # The same points: nothing of them is copied to where they came from.
    new_to_bucket = new.json("copy", *bucket.to)
    assert (new_to_bucket["points"], new_to_bucket["machines"][0]["already_there"]) == (0, 4)


def test_latest_and_other_formats(any_bucket, coldrise, tmp_path):
    bucket = any_bucket
    image = Image(2 * MIB)
    image.fill(0, MIB, "content")
    coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    bucket.init("--compression", "zstd:9", "--chunk-size", "64K")
    bucket.copy()
    target = tmp_path / "disk.qcow2"
    restored = bucket.json("restore", "web01/latest", target)
    assert restored["address"].endswith("/vda") and restored["format"] == "qcow2"
    plain = tmp_path / "plain.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", target, plain], check=True)
    assert plain.read_bytes() == image.content
    for address, words in (("web02/latest", "no machine web02"), ("web01/latest~3", "no such point"), ("web01/latest/vdb", "vdb")):
        refused = bucket.program.run("bucket", "restore", bucket.url, address, tmp_path / "none.raw")
        assert refused.returncode == FAILED and words in refused.stderr, refused.stderr
    assert not (tmp_path / "none.raw").exists()


def test_content_in_the_bucket_is_not_sent_again(bucket, coldrise, tmp_path):
    image = Image(24 * MIB)
    image.write(0, random.Random(1).randbytes(20 * MIB))
    coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    bucket.init()
    bucket.copy()
    first = bucket.sent()
    # As another machine, from another repository, without the index.
    other = bucket.empty("other")
    other.backup("db01", vda=tmp_path / "vda.raw")
    other.json("copy", *bucket.to)
    assert bucket.sent() - first < 64 * KIB
    # An index that is damaged is written again.
    index = next((coldrise.repository / "buckets").iterdir()) / "db"
    for path in index.glob("MANIFEST*"):
        path.write_bytes(b"\0" * 100)
    image.write(5 * MIB, b"changed" * 100)
    coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    assert bucket.copy()["points"] == 1
    assert bucket.sent() - first < 200 * KIB
    assert content(bucket.restored(), "web01/latest", tmp_path) == image.content


def test_the_bucket_contains_no_plain_text(bucket, coldrise, tmp_path):
    image = Image(MIB)
    image.fill(0, MIB, "a sentence that is easy to find")
    (tmp_path / "machine.xml").write_text("<domain><name>secretname</name></domain>", encoding="utf-8")
    coldrise.json("backup", "secretname", "--config", tmp_path / "machine.xml", f"secretdisk=raw:{image.save(tmp_path / 'vda.raw')}")
    bucket.init("--compression", "none")
    bucket.copy()
    there = bucket.server.data / bucket.server.bucket
    for path in there.rglob("*"):
        revealed = str(path.relative_to(there)).encode() + (path.read_bytes() if path.is_file() else b"")
        assert not [word for word in (b"secret", b"easy to find", b"20261") if word in revealed.replace(b"site a", b"")], path


def test_wrong_addresses_are_refused(bucket, coldrise, tmp_path):
    bucket.init()
    coldrise.backup("web01", vda=Image(MIB).save(tmp_path / "vda.raw"))
    for program, arguments, code, words in [
        (bucket.program, ["bucket", "list", "s3://nobucket/x"], NO_REPOSITORY, "nobucket"),
        (bucket.program, ["bucket", "list", "s3://vault/elsewhere"], NO_REPOSITORY, "coldrise bucket init"),
        (bucket.program, ["bucket", "list", "/a/path"], 2, "s3://BUCKET"),
        (bucket.program, ["bucket", "init", "s3://vault/site a"], FAILED, "already"),
        (coldrise, ["copy", "--to", "s3://vault/elsewhere"], NO_REPOSITORY, "coldrise bucket init"),
    ]:
        refused = program.run(*arguments)
        assert refused.returncode == code and words in refused.stderr, (arguments, refused)


@pytest.mark.encrypted
def test_wrong_keys_and_passphrases(bucket, coldrise, tmp_path):
    bucket.init()
    coldrise.backup("web01", vda=Image(MIB).save(tmp_path / "vda.raw"))
    refused = coldrise.run("copy", "--to", bucket.url)
    assert refused.returncode == WRONG_PASSPHRASE and bucket.url in refused.stderr
    bucket.copy()
    bucket.use(coldrise, AWS_SECRET_ACCESS_KEY="another")
    refused = coldrise.run("copy", *bucket.to, "--retry", "2s")
    assert refused.returncode != 0 and "AWS_SECRET_ACCESS_KEY" in refused.stderr, refused.stderr
    # A failure is on record, and not shown as success.
    assert bucket.source.json("copies", bucket.url)["targets"][0]["state"] == "failing"
    bucket.use(coldrise)
    bucket.copy()
    assert bucket.source.json("copies", bucket.url)["targets"][0]["state"] == "current"
    assert bucket.source.json("copies", bucket.url, "--forget")
    assert bucket.source.json("copies")["targets"] == []


def test_space_is_returned_except_during_a_copy(bucket, coldrise, tmp_path):
    bucket.init()
    image = Image(32 * MIB)
    contents = {}
    for day in range(1, 5):
        image.write(0, random.Random(day).randbytes(20 * MIB))
        image.write(20 * MIB, random.Random(99).randbytes(4 * MIB))
        point = f"2026110{day}T100000Z"
        coldrise.json("backup", "web01", f"vda=raw:{image.save(tmp_path / 'vda.raw')}", "--time", point)
        contents[point] = bytes(image.content)
    bucket.copy()
    full = bucket.sent()
    shown = bucket.json("prune", "--keep-last", "1", "--dry-run")
    assert shown["forgotten"] == 3 and len(bucket.points()) == 4 and bucket.sent() == full
    # A copy that was killed a moment ago refuses it, and so does one that runs.
    image.write(0, random.Random(7).randbytes(20 * MIB))
    coldrise.backup("db01", vda=image.save(tmp_path / "vda.raw"))
    bucket.server.proxy.gate("^PUT .*/packs/", 0)
    copying = coldrise.start("copy", *bucket.to, "--retry", "60s")
    wait_until(lambda: any("busy/w-" in name for name in bucket.server.objects()), "the copy's object")
    direct = Coldrise(tmp_path / "none", bucket.passphrase_file)
    direct.more = bucket.server.env(direct=True)
    refused = direct.run("bucket", "prune", bucket.url, "--keep-last", "1")
    assert refused.returncode == BUSY and "a copy writes to it" in refused.stderr, refused
    bucket.server.proxy.release()
    assert copying.wait(60) == 0
    pruned = bucket.json("prune", "--keep-last", "1")
    # What was forgotten before the refusal stays forgotten.
    assert pruned["tidied"]["returned_bytes"] > 50 * MIB
    assert bucket.sent() < full - 30 * MIB
    left = bucket.points()
    assert {point.split("/")[0] for point in left} == {"web01", "db01"} and len(left) == 2
    assert bucket.json("verify")["damaged"] == []
    target = tmp_path / "direct.raw"
    bucket.json("restore", "web01/latest", target)
    assert target.read_bytes() == contents["20261104T100000Z"]
    # Points pruned there are not copied again.
    assert bucket.copy()["points"] == 0


def test_a_cancelled_copy_leaves_no_traces(bucket, coldrise, tmp_path):
    bucket.init()
    image = Image(20 * MIB)
    image.write(0, random.Random(3).randbytes(20 * MIB))
    coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    copying = start_of_copy(bucket)
    copying.send_signal(signal.SIGINT)
    assert copying.wait(30) == INTERRUPTED
    bucket.server.proxy.release()
    # One that hears nothing from the server ends, too; what says that it is at work is forgotten later.
    clock = BothClocks(tmp_path)
    with clock.of(coldrise):
        copying = coldrise.start("copy", *bucket.to)
    wait_until(lambda: len([name for name in bucket.server.objects() if "busy/" in name]) == 1, "its beginning")
    bucket.server.proxy.hold()
    copying.send_signal(signal.SIGINT)
    assert clock.end_of(copying) == INTERRUPTED
    # What was held is lost: the server must not hear the end of the copy after all.
    bucket.server.proxy.cut()
    bucket.server.proxy.release()
    [busy] = (bucket.server.data / bucket.server.bucket).rglob("busy/*")
    os.utime(busy, (0, 0))
    kept = bucket.sent()
    # Nothing is at work there. But packs without any point are kept: they may have had some.
    refused = bucket.program.run("bucket", "prune", bucket.url, "--keep-last", "1")
    assert refused.returncode == FAILED and "no points" in refused.stderr and bucket.sent() == kept > 0, refused
    bucket.copy()
    assert bucket.sent() < 22 * MIB, "what was there was sent again"


def start_of_copy(bucket, *options, **keywords):
    """A copy of more than one pack, one of which is in the bucket; the others are held."""
    before = bucket.sent()
    bucket.server.proxy.gate("^PUT .*/packs/", 1)
    copying = bucket.source.start("copy", *bucket.to, *options, **keywords)
    wait_until(lambda: bucket.sent() > before, "a pack")
    return copying


def test_a_session_over_a_point_arriving_from_the_bucket(any_bucket, coldrise, tmp_path):
    """A machine can boot while its point is fetched; received data is kept when the copy is killed."""
    bucket = any_bucket
    disk = bytearray(random.Random(3).randbytes(48 * MIB))
    disk[MIB : 3 * MIB] = bytes(2 * MIB)
    (tmp_path / "vda.raw").write_bytes(disk)
    coldrise.json("backup", "web01", f"vda=raw:{tmp_path / 'vda.raw'}", "--time", "20261101T100000Z")
    bucket.init()
    bucket.copy()
    new = bucket.empty()
    fetch = ["copy", "--from", bucket.url, "--from-passphrase-file", bucket.passphrase_file, "--rate", "1M"]
    clock = BothClocks(tmp_path)
    with clock.of(new):
        copying = new.start(*fetch, stderr=subprocess.PIPE)

    def is_noted():
        # Received data is recorded periodically.
        clock.skip(10)
        found = incoming(new, "web01/20261101T100000Z")
        return found and found["percent_here"] > 5

    wait_until(is_noted, "the beginning")
    new.json("publish", "web01/latest", "--name", "early")
    server = Nbdkit(new, tmp_path / "served")
    with server.connect("live/early/vda") as machine:
        rng = random.Random(5)
        for _ in range(60):
            length = rng.randint(1, 200_000)
            offset = rng.randrange(0, len(disk) - length)
            assert bytes(machine.pread(length, offset)) == disk[offset : offset + length], offset
        machine.pwrite(b"\x5a" * 5000, 40 * MIB + 300)
        machine.flush()
        assert incoming(new, "web01/20261101T100000Z")["percent_here"] < 90
        copying.kill()
        copying.wait()
        here = incoming(new, "web01/20261101T100000Z")
        assert not here["is_reachable"] and here["percent_here"] > 5
        new.json(*fetch[:-2])
        disk[40 * MIB + 300 : 40 * MIB + 5300] = b"\x5a" * 5000
        assert read_all(machine) == disk
    server.stop()
    sealed = new.json("seal", "early")["address"]
    assert content(new, sealed, tmp_path) == disk
    assert new.json("verify")["is_clean"]


def test_a_boot_trace_is_copied_with_the_machine(bucket, coldrise, nbdkit, tmp_path):
    image = Image(8 * MIB)
    image.fill(0, 8 * MIB, "system")
    address = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    coldrise.publish(address, "trial")
    with nbdkit() as server, server.connect("live/trial/vda") as machine:
        for offset in range(0, 4 * MIB, 64 * KIB):
            machine.pread(4096, offset)
    coldrise.json("unpublish", "trial", "--discard")
    assert len(list((coldrise.repository / "traces").iterdir())) == 1
    bucket.init()
    bucket.copy()
    assert len([name for name in bucket.server.objects() if "traces/" in name]) == 1
    new = bucket.restored()
    assert len(list((new.repository / "traces").iterdir())) == 1
    bucket.json("forget", address)
    assert not [name for name in bucket.server.objects() if "packs/" in name or "traces/" in name]


def damage_a_value(bucket):
    """Flips a bit in the largest pack; returns its file."""
    packs = (bucket.server.data / bucket.server.bucket).rglob("packs/*")
    pack = max(packs, key=lambda path: path.stat().st_size)
    kept = pack.read_bytes()
    pack.write_bytes(kept[:-1000] + bytes([kept[-1000] ^ 1]) + kept[-999:])
    return pack


def test_damage_is_named(bucket, coldrise, tmp_path):
    bucket.init()
    image = Image(8 * MIB)
    image.write(0, random.Random(1).randbytes(8 * MIB))
    address = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    bucket.copy()
    assert bucket.json("verify")["damaged"] == [] and bucket.json("verify", "--quick")["damaged"] == []
    (bucket.server.data / bucket.server.bucket / "site a/repository.json").unlink()
    mended = bucket.program.run("bucket", "verify", bucket.url, "--mend")
    assert mended.returncode == FAILED and "put repository.json back" in mended.stdout, mended
    assert "forget" not in mended.stdout and bucket.json("verify")["damaged"] == []
    pack = damage_a_value(bucket)
    found = bucket.program.run("--json", "bucket", "verify", bucket.url)
    assert found.returncode == FAILED and address in found.stdout
    failed = bucket.program.run("bucket", "restore", bucket.url, "web01/latest", tmp_path / "bad.raw")
    assert failed.returncode == FAILED and not (tmp_path / "bad.raw").exists()
    # The next copy would have it as its base. It does not after what is damaged was removed.
    mended = bucket.program.run("--json", "bucket", "verify", bucket.url, "--mend")
    assert mended.returncode == FAILED and json.loads(mended.stdout)["mended_packs"] == 1
    image.write(0, b"changed" * 100)
    second = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    bucket.copy()
    target = tmp_path / "second.raw"
    bucket.json("restore", second, target)
    assert target.read_bytes() == image.content
    verified = bucket.program.run("--json", "bucket", "verify", bucket.url)
    assert [found["address"] for found in json.loads(verified.stdout)["damaged"]] == [f"{address}/vda"]
    pack.unlink()
    assert bucket.program.run("bucket", "verify", bucket.url, "--quick").returncode == FAILED


def test_copies_detect_removals_without_their_index(bucket, coldrise, tmp_path):
    bucket.init()
    image = Image(8 * MIB)
    image.write(0, random.Random(1).randbytes(8 * MIB))
    first = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    bucket.copy()
    damage_a_value(bucket)
    assert bucket.program.run("bucket", "verify", bucket.url, "--mend").returncode == FAILED
    shutil.rmtree(coldrise.repository / "buckets")
    for seed in (2, 3):
        image.write(4 * MIB, random.Random(seed).randbytes(1000))
        point = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
        bucket.copy()
        target = tmp_path / f"{seed}.raw"
        bucket.json("restore", point, target)
        assert target.read_bytes() == image.content
    verified = bucket.program.run("--json", "bucket", "verify", bucket.url)
    assert [found["address"] for found in json.loads(verified.stdout)["damaged"]] == [f"{first}/vda"]


def test_damaged_and_lost_point_documents_are_reported(bucket, coldrise, tmp_path):
    bucket.init()
    image = Image(4 * MIB)
    points = []
    for seed in range(3):
        image.write(0, random.Random(seed).randbytes(MIB))
        points.append(coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw")))
    bucket.copy()
    there = bucket.server.data / bucket.server.bucket / "site a"
    documents = sorted((there / "points").rglob("*"), key=lambda path: path.name if path.is_file() else "")[-3:]
    documents[1].write_bytes(b"\0" * 100)
    (there / "points/zzz").write_bytes(b"x")
    for action in (["list"], ["verify"], ["prune", "--keep-last=1", "--dry-run"]):
        output = bucket.program.run("bucket", action[0], bucket.url, *action[1:])
        assert output.returncode == FAILED and documents[1].name in output.stdout and "versions" in output.stdout, output
    # The others are restored.
    new = bucket.empty()
    copied = new.run("copy", "--from", bucket.url, "--from-passphrase-file", bucket.passphrase_file)
    assert copied.returncode == INCOMPLETE and documents[1].name in copied.stderr
    assert addresses(new) == {points[0], points[2]}
    refused = bucket.program.run("bucket", "prune", bucket.url, "--keep-last", "1")
    assert refused.returncode == FAILED and "--damaged" in refused.stderr
    assert bucket.json("forget", "--damaged")["damaged_points"] == 1
    left = bucket.points()
    assert points[2] in left and points[1] not in left
    for path in documents:
        path.unlink(missing_ok=True)
    size = bucket.sent()
    assert bucket.program.run("bucket", "verify", bucket.url).returncode == INCOMPLETE
    refused = bucket.program.run("bucket", "prune", bucket.url, "--keep-last", "1")
    assert refused.returncode == FAILED and "no points" in refused.stderr and bucket.sent() == size


def test_copies_survive_a_disturbed_connection(bucket, coldrise, tmp_path):
    bucket.init()
    image = Image(20 * MIB)
    image.write(0, random.Random(3).randbytes(20 * MIB))
    coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    bucket.server.proxy.cut_after(9 * MIB)
    bucket.server.proxy.answer_busy(3)
    bucket.copy()
    assert bucket.server.proxy.has_cut()
    bucket.server.proxy.cut_after(9 * MIB)
    assert content(bucket.restored(), "web01/latest", tmp_path) == image.content
    # Waiting for an unreachable server is limited, and the next copy resumes.
    image.write(0, random.Random(4).randbytes(20 * MIB))
    coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    before = bucket.sent()
    # The server fails before the rest has arrived.
    copying = start_of_copy(bucket, "--retry", "1s", stderr=subprocess.PIPE)
    bucket.server.kill()
    bucket.server.proxy.release()
    _, output = copying.communicate(timeout=60)
    assert copying.returncode != 0, output
    bucket.server.start()
    assert len(bucket.points()) == 1
    kept = bucket.sent() - before
    bucket.copy()
    assert bucket.sent() - before < 22 * MIB and kept > 0, "what was there was sent again"
    assert content(bucket.restored("again"), "web01/latest", tmp_path) == image.content


def test_kills_at_random_moments(any_bucket, coldrise, tmp_path, request):
    """The points in the bucket are equal or absent, and the next copy brings the rest."""
    bucket = any_bucket
    seed = request.config.getoption("bucket_seed") or int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    rng = random.Random(seed)
    bucket.init()
    image = Image(24 * MIB)
    contents = {}
    for number in range(request.config.getoption("bucket_kills")):
        changed = 0
        for _ in range(rng.randint(1, 10)):
            length = rng.randint(1, 100) * 4 * KIB
            image.write(rng.randrange(0, len(image) - length, 512), rng.randbytes(length))
            changed += length
        if number % 4 == 0:
            # More than one pack.
            changed = 20 * MIB
            image.write(0, rng.randbytes(changed))
        machine = f"machine{number % 2}"
        address = coldrise.backup(machine, vda=image.save(tmp_path / "vda.raw"))
        contents[address] = bytes(image.content)
        # Some complete.
        bucket.server.proxy.hold_after(rng.randint(1, changed * 6 // 5 + 100 * KIB))
        copying = coldrise.start("copy", *bucket.to, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: bucket.server.proxy.is_held() or copying.poll() is not None, "the moment")
        copying.send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT]))
        bucket.server.proxy.release()
        copying.wait(30)
        there = bucket.points()
        assert there <= contents.keys()
        for address in sorted(there)[-2:]:
            target = tmp_path / "direct.raw"
            bucket.json("restore", address, target, "--force")
            assert target.read_bytes() == contents[address], (seed, address)
    bucket.copy()
    assert bucket.points() == contents.keys(), seed
    assert bucket.json("verify")["damaged"] == [], seed
    new = bucket.restored()
    for address, expected in contents.items():
        assert content(new, address, tmp_path) == expected, (seed, address)
