"""coldrise protect-live --to: another site gets the time marks of a session as they are made."""

import random
import signal

import pytest

from support.nbdserver import wait_until
from support.numbered_writes import BLOCK, DISK_BYTES, NumberedWrites, content, images, publish_empty_disks
from support.protection import Protections, marks
from support.running import TICKING_SECTOR, assert_one_instant, machines, restored

SESSION, FAR_SESSION = "trial", "web01-1"


@pytest.fixture
def session(coldrise, tmp_path):
    return publish_empty_disks(coldrise, tmp_path, SESSION)


@pytest.fixture
def send(coldrise):
    """Sends the marks of the session; all that were started are ended."""
    started = Protections(coldrise, "--to", "far", subject=[f"live/{SESSION}"])
    yield started
    started.end()


@pytest.fixture
def writing(session, nbdkit):
    """Numbered writes to the session, about 500 in a second."""
    server = nbdkit()
    writer = NumberedWrites(server, list(session.values()), pause_s=0.002)
    writer.start()
    yield writer
    writer.end()


def refusal(coldrise, *arguments):
    done = coldrise.run("protect-live", *arguments)
    assert done.returncode not in (0, 70, 101), done.stderr
    return done.stderr


def far_marks(site, after=0):
    listed = site.program.run("marks", FAR_SESSION)
    if listed.returncode != 0:
        assert "no session" in listed.stderr, listed.stderr
        return []
    return [mark for mark in marks(site.program, FAR_SESSION) if mark["marked_at_ms"] > after]


def wait_for_far_marks(site, count, after=0):
    def enough():
        found = far_marks(site, after)
        return found if len(found) >= count else None
    return wait_until(enough, f"{count} marks at the other site")


def check_far_marks(site, writer, folder, found):
    numbers = [writer.check(mark, images(site.program, mark["address"], folder)) for mark in found]
    assert numbers == sorted(numbers)


def shown_site(coldrise):
    [found] = coldrise.json("marks", SESSION)["sites"]
    return found


def test_each_mark_there_is_what_both_disks_were_at_one_instant(coldrise, far, writing, send, tmp_path):
    protection = send()
    found = wait_for_far_marks(far, 4)
    check_far_marks(far, writing, tmp_path, found)
    # It can be used there while more come.
    published = far.program.json("publish", found[1]["address"], "--name", "back")
    assert published["session"] == "back"
    # Its points never meet those of the source.
    assert far.program.json("seal", found[2]["address"])["address"].endswith(("+1000001", "+1000002"))
    listed = coldrise.run("sessions").stdout
    assert "live/trial can go back to 20" in listed and "live/trial is sent to site far: up to " in listed
    [history] = coldrise.json("sessions")["history"]
    assert history["session"] == SESSION and history["stretches"] and history["sites"][0]["link"] == "far" and not history["marks"]
    # One process sends them.
    assert "another process sends" in refusal(coldrise, f"live/{SESSION}", "--to", "far")
    newest = found[-1]["marked_at_ms"]
    wait_for_far_marks(far, 2, after=newest)
    shown = shown_site(coldrise)
    assert shown["is_running"] and shown["session"] == FAR_SESSION and shown["lag_s"] < 60 and "problem" not in shown
    follows = far.program.json("marks", FAR_SESSION)["follows"]
    assert follows["is_running"] and follows["site"] == "from-far-0" and follows["lag_s"] < 60
    # The times are those of the source.
    ours = {mark["marked_at_ms"] for mark in marks(coldrise, SESSION)}
    assert {mark["marked_at_ms"] for mark in far_marks(far)} <= ours | {0}
    code, message = protection.end()
    assert code == 0, message
    wait_until(lambda: not far.program.json("marks", FAR_SESSION)["follows"]["is_running"], "the end of the connection")
    writing.end()
    check_far_marks(far, writing, tmp_path, far_marks(far))
    assert coldrise.run("verify").returncode == 0 and far.program.run("verify").returncode == 0


def test_the_last_writes_of_a_session_that_is_closed_arrive(coldrise, far, session, nbdkit, send, tmp_path):
    server = nbdkit()
    with server.connect(session["vda"]) as disk:
        disk.pwrite(content(1), 0)
        send()
        wait_for_far_marks(far, 1)
        disk.pwrite(content(2), BLOCK)
    server.stop()

    def has_last():
        found = far_marks(far)
        last = images(far.program, found[-1]["address"], tmp_path)[0]
        return last[BLOCK:2 * BLOCK] == content(2)
    wait_until(has_last, "the last write at the other site")
    # Idle is not behind.
    assert shown_site(coldrise)["lag_s"] < 30


def test_the_first_writes_after_a_kill_arrive(coldrise, far, session, nbdkit, send, tmp_path):
    """Marks that a kill takes back have numbers that later writes get again."""
    server = nbdkit()
    with server.connect(session["vda"]) as disk:
        protection = send()
        for number in range(1, 6):
            disk.pwrite(content(number), 0)
            wait_for_far_marks(far, number)
        server.kill()
    server = nbdkit()
    with server.connect(session["vdb"]) as disk:
        for block in range(3):
            disk.pwrite(content(9), block * BLOCK)
        disk.flush()
        lost = marks(coldrise, SESSION)
        written = wait_until(lambda: [m for m in marks(coldrise, SESSION) if m not in lost], "the mark of the writes")[-1]
        wait_until(lambda: far_marks(far)[-1]["marked_at_ms"] == written["marked_at_ms"], "the mark at the other site")
        assert images(far.program, written["address"].replace(SESSION, FAR_SESSION), tmp_path)[1][:3 * BLOCK] == content(9) * 3
    assert protection.end()[0] == 0


def test_killed_at_any_moment_at_either_side_each_mark_there_stays_one_instant(
        coldrise, far, session, nbdkit, send, tmp_path):
    chance = random.Random(5)
    server = nbdkit()
    writer = NumberedWrites(server, list(session.values()), pause_s=0.002)
    writer.start()
    protection = send()
    newest = wait_for_far_marks(far, 2)[-1]["marked_at_ms"]
    for step in range(6):
        wait_until(lambda: protection.events("sent"), "a mark that was sent")
        seen = len(protection.events("sent"))
        wait_until(lambda: len(protection.events("sent")) > seen + chance.randrange(2), "another one")
        if step % 2:
            protection.end(signal.SIGKILL)
            protection = send()
        else:
            far.stop(chance.choice([signal.SIGKILL, signal.SIGTERM]))
            far.start()
        newest = wait_for_far_marks(far, 1, after=newest)[-1]["marked_at_ms"]
    # The server of the session is killed with writes that were not flushed: the other site goes back.
    server.kill()
    writer.end()
    check_far_marks(far, writer, tmp_path, far_marks(far)[-5:])
    server = nbdkit()
    with server.connect(session["vda"]) as disk:
        disk.pwrite(content(7), (DISK_BYTES // BLOCK - 1) * BLOCK)

        def has_last():
            # Marks of before the kill may arrive, too.
            last = wait_for_far_marks(far, 1, after=newest)[-1]["address"]
            found = images(far.program, last, tmp_path)
            return (last, found) if found[0].endswith(content(7)) else None
        last, found = wait_until(has_last, "the last write at the other site")
        assert found == images(coldrise, last.replace(FAR_SESSION, SESSION), tmp_path)
    assert far.program.run("verify").returncode == 0


def test_a_site_that_was_away_gets_the_newest_content_only(coldrise, far, writing, send, tmp_path):
    protection = send()
    newest = wait_for_far_marks(far, 1)[-1]["marked_at_ms"]
    far.stop(signal.SIGKILL)
    away = marks(coldrise, SESSION)[-1]["marked_at_ms"]
    wait_until(lambda: len([m for m in marks(coldrise, SESSION) if m["marked_at_ms"] > away]) >= 5, "five marks here")
    wait_until(lambda: protection.events("failed") and "problem" in shown_site(coldrise), "the lost site")
    wait_until(lambda: shown_site(coldrise)["pending_bytes"] >= BLOCK, "what is not there")
    far.start()
    found = wait_for_far_marks(far, 3, after=newest)
    skipped = [m for m in marks(coldrise, SESSION) if newest < m["marked_at_ms"] < found[-1]["marked_at_ms"]]
    assert len(found) - 1 < len(skipped), "each mark was sent, though the site was away"
    check_far_marks(far, writing, tmp_path, found)
    wait_until(lambda: "problem" not in shown_site(coldrise), "the end of the problem")
    writing.end()


def test_the_copy_of_the_first_point_is_shown(coldrise, far, session, nbdkit, send):
    with nbdkit().connect(session["vda"]) as disk:
        disk.pwrite(random.Random(7).randbytes(2 << 20), 0)
        wait_until(lambda: marks(coldrise, SESSION), "a mark")
        protection = send("--rate", "64K")
        [shown] = wait_until(lambda: coldrise.json("marks", SESSION).get("sites"), "the beginning")
        assert shown["is_running"] and "session" not in shown and "lag_s" not in shown
        assert "site       far: its first point is being copied" in coldrise.run("marks", SESSION).stdout
        protection.process.send_signal(signal.SIGKILL)
        protection.process.wait()
        assert not shown_site(coldrise)["is_running"]
        assert "no process sends now" in coldrise.run("marks", SESSION).stdout
        send()
        assert wait_for_far_marks(far, 1)[0]["marked_at_ms"] == marks(coldrise, SESSION)[0]["marked_at_ms"]


def test_a_removed_link_ends_it(coldrise, far, writing, send):
    protection = send()
    wait_for_far_marks(far, 1)
    far.program.json("link", "remove", "from-far-0")
    assert protection.process.wait(timeout=60) != 0
    assert "link" in protection.process.stderr.read()
    assert "problem" in shown_site(coldrise)


def test_a_link_that_is_removed_here_ends_it(coldrise, far, writing, send):
    protection = send()
    wait_for_far_marks(far, 1)
    coldrise.json("link", "remove", "far")
    assert protection.process.wait(timeout=60) != 0
    assert "link far was removed here" in protection.process.stderr.read()


def test_a_link_that_may_only_fetch_is_refused_at_once(coldrise, site, session):
    reader = site()
    reader.pair(coldrise, "reader", "--may", "fetch", "--machines", "web01")
    error = refusal(coldrise, f"live/{SESSION}", "--to", "reader")
    assert "may not send" in error
    assert far_marks(reader) == []


@pytest.mark.parametrize("arguments, word", [
    (["live/trial"], "--to"),
    (["web01"], "--from"),
    (["live/trial", "--to", "far", "--every", "5s"], "only --to and --rate"),
    (["live/trial", "--to", "nowhere"], "no link"),
    (["live/none", "--to", "far"], "no session none"),
    (["live/trial", "--rate", "5M"], "--to"),
])
def test_unsuitable_options_are_refused(coldrise, far, session, arguments, word):
    assert word in refusal(coldrise, *arguments)


def test_a_machine_that_runs_elsewhere_is_at_the_other_site_as_well(coldrise, far, tmp_path):
    with machines(tmp_path) as start:
        running = start(sector=TICKING_SECTOR)
        started = Protections(coldrise)
        started("--from", f"qmp:{running.monitor}", "--to", "far")
        try:
            found = wait_for_far_marks(far, 4)
            numbers = [assert_one_instant(*restored(far.program, mark["address"], tmp_path)) for mark in found]
            assert numbers == sorted(set(numbers)), "the guest does not run"
        finally:
            started.end()
    assert far.program.run("verify").returncode == 0
