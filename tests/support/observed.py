"""Observes a program: the files that it opens, and the memory of its processes."""

import dataclasses
import os
import pathlib
import re
import subprocess
import threading
import time

_CALL = re.compile(r"^(\w+)\((.*)\) += (-?\w+)")
_FIRST_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB", re.M)
# The first call of each thread. strace stops a thread at all its calls until it has seen one of those to look at: without this
# one, that would be for ever where a thread only reads and waits.
_FIRST = "set_robust_list"
_STARTS = ("clone", "clone3", "fork", "vfork")
# A program that takes a gigabyte lives longer: its pages are cleared.
SAMPLE_S = 0.05


@dataclasses.dataclass
class Observation:
    """The observation of one run."""

    returncode: int
    stdout: str
    stderr: str
    elapsed_s: float
    peak_bytes: int
    # The opened paths, by the name of the program.
    opened: dict[str, set[str]]
    connections: dict[str, set[str]]


def watch(command, environment, trace, timeout_s, cwd=None):
    """Runs a program under strace, which writes to `trace`."""
    started = time.monotonic()
    process = subprocess.Popen(
        ["strace", "-f", "-qq", "--seccomp-bpf", "-s", "4096",
         "-e", f"trace={_FIRST},open,openat,openat2,execve,connect,bind,listen,clone,clone3,fork,vfork",
         "-e", "signal=none", "-o", trace, *map(str, command)],
        env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace")
    memory = _Memory(process.pid)
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    finally:
        memory.stop()
    opened, connections = _read(trace)
    return Observation(process.returncode, stdout, stderr, time.monotonic() - started,
                       memory.peak_bytes, opened, connections)


class _Memory:
    """Sums up the memory of a process's descendants at intervals. Each counts with its peak, so
    that little is missed in between."""

    def __init__(self, root):
        self.root = root
        self.peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self):
        self._stopped.set()
        self._thread.join()

    def _sample(self):
        while not self._stopped.wait(SAMPLE_S):
            held = sum(_peak_bytes(process) for process in _descendants(self.root))
            self.peak_bytes = max(self.peak_bytes, held)


def _descendants(root):
    """All processes below `root`. Reads only those: the rest of /proc may be long."""
    found, waiting = [], [root]
    while waiting:
        folder = f"/proc/{waiting.pop()}/task"
        try:
            below = [int(child) for thread in os.listdir(folder)
                     for child in _content(f"{folder}/{thread}/children").split()]
        except OSError:
            continue  # it has ended
        found += below
        waiting += below
    return found


def _peak_bytes(process):
    try:
        found = _PEAK.search(_content(f"/proc/{process}/status"))
    except OSError:
        return 0  # it has ended
    return int(found[1]) * 1024 if found else 0


def _content(path):
    """Of a file of /proc: a file object would cost more than the reading."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)


def _read(trace):
    """The files that each program opened, and its connections."""
    calls = list(_calls(trace))
    parents = {int(result): process for process, call, _, result in calls
               if call in _STARTS and result.isdigit()}
    opened, connections, programs = {}, {}, {}

    def program(process):
        while process not in programs and process in parents:
            process = parents[process]
        return programs.get(process, "?")

    for process, call, arguments, result in calls:
        if result.startswith("-"):
            continue
        if call in ("connect", "bind", "listen"):
            connections.setdefault(program(process), set()).add(arguments)
        elif call not in _STARTS:
            path = _FIRST_TEXT.search(arguments)[1]
            if call == "execve":
                programs[process] = os.path.basename(path)
            opened.setdefault(program(process), set()).add(path)
    return opened, connections


def _calls(trace):
    """Each call: the thread, the call's name, its arguments, its result."""
    begun = {}
    for line in pathlib.Path(trace).read_text(errors="replace").splitlines():
        process, _, text = line.partition(" ")
        text = text.strip()
        if text.endswith("<unfinished ...>"):
            begun[process] = text.removesuffix("<unfinished ...>")
            continue
        if text.startswith("<... "):
            text = begun.pop(process, "") + text.partition(" resumed>")[2]
        if (found := _CALL.match(text)) and found[1] != _FIRST:
            yield int(process), found[1], found[2], found[3]
