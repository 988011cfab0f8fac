"""repair: damage is repaired from any source that still has the content."""

import json
import random

import pytest

from support.cli import Coldrise
from support.image import Image
from support.prepared import become

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 16 * KIB


@pytest.fixture(scope="module")
def backed_up(template, tmp_path_factory):
    """A repository with one point, which has a file of chunks of its own."""
    folder = tmp_path_factory.mktemp("repair")
    image = Image(12 * MIB)
    image.fill(0, 10 * MIB, "disk")
    path = image.save(folder / "vda.raw")
    program = Coldrise.copied(template, folder / "repository")
    return program.repository, program.backup("web01", vda=path), image, path


@pytest.fixture
def disk(coldrise, backed_up):
    """A machine with one point, and the image that it was made from."""
    prepared, *disk = backed_up
    become(coldrise, prepared)
    return disk


def damage(coldrise, count):
    """Flips pairs of bits all over the largest file of the database, not in its index."""
    files = (coldrise.repository / "db").glob("*.sst")
    path = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    numbers = random.Random(3)
    for _ in range(count):
        content[numbers.randrange(len(content) // 10 * 9)] ^= 0x30
    path.write_bytes(content)


def restored(coldrise, address, tmp_path):
    target = tmp_path / "restored.raw"
    target.unlink(missing_ok=True)
    done = coldrise.run("restore", f"{address}/vda", target)
    return target.read_bytes() if done.returncode == 0 else None


def answer(coldrise, *arguments, code):
    done = coldrise.run("--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_an_intact_repository_is_not_repaired(coldrise, disk):
    assert coldrise.run("repair").stdout.startswith("nothing to repair in 640 chunks (")


def test_the_next_backup_heals(coldrise, disk, nbdkit, tmp_path):
    address, image, path = disk
    damage(coldrise, 5)
    with nbdkit() as server, server.connect(f"{address}/vda") as reader:
        found = answer(coldrise, "repair", code=1)
        assert found["damaged_chunks"] == found["healable_chunks"] == 5
        assert (found["mended_files"], found["lost_blocks"]) == (1, 5)
        assert restored(coldrise, address, tmp_path) is None
        text = coldrise.run("repair").stdout
        assert "still damaged: 5 chunks. They heal with the next backup" in text
        second = coldrise.backup("web01", vda=path)
        # The server that ran meanwhile reads what was healed.
        assert reader.pread(len(image), 0) == bytes(image.content)
    assert answer(coldrise, "verify", code=0)["is_clean"]
    for point in (address, second):
        assert restored(coldrise, point, tmp_path) == bytes(image.content)
    assert coldrise.run("repair").returncode == 0


def test_an_image_restores_chunks_it_still_contains(coldrise, disk, tmp_path):
    address, image, path = disk
    damage(coldrise, 8)
    # The machine kept running: its first half has changed completely.
    later = Image(12 * MIB)
    later.write(0, image.content[: 10 * MIB])
    later.fill(0, 5 * MIB, "later")
    newer = later.save(tmp_path / "later.raw")
    stored = coldrise.json("stats")["chunks"]
    found = answer(coldrise, "repair", "--from", newer, code=1)
    assert 0 < found["healed_chunks"] < found["damaged_chunks"] == 8
    assert found["healable_chunks"] == 8 - found["healed_chunks"]
    assert restored(coldrise, address, tmp_path) is None
    rest = found["healable_chunks"]
    found = answer(coldrise, "repair", "--from", f"raw:{path}", code=0)
    assert found["damaged_chunks"] == found["healed_chunks"] == rest
    assert restored(coldrise, address, tmp_path) == bytes(image.content)
    assert answer(coldrise, "verify", code=0)["is_clean"]
    assert coldrise.json("stats")["chunks"] == stored, "nothing but the healed chunks is stored"


def test_a_missing_source_is_reported_before_any_read_or_repair(coldrise, disk, tmp_path):
    address, image, path = disk
    damage(coldrise, 2)
    before = database(coldrise)
    refused = coldrise.run("repair", "--from", f"raw:{path}", "--from", tmp_path / "absent.raw")
    assert refused.returncode == 1 and "absent.raw" in refused.stderr
    assert database(coldrise) == before
    answer(coldrise, "repair", code=1)
    coldrise.backup("web01", vda=path)
    assert restored(coldrise, address, tmp_path) == bytes(image.content)


def database(coldrise):
    """Its files of data, as they are."""
    return {path.name: path.read_bytes() for path in (coldrise.repository / "db").glob("*.sst")}


def test_unreferenced_damage_is_dropped(coldrise, disk, tmp_path):
    """No later backup trusts it."""
    address, image, path = disk
    small = Image(4 * MIB)
    small.fill(0, 3 * MIB, "small")
    kept = coldrise.backup("db01", sda=small.save(tmp_path / "sda.raw"))
    coldrise.json("forget", address)
    # In one chunk or two.
    damaged = max((coldrise.repository / "db").glob("*.sst"), key=lambda f: f.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0x99
    content[len(content) // 2 + 7] ^= 0x99
    damaged.write_bytes(content)
    found = answer(coldrise, "repair", code=0)
    assert found["is_clean"] and found["damaged_chunks"] == found["healable_chunks"] == 0
    assert 1 <= found["unreferenced_chunks"] <= 2
    assert coldrise.run("repair").stdout.startswith("nothing to repair")
    assert answer(coldrise, "verify", code=0)["is_clean"]
    again = coldrise.backup("web01", vda=path)
    assert restored(coldrise, again, tmp_path) == bytes(image.content)
    assert coldrise.run("restore", f"{kept}/sda", tmp_path / "sda-out.raw").returncode == 0
    assert answer(coldrise, "verify", code=0)["is_clean"]


@pytest.fixture
def other(tmp_path):
    """Another repository, with a passphrase of its own and chunks of a given size."""

    def make(chunk_size):
        passphrase = tmp_path / "other-passphrase"
        passphrase.write_text("battery staple\n", encoding="utf-8")
        program = Coldrise(tmp_path / f"other-{chunk_size}", passphrase)
        program.init("--chunk-size", chunk_size)
        return program

    return make


@pytest.mark.parametrize("chunk_size", ["4K", "16K", "64K"])
def test_another_repository_restores_content(coldrise, disk, other, tmp_path, chunk_size):
    """Its newest point holds half of it in the same places; the rest is an older one's."""
    address, image, path = disk
    second = other(chunk_size)
    second.backup("web01", vda=path)
    later = Image(12 * MIB)
    later.write(0, image.content[: 10 * MIB])
    later.fill(0, 5 * MIB, "later")
    second.backup("web01", vda=later.save(tmp_path / "later.raw"))
    damage(coldrise, 8)
    refused = coldrise.run("repair", "--from-repo", second.repository)
    assert refused.returncode == 12 and "--from-passphrase-file" in refused.stderr
    found = answer(
        coldrise, "repair", "--from-repo", second.repository,
        "--from-passphrase-file", second.passphrase_file, code=0,
    )  # fmt: skip
    assert found["damaged_chunks"] == found["healed_chunks"] == 8
    assert restored(coldrise, address, tmp_path) == bytes(image.content)
    assert second.json("verify")["is_clean"]


@pytest.mark.parametrize("chunk_size", ["4K", "16K", "64K"])
def test_any_repository_with_the_content_restores_it(
    coldrise, disk, other, tmp_path, chunk_size
):
    """On another machine's disk, elsewhere; and with damage of its own."""
    address, image, _ = disk
    second = other(chunk_size)
    moved = Image(16 * MIB)
    moved.write(4 * MIB, image.content[: 10 * MIB])
    second.backup("db01", sda=moved.save(tmp_path / "moved.raw"))
    damage(coldrise, 40)
    damage(second, 3)
    done = coldrise.run(
        "--json", "repair", "--from-repo", second.repository,
        "--from-passphrase-file", second.passphrase_file,
    )  # fmt: skip
    found = json.loads(done.stdout.strip().splitlines()[-1])
    # Chunks damaged in both stay damaged, at most four chunks of ours for each of theirs.
    assert found["damaged_chunks"] - 12 <= found["healed_chunks"] > 0
    is_healed = found["healed_chunks"] == found["damaged_chunks"]
    assert done.returncode == (0 if is_healed else 1)
    expected = bytes(image.content) if is_healed else None
    assert restored(coldrise, address, tmp_path) == expected


def family(path):
    """The column family of a database file: it is in the properties at the end."""
    end = path.read_bytes()[-4000:]
    names = (b"dedup", b"maps_copy", b"maps", b"catalog", b"default")
    return next((name.decode() for name in names if name in end), "chunks")


def files_of(coldrise, name):
    """The largest first. A writer that opens the database writes its log to files."""
    coldrise.json("fold")
    files = [path for path in (coldrise.repository / "db").glob("*.sst") if family(path) == name]
    return sorted(files, key=lambda file: -file.stat().st_size)


def flip(path, bits=0x10):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= bits
    path.write_bytes(content)


def garble(path):
    flip(path, 0x99)


def cut(path):
    path.write_bytes(path.read_bytes()[:-60])


def remove(path):
    path.unlink()


@pytest.mark.parametrize("how", [garble, remove, cut])
def test_lost_index_entries_are_recreated(coldrise, disk, how):
    _, _, path = disk
    stored = coldrise.json("stats")["chunks"]
    (index,) = files_of(coldrise, "dedup")
    how(index)
    refused = coldrise.run("backup", "web01", f"vda=raw:{path}")
    assert refused.returncode == 1 and "run coldrise repair" in refused.stderr
    done = answer(coldrise, "repair", code=0)
    assert (done["dropped_files"], done["lost_blocks"]) == (int(how is remove), int(how is garble))
    assert (done["added_entries"] > 0) == (how is not cut), "of one cut short all is there"
    coldrise.backup("web01", vda=path)
    assert coldrise.json("stats")["chunks"] == stored, "all of it is known again"
    done = answer(coldrise, "repair", code=0)
    assert done["dropped_files"] == done["lost_blocks"] == done["added_entries"] == 0


def wipe_end(path):
    """A bad sector: all that leads to what the file holds."""
    content = path.read_bytes()
    path.write_bytes(content[:-700] + bytes(range(7)) * 100)


@pytest.mark.parametrize("name, how", [
    ("chunks", cut), ("chunks", wipe_end), ("maps", cut), ("maps_copy", wipe_end), ("catalog", cut), ("default", wipe_end),
    ("dedup", cut), ("dedup", wipe_end),
])  # fmt: skip
def test_a_truncated_file_loses_only_its_end(
    coldrise, disk, tmp_path, name, how
):
    address, image, path = disk
    damaged = files_of(coldrise, name)[0]
    how(damaged)
    assert verify_names(coldrise, damaged)
    done = answer(coldrise, "repair", code=0)
    assert (done["mended_files"], done["dropped_files"], done["lost_blocks"]) == (1, 0, 0)
    assert answer(coldrise, "verify", code=0)["is_clean"]
    assert not list((coldrise.repository / "db").glob("*.lost"))
    stored = coldrise.json("stats")["chunks"]
    second = coldrise.backup("web01", vda=path)
    assert coldrise.json("stats")["chunks"] == stored, "all of it is still known"
    for point in (address, second):
        assert restored(coldrise, point, tmp_path) == bytes(image.content)
    assert answer(coldrise, "repair", code=0)["mended_files"] == 0


def test_a_lost_chunk_file_is_dropped_and_its_content_is_restored(coldrise, tmp_path):
    image = Image(20 * MIB)
    image.fill(0, 17 * MIB, "disk")
    path = image.save(tmp_path / "vda.raw")
    address = coldrise.backup("web01", vda=path)
    other = Image(4 * MIB)
    other.fill(0, 3 * MIB, "other")
    sound = coldrise.backup("db01", sda=other.save(tmp_path / "sda.raw"))
    remove(files_of(coldrise, "chunks")[0])
    refused = coldrise.run("backup", "web01", f"vda=raw:{path}")
    assert refused.returncode == 1 and "run coldrise repair" in refused.stderr
    assert "is missing" in refused.stderr and "MANIFEST" not in refused.stderr, refused.stderr
    done = answer(coldrise, "repair", code=1)
    assert (done["dropped_files"], done["damaged_chunks"], done["lost"]) == (1, 1088, [])
    found = answer(coldrise, "verify", code=1)
    assert [disk["disk"] for disk in found["affected"]] == [f"{address}/vda"]
    # Missing chunks are damage, one by one.
    assert found["damaged_chunks"] == 1088 and len(found["chunks_described"]) == 1000
    text = coldrise.run("verify").stdout
    assert "damaged: chunk 1: it is missing" in text
    assert "damage found: 1088 chunks, 1 affected disk; read: " in text, text
    assert coldrise.run("restore", f"{sound}/sda", tmp_path / "sda-out.raw").returncode == 0
    second = coldrise.backup("web01", vda=path)
    for point in (address, second):
        assert restored(coldrise, point, tmp_path) == bytes(image.content)
    assert answer(coldrise, "verify", code=0)["is_clean"]


def test_a_damaged_map_page_is_read_from_its_copy(coldrise, disk, tmp_path):
    address, image, path = disk
    for family_name in ("maps", "maps_copy"):
        # A page, at the beginning of the file.
        damaged = files_of(coldrise, family_name)[0]
        content = damaged.read_bytes()
        damaged.write_bytes(content[:100] + b"damage" + content[106:])
        assert restored(coldrise, address, tmp_path) == bytes(image.content)
        assert verify_names(coldrise, damaged)
        done = answer(coldrise, "repair", code=0)
        assert (done["mended_files"] + done["dropped_files"], done["lost"]) == (1, [])
        assert answer(coldrise, "verify", code=0)["is_clean"]
        assert restored(coldrise, address, tmp_path) == bytes(image.content)
    coldrise.backup("web01", vda=path)


FAMILIES = ["chunks", "maps", "maps_copy", "catalog", "default", "dedup"]


def verify_names(coldrise, path):
    found = answer(coldrise, "verify", code=1)
    return path.name in json.dumps(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_flipped_bit_is_named_and_healed(coldrise, disk, tmp_path, name):
    address, image, path = disk
    damaged = files_of(coldrise, name)[0]
    flip(damaged)
    assert verify_names(coldrise, damaged) or name == "chunks"
    done = answer(coldrise, "repair", code=int(name == "chunks"))
    assert done["mended_files"] + done["dropped_files"] == 1 and done["lost"] == []
    if name == "chunks":
        assert done["healable_chunks"] == 1
        coldrise.backup("web01", vda=path)
    assert answer(coldrise, "verify", code=0)["is_clean"]
    assert restored(coldrise, address, tmp_path) == bytes(image.content)


def older_or_other(files):
    """Each file in the place of the next one of its family, and the other way round."""
    return [*zip(files, files[1:]), *zip(files[1:], files)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_misplaced_file_is_named_and_repaired(coldrise, disk, tmp_path, name):
    address, image, path = disk
    older = files_of(coldrise, name)[0].read_bytes()
    other = Image(4 * MIB)
    other.fill(0, 3 * MIB, "other")
    second = coldrise.backup("db01", sda=other.save(tmp_path / "sda.raw"))
    files = files_of(coldrise, name)
    # Small files of one family are merged: then an older one takes its place.
    files[0].write_bytes(files[1].read_bytes() if len(files) > 1 else older)
    assert not json.loads(coldrise.run("--json", "verify").stdout.splitlines()[-1])["is_clean"]
    refused = coldrise.run("backup", "web01", f"vda=raw:{path}")
    assert refused.returncode == 1 and "run coldrise repair" in refused.stderr
    done = json.loads(coldrise.run("--json", "repair").stdout.splitlines()[-1])
    assert done["is_clean"] == (name != "chunks"), done
    coldrise.backup("web01", vda=path)
    coldrise.backup("db01", sda=tmp_path / "sda.raw")
    assert answer(coldrise, "verify", code=0)["is_clean"]
    assert restored(coldrise, address, tmp_path) == bytes(image.content)
    coldrise.json("restore", f"{second}/sda", tmp_path / "other.raw")
    assert (tmp_path / "other.raw").read_bytes() == bytes(other.content)


def wipe(path):
    """Nothing of it is left but its name."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("name, how", [
    ("chunks", garble), ("chunks", wipe), ("maps", remove), ("maps_copy", garble), ("catalog", wipe), ("default", remove),
    ("dedup", garble),
])  # fmt: skip
def test_damage_in_any_database_file_is_repairable(coldrise, disk, tmp_path, name, how):
    address, _, path = disk
    other = Image(4 * MIB)
    other.fill(0, 3 * MIB, "other")
    source = other.save(tmp_path / "sda.raw")
    points = [coldrise.backup("db01", sda=source)]
    # The newest one.
    damaged = max(files_of(coldrise, name), key=lambda file: file.name)
    how(damaged)
    assert verify_names(coldrise, damaged)
    done = json.loads(coldrise.run("--json", "repair", "--quarantine").stdout.splitlines()[-1])
    assert done["mended_files"] + done["dropped_files"] == 1, done
    # As many as let the database merge its files. Of several machines: two points of one machine are a second apart.
    for number in range(5):
        other.fill(number * 64 * KIB, 64 * KIB, f"day {number}")
        other.save(source)
        points.append(coldrise.backup(f"db1{number}", sda=source))
        last = bytes(other.content)
    target = tmp_path / "sda-out.raw"
    assert coldrise.run("restore", f"{points[-1]}/sda", target).returncode == 0
    assert target.read_bytes() == last
    second = coldrise.backup("web01", vda=path)
    found = json.loads(coldrise.run("--json", "verify").stdout.splitlines()[-1])
    lost = {entry["disk"].rpartition("/")[0] for entry in found["affected"]}
    lost |= {entry["what"] for entry in found["damaged_documents"]}
    assert not found["damaged_files"] and lost <= {address, points[0]}, found
    assert second not in lost
    if name != "chunks":
        assert not lost, "what a point holds is in other files"
    if lost:
        coldrise.json("forget", *sorted(lost))
    assert answer(coldrise, "verify", code=0)["is_clean"]
    coldrise.json("gc")


def test_an_interrupted_repair_must_be_completed(coldrise, disk, tmp_path):
    address, image, path = disk
    garble(files_of(coldrise, "default")[0])
    # The state after a kill in the middle of a repair.
    (coldrise.repository / "repair-unfinished").touch()
    refused = coldrise.run("backup", "web01", f"vda=raw:{path}")
    assert refused.returncode == 1 and "run coldrise repair again" in refused.stderr
    examined = coldrise.run("doctor")
    assert examined.returncode == 1 and refused.stderr.removeprefix("coldrise: ") in examined.stdout
    assert answer(coldrise, "repair", code=0)["is_clean"]
    coldrise.backup("web01", vda=path)
    assert restored(coldrise, address, tmp_path) == bytes(image.content)
