"""coldrise repair of what has to be read before anything else."""

import json
import random
import shutil

import pytest

from support.cli import Coldrise
from support.image import Image
from support.prepared import become

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def backed_up(template, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    program = Coldrise.copied(template, folder / "repository")
    image = Image(8 * MIB)
    image.fill(0, MIB, "first")
    points = [program.backup("web01", vda=image.save(folder / "vda.raw"))]
    image.fill(MIB, 300 * KIB, "second")
    path = image.save(folder / "vda.raw")
    points += [program.backup("web01", vda=path) for _ in range(2)]
    return program.repository, points, path


@pytest.fixture
def filled(coldrise, backed_up, tmp_path):
    """Three points; the last one, of which nothing is new, is in the log."""
    prepared, points, path = backed_up
    become(coldrise, prepared)
    shutil.copy(path, tmp_path / "vda.raw")
    return points.copy(), path.read_bytes()


def one_of(folder, pattern):
    (path,) = [path for path in folder.glob(pattern) if path.stat().st_size]
    return path


@pytest.mark.parametrize("pattern", ["repository.json", "db/CURRENT", "db/MANIFEST-*", "db/*.log"])
def test_a_flipped_bit_loses_nothing(coldrise, filled, tmp_path, pattern):
    points, content = filled
    numbers = random.Random(pattern)
    for round_number in range(3):
        path = one_of(coldrise.repository, pattern)
        damaged = bytearray(path.read_bytes())
        # The first bytes, and any.
        at = numbers.randrange(len(damaged)) if round_number else 0
        damaged[at] ^= 1 << numbers.randrange(8)
        path.write_bytes(damaged)
        done = coldrise.run("list")
        assert done.returncode == 0 or "coldrise repair" in done.stderr, (at, done.stderr)
        done = coldrise.run("--json", "repair")
        assert done.returncode == 0, (at, done.stdout, done.stderr)
        (machine,) = coldrise.json("list")["machines"]
        assert [point["address"] for point in machine["points"]] == points, at
        assert coldrise.json("verify")["is_clean"]
    coldrise.json("restore", f"{points[1]}/vda", tmp_path / "restored.raw")
    assert (tmp_path / "restored.raw").read_bytes() == content


def addresses(coldrise):
    (machine,) = coldrise.json("list")["machines"]
    return [point["address"] for point in machine["points"]]


@pytest.mark.parametrize("how", ["flipped", "cut", "removed"])
def test_a_damaged_log_is_never_continued(coldrise, filled, tmp_path, how):
    points, content = filled
    path = one_of(coldrise.repository, "db/*.log")
    damaged = bytearray(path.read_bytes())
    before = {path.name for path in (coldrise.repository / "db").glob("*.sst")}
    match how:
        case "flipped":
            damaged[20] ^= 4
            path.write_bytes(damaged)
        case "cut":
            path.write_bytes(damaged[: len(damaged) // 2])
        case "removed":
            path.unlink()
    for _ in range(2):
        refused = coldrise.run("backup", "web01", f"vda=raw:{tmp_path / 'vda.raw'}")
        assert refused.returncode == 1 and "run coldrise repair" in refused.stderr
        assert {path.name for path in (coldrise.repository / "db").glob("*.sst")} == before
    # The doctor says the same.
    examined = coldrise.run("--json", "doctor")
    assert examined.returncode == 1, examined.stdout
    findings = json.loads(examined.stdout.splitlines()[-1])["findings"]
    failures = [finding["message"] for finding in findings if finding["status"] == "fail"]
    if how == "flipped":
        assert len(failures) == 1 and "run coldrise repair" in failures[0], failures
    else:
        assert f"coldrise: {failures[0]}" == refused.stderr.strip()
    # No reader opens a file with a wrong checksum.
    verified = coldrise.run("verify")
    assert verified.returncode == 1 and "run coldrise repair" in verified.stdout + verified.stderr
    assert coldrise.run("repair").returncode == 0
    assert addresses(coldrise) == points
    later = coldrise.backup("web01", vda=tmp_path / "vda.raw")
    assert addresses(coldrise) == [*points, later]
    check(coldrise, [*points, later], content, tmp_path)


def test_a_lost_entry_of_the_file_list_is_reported(coldrise, filled, tmp_path):
    points, content = filled
    (coldrise.repository / "db/CURRENT").unlink()
    done = coldrise.run("list")
    assert done.returncode == 1 and "CURRENT" in done.stderr and "coldrise repair" in done.stderr
    assert json.loads(coldrise.run("--json", "repair").stdout.splitlines()[-1])["is_list_new"]
    check(coldrise, points, content, tmp_path)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("how", ["removed", "flipped"])
def test_one_of_two_high_water_marks_is_enough(coldrise, filled, tmp_path, number, how):
    points, _ = filled
    path = coldrise.repository / f"high-water.{number}"
    if how == "removed":
        path.unlink()
    else:
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 8
        path.write_bytes(damaged)
    found = json.loads(coldrise.run("--json", "verify").stdout.splitlines()[-1])
    assert not found["is_clean"] and path.name in str(found["damaged_files"])
    examined = coldrise.run("doctor")
    assert "warn  database" in examined.stdout and path.name in examined.stdout
    later = coldrise.backup("web01", vda=tmp_path / "vda.raw")
    assert coldrise.json("verify")["is_clean"]
    assert addresses(coldrise) == [*points, later]


def test_high_water_marks_are_not_followed_through_a_link(coldrise, filled, tmp_path):
    path, away = coldrise.repository / "high-water.1", tmp_path / "elsewhere"
    path.rename(away)
    path.symlink_to(away)
    other = coldrise.repository / "high-water.2"
    before = [away.read_bytes(), other.read_bytes()]
    coldrise.backup("web01", vda=tmp_path / "vda.raw")
    assert away.read_bytes() == before[0] and other.read_bytes() != before[1]
    assert "the file high-water.1: it is not a file: remove it" in coldrise.run("verify").stdout
    path.unlink()
    coldrise.backup("web01", vda=tmp_path / "vda.raw")
    assert path.is_file() and coldrise.json("verify")["is_clean"]


def lose(how, path):
    """The manifest, or most of it."""
    content = path.read_bytes()
    match how:
        case "removed":
            path.unlink()
        case "with its name":
            path.unlink()
            path.with_name("CURRENT").unlink()
        case "empty":
            path.write_bytes(b"")
        case "garbled":
            path.write_bytes(random.Random(5).randbytes(len(content)))
        case "garbled in the middle":
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes(40) + content[middle + 40 :])


LOSSES = ["removed", "with its name", "empty", "garbled", "garbled in the middle"]


@pytest.mark.parametrize("how", LOSSES)
def test_the_list_of_files_is_recreated(coldrise, filled, tmp_path, how):
    points, content = filled
    lose(how, one_of(coldrise.repository, "db/MANIFEST-*"))
    for command in (["list"], ["backup", "web01", f"vda=raw:{tmp_path / 'vda.raw'}"]):
        done = coldrise.run(*command)
        assert done.returncode == 1, (command, done.stdout, done.stderr)
    done = coldrise.run("repair")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "the list of the database's files was rebuilt" in done.stdout
    check(coldrise, points, content, tmp_path)
    assert not json.loads(coldrise.run("--json", "repair").stdout.splitlines()[-1])["is_list_new"]


def check(coldrise, points, content, tmp_path):
    (machine,) = coldrise.json("list")["machines"]
    assert [point["address"] for point in machine["points"]] == points
    assert coldrise.json("verify")["is_clean"]
    coldrise.json("restore", "--force", f"{points[1]}/vda", tmp_path / "restored.raw")
    assert (tmp_path / "restored.raw").read_bytes() == content


def test_a_truncated_list_is_recreated(coldrise, filled, tmp_path):
    points, content = filled
    # The content of the log is written to files, some of which replace others.
    coldrise.json("gc")
    points.append(coldrise.backup("web01", vda=tmp_path / "vda.raw"))
    coldrise.json("gc")
    sound = tmp_path / "sound"
    shutil.copytree(coldrise.repository, sound)
    manifest = one_of(coldrise.repository, "db/MANIFEST-*")
    length, recreated = manifest.stat().st_size, 0
    for cut in range(0, length, max(1, length // 5)):
        become(coldrise, sound)
        with manifest.open("r+b") as file:
            file.truncate(cut)
        done = coldrise.run("--json", "repair")
        assert done.returncode == 0, (cut, done.stdout, done.stderr)
        recreated += json.loads(done.stdout.splitlines()[-1])["is_list_new"]
        check(coldrise, points, content, tmp_path)
    assert recreated


def test_a_lost_description_is_distinguished_from_a_missing_repository(coldrise, filled):
    assert filled
    (coldrise.repository / "repository.json").unlink()
    done = coldrise.run("list")
    assert done.returncode == 1 and "put a copy of it back" in done.stderr
    assert "coldrise init" not in done.stderr
