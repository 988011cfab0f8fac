"""Images that are made to harm the importing program: each is refused, or imported as what
it is, within 30 s and 1 GiB, and no other file is opened meanwhile."""

import concurrent.futures
import json
import os
import platform
import subprocess
import sys

import pytest

from support.cli import PROGRAM, ROOT, Coldrise
from support.observed import watch

sys.path.insert(0, str(ROOT / "images"))

from hostile import CASES  # noqa: E402
from hostile.case import SECRET, Refused  # noqa: E402

# The limit for endless imports; a busy machine is slow.
MOST_SECONDS = 120
MOST_BYTES = 1 << 30
# Larger disks are looked at, not restored.
RESTORED_BYTES = 1 << 30
WORKERS = 2
# The files that programs need to run. They know only these, and the image.
SYSTEM = ("/usr/", "/bin/", "/lib/", "/lib64/", "/etc/ld.so.cache", "/dev/null", "/dev/urandom",
          "/sys/devices/system/cpu")
CHILDREN = ("sh", "prlimit", "qemu-img", "qemu-nbd")


class Outcome:
    """The outcome of one case."""

    def __init__(self, case, base, coldrise):
        self.folder = base / case.name
        self.image = case.write(base)
        command = [PROGRAM, "--json", "backup", case.name, f"vda={case.word}:{self.image}",
                   *case.arguments]
        self.seen = watch(command, coldrise.environment(), base / f"{case.name}.trace",
                          timeout_s=2 * MOST_SECONDS)
        self.points, self.disk, self.content = [], None, None

    def look(self, coldrise, points):
        """What was stored: `points` are those of this case's machine."""
        self.points = points
        if points:
            self.disk = coldrise.json("show", points[0])["disks"][0]
            if self.disk["size_bytes"] <= RESTORED_BYTES:
                target = self.folder.with_name(f"{self.folder.name}.restored.raw")
                coldrise.json("restore", f"{points[0]}/vda", target)
                self.content = target.read_bytes()
                target.unlink()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All cases, tried side by side: a repository has one writer at a time."""
    def work(base, cases):
        coldrise = Coldrise(base / "repository")
        coldrise.init("--no-encryption")
        outcomes = {case.name: Outcome(case, base, coldrise) for case in cases}
        points = {machine["machine"]: [point["address"] for point in machine["points"]]
                  for machine in coldrise.json("list")["machines"]}
        for name, outcome in outcomes.items():
            outcome.look(coldrise, points.get(name, []))
        return outcomes

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        # Made here: the first use of the factory empties its folder, and several threads may be the first.
        bases = [tmp_path_factory.mktemp("hostile") for _ in range(WORKERS)]
        parts = pool.map(work, bases, [CASES[number::WORKERS] for number in range(WORKERS)])
        return {name: outcome for part in parts for name, outcome in part.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_or_harmless(outcomes, case):
    outcome = outcomes[case.name]
    seen = outcome.seen
    # The image's path holds the case's name, and that some of the words.
    said = seen.stderr.replace(str(outcome.folder), "").lower()
    if isinstance(case.expected, Refused):
        assert seen.returncode in (1, 2), seen.stdout + seen.stderr
        assert outcome.points == []
        assert any(word.lower() in said for word in case.expected.words), seen.stderr
        assert str(outcome.folder) in seen.stderr
        assert "panic" not in said and "internal" not in said
    else:
        assert seen.returncode == 0, seen.stdout + seen.stderr
        assert len(outcome.points) == 1
        assert outcome.disk["size_bytes"] == case.expected.size_bytes
        expected = case.expected.stored
        if outcome.content is None:
            assert not expected
            assert '"read_bytes":0' in seen.stdout
        else:
            content = bytearray(case.expected.size_bytes)
            for offset, part in expected.items():
                content[offset : offset + len(part)] = part
            assert outcome.content == bytes(content)
    # No image gets a word to the terminal that it would obey.
    assert all(character.isprintable() or character == "\n" for character in seen.stderr)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_time_and_memory_are_bounded(outcomes, case):
    seen = outcomes[case.name].seen
    assert seen.elapsed_s <= MOST_SECONDS
    assert seen.peak_bytes <= MOST_BYTES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_other_files_are_opened(outcomes, case):
    outcome = outcomes[case.name]
    seen = outcome.seen
    base = outcome.folder.parent
    own = str(outcome.folder) + os.sep
    for program, paths in seen.opened.items():
        for path in paths:
            # No program leaves the image's folder because of the image.
            assert not path.startswith((str(base / "secret"), "/etc/passwd", "/dev/zero")), path
            if program in CHILDREN:
                assert path.startswith((*SYSTEM, own)), f"{program} opened {path}"
            else:
                assert program == "coldrise", f"{program} was started"
                inside = path.startswith(str(base))
                assert not inside or path.startswith((own, str(base / "repository"))), path
    for program, places in seen.connections.items():
        assert program == "coldrise", f"{program} made a connection: {places}"
        assert all("AF_UNIX" in place for place in places if "sa_family" in place), places
    if outcome.content is not None:
        assert SECRET not in outcome.content


def test_the_trace_is_not_empty(outcomes, tmp_path):
    """Without this the tests above could pass on an empty trace."""
    seen = outcomes["qcow2-plain"].seen
    assert set(CHILDREN) <= set(seen.opened)
    image = str(outcomes["qcow2-plain"].image)
    for program in ("coldrise", "qemu-img", "qemu-nbd"):
        assert image in seen.opened[program]
    assert any("AF_UNIX" in place for place in seen.connections["coldrise"])
    assert outcomes["qcow2-shared-tables"].seen.peak_bytes > 16 << 20
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    # It stays for a while: a busy machine may keep the observer from a look for a second.
    script = ("import socket, sys; x = b'x' * (300 << 20); open(sys.argv[1]).read();"
              "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
              "socket.create_connection(s.getsockname()); import time; time.sleep(2)")
    seen = watch(["/usr/bin/python3", "-c", script, secret], dict(os.environ), tmp_path / "trace",
                 timeout_s=60)
    assert seen.returncode == 0, seen.stderr
    assert str(secret) in seen.opened["python3"]
    assert any("AF_INET" in place for place in seen.connections["python3"])
    assert seen.peak_bytes > 300 << 20


def test_a_raw_disk_with_an_image_header_gets_a_warning(outcomes):
    seen = outcomes["raw-qcow2"].seen
    assert "begins as a qcow2 image" in seen.stderr and "raw disk" in seen.stderr
    assert "begins as a qcow2 image" in seen.stdout


def test_a_disk_that_only_ends_as_a_fixed_vhd_gets_in_through_nbd(tmp_path):
    """The workaround that the refusal names."""
    case = next(case for case in CASES if case.name == "vhd-fixed-as-raw")
    image = case.write(tmp_path)
    coldrise = Coldrise(tmp_path / "repository")
    coldrise.init("--no-encryption")
    socket = tmp_path / "socket"
    with subprocess.Popen(["qemu-nbd", "--read-only", "--format=raw", f"--socket={socket}",
                           "--persistent", "--fork", f"--pid-file={tmp_path / 'pid'}",
                           image]) as starting:
        assert starting.wait() == 0
    try:
        coldrise.json("backup", "web01", f"vda=nbd+unix:///?socket={socket}")
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 15)
    target = tmp_path / "restored.raw"
    coldrise.json("restore", "web01/latest/vda", target)
    assert target.read_bytes() == image.read_bytes()


def test_doctor_reports_whether_imports_are_confined(tmp_path):
    coldrise = Coldrise(tmp_path / "repository")
    coldrise.init("--no-encryption")
    findings = {entry["check"]: entry for entry in coldrise.json("doctor")["findings"]}
    assert findings["import"]["status"] == "ok", findings["import"]


# Answers ENOSYS to two system calls, as a kernel that lacks them, and runs a program.
WITHOUT = """
import ctypes, os, struct, sys
first, second = int(sys.argv[1]), int(sys.argv[2])
code = [(0x20, 0, 0, 0), (0x15, 1, 0, first), (0x15, 0, 1, second),
        (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7fff0000)]
code = b"".join(struct.pack("=HBBI", *line) for line in code)
code = ctypes.create_string_buffer(code, len(code))
program = ctypes.create_string_buffer(struct.pack("@HP", 5, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0, ctypes.get_errno()
os.execv(sys.argv[3], sys.argv[3:])
"""
LANDLOCK = 444
SECCOMP = {"x86_64": 317, "aarch64": 277}[platform.machine()]


@pytest.mark.parametrize("lacking, word", [
    ((LANDLOCK, LANDLOCK), "Landlock"), ((SECCOMP, SECCOMP), "seccomp"),
    ((LANDLOCK, SECCOMP), "neither")])
def test_an_older_kernel_imports_with_a_warning(tmp_path, lacking, word):
    case = next(case for case in CASES if case.name == "qcow2-plain")
    image = case.write(tmp_path)
    coldrise = Coldrise(tmp_path / "repository")
    coldrise.init("--no-encryption")

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, *map(str, lacking), PROGRAM, *words],
            env=coldrise.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    done = run("backup", "web01", f"vda={image}")
    # Several children are started for one image; one line is enough.
    assert done.stderr.count("not fully confined") == 1 and word in done.stderr
    findings = json.loads(run("--json", "doctor").stdout)["findings"]
    finding = next(entry for entry in findings if entry["check"] == "import")
    assert finding["status"] == "warn" and word in finding["message"]
