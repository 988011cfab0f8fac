#!/usr/bin/env python3
"""Demonstrates the whole cycle on a real guest, in about two minutes.

It backs up a Debian guest twice, publishes the first restore point and boots it over
NBD. It seals the guest's writes into a synthetic restore point and boots that over NBD
and over NFS. Finally it shows that the first point is unchanged.

    demo/run.py --build-dir target/release

The last line of standard output is either

    demo: ok boot_raw_s=… boot_backup_s=… publish_ms=… seal_ms=… boot_nbd_s=… boot_nfs_s=…

or says which step failed, why, and where its logs are (exit status 1). All times
are wall-clock times of whole commands and whole boots, measured from outside. With
--two-boots the boots that only serve comparisons are left out, and their times.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "tests"))

from support.guest import Guest, GuestError, kvm_works, nbd_disk, raw_disk  # noqa: E402

MIB = 1024 * 1024
NEEDED_FREE_BYTES = 3 * 1024 * MIB
GUEST_BUILD_SECONDS = 900
COMMAND_SECONDS = 300
BOOT_SECONDS = 240
SERVE_SECONDS = 30
# In the guest: the file that the demo writes while the guest runs from its backup.
GUEST_FILE = "/root/written-in-the-session"
GUEST_FILE_BYTES = 16 * 1024
# In the image: the change between the first and the second backup.
CHANGED_FILE_BYTES = 4 * MIB


class DemoError(Exception):
    """A step failed; the message says what happened and what to do."""


@dataclasses.dataclass
class Demo:
    """Paths, and the results of the steps so far."""

    coldrise: Path
    work: Path
    cleanup: contextlib.ExitStack
    cpus: int
    figures: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.logs = self.work / "logs"
        self.first_image = self.work / "first.raw"
        self.second_image = self.work / "second.raw"
        self.socket = self.work / "nbd.socket"
        self.content = secrets.token_bytes(GUEST_FILE_BYTES)
        passphrase = self.work / "passphrase"
        self.environment = os.environ | {
            "COLDRISE_REPO": str(self.work / "repository"),
            "COLDRISE_RUNS": "none",
            "COLDRISE_PASSPHRASE_FILE": str(passphrase),
        }
        # The environment might name another source of the passphrase.
        self.environment.pop("COLDRISE_PASSPHRASE_COMMAND", None)
        self.logs.mkdir()
        with open(os.open(passphrase, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")

    def run(self, *arguments) -> tuple[dict, float]:
        """Runs one coldrise command; returns its final JSON object and its time in ms."""
        command = [str(self.coldrise), "--json", *map(str, arguments)]
        log = self.logs / f"coldrise-{arguments[0]}.log"
        started = time.monotonic()
        try:
            done = subprocess.run(command, env=self.environment, stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"`{_shown(arguments)}` did not end within {COMMAND_SECONDS} s") from None
        elapsed_ms = (time.monotonic() - started) * 1000
        with open(log, "a") as file:
            file.write(f"$ {_shown(arguments)}\n{done.stdout}{done.stderr}"
                       f"# exit status {done.returncode}, {elapsed_ms:.0f} ms\n")
        if done.returncode != 0:
            why = done.stderr.strip() or done.stdout.strip() or "it printed nothing"
            raise DemoError(f"`{_shown(arguments)}` ended with exit status {done.returncode}:\n{why}")
        lines = done.stdout.strip().splitlines()
        try:
            return json.loads(lines[-1]), elapsed_ms
        except (IndexError, json.JSONDecodeError):
            raise DemoError(f"`{_shown(arguments)}` succeeded without a JSON object on its "
                            f"last line: see {log}") from None

    def guest(self, disk, name: str) -> Guest:
        return Guest([disk], log=self.logs / f"console-{name}.log", cpus=self.cpus)

    def nbd_uri(self, export: str) -> str:
        return f"nbd+unix:///{export}?socket={self.socket}"


def _shown(arguments) -> str:
    return " ".join(["coldrise", *map(str, arguments)])


# --------------------------------------------------------------------- steps
# Each step takes the Demo, returns a short text to print, and raises on failure.


def build_guest(demo: Demo) -> str:
    log = demo.logs / "guest-build.log"
    with open(log, "w") as errors:
        done = subprocess.run([PROJECT / "images/guest/build.sh"], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=errors, text=True, timeout=GUEST_BUILD_SECONDS)
    if done.returncode != 0:
        raise DemoError(f"images/guest/build.sh ended with exit status {done.returncode}:\n{_tail(log)}")
    built = Path(done.stdout.strip().splitlines()[-1])
    _copy_sparse(built, demo.first_image)
    demo.figures["virtual_bytes"] = demo.first_image.stat().st_size
    demo.figures["used_bytes"] = _used_bytes(demo.first_image)
    return f"{_size(demo.figures['virtual_bytes'])} disk, {_size(_used_bytes(demo.first_image))} used"


def boot_raw(demo: Demo) -> str:
    seconds = _boot(demo, raw_disk(demo.first_image), "raw")
    demo.figures["boot_raw_s"] = seconds
    # The boot wrote to the image, so its size counts from here on.
    demo.figures["used_bytes"] = _used_bytes(demo.first_image)
    return f"{seconds:.1f} s to the login prompt, {'KVM' if kvm_works() else 'no KVM here: emulated CPU'}"


def create_repository(demo: Demo) -> str:
    demo.run("init")
    return "encrypted with a random passphrase"


def backup_first(demo: Demo) -> str:
    demo.figures["first_sha256"] = _sha256(demo.first_image)
    report, elapsed_ms = demo.run("backup", "web01", f"vda=raw:{demo.first_image}")
    demo.figures |= {"first_address": report["address"], "first": report["disks"][0]}
    stored = report["disks"][0]["stored_bytes"]
    return f"{report['address']}: {_size(stored)} stored in {elapsed_ms / 1000:.1f} s"


def change_image(demo: Demo) -> str:
    """Writes a file into the image's file system, like a day's work."""
    _copy_sparse(demo.first_image, demo.second_image)
    content = demo.work / "changed"
    content.write_bytes(secrets.token_bytes(CHANGED_FILE_BYTES))
    # debugfs writes into its working directory and accepts no blanks in names.
    _debugfs(demo.second_image, "cd /root", f"write {content.name} changed", cwd=demo.work, write=True)
    found = _debugfs(demo.second_image, "stat /root/changed", cwd=demo.work)
    if f"Size: {CHANGED_FILE_BYTES}" not in found:
        raise DemoError(f"debugfs did not write the new file into {demo.second_image}:\n{found.strip()}")
    return f"a new file of {_size(CHANGED_FILE_BYTES)} on it"


def backup_second(demo: Demo) -> str:
    report, elapsed_ms = demo.run("backup", "web01", f"vda=raw:{demo.second_image}")
    disk = report["disks"][0]
    if disk["stored_bytes"] >= demo.figures["first"]["stored_bytes"] / 4:
        raise DemoError(f"the second backup stored {_size(disk['stored_bytes'])} although only "
                        f"{_size(CHANGED_FILE_BYTES)} changed: deduplication does not work")
    demo.figures |= {"second": disk, "stats": demo.run("stats")[0]}
    return f"{report['address']}: {_size(disk['stored_bytes'])} stored in {elapsed_ms / 1000:.1f} s"


def serve(demo: Demo) -> str:
    """Starts the NBD server; it is stopped when the demo ends."""
    command = [demo.coldrise, "serve", "nbd", "--socket", demo.socket]
    log = demo.cleanup.enter_context(open(demo.logs / "serve.log", "w"))
    process = subprocess.Popen(command, env=demo.environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=log, text=True)
    ready, ended = threading.Event(), threading.Event()

    def read_lines():
        for line in process.stdout:
            log.write(line)
            log.flush()
            if line.startswith("ready"):
                ready.set()
        ended.set()
        ready.set()

    reader = threading.Thread(target=read_lines, daemon=True)
    # The stack unwinds in reverse: the process stops first, then its reader ends.
    demo.cleanup.callback(reader.join)
    demo.cleanup.callback(_stop, process)
    reader.start()
    if not ready.wait(SERVE_SECONDS):
        raise DemoError(f"`coldrise serve nbd` was not ready within {SERVE_SECONDS} s:\n{_tail(log.name)}")
    if ended.is_set():
        raise DemoError(f"`coldrise serve nbd` ended with exit status {process.wait()} before it was "
                        f"ready:\n{_tail(log.name)}")
    return "on a Unix socket"


def publish_first(demo: Demo) -> str:
    report, elapsed_ms = demo.run("publish", demo.figures["first_address"], "--name", "trial1")
    demo.figures |= {"export": report["disks"][0]["export"], "publish_ms": elapsed_ms}
    return f"{demo.figures['export']} in {elapsed_ms:.0f} ms"


def boot_backup(demo: Demo) -> str:
    def write_file(guest: Guest):
        encoded = base64.b64encode(demo.content).decode()
        guest.check(f"echo {encoded} | base64 -d > {GUEST_FILE} && sync")
        digest = guest.check(f"sha256sum < {GUEST_FILE}").split()[0]
        _expect_content(demo, digest, "the guest did not keep the file it was given")

    seconds = _boot(demo, nbd_disk(demo.nbd_uri(demo.figures["export"])), "backup", write_file)
    demo.figures["boot_backup_s"] = seconds
    return f"{seconds:.1f} s to the login prompt; a file written inside"


def seal(demo: Demo) -> str:
    report, elapsed_ms = demo.run("seal", "trial1")
    demo.figures |= {"sealed_address": report["address"], "seal_ms": elapsed_ms}
    return f"{report['address']} in {elapsed_ms:.0f} ms"


def boot_sealed(demo: Demo) -> str:
    seconds = _boot_command(demo, "nbd")
    demo.figures["boot_nbd_s"] = seconds
    return f"{seconds:.1f} s to the login prompt; the file is there"


def boot_over_nfs(demo: Demo) -> str:
    seconds = _boot_command(demo, "nfs")
    demo.figures["boot_nfs_s"] = seconds
    return f"{seconds:.1f} s to the login prompt; the file is there"


def compare_original(demo: Demo) -> str:
    restored = demo.work / "restored.raw"
    _, elapsed_ms = demo.run("restore", f"{demo.figures['first_address']}/vda", restored)
    if _sha256(restored) != demo.figures["first_sha256"]:
        raise DemoError(f"{demo.figures['first_address']} no longer restores to the image it was made "
                        f"from: compare {restored} with {demo.first_image} (run with --keep)")
    found = _debugfs(restored, f"stat {GUEST_FILE}", cwd=demo.work)
    if "File not found" not in found:
        raise DemoError(f"{GUEST_FILE}, written in the session, is in the original point:\n{found}")
    return f"bit for bit as backed up, without that file (restored in {elapsed_ms / 1000:.1f} s)"


STEPS = [
    ("build the guest", build_guest),
    ("boot its raw image", boot_raw),
    ("create a repository", create_repository),
    ("back it up", backup_first),
    ("change the image", change_image),
    ("back it up again", backup_second),
    ("serve over NBD", serve),
    ("publish the first point", publish_first),
    ("boot from the backup", boot_backup),
    ("seal what it wrote", seal),
    ("boot the synthetic point", boot_sealed),
    ("boot it over NFS", boot_over_nfs),
    ("check the first point", compare_original),
]
# The guest boots from the backup and from what it wrote in any case.
COMPARISONS = [boot_raw, boot_sealed]
# The times of the last line.
TIMES = ["boot_raw_s", "boot_backup_s", "publish_ms", "seal_ms", "boot_nbd_s", "boot_nfs_s"]


# ------------------------------------------------------- what the steps share


def _boot(demo: Demo, disk, name: str, inside=None) -> float:
    """Boots to the login prompt, calls `inside`, powers off."""
    with demo.guest(disk, name) as guest:
        seconds = guest.wait_for_login(BOOT_SECONDS)
        guest.login()
        if inside:
            inside(guest)
        guest.poweroff()
    return seconds


def _boot_command(demo: Demo, protocol: str) -> float:
    """Boots the synthetic point as a user would: the command starts and ends the server."""
    command = [demo.coldrise, "boot", demo.figures["sealed_address"], "--over", protocol, "--discard",
               "--memory", "1G", "--cpus", demo.cpus]
    with Guest([], log=demo.logs / f"console-boot-{protocol}.log", boot=command,
               environment=demo.environment) as guest:
        seconds = guest.wait_for_login(BOOT_SECONDS)
        guest.login()
        digest = guest.check(f"sha256sum < {GUEST_FILE}").split()[0]
        _expect_content(demo, digest, "the synthetic point has other content in the file")
        guest.poweroff()
    return seconds


def _expect_content(demo: Demo, digest: str, otherwise: str) -> None:
    wanted = hashlib.sha256(demo.content).hexdigest()
    if digest != wanted:
        raise DemoError(f"{otherwise}: {GUEST_FILE} has SHA-256 {digest}, not {wanted}")


def _copy_sparse(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--sparse=always", source, target], check=True)


def _debugfs(image: Path, *requests: str, cwd: Path, write: bool = False) -> str:
    """Runs debugfs requests on the image's first partition."""
    with open(image, "rb") as file:
        table = file.read(512)
    start_sector = struct.unpack_from("<I", table, 446 + 8)[0]
    tool = shutil.which("debugfs", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if tool is None:
        raise DemoError("the program debugfs is missing: apt-get install e2fsprogs")
    command = [tool, *(["-w"] if write else []), "-f", "-", f"{image}?offset={start_sector * 512}"]
    done = subprocess.run(command, cwd=cwd, input="\n".join(requests) + "\n", text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    # debugfs exits with 0 even if it could not open the image.
    if done.returncode != 0 or "Filesystem not open" in done.stdout:
        raise DemoError(f"debugfs cannot use the file system in {image}:\n{done.stdout.strip()}")
    return done.stdout


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _used_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def _tail(path, lines: int = 12) -> str:
    return "\n".join(Path(path).read_text(errors="replace").splitlines()[-lines:])


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


# -------------------------------------------------------------------- report


def print_table(figures: dict) -> None:
    first, second, stats = figures["first"], figures["second"], figures["stats"]
    chunks = second["known_chunks"] + second["new_chunks"]
    rows = [
        ("disk, virtual size", _size(figures["virtual_bytes"])),
        ("disk, used", _size(figures["used_bytes"])),
        ("first backup, stored", _size(first["stored_bytes"])),
        ("second backup, stored", _size(second["stored_bytes"])),
        ("second backup, chunks already known", f"{_percent(second['known_chunks'], chunks)} of {chunks}"),
        ("both backups, saved by deduplication", f"{stats['deduplication_percent']:.1f} %"),
        ("both backups, saved by compression", f"{stats['compression_percent']:.1f} %"),
        ("both backups, saved in all", f"{stats['reduction_percent']:.1f} %"),
        *_boot_rows(figures),
        ("publish", f"{figures['publish_ms']:.0f} ms"),
        ("seal", f"{figures['seal_ms']:.0f} ms"),
    ]
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    print()


def _boot_rows(figures: dict) -> list[tuple[str, str]]:
    """The boots that were made, and their ratio to another one."""
    rows = [("boot from the raw image", "boot_raw_s", None), ("boot from the backup", "boot_backup_s", "boot_raw_s"),
            ("coldrise boot of the synthetic point", "boot_nbd_s", None), ("the same over NFS", "boot_nfs_s", "boot_nbd_s")]
    others = {"boot_raw_s": "raw", "boot_nbd_s": "NBD"}
    return [(name, f"{figures[key]:.2f} s" + (f" ({figures[key] / figures[other]:.2f} of {others[other]})" if other in figures else ""))
            for name, key, other in rows if key in figures]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def run_steps(demo: Demo, steps) -> None:
    width = max(len(name) for name, _ in steps)
    for number, (name, step) in enumerate(steps, 1):
        print(f"{number:2}/{len(steps)} {name:<{width}}  ", end="", flush=True)
        try:
            print(step(demo), flush=True)
        except BaseException as error:
            print("failed", flush=True)
            error.add_note(name)
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description="Back up a guest, boot it from its backup, seal what it wrote.")
    parser.add_argument("--build-dir", type=Path, default=PROJECT / "target/release",
                        help="folder with the coldrise program (default: target/release)")
    parser.add_argument("--work-dir", type=Path, help="where to put the temporary folder (default: $TMPDIR or /tmp)")
    parser.add_argument("--cpus", type=int, default=2, help="processors of the guest (default: 2)")
    parser.add_argument("--two-boots", action="store_true", help="boot from the backup and over NFS from the sealed writes, no more")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder with repository and images")
    arguments = parser.parse_args()

    coldrise = arguments.build_dir.resolve() / "coldrise"
    if not os.access(coldrise, os.X_OK):
        print(f"demo: failed: no program at {coldrise}; build it (make build) or name its folder with --build-dir")
        return 1
    # On SIGTERM the demo stops its guest and its server, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    work = Path(tempfile.mkdtemp(prefix="coldrise-demo-", dir=arguments.work_dir))
    succeeded = False
    try:
        free = shutil.disk_usage(work).free
        if free < NEEDED_FREE_BYTES:
            print(f"demo: failed: {work.parent} has {_size(free)} free, {_size(NEEDED_FREE_BYTES)} are "
                  f"needed; name another folder with --work-dir")
            return 1
        with contextlib.ExitStack() as cleanup:
            demo = Demo(coldrise, work, cleanup, arguments.cpus)
            run_steps(demo, [entry for entry in STEPS if not arguments.two_boots or entry[1] not in COMPARISONS])
        print_table(demo.figures)
        succeeded = True
    except KeyboardInterrupt:
        print("demo: interrupted")
        return 130
    except (DemoError, GuestError, OSError, subprocess.SubprocessError, KeyError) as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
        step = getattr(error, "__notes__", ["start"])[0]
        print(f"\n{what}\n\ndemo: failed at the step \"{step}\"; logs: {work / 'logs'}")
        return 1
    finally:
        clean_up(work, keep=arguments.keep, keep_logs=not succeeded)
    if arguments.keep:
        print(f"kept: {work}")
    figures = {name: demo.figures[name] for name in TIMES if name in demo.figures}
    print("demo: ok " + " ".join(f"{name}={value:.{2 if name.endswith('_s') else 0}f}" for name, value in figures.items()))
    return 0


def clean_up(work: Path, *, keep: bool, keep_logs: bool) -> None:
    """Removes the temporary folder; after a failure, everything except the logs."""
    if keep:
        return
    if not keep_logs:
        shutil.rmtree(work)
        return
    for entry in work.iterdir():
        if entry.is_dir() and entry.name != "logs":
            shutil.rmtree(entry)
        elif not entry.is_dir():
            entry.unlink()


if __name__ == "__main__":
    sys.exit(main())
