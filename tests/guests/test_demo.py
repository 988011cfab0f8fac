"""The complete main job with a real guest: the script of `make demo` is also a test.

It boots a Debian guest from its restore point over NBD, writes inside, seals,
boots the synthetic point over NFS, reads the file back, and compares the first point with
the image it was made of. The demo's other boots are for comparison.
"""

import re
import subprocess

from support.cli import BUILT, ROOT


def test_a_guest_boots_from_its_backup_and_its_writes_become_a_point():
    # One processor: two of an emulated guest cost a third more, mostly in waiting for each other.
    command = ["/usr/bin/python3", ROOT / "demo/run.py", "--build-dir", BUILT, "--cpus", "1", "--two-boots"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(
        r"demo: ok boot_backup_s=[\d.]+ publish_ms=\d+ seal_ms=\d+ boot_nfs_s=[\d.]+", last
    ), last
