"""A paired site that breaks the protocol: it is refused, memory is bounded, the repository is unharmed."""

import hashlib
import json
import pathlib
import random
import re
import signal
import subprocess

from support.cli import PROGRAM
from support.copies import addresses, content
from support.nbdserver import DEADLINE_S

PEER = PROGRAM.parent / "examples" / "hostile_peer"
KIB, MIB = 1 << 10, 1 << 20
# The server's memory limit while one line attacks: the credit of the line, a message of 128 MiB and what
# 16 MiB of it become, and the batches. Without attacks it has about 100.
MOST_KIB = 640 * KIB

# The last message of the other side to each attack.
SAID = {
    "content of another name": "does not have its name",
    "content twice": "duplicate chunk content",
    "content that was not wanted": "duplicate chunk content",
    # Skipped: they may belong to a cancelled disk.
    "content for unknown batches": "applied",
    "content for unknown places": "no such piece",
    "a bomb": "another length",
    "a bomb of many places": "too much content",
    "content that is not packed": "cannot be decompressed",
    "deltas without a base": "came again",
    "parts without the first": "came early",
    "a part of a stream twice": "came twice",
    "an unknown coding": "unknown coding",
    "batches without content": "too much at once",
    "more names than a batch has": "too many names",
    "more runs than names": "too many names",
    "pieces in reverse": "not in chunks",
    "batches in reverse": "not in chunks",
    # The second arrives before or after the first is applied.
    "a batch twice": "not in chunks|duplicate chunk content",
    "pieces between pieces": "not in chunks",
    "a piece at the end of all numbers": "out of range",
    "holes beyond the end": "not in chunks",
    "holes without end": "not in chunks",
    "disks of impossible sizes": "not possible",
    # The next one takes its place.
    "disks that are never finished": "nothing",
    "finish before content": "was not sent",
    "a made-up base": "the base disk is not in the retained point",
    # It has the announced length: the rest is zeroes.
    "a base of another size": "added",
    "another disk begun beside an open one": "added|nothing has begun",
    "a point whose disks were not sent": "was not sent",
    "a point of another machine": "was not claimed",
    "points that cannot be": "0 disks; twice; unknown message",
    "a point that is there": "is there already",
    "a message without end": "too long",
    "a message of millions of parts": "too long",
    "messages that are none": "no length; too short; unknown message; too short; unknown frame",
    # Until it waits for the one who asks.
    "questions without listening": "took some",
}


class Hostile:
    def __init__(self, far, machine):
        self.far = far
        code = far.invite("hostile")
        # A server that starts knows the code.
        far.stop(signal.SIGKILL)
        far.start()
        self.process = subprocess.Popen([PEER, far.address, code, machine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "paired\n"

    def attack(self):
        """The next one: its name, the messages, and the peak memory of the server during it, in KiB."""
        process = pathlib.Path(f"/proc/{self.far.process.pid}")
        (process / "clear_refs").write_text("5")
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        highest = int((process / "status").read_text().split("VmHWM:")[1].split()[0])
        answer = json.loads(line)
        return answer["attack"], answer["said"], highest

    def close(self):
        self.process.kill()
        self.process.communicate()


def test_a_hostile_site_is_refused_and_harms_nothing(coldrise, far, tmp_path):
    path = tmp_path / "vda.raw"
    path.write_bytes(random.Random(31).randbytes(4 * MIB))
    coldrise.json("backup", "web01", f"vda=raw:{path}")
    coldrise.json("copy", "--to", "far")
    original = hashlib.sha256(path.read_bytes()).hexdigest()
    hostile = Hostile(far, "web01")
    before, server = addresses(far.program), far.process.pid
    try:
        for expected, words in SAID.items():
            name, said, highest_kib = hostile.attack()
            print(f"{name}: {said[:300]} ({highest_kib >> 10} MiB)", flush=True)
            assert name == expected
            assert all(re.search(word, said) for word in words.split("; ")), (name, said)
            assert highest_kib < MOST_KIB, name
        # These are all.
        assert hostile.process.wait(timeout=DEADLINE_S) == 0
    finally:
        hostile.close()
    # The server still runs, and a site that keeps to the protocol is served.
    assert far.process.pid == server and far.process.poll() is None
    assert "panicked" not in far.log_path.read_text()
    with open(path, "r+b") as disk:
        disk.write(b"changed")
    coldrise.json("backup", "web01", f"vda=raw:{path}")
    assert coldrise.json("copy", "--to", "far", "web01", "--as", "web02")["points"] == 2
    assert content(far.program, "web02/latest/vda", tmp_path) == path.read_bytes()
    # It has added points to its own machine, as it may. They can be read; all others are unchanged.
    added = addresses(far.program) - before
    assert {address for address in added if not address.startswith("web0")} == set()
    for point in far.program.json("list", "web01")["machines"][0]["points"]:
        for disk in point["disks"]:
            found = content(far.program, f"web01/{point['point']}/{disk['disk']}", tmp_path)
            assert len(found) == disk["size_bytes"]
    for address in before:
        assert hashlib.sha256(content(far.program, f"{address}/vda", tmp_path)).hexdigest() == original
    far.program.json("gc", "--max-unused", "0")
    assert far.program.json("verify")["is_clean"]
