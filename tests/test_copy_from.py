"""coldrise copy --from: the site that receives dials, and the one that has the points serves them."""

import json
import random
import signal

import pytest

from support.copies import addresses, check, content, make_history
from support.far_site import FarSite, finish, incoming, wait_for_beginning
from support.image import Image
from support.nbdserver import DEADLINE_S, wait_until
from support.wallclock import BothClocks

MIB = 1 << 20
INCOMPLETE = 3


@pytest.fixture
def source(coldrise, tmp_path):
    """The site that has the points: the repository of the other fixtures, and its server."""
    site = FarSite(tmp_path, "source", program=coldrise)
    yield site
    site.close()


@pytest.fixture
def here(request, tmp_path):
    """The repository that receives."""
    program = FarSite.repository(tmp_path, "here", is_encrypted=bool(request.node.get_closest_marker("encrypted")))
    yield program
    for process in program.started:
        process.kill()


@pytest.fixture
def history(coldrise, nbdkit, tmp_path):
    return make_history(coldrise, nbdkit, tmp_path)


def back_up(program, machine, path, time=None):
    return program.json("backup", machine, f"vda=raw:{path}", *(["--time", time] if time else []))


def test_points_are_fetched_and_then_only_changes(source, here, history, tmp_path):
    source.pair(here, "source", "--may", "fetch")
    fetched = here.json("copy", "--from", "source", "web01")
    assert (fetched["from"], fetched["to"]) == ("source", str(here.repository))
    (machine,) = fetched["machines"]
    first, second, third, sealed = machine["points"]
    assert first["base"] is None and [p["base"] for p in (second, third, sealed)] == [
        first["point"], second["point"], first["point"]]
    assert first["stored_bytes"] > 0 and first["elapsed_ms"] > 0
    line = fetched["line"]
    assert machine["line"]["content_bytes"] == line["content_bytes"] and line["offered_bytes"] == fetched["size_bytes"]
    assert 6 * MIB < line["content_bytes"] <= 8 * MIB and line["sent_bytes"] < line["content_bytes"] + MIB
    check(here, history, tmp_path)
    assert here.json("verify")["is_clean"]
    again = here.json("copy", "--from", "source")
    assert (again["points"], again["machines"][0]["already_there"], again["line"]["content_bytes"]) == (0, 4, 0)
    # Under another name; existing content is not sent again.
    text = here.run("copy", "--from", "source", "web01", "--as", "spare", "--last", "1")
    assert text.returncode == 0 and "web01 as spare" in text.stdout and "received" in text.stdout, text
    prefixed = here.json("copy", "--from", "source", "--prefix", "berlin-")
    assert prefixed["machines"][0]["to_machine"] == "berlin-web01"
    check(here, history, tmp_path, "berlin-web01")
    assert here.json("copy", "--from", "source", "--prefix", "berlin-")["points"] == 0
    # Points pruned here are not fetched again.
    here.json("forget", "web01/20261102T100000Z")
    passed = here.json("copy", "--from", "source", "web01")
    assert (passed["points"], passed["machines"][0]["passed_over"]) == (0, ["20261102T100000Z"])
    assert here.json("copy", "--from", "source", "web01", "--all")["points"] == 1


def test_a_link_may_fetch_only_its_machines(source, coldrise, here, tmp_path):
    path = Image(MIB).save(tmp_path / "vda.raw")
    for machine in ("web01", "web02", "db01"):
        back_up(coldrise, machine, path)
    source.pair(here, "source", "--may", "fetch", "--machines", "web0?", "mail*")
    fetched = here.json("copy", "--from", "source")
    assert [machine["machine"] for machine in fetched["machines"]] == ["web01", "web02"]
    refusals = []
    for machine in ("db01", "db02"):
        refused = here.run("copy", "--from", "source", machine)
        assert refused.returncode == 1 and machine in refused.stderr, refused
        refusals.append(refused.stderr.replace(machine, "X"))
    # Whether it exists is not revealed.
    assert refusals[0] == refusals[1] and "may be fetched" in refusals[0]
    sending = here.run("copy", "--to", "source")
    assert sending.returncode == 1 and "may not send" in sending.stderr, sending
    (link,) = coldrise.json("link", "list")["links"]
    assert (link["may"], link["machines"], link["prefix"]) == ("fetch", ["web0?", "mail*"], "")
    assert "fetch web0? mail*" in coldrise.run("link", "list").stdout
    # The site that is dialled has no way to the other one.
    back = coldrise.run("copy", "--to", link["name"])
    assert back.returncode == 2 and "dials" in back.stderr
    # A second link may send. Each use takes the one that allows it.
    source.pair(here, "drop", "--may", "send", "--prefix", "here-")
    back_up(here, "own", path)
    assert here.json("copy", "--to", "drop", "own")["machines"][0]["points"]
    assert here.json("copy", "--from", "source")["points"] == 0
    assert {name.split("/")[0] for name in addresses(coldrise)} == {"web01", "web02", "db01", "here-own"}
    # Without the right to fetch, none.
    coldrise.json("link", "remove", link["name"])
    wait_until(lambda: "may not fetch" in here.run("copy", "--from", "source").stderr, "the end of the right")


def test_a_sending_site_may_not_fetch(source, coldrise, here, tmp_path):
    back_up(coldrise, "web01", Image(MIB).save(tmp_path / "vda.raw"))
    source.pair(here, "source")
    refused = here.run("copy", "--from", "source")
    assert refused.returncode == 1 and "may not fetch" in refused.stderr and "web01" not in refused.stderr, refused
    assert addresses(here) == set()
    for options, words in [(["--machines", "web*"], "--may fetch"), (["--may", "fetch", "--prefix", "x-"], "--may send"),
                           (["--may", "fetch", "--machines", "Web"], "pattern"), (["--may", "all"], "--may")]:
        wrong = coldrise.run("link", "invite", "other", *options)
        assert wrong.returncode == 2 and words in wrong.stderr, wrong


@pytest.fixture
def large(coldrise, tmp_path):
    """web01: two points of two disks with random content, 4 MiB each. Returns {point: {disk: content}}."""
    pieces = random.Random(8)
    paths = {disk: tmp_path / f"{disk}.raw" for disk in ("vda", "vdb")}
    expected = {}
    for day in (1, 2):
        for path in paths.values():
            path.write_bytes(pieces.randbytes(4 * MIB))
        point = f"2026110{day}T100000Z"
        coldrise.json("backup", "web01", *(f"{disk}=raw:{path}" for disk, path in paths.items()), "--time", point)
        expected[point] = {disk: path.read_bytes() for disk, path in paths.items()}
    return expected


@pytest.fixture
def gate(source):
    """Before the source: it holds what the line carries in the middle of a point, until a test has seen what it waits for."""
    source.put_gate()
    return source.gate


def held(source, here):
    """A fetch of which only the first disk arrives, and half of the second one: less than one stored batch."""
    return source.held(here, 6 * MIB, "--from", "source")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_fetch_continues_after_the_other_site_returns(source, gate, here, large, tmp_path, how):
    source.pair(here, "source", "--may", "fetch")
    process = held(source, here)
    # Twice: in the first point, and in the second. A site that was never reached is not waited for.
    for point, count in zip(large, (10 * MIB, None), strict=True):
        gate.wait_for_hold()
        wait_for_beginning(here, point)
        source.process.send_signal(how)
        # Held data would delay its end.
        gate.cut()
        assert source.process.wait(timeout=DEADLINE_S) in (0, -how)
        gate.hold_after(count)
        source.start()
    printed, message = process.communicate(timeout=2 * DEADLINE_S)
    assert process.returncode == 0, message
    assert message.count("trying again for") >= 2, message
    copied = json.loads(printed.splitlines()[-1])
    assert copied["points"] == 2 and copied["machines"][0]["already_there"] == 0
    # Of each point in which the line was lost, only the half of the second disk came twice.
    assert 16 * MIB < copied["line"]["sent_bytes"] < 21 * MIB
    check(here, large, tmp_path)
    assert here.json("verify")["is_clean"]


def test_a_cancelled_fetch_resumes(source, gate, here, large, tmp_path):
    source.pair(here, "source", "--may", "fetch")
    clock = BothClocks(tmp_path)
    here.more = clock.environment()
    process = held(source, here)
    clock.skip(10)
    wait_until(lambda: [point["missing_bytes"] for point in incoming(here).values()] == [4 * MIB], "a note")
    process.send_signal(signal.SIGINT)
    gate.cut()
    gate.release()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130 and "run it again to continue" in errors, errors
    assert addresses(here) == set()
    # Both sites let the machine go.
    copied = here.json("copy", "--from", "source")
    # The first disk is not read again.
    assert copied["points"] == 2 and copied["read_bytes"] <= 12 * MIB
    check(here, large, tmp_path)


def test_removing_a_link_ends_a_fetch(source, gate, coldrise, here, large):
    source.pair(here, "source", "--may", "fetch")
    (link,) = coldrise.json("link", "list")["links"]
    process = held(source, here)
    coldrise.json("link", "remove", link["name"])
    gate.wait_for_end()
    gate.release()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "refuses the key" in errors, errors
    assert addresses(here) == set()


def test_several_sites_fetch_concurrently(source, here, large, tmp_path):
    programs, gates, fetches = [here, FarSite.repository(tmp_path, "second")], [], []
    for program in programs:
        source.put_gate()
        gates.append(source.gate)
        source.pair(program, "source", "--may", "fetch")
    for program, source.gate in zip(programs, gates, strict=True):
        fetches.append(held(source, program))
    for gate in gates:
        gate.release()
    for process in fetches:
        finish(process)
    for program in programs:
        check(program, large, tmp_path)


@pytest.mark.encrypted
def test_copies_from_a_directory(coldrise, here, history, tmp_path):
    here.json("backup", "own", f"vda=raw:{tmp_path / 'vda.raw'}")
    wrong = coldrise.run("copy", "--from", here.repository)
    assert wrong.returncode == 12 and "passphrase" in wrong.stderr, wrong
    back = ["--from", coldrise.repository, "--from-passphrase-file", coldrise.passphrase_file]
    copied = here.json("copy", *back, "--prefix", "a-")
    assert copied["machines"][0]["to_machine"] == "a-web01" and "line" not in copied
    check(here, history, tmp_path, "a-web01")
    command = ["--from", coldrise.repository, "--from-passphrase-command", f"cat {coldrise.passphrase_file}"]
    assert here.json("copy", *command, "--prefix", "a-")["points"] == 0
    assert here.json("copy", *back, "web01", "--as", "b", "--last", "1")["points"] == 1
    assert {name.split("/")[0] for name in addresses(here)} == {"own", "a-web01", "b"}
    assert {name.split("/")[0] for name in addresses(coldrise)} == {"web01"}
    for arguments, words in [([], "--to"), (["--from", "x", "--to", "y"], "cannot be used"),
                             (["--from", here.repository], "same repository"),
                             ([*back, "--to-passphrase-file", "x"], "cannot be used")]:
        refused = here.run("copy", *arguments)
        assert refused.returncode == 2 and words in refused.stderr, refused


def test_a_busy_machine_is_reported(source, gate, here, large, tmp_path):
    source.pair(here, "source", "--may", "fetch")
    process = held(source, here)
    second = here.run("copy", "--from", "source")
    assert second.returncode == INCOMPLETE and "is running" in second.stdout, second
    # Backups of others run concurrently.
    here.json("backup", "own", f"vda=raw:{tmp_path / 'vda.raw'}")
    gate.release()
    finish(process)
    assert content(here, "web01/latest/vda", tmp_path) == large["20261102T100000Z"]["vda"]
