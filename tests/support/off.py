"""Images of machines that are off."""

import json
import subprocess

from support.nbdserver import wait_until
from support.running import restored
from support.sources import tool


def write(machine, disk, command):
    """Writes to an image as a program would that knows bitmaps. Waits while a backup adds or removes one."""
    def written():
        words = ["qemu-io", "-f", machine.format, "-c", command, machine.images[disk]]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 or 'Failed to get "write" lock' in done.stderr, done.stderr
        return done.returncode == 0

    wait_until(written, f"a write to {disk}")


def bitmaps(machine, disk="vda"):
    """Those in the image, by name."""
    data = json.loads(tool("qemu-img", "info", "-U", "--output=json", machine.images[disk]))["format-specific"]["data"]
    return [bitmap["name"] for bitmap in data.get("bitmaps", [])]


def assert_same(coldrise, made, machine, folder):
    for image, source in zip(restored(coldrise, made["address"], folder), machine.images.values()):
        tool("qemu-img", "compare", "-U", "-f", "raw", "-F", machine.format, image, source)
