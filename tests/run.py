"""Runs the Python tests: `tests/run.py [--workers N] [pytest's options and tests]`.

What fails is run again alone, one test after another. A test that fails twice fails the run. One
that passes alone does not: the last section names it, and both outputs are in build/unstable. It
is a defect all the same, of the test or of the product.
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


def pytest(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def keep_output(which):
    """Returns the tests that failed in the last run of pytest, and keeps what they printed."""
    failed = json.loads(FAILED.read_text(encoding="utf-8"))
    for test, output in failed.items():
        folder = UNSTABLE / re.sub(r"[^\w.-]+", "_", test)[-200:]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / which).write_text(f"{test}\n{output}", encoding="utf-8")
    return list(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # More workers than processors: half of a test's time is waiting, for syncs and for servers.
    parser.add_argument("--workers", type=int, default=2 * len(os.sched_getaffinity(0)))
    options, rest = parser.parse_known_args()
    shutil.rmtree(UNSTABLE, ignore_errors=True)
    FAILED.unlink(missing_ok=True)
    tests = [word for word in rest if not word.startswith("-")] or ["tests"]
    status = pytest("-n", str(options.workers), f"--junitxml={KEPT / 'junit.xml'}", "--durations=10",
                    *(word for word in rest if word.startswith("-")), *tests)
    if status != TESTS_FAILED or not FAILED.exists():
        return status
    beside = keep_output("beside.txt")
    if not 0 < len(beside) <= MOST_REPEATED:
        return status
    print(f"\nRunning what failed again, alone: {len(beside)} tests", flush=True)
    again = pytest(*beside)
    alone = keep_output("alone.txt")
    if again not in (0, TESTS_FAILED):
        return again
    unstable = [test for test in beside if test not in alone]
    if unstable:
        print(f"\n==== failed beside others, passed alone: {len(unstable)} (output: {UNSTABLE}) ====")
        print("\n".join(unstable))
    if alone:
        print(f"\n==== failed twice: {len(alone)} ====")
        print("\n".join(alone))
    return again


if __name__ == "__main__":
    sys.exit(main())
