"""coldrise copy: restore points in another repository, stored its way."""

import os
import signal
import subprocess

import pytest

from support.copies import addresses, check, content, make_history
from support.far_site import FarSite, finish
from support.image import Image
from support.sources import RunningBackup, gated_server
from support.wallclock import WallClock

MIB = 1 << 20
INCOMPLETE, BUSY = 3, 11


@pytest.fixture
def far(request, tmp_path):
    """A repository with larger chunks and stronger compression, and another passphrase if the source has one."""
    is_encrypted = bool(request.node.get_closest_marker("encrypted"))
    return FarSite.repository(tmp_path, "far", "--compression", "zstd:9", is_encrypted=is_encrypted)


def copy(coldrise, far, *arguments, **keywords):
    return coldrise.json("copy", *to(far), *arguments, **keywords)


def to(far):
    return ["--to", far.repository, *(["--to-passphrase-file", far.passphrase_file] if far.passphrase_file else [])]


@pytest.fixture
def history(coldrise, nbdkit, tmp_path):
    return make_history(coldrise, nbdkit, tmp_path)


@pytest.mark.encrypted
def test_every_point_reads_the_same_from_other_chunks(coldrise, far, history, tmp_path):
    copied = copy(coldrise, far)
    (machine,) = copied["machines"]
    assert [point["point"] for point in machine["points"]] == [
        "20261101T100000Z", "20261102T100000Z", "20261103T100000Z", *(set(history) - {f"2026110{d}T100000Z" for d in (1, 2, 3)})
    ]  # fmt: skip
    # Only the first was read completely, but for its holes.
    first, second, third, sealed = machine["points"]
    assert first["base"] is None and first["read_bytes"] <= 9 * MIB
    assert second["base"] == first["point"] and second["read_bytes"] <= 2 * 64 * 1024
    assert third["base"] == second["point"] and third["read_bytes"] <= 4 * 64 * 1024
    assert sealed["base"] == first["point"] and sealed["read_bytes"] <= 2 * 64 * 1024
    check(far, history, tmp_path)
    assert far.json("verify")["is_clean"]
    kinds = {p["point"]: p["kind"] for p in far.json("list")["machines"][0]["points"]}
    assert kinds == {p["point"]: p["kind"] for p in coldrise.json("list")["machines"][0]["points"]}
    # Nothing is left to do.
    again = copy(coldrise, far)
    assert (again["points"], again["machines"][0]["already_there"]) == (0, 4)
    # A copy is an ordinary point: it can be published, written and sealed there.
    far.publish(f"web01/{sealed['point']}", "there")
    assert far.json("seal", "there")["address"].startswith("web01/")


def test_points_pruned_there_are_not_copied_again(coldrise, far, history, tmp_path):
    copy(coldrise, far, "web01")
    far.json("forget", "web01/20261102T100000Z")
    again = copy(coldrise, far, "web01")
    assert (again["points"], again["machines"][0]["passed_over"]) == (0, ["20261102T100000Z"])
    text = coldrise.run("copy", *to(far), "web01")
    assert text.returncode == 0 and "--all copies them" in text.stdout
    assert copy(coldrise, far, "web01", "--all")["points"] == 1
    check(far, history, tmp_path)
    # Nothing is forgotten there because it was forgotten here.
    coldrise.json("forget", "web01/20261103T100000Z")
    assert copy(coldrise, far)["points"] == 0
    assert "web01/20261103T100000Z" in addresses(far)


@pytest.mark.encrypted
def test_mutual_copies_of_two_sites_terminate(coldrise, far, history, tmp_path):
    coldrise_as_far = to(coldrise)
    far.backup("db01", vda=Image(MIB).save(tmp_path / "db.raw"))
    for _ in range(2):
        copy(coldrise, far, "--prefix", "berlin-")
        far.json("copy", *coldrise_as_far, "--prefix", "munich-")
    machines = [{machine["machine"] for machine in site.json("list")["machines"]} for site in (coldrise, far)]
    assert machines == [{"web01", "munich-db01"}, {"db01", "berlin-web01"}]
    for site in (coldrise, far):
        (target,) = site.json("copies")["targets"]
        assert (target["state"], target["points_behind"]) == ("current", 0), target
    # New points there are copied back, and so is a named machine.
    far.publish("berlin-web01/latest", "there")
    with open(tmp_path / "new.raw", "wb") as new:
        new.truncate(MIB)
    far.json("unpublish", "there")
    far.json("backup", "berlin-web01", f"vda=raw:{tmp_path / 'new.raw'}")
    assert far.json("copies")["targets"][0]["points_behind"] == 1
    assert far.json("copy", *coldrise_as_far, "--prefix", "munich-")["points"] == 1
    assert len(coldrise.json("list", "munich-berlin-web01")["machines"][0]["points"]) == 1
    assert far.json("copy", *coldrise_as_far, "berlin-web01", "--as", "back", "--all")["points"] == 5


def test_copies_in_a_ring_of_sites_terminate(coldrise, far, tmp_path):
    """Neither their own points nor those from an outside site circulate forever."""
    sites = {"a": coldrise, "b": far}
    for name in ("c", "outside"):
        sites[name] = FarSite.repository(tmp_path, f"ring-{name}", "--chunk-size", "16K")
    disk = Image(MIB)
    disk.write(0, bytes(range(256)) * 1024)
    for name, site in sites.items():
        site.backup(f"of-{name}", vda=disk.save(tmp_path / f"{name}.raw"))

    def sent(source, target):
        return copy(sites[source], sites[target], "--prefix", f"{source}-")["points"]

    assert sent("outside", "a") == 1
    ways = [("a", "b"), ("b", "c"), ("c", "a")]
    rounds = [[sent(*way) for way in ways] for _ in range(3)]
    # The points from the previous site, and its own; after the first round only the last link's share is new.
    assert rounds == [[2, 3, 2], [1, 0, 0], [0, 0, 0]]
    # The other way round, each has everything under one more name, and it ends.
    back = [[sent(*reversed(way)) for way in ways] for _ in range(3)]
    assert back[2] == [0, 0, 0], back
    assert [sent(*way) for way in ways] == [0, 0, 0]
    for name in ("a", "b", "c"):
        assert all(len(machine["points"]) == 1 for machine in sites[name].json("list")["machines"])
        assert all(target["points_behind"] == 0 for target in sites[name].json("copies")["targets"])


@pytest.mark.encrypted
def test_names_of_remote_machines(coldrise, far, history, tmp_path):
    point = "20261103T100000Z"
    assert copy(coldrise, far, "--prefix", "site-b-", "--last", "1")["machines"][0]["to_machine"] == "site-b-web01"
    assert copy(coldrise, far, "web01", "--as", "spare", "--last", "1")["points"] == 1
    assert {name.split("/")[0] for name in addresses(far)} == {"site-b-web01", "spare"}
    # The far side's own machine of this name is another one.
    far.json("backup", "web01", f"vda=raw:{tmp_path / 'vda.raw'}", "--time", point)
    refused = coldrise.run("copy", *to(far), "web01")
    assert refused.returncode == INCOMPLETE and "--prefix" in refused.stdout, refused
    assert f"another point web01/{point}" in refused.stdout
    # Back, a copy is known.
    back = far.json("copy", "spare", "--as", "web01", *to(coldrise))
    assert (back["points"], back["machines"][0]["already_there"]) == (0, 1)


@pytest.mark.encrypted
def test_refusals_do_not_change_the_other_side(coldrise, far, tmp_path):
    coldrise.backup("web01", vda=Image(MIB).save(tmp_path / "vda.raw"))
    nowhere = tmp_path / "nowhere"
    for arguments, code, words in (
            (["--to", coldrise.repository], 2, "the same repository"),
            (["--to", nowhere], 10, "coldrise init"),
            (["--to", far.repository, "--to-passphrase-file", coldrise.passphrase_file], 12, "passphrase"),
            ([*to(far), "--as", "x"], 2, "name that machine"),
            ([*to(far), "--prefix", "../"], 2, "name"),
            ([*to(far), "nobody"], 1, "nobody"),
            ([*to(far), "--last", "0"], 2, "--last")):
        done = coldrise.run("copy", *arguments)
        assert done.returncode == code and words in done.stderr, done
    assert addresses(far) == set() and not nowhere.exists()


@pytest.fixture
def large(coldrise, tmp_path):
    """db01: two points of a disk."""
    image = Image(16 * MIB)
    image.fill(0, 6 * MIB, "first")
    coldrise.json("backup", "db01", f"vda=raw:{image.save(tmp_path / 'db.raw')}", "--time", "20261101T000000Z")
    image.fill(4 * MIB, 8 * MIB, "second")
    path = image.save(tmp_path / "db.raw")
    coldrise.json("backup", "db01", f"vda=raw:{path}", "--time", "20261102T000000Z")
    return path


class Held:
    """A copy in its middle, limited to 256 KiB per second until `go_on` is called."""

    WINDOWS = ("--window", "00:00-12:00=256K", "--window", "13:00-14:00=2M")

    def __init__(self, folder, program, *arguments):
        self.clock = WallClock(folder)
        self.clock.set_to_noon(5400)
        program.more = self.clock.environment() | {"TZ": "UTC"}
        self.process = program.start("--json", "copy", *arguments, *self.WINDOWS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        program.more = {}
        assert any('"progress"' in line and '"done_bytes":0' not in line for line in self.process.stdout), self.process.stderr.read()
        self.clock.set_to_noon(-1800)

    def go_on(self):
        self.clock.set_to_noon(60)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_copy_resumes(coldrise, far, large, tmp_path, how):
    process = Held(tmp_path, coldrise, *to(far)).process
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), errors
    if how == signal.SIGINT:
        assert "run it again to continue" in errors
    assert addresses(far) == set()
    assert copy(coldrise, far)["points"] == 2
    assert content(far, "db01/latest/vda", tmp_path) == large.read_bytes()
    assert far.json("verify")["is_clean"]


def test_backups_and_a_second_copy_run_during_a_copy(coldrise, far, large, tmp_path):
    held = Held(tmp_path, coldrise, *to(far))
    # Another machine is backed up there meanwhile, and a copy of this one is refused.
    image = Image(MIB).save(tmp_path / "other.raw")
    far.json("backup", "other", f"vda=raw:{image}")
    second = coldrise.run("copy", *to(far), "db01")
    assert second.returncode == INCOMPLETE and "another backup or copy of db01 is running" in second.stdout, second
    # A point forgotten here while it is copied is copied completely: it is leased.
    coldrise.json("forget", "db01/20261101T000000Z")
    coldrise.json("gc")
    assert held.process.poll() is None
    held.go_on()
    finish(held.process)
    assert content(far, "db01/latest/vda", tmp_path) == large.read_bytes()
    assert "db01/20261101T000000Z" in addresses(far)


def test_a_copy_continues_after_the_storing_backup_is_killed(coldrise, far, large, tmp_path):
    # This backup holds the writer there.
    source = tmp_path / "host.raw"
    source.write_bytes(os.urandom(8 * MIB))
    with gated_server(source, 6 * MIB) as (uri, _, _):
        host = RunningBackup(far, "host", f"vda={uri}").process
        held = Held(tmp_path, coldrise, *to(far))
        host.kill()
        host.wait()
    held.go_on()
    _, errors = held.process.communicate(timeout=60)
    assert held.process.returncode == 0 and "ended unexpectedly" in errors, errors
    assert content(far, "db01/latest/vda", tmp_path) == large.read_bytes()
    assert far.json("verify")["is_clean"]


def test_damage_here_is_not_copied(coldrise, far, history, tmp_path):
    coldrise.json("quarantine", "web01/20261102T100000Z")
    copied = copy(coldrise, far)
    assert copied["machines"][0]["quarantined"] == ["20261102T100000Z"]
    assert "web01/20261102T100000Z" not in addresses(far)
    del history["20261102T100000Z"]
    check(far, history, tmp_path)
