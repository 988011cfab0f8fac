#!/usr/bin/python3
"""Measures Coldrise and its peers side by side, in one run.

    bench/run.py --build-dir target/release --out build/bench
    bench/run.py --list
    bench/run.py --quick --only nbd_read,nbd_write

The contestants of a row run in turn (A B A B …) for several rounds. A ratio is computed
within a round; median, lowest and highest are reported. Results go to
OUT/results.json and OUT/results.md; the table is printed too. The exit code is 0
whatever the ratios are, 1 if a measurement failed, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))
sys.dont_write_bytecode = True

from bench.support import machine, report  # noqa: E402
from bench.support.figures import Failure  # noqa: E402
from bench.support.setting import Setting, Sizes  # noqa: E402

# In the order in which they run.
MEASUREMENTS = [
    "nbd_read",
    "nbd_write",
    "marks",
    "mark_history",
    "protect_live",
    "protect_files",
    "protect_site",
    "many_sessions",
    "flush_latency",
    "publish_seal",
    "backup_restore",
    "restore_formats",
    "mount_formats",
    "verify",
    "space",
    "gc",
    "incremental",
    "parallel_backups",
    "over_ssh",
    "boot",
    "check_boot",
    "nfs_data",
    "nfs_guest",
    "listing",
    "service",
    "growth",
    "line",
    "offsite",
    "offsite_peers",
    "offsite_changes",
    "early_boot",
    "copies",
    "moving",
    "shares",
    "memory",
]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.py", description="Measure Coldrise and its peers side by side."
    )
    parser.add_argument("--build-dir", type=Path, default=PROJECT / "target" / "release",
                        help="where the coldrise program is (default target/release)")
    parser.add_argument("--out", type=Path, default=PROJECT / "build" / "bench",
                        help="results, images kept between runs, scratch space (default build/bench)")
    parser.add_argument("--guest", type=Path, help="raw image of a real guest (default: the project's own)")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="measure only these")
    parser.add_argument("--quick", action="store_true",
                        help="small disks, short runs: shows that everything works; the figures mean nothing")
    parser.add_argument("--rounds", type=int, help="rounds per row (default 5, quick 2)")
    parser.add_argument("--points", default="100,1000", metavar="N[,N]",
                        help="numbers of points of the measurement growth (default 100,1000)")
    parser.add_argument("--chunk-size", help="of the repository (default: Coldrise's own)")
    parser.add_argument("--compression", default="zstd:1", help="of the repository (default zstd:1, as init has it)")
    parser.add_argument("--peers-only", action="store_true", help="leave Coldrise out")
    parser.add_argument("--keep", action="store_true", help="keep the scratch space")
    parser.add_argument("--list", action="store_true", help="list the measurements and end")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    chosen = options.only.split(",") if options.only else MEASUREMENTS
    unknown = [name for name in chosen if name not in MEASUREMENTS]
    if unknown:
        parser.error(f"no measurement named {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    options.points = sorted(int(number) for number in options.points.split(","))
    options.chosen = [name for name in MEASUREMENTS if name in chosen]
    return options


def find_program(options: argparse.Namespace, failures: list[str]) -> Path | None:
    if options.peers_only:
        return None
    program = (options.build_dir / "coldrise").resolve()
    if os.access(program, os.X_OK):
        return program
    failures.append(f"{program}: no such program; build it first, or measure with --peers-only")
    return None


def take(out: Path) -> int | None:
    """Makes this the only run in `out` and removes the remains of a killed one. Returns
    the lock's file descriptor, or None if another run holds the lock."""
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    for leftover in out.glob("run-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return lock


def measure(setting: Setting, names: list[str]) -> None:
    for name in names:
        setting.say(f"== {name}")
        began = time.monotonic()
        try:
            importlib.import_module(f"bench.measure.{name}").measure(setting)
        except (Failure, OSError) as error:
            setting.failures.append(f"{name}: {error}")
            setting.say(f"  {name} FAILED: {error}")
        except Exception:
            # A defect in one measurement must not lose the figures of the others.
            setting.failures.append(f"{name}: {traceback.format_exc(limit=-3)}")
            setting.say(traceback.format_exc())
        setting.say(f"== {name}: {time.monotonic() - began:.0f} s")


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.list:
        for name in MEASUREMENTS:
            print(f"{name:16} {importlib.import_module(f'bench.measure.{name}').SUMMARY}")
        return 0
    # SIGTERM unwinds like Ctrl-C, so every server ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    out = options.out.resolve()
    if take(out) is None:
        print(f"{out}: another run is measuring here; wait for it, or name another --out", file=sys.stderr)
        return 1
    work = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    sockets = Path(tempfile.mkdtemp(prefix="coldrise-bench-"))
    sizes = Sizes.quick(options.rounds) if options.quick else Sizes.full(options.rounds)
    failures: list[str] = []
    setting = Setting(
        project=PROJECT,
        store=out,
        work=work,
        sockets=sockets,
        sizes=sizes,
        is_quick=options.quick,
        program=find_program(options, failures),
        guest_source=options.guest,
        points=options.points,
        chunk_size=options.chunk_size,
        compression=options.compression,
        failures=failures,
    )
    surroundings = machine.describe(PROJECT, work)
    try:
        measure(setting, options.chosen)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    (out / "results.json").write_text(
        json.dumps(report.as_json(setting, surroundings), indent=2, ensure_ascii=False) + "\n"
    )
    text = report.as_markdown(setting, surroundings)
    (out / "results.md").write_text(text)
    print(text)
    return 1 if setting.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
