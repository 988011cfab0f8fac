"""Runs the Python tests: `tests/run.py [--quick] [--workers N] [pytest's options and tests]`.

Failed tests run again alone, one after another. A test that fails twice fails the run. One
that passes alone does not: the last section names it, and both outputs are in build/unstable. It
is still a defect, of the test or of the product.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys

from support.suite import FAILED, KEPT, ROOT

UNSTABLE = ROOT / "build" / "unstable"
# More failures than this have one cause, which does not depend on what runs beside.
MOST_REPEATED = 10
TESTS_FAILED = 1
# Each front end once, and the commands that most of the others build on: without a guest.
QUICK = [
    "test_cli_backup.py", "test_cli_restore.py", "test_cli_forget.py", "test_cli_errors.py",
    "test_cli_sessions.py::test_seal_while_served_and_while_idle",
    "test_cli_gc.py::test_the_space_of_a_forgotten_machine_is_returned",
    "test_cli_verify.py::test_an_intact_repository_is_verified_completely",
    "test_cli_repair.py::test_the_next_backup_heals",
    "test_formats.py::test_an_empty_disk",
    "test_nbd_data.py", "test_nbd_sessions.py",
    "test_nfs_live.py::test_qemu_writes_to_one_file_are_sealed",
    "test_nfs_live.py::test_flushed_writes_survive_a_crash",
    "test_mount_live.py",
    "test_serve_smb.py::test_a_disk_is_written_as_hyper_v_writes_it",
    "test_serve_iscsi.py::test_a_session_is_written_flushed_and_trimmed",
    "test_copy.py::test_every_point_reads_the_same_from_other_chunks",
    "test_bucket.py::test_a_repository_and_a_disk_are_restored_from_a_bucket",
    "test_service_jobs.py::test_a_schedule_creates_points",
    "test_service_machines.py::test_the_api_matches_the_command_line",
    "web/test_web_machines.py::test_machines_by_state_with_search_and_keys",
]


def pytest(which, *arguments):
    """The exit code, and the tests that failed. What they printed is kept in files of the name `which`."""
    report = KEPT / "failed.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    # Each worker reads all test files: to rewrite their assertions takes it six seconds, unless they are kept.
    environment = os.environ | {FAILED: str(report), "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "pycache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    failed = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    for test, output in failed.items():
        folder = UNSTABLE / re.sub(r"[^\w.-]+", "_", test)[-200:]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / which).write_text(f"{test}\n{output}", encoding="utf-8")
    return status, list(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # More workers than processors: half of a test's time is waiting, for syncs and for servers.
    parser.add_argument("--workers", type=int, default=3 * len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="each front end once, no guest")
    options, rest = parser.parse_known_args()
    shutil.rmtree(UNSTABLE, ignore_errors=True)
    KEPT.mkdir(parents=True, exist_ok=True)
    quick = [f"tests/{test}" for test in QUICK] if options.quick else []
    tests = [word for word in rest if not word.startswith("-")] or quick or ["tests"]
    status, beside = pytest("beside.txt", "-n", str(options.workers), f"--junitxml={KEPT / 'junit.xml'}", "--durations=10",
                            *(word for word in rest if word.startswith("-")), *tests)
    if status != TESTS_FAILED or not 0 < len(beside) <= MOST_REPEATED:
        return status
    print(f"\nRunning what failed again, alone: {len(beside)} tests", flush=True)
    if "TMPDIR" in os.environ and os.path.ismount(os.environ["TMPDIR"]):
        # On the drive: what a failed test leaves outlives this run.
        del os.environ["TMPDIR"]
    status, alone = pytest("alone.txt", *beside)
    if status not in (0, TESTS_FAILED):
        return status
    unstable = [test for test in beside if test not in alone]
    if unstable:
        print(f"\n==== failed beside others, passed alone: {len(unstable)} (output: {UNSTABLE.relative_to(ROOT)}) ====")
        print("\n".join(unstable))
    if alone:
        print(f"\n==== failed twice: {len(alone)} ====")
        print("\n".join(alone))
    return status


if __name__ == "__main__":
    sys.exit(main())
