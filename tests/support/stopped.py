"""A process that does not answer, for a while or until it is killed."""

import contextlib
import os
import signal
from pathlib import Path

from support.nbdserver import wait_until


def stop(pid):
    """Returns when every thread has stopped: until then, another one may answer a request."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: states(pid) == {"T"}, f"process {pid} stands")


def states(pid):
    """The states of a process's threads, as letters of ps; empty when a thread has just ended."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def sleeps(pid):
    """Whether all threads of a process wait for something."""
    return states(pid) == {"S"}


@contextlib.contextmanager
def stopped(pid):
    try:
        stop(pid)
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
