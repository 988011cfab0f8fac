"""A process that does not answer for a while."""

import contextlib
import os
import signal
from pathlib import Path

from support.nbdserver import wait_until


def stands(thread):
    """Whether a thread does not run. One that has ended meanwhile does not."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextlib.contextmanager
def stopped(pid):
    """Every thread stands meanwhile: until then, another one may answer a request."""
    os.kill(pid, signal.SIGSTOP)
    try:
        threads = Path(f"/proc/{pid}/task")
        wait_until(lambda: all(stands(thread) for thread in threads.glob("*")), f"process {pid} stands")
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
