"""Images of machines that are off."""

import json

from support.running import restored
from support.sources import tool


def write(machine, disk, command):
    """Writes to an image as a program would that knows bitmaps."""
    tool("qemu-io", "-f", machine.format, "-c", command, machine.images[disk])


def bitmaps(machine, disk="vda"):
    """Those in the image, by name."""
    data = json.loads(tool("qemu-img", "info", "-U", "--output=json", machine.images[disk]))["format-specific"]["data"]
    return [bitmap["name"] for bitmap in data.get("bitmaps", [])]


def assert_same(coldrise, made, machine, folder):
    for image, source in zip(restored(coldrise, made["address"], folder), machine.images.values()):
        tool("qemu-img", "compare", "-U", "-f", "raw", "-F", machine.format, image, source)
