"""The two kinds of crash, the clients that connect and leave, and the rounds of each."""

import contextlib
import pathlib
import shutil
import tempfile
import time

from .command_kills import CommandKills
from .loopfs import LoopFileSystem
from .story import Story

LOOP_BYTES = 4 << 30


@contextlib.contextmanager
def kept_on_failure(seed):
    """A folder for a story: removed after success, kept for study otherwise."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="coldrise-crash-"))
    try:
        yield directory
    except BaseException as failure:
        print(f"\nkept for study: {directory} (seed {seed}): {type(failure).__name__}")
        raise
    else:
        shutil.rmtree(directory)


def kill_round(story):
    """Load, SIGKILL to nbdkit at some moment, and the check after the restart."""
    rng = story.rng
    story.start_server()
    story.check_crash(look_at_list=rng.random() < 0.1)
    story.start_load()
    seconds = rng.choice((0.05, 0.2, 0.4)) * (0.5 + rng.random())
    story.run_load(seconds, may_seal=True, to_a_flush=rng.random() < 0.5)
    assert not story.load.errors, f"requests failed: {story.load.errors}"
    assert story.server.process.poll() is None, f"nbdkit died: {story.server.messages()}"
    _crash(story, kill_seal=rng.random() < 0.3, believe_answer=True)
    while rng.random() < 0.15:
        _interrupted_opening(story, cut=None)
        story.counts["kills"] += 1
    story.counts["kills"] += 1


def cut_round(story, disk):
    """The same with a power cut, and with requests that arrive after it."""
    rng = story.rng
    story.start_server()
    story.check_crash(look_at_list=rng.random() < 0.2)
    story.start_load()
    layers = story.coldrise.repository / "layers"
    writes_out = rng.random() < 0.7

    def now_and_then():
        if writes_out and rng.random() < 0.01:
            disk.write_out_some(rng, layers)

    seconds = rng.choice((0.1, 0.4, 0.8)) * (0.5 + rng.random())
    to_a_flush = rng.random() < 0.5
    story.run_load(seconds, True, now_and_then, to_a_flush)
    assert not story.load.errors, f"requests failed before the cut: {story.load.errors}"
    if writes_out and not to_a_flush:
        disk.write_out_some(rng, layers)
    for oracle in story.disks:
        oracle.cut_power()
    disk.cut_power()
    if story.sealing is not None:
        story.sealing.process.kill()
    # Some rounds continue long enough to see that every later flush fails.
    story.load.run(rng.choice((0, 0.01, 0.1)))
    if story.server.process.poll() is not None:
        story.counts["servers_that_died_after_a_cut"] += 1
        print(f"nbdkit died after a cut: {story.server.process.returncode}")
    story.counts["flushes_refused_after_a_failed_one"] += story.load.later_flushes_refused
    _crash(story, kill_seal=True, believe_answer=False)
    disk.power_up()
    while rng.random() < 0.15:
        _interrupted_opening(story, cut=disk)
        story.counts["cuts"] += 1
    story.counts["cuts"] += 1


def reopen_round(story):
    """Clients connect and disconnect at the same time: the last disconnect closes the session,
    the next connect reopens it. No client may be refused, and no write may be lost."""
    rng = story.rng
    story.start_server()
    story.check_live()
    # A seal keeps the session open for longer: most rounds have none.
    seal_share = rng.choice((0, 0, 0.2))
    for _ in range(rng.randrange(8, 40)):
        story.start_load()
        story.look_at_seal()
        if story.sealing is None and rng.random() < seal_share:
            # Most seals end with other clients than they began with.
            story.begin_seal()
        if rng.random() < 0.7:
            story.run_load_until_space_is_prepared()
        else:
            story.run_load(rng.choice((0, 0.003, 0.01, 0.04)))
        errors = story.load.errors
        # Requests in flight at the disconnect are still answered.
        rng.choice((story.finish_load, story.break_off_load))()
        assert not errors, f"requests failed: {errors}"
        story.counts["reopenings"] += 1
    story.end_seal()
    story.check_live()
    story.server.stop()


def _crash(story, kill_seal, believe_answer):
    story.kill_server()
    story.give_up_seal(kill_seal, believe_answer)


def _interrupted_opening(story, cut):
    handles = story.interrupt_opening()
    if cut is not None:
        cut.cut_power()
    story.server.process.kill()
    del handles
    story.stop_server()
    if cut is not None:
        cut.power_up()
    story.counts["interrupted_openings"] += 1


def run_kills(rng, seed, wanted, counts, report):
    """Stories of kill rounds until the wanted number of kills."""
    while counts["kills"] < wanted:
        with kept_on_failure(seed) as directory:
            story = Story(rng, directory, directory, counts)
            _tell(story, wanted, counts, report, "kills", kill_round)


def run_cuts(rng, seed, wanted, counts, report):
    """The same with power cuts."""
    while counts["cuts"] < wanted:
        with kept_on_failure(seed) as directory:
            disk = LoopFileSystem(directory, LOOP_BYTES)
            try:
                story = Story(rng, directory, disk.mount_point, counts)
                _tell(story, wanted, counts, report, "cuts", cut_round, disk)
            finally:
                disk.close()


def run_reopenings(rng, seed, wanted, counts, report):
    """Stories of connecting and disconnecting clients until the wanted number of openings."""
    while counts["reopenings"] < wanted:
        with kept_on_failure(seed) as directory:
            story = Story(rng, directory, directory, counts)
            _tell(story, wanted, counts, report, "reopenings", reopen_round)


def run_command_kills(rng, seed, wanted, counts, report):
    """Kills of commands, with a new repository for every few kills."""
    done = 0
    while done < wanted:
        with kept_on_failure(seed) as directory:
            commands = CommandKills(rng, directory, counts)
            try:
                commands.begin()
                for _ in range(min(20, wanted - done)):
                    began = time.monotonic()
                    commands.round()
                    done += 1
                    report("command kills", done, time.monotonic() - began)
            except BaseException:
                if commands.server is not None:
                    print(commands.server.messages()[-3000:])
                raise
            finally:
                commands.close()


def _tell(story, wanted, counts, report, what, one_round, *arguments):
    """One repository's rounds: some sessions, one after the other."""
    try:
        story.begin()
        for _ in range(3):
            for _ in range(story.rng.randrange(3, 12)):
                began = time.monotonic()
                one_round(story, *arguments)
                report(what, counts[what], time.monotonic() - began)
                if counts[what] >= wanted:
                    break
            story.end_session()
            if counts[what] >= wanted:
                return
    except BaseException:
        print(f"\nthe repository: {story.coldrise.repository}, session {story.session}")
        if story.server is not None:
            print(f"nbdkit, exit code {story.server.process.poll()}:")
            print(story.server.messages()[-3000:])
        raise
    finally:
        story.close()
