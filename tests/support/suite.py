"""The results that a run of the suite keeps, for people and for the next run: see tests/run.py.

`build/tests/durations.tsv` has a line for each test: wall seconds, processor seconds, name. The
processor seconds include the processes that the test started and waited for. Files that took
longest start first in the next run.
"""

import contextlib
import json
import os
import pathlib
import resource

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "tests"
# Names the file that gets the output of what failed, as JSON by test.
FAILED = "COLDRISE_TESTS_FAILED"
_CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "coldrise"
# The second one is for a fresh clone.
_DURATIONS = [KEPT / "durations.tsv", _CACHE / "test-durations.tsv"]
_PROCESSOR = "processor_s"


def _processor_seconds():
    """Of this process, and of all processes that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def last_durations():
    """Wall and processor seconds of each test in the last run that had it."""
    for path in _DURATIONS:
        with contextlib.suppress(OSError, ValueError):
            lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
            return {test: (float(wall), float(processor)) for wall, processor, test in lines}
    return {}


def seconds_by_file():
    """Wall seconds of each test file in the last run that had it."""
    files = {}
    for test, (wall, _) in last_durations().items():
        file = test.split("::")[0]
        files[file] = files.get(file, 0) + wall
    return files


class Worker:
    """Measures the processor seconds of each test."""

    def __init__(self):
        self.before = 0

    def pytest_runtest_logstart(self):
        self.before = _processor_seconds()

    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            item.user_properties.append((_PROCESSOR, _processor_seconds() - self.before))


class Recorder:
    """Takes the reports of all workers."""

    def __init__(self):
        self.durations = {}
        self.failed = {}

    def pytest_runtest_logreport(self, report):
        wall, processor = self.durations.get(report.nodeid, (0, 0))
        processor = dict(report.user_properties).get(_PROCESSOR, processor)
        self.durations[report.nodeid] = (wall + report.duration, processor)
        if report.failed:
            parts = [report.longreprtext, *(f"--- {name} ---\n{text}" for name, text in report.sections)]
            self.failed[report.nodeid] = self.failed.get(report.nodeid, "") + "\n".join([*parts, ""])

    def pytest_sessionfinish(self):
        if FAILED in os.environ:
            pathlib.Path(os.environ[FAILED]).write_text(json.dumps(self.failed), encoding="utf-8")
        kept = sorted((last_durations() | self.durations).items(), key=lambda entry: -entry[1][0])
        text = "".join(f"{wall:.2f}\t{processor:.2f}\t{test}\n" for test, (wall, processor) in kept)
        for path in _DURATIONS:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_suffix(f".{os.getpid()}")
                new.write_text(text, encoding="utf-8")
                new.replace(path)


def lanes(config, log):
    """Test files go to the workers whole, the longest first. Those in tests/guests have the first
    worker: two emulated processors leave nothing for concurrent tests."""
    from xdist.scheduler import LoadScopeScheduling  # The plugin, where it is in use.

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.split("::")[0]

        def schedule(self):
            self.seconds = seconds_by_file()
            super().schedule()

        def _assign_work_unit(self, node):
            is_first = node is self.nodes[0]
            # Unknown ones may be long.
            order = sorted(self.workqueue, key=lambda file: -self.seconds.get(file, 1000))
            mine = [file for file in order if file.startswith("tests/guests/") == is_first]
            file = (mine or order)[0]
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    return Lanes(config, log)
