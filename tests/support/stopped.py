"""A process that does not answer, for a while or until it is killed."""

import contextlib
import os
import signal
from pathlib import Path

from support.nbdserver import wait_until


def stop(pid):
    """Returns when every thread has stopped: until then, another one may answer a request."""
    os.kill(pid, signal.SIGSTOP)

    def stands():
        try:
            stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):
            return False  # a thread has just ended
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    wait_until(stands, f"process {pid} stands")


@contextlib.contextmanager
def stopped(pid):
    try:
        stop(pid)
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
