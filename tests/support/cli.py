"""The coldrise program, run on one repository."""

import contextlib
import json
import os
import pathlib
import shutil
import struct
import subprocess

from .blake3 import derived_key

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILT = pathlib.Path(os.environ.get("COLDRISE_BUILD_DIR", ROOT / "target" / "release"))
PROGRAM = BUILT / "coldrise"
NBDKIT_PLUGIN = BUILT / "nbdkit-coldrise-plugin.so"


class Coldrise:
    """Runs `coldrise` on the repository of one test."""

    def __init__(self, repository, passphrase_file=None, runs="none"):
        self.repository = pathlib.Path(repository)
        self.runs = runs
        self.passphrase_file = passphrase_file
        self.started = []
        # Settings of the program besides those of the repository.
        self.more = {}
        # Puts the program elsewhere, such as into a network of its own.
        self.wrap = lambda *command: command

    @classmethod
    def encrypted(cls, folder, place=None):
        """For a repository, not made yet, in `place` or the folder. The folder gets the passphrase's file."""
        passphrase = folder / "passphrase"
        passphrase.write_text("correct horse\n", encoding="utf-8")
        return cls((place or folder) / "repository", passphrase)

    @classmethod
    def copied(cls, template, repository):
        """An unencrypted repository with the settings of the empty one at `template`, and an id of its own."""
        shutil.copytree(template, repository)
        path = repository / "repository.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        assert config["key_slots"] == []
        config["id"] = os.urandom(16).hex()
        compression = config["compression"].encode()
        checked = (config["format"].encode() + struct.pack("<I", config["format_version"]) + bytes.fromhex(config["id"])
                   + struct.pack("<II", config["chunk_size_bytes"], len(compression)) + compression + b"[]")
        config["checksum"] = derived_key(b"coldrise v1 repository.json", checked).hex()
        path.write_text(json.dumps(config), encoding="utf-8")
        return cls(repository)

    def environment(self):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("COLDRISE_")}
        kept["COLDRISE_RUNS"] = str(self.runs)
        kept["COLDRISE_REPO"] = str(self.repository)
        if self.passphrase_file is not None:
            kept["COLDRISE_PASSPHRASE_FILE"] = str(self.passphrase_file)
        return kept | self.more

    def run(self, *arguments, timeout_s=120):
        """The finished process, with any exit code."""
        return subprocess.run(
            self.wrap(PROGRAM, *map(str, arguments)),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def json(self, *arguments, timeout_s=120):
        """The final JSON object of a command that must succeed."""
        done = self.run("--json", *arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"coldrise {arguments}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout.strip().splitlines()[-1])

    def start(self, *arguments, **keywords):
        """The running process."""
        process = subprocess.Popen(
            self.wrap(PROGRAM, *map(str, arguments)),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            text=True,
            **keywords,
        )
        self.started.append(process)
        return process

    def end(self):
        """Ends what a failed test left running."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
                process.kill()

    def init(self, *arguments):
        self.json("init", *arguments)

    def backup(self, machine, **disks):
        """Backs up raw images; returns the address MACHINE/POINT."""
        sources = [f"{disk}=raw:{image}" for disk, image in disks.items()]
        return self.json("backup", machine, *sources)["address"]

    def publish(self, address, session, *options):
        """Publishes a point; returns its export names by disk."""
        published = self.json("publish", address, "--name", session, *options)
        assert published["session"] == session
        return {entry["disk"]: entry["export"] for entry in published["disks"]}
