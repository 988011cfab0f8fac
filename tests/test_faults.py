"""Each file operation below the repository fails once, or the process is killed at it.

Afterwards every point reads right, flushed data is present, the operation can be run
again, and two gcs leave nothing behind. The short form takes a sample;
`make test-faults` takes more.
"""

import collections
import concurrent.futures
import json
import random
import shutil
import threading
import time

import pytest

from support.cli import Coldrise
from support.faults import Faults, build_shim, faults_of
from support.mutation.fixture import Fixture, copy_repository
from support.nbdserver import Nbdkit, read_all
from support.operations import OPERATIONS, Scene

WORKERS = 2
KIB = 1 << 10
# Valid exit codes of an operation when a file operation fails.
EXIT_CODES = {0, 1, 3}


@pytest.fixture(scope="module", params=["plain", "encrypted"])
def fixture(request, tmp_path_factory):
    """Encrypted for the operations with keys: else each command would derive the key."""
    return Fixture(tmp_path_factory.mktemp("faults"), request.param == "encrypted")


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def references():
    """By the operation's name: its undisturbed run, which both tests compare with."""
    return {}


# The calls that an undisturbed operation makes, and the files and bytes that it leaves.
Reference = collections.namedtuple("Reference", "counts files size")


class Place:
    """Where one thread works."""

    def __init__(self, fixture, shim, references, directory):
        self.fixture = fixture
        self.shim = shim
        self.directory = directory
        self.scene = Scene(fixture, directory)
        self.references = references

    def reference(self, operation):
        """The state after an undisturbed operation, its repetition and two gcs."""
        if operation.name not in self.references:
            with self._prepared(operation) as (coldrise, scene):
                faults = Faults(self.shim, self.directory, coldrise.repository)
                code, messages = operation.run(coldrise, faults, scene)
                assert code == 0, f"{operation.name}: {code}: {messages}"
                counts = faults.counts()
                operation.settle(coldrise, scene)
                operation.repeat(coldrise, scene)
                operation.settle(coldrise, scene)
                self.references[operation.name] = Reference(counts, *self._left(coldrise))
        return self.references[operation.name]

    def judge(self, operation, fault, is_thorough):
        """Runs the operation with the fault and checks the result; returns its exit code."""
        reference = self.reference(operation)
        with self._prepared(operation) as (coldrise, scene):
            faults = Faults(self.shim, self.directory, coldrise.repository, fault)
            code, messages = operation.run(coldrise, faults, scene)
            was_killed = code == -9 and fault.action.startswith("kill")
            assert code in EXIT_CODES or was_killed, f"{code}: {messages}"
            assert "panicked" not in messages and '"internal"' not in messages, messages
            if code == 1:
                assert str(coldrise.repository) in messages or "database" in messages, messages
            operation.settle(coldrise, scene)
            self._check(operation, coldrise, messages, is_thorough)
            operation.repeat(coldrise, scene)
            operation.settle(coldrise, scene)
            files, size = self._left(coldrise)
            # After the gcs: a marker that could not be made is left to a writer.
            done = coldrise.run("verify")
            assert done.returncode == 0, done.stdout
            assert not files - reference.files, f"left behind: {files - reference.files}"
            assert size <= reference.size * 1.2 + 256 * KIB, f"{size} bytes, {reference.size} without"
            return code

    def _prepared(self, operation):
        return _Copy(self, operation)

    def _check(self, operation, coldrise, messages, is_thorough):
        """All points are what they were."""
        if operation.name == "init":
            assert coldrise.run("list").returncode in (0, 10)
            return
        done = coldrise.run("--json", "verify")
        answer = json.loads(done.stdout.splitlines()[-1])
        # A marker that could not be made was reported, and the next writer makes it.
        is_unmarked = answer["damaged_markers"] and "a marker is left to the next writer" in messages
        others = [name for name, found in answer.items()
                  if found and name.startswith("damaged") and name != "damaged_markers"]  # fmt: skip
        is_sound = done.returncode == 0 or is_unmarked and not others and not answer["affected"]
        assert is_sound or operation.name.startswith("repair"), done.stdout + done.stderr
        # One that a repair has not reached yet.
        is_repair = operation.name.startswith("repair")
        assert answer["damaged_documents"] == [] or is_repair, answer
        points_now = [point for machine in coldrise.json("list")["machines"]
                      for point in machine["points"]]  # fmt: skip
        listed = {point["address"] for point in points_now}
        served = {point["address"] for point in points_now if not point.get("quarantine")}
        known = {export.rpartition("/")[0] for export in self.fixture.expected}
        points = {name for name in known if not name.startswith("live/")}
        assert points <= listed or operation.name in ("forget", "prune", "prune gc"), points - listed
        if not is_thorough or operation.name.startswith("repair"):
            return
        with Nbdkit(coldrise, self.directory / "check") as server:
            for export, content in self.fixture.expected.items():
                if export.rpartition("/")[0] in served:
                    with server.connect(export) as handle:
                        assert read_all(handle) == content, f"{export} reads wrong"

    def _left(self, coldrise):
        """After two gcs: the files outside the database, by folder and suffix, and its bytes."""
        for _ in range(2):
            coldrise.json("gc")
        files = [path for path in coldrise.repository.rglob("*") if path.is_file()]
        database = [path for path in files if path.parent.name == "db"]
        beside = collections.Counter(
            f"{path.parent.name if len(path.parent.name) < 30 else 'session'}/*{path.suffix}"
            for path in files if path not in database)  # fmt: skip
        return beside, sum(path.stat().st_size for path in database)


class _Copy:
    """The repository before an operation."""

    def __init__(self, place, operation):
        self.place = place
        self.operation = operation
        self.repository = place.directory / "repository"

    def __enter__(self):
        copy_repository(self.place.fixture.repository, self.repository)
        coldrise = Coldrise(self.repository, self.place.fixture.coldrise.passphrase_file)
        self.place.scene.flushed, self.place.scene.uncertain = {}, {}
        self.operation.prepare(coldrise, self.place.scene)
        return coldrise, self.place.scene

    def __exit__(self, kind, value, trace):
        shutil.rmtree(self.repository, ignore_errors=True)


def sample(found, wanted, numbers):
    """As many of each operation, at least one, and of each the kinds of call that the
    others have least of. What an operation has too few calls for, the larger ones get."""
    chosen, taken = [], collections.Counter()
    for following, group in zip(range(len(found), 0, -1), sorted(found, key=len)):
        by_family = collections.defaultdict(list)
        for pair in numbers.sample(group, len(group)):
            by_family[pair[1].family].append(pair)
        share = (wanted - len(chosen)) // following
        for _ in range(min(len(group), max(1, share))):
            family = min(filter(by_family.get, by_family), key=lambda family: taken[family])
            taken[family] += 1
            chosen.append(by_family[family].pop())
    return chosen


def run(request, fixture, shim, references, tmp_path, wanted, actions):
    numbers = random.Random(request.config.getoption("--fault-seed"))
    only = request.config.getoption("--fault-operation")
    family = request.config.getoption("--fault-family")
    operations = [o for o in OPERATIONS if only in (None, o.name) and o.name.startswith(("init", "key ")) == fixture.is_encrypted]
    wanted = wanted and max(1, wanted * len(operations) // len(OPERATIONS))
    places = [Place(fixture, shim, references, tmp_path / f"place{n}") for n in range(WORKERS)]
    found = []
    for operation in operations:
        faults = faults_of(places[0].reference(operation).counts, actions)
        found.append([(operation, fault) for fault in faults if family in (None, fault.family)])
    total = sum(map(len, found))
    if wanted:
        chosen = sample(found, wanted, numbers)
        numbers.shuffle(chosen)
    else:
        chosen = [pair for group in found for pair in group]
    began, done, broken = time.monotonic(), collections.Counter(), []
    local, lock = threading.local(), threading.Lock()

    def one(number, operation, fault):
        if not hasattr(local, "place"):
            with lock:
                local.place = places.pop()
        try:
            code = local.place.judge(operation, fault, number % 4 == 0)
        except Exception as error:  # pylint: disable=broad-except
            code = "broken"
            with lock:
                broken.append(f"{operation.name}: {fault}: {type(error).__name__}: {error}")
                print(broken[-1][:1500], flush=True)
        with lock:
            done[code] += 1
            if sum(done.values()) % 100 == 0:
                print(f"{sum(done.values())} of {len(chosen)}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for task in [pool.submit(one, n, *pair) for n, pair in enumerate(chosen)]:
            task.result()
    summary = ", ".join(f"exit code {code}: {count}" for code, count in sorted(done.items(), key=str))
    print(f"{len(chosen)} of {total}: {summary}; {time.monotonic() - began:.0f} s", flush=True)
    assert not broken, f"{len(broken)} broken, first: {broken[0]}"


def test_a_failed_file_operation_loses_nothing(request, fixture, shim, references, tmp_path):
    wanted = request.config.getoption("--faults")
    run(request, fixture, shim, references, tmp_path, wanted, ("EIO", "ENOSPC", "short"))


def test_a_process_killed_at_a_file_operation_loses_nothing(request, fixture, shim, references, tmp_path):
    wanted = request.config.getoption("--kills")
    run(request, fixture, shim, references, tmp_path, wanted, ("kill before", "kill after"))
