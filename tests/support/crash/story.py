"""One repository and its history: load, crash, check, repeated."""

import contextlib
import hashlib
import json
import shutil
import subprocess
import time

import nbd

from support.cli import Coldrise
from support.nbdserver import Nbdkit, read_all, wait_until

from .load import MAX_WRITE_BLOCKS, CrashViolation, Load
from .oracle import Clock, DiskOracle, PointOracle
from .stamp import BLOCK, ZERO

MIB = 1 << 20
MACHINE = "web01"
# Name, bytes of 4 KiB cells, bytes of fine cells: the disks end in a short block.
DISKS = (("vda", 20 * MIB, 256 * 1024 + 512), ("vdb", 8 * MIB, 64 * 1024 + 512))
CLI_DEADLINE_S = 60
# How the server grows a layer: see server/session/src/layer/slots.rs.
LAYER_SEGMENT_BLOCKS = 1024
FLUSHES_BEFORE_WRITTEN_SPACE = 17


class Sealing:
    """A running `coldrise seal`."""

    def __init__(self, process, began):
        self.process = process
        self.began = began


class Point:
    """A sealed point: judged once; after that its bytes must never change."""

    def __init__(self, oracle):
        self.oracle = oracle
        self.digests = None


class Story:
    """The state of one repository; `place` is its folder."""

    def __init__(self, rng, directory, place, counts):
        self.rng = rng
        self.directory = directory
        self.counts = counts
        self.coldrise = Coldrise(place / "repository")
        self.clock = Clock()
        self.disks = [
            DiskOracle(self.clock, number, name, coarse + fine, coarse)
            for number, (name, coarse, fine) in enumerate(DISKS, 1)
        ]
        self.server = None
        self.servers = 0
        self.load = None
        self.sealing = None
        # The oracle of the point that an interrupted seal may have left.
        self.perhaps = None
        self.points = {}
        self.session = None
        self.sessions = 0
        self.base_values = []
        self.base_address = None

    # ---------------------------------------------------------- beginning

    def begin(self):
        """Makes the repository with one point, and publishes it."""
        images = {}
        for disk in self.disks:
            values = self._base_values(disk)
            self.base_values.append(values)
            images[disk.name] = self.directory / f"{disk.name}.raw"
            write_image(disk, values, images[disk.name])
        self.coldrise.init("--no-encryption")
        self.base_address = self.coldrise.backup(MACHINE, **images)
        self.publish(self.base_address, self.base_values)

    def _base_values(self, disk):
        """Runs of stored blocks and holes."""
        values = []
        while len(values) < disk.cells:
            value = self.rng.choice((ZERO, DiskOracle.BASE_SEQUENCE))
            values += [value] * self.rng.choice((1, 5, 60, 400))
        return values[: disk.cells]

    def publish(self, address, values):
        self.sessions += 1
        self.session = f"trial{self.sessions}"
        self.coldrise.publish(address, self.session)
        for disk, its_values in zip(self.disks, values):
            disk.rebase(its_values)

    # ------------------------------------------------------------- server

    def start_server(self):
        self.servers += 1
        shutil.rmtree(self.directory / f"server{self.servers - 3}", ignore_errors=True)
        self.server = Nbdkit(self.coldrise, self.directory / f"server{self.servers}")

    def export(self, disk):
        return f"live/{self.session}/{disk.name}"

    def read_disk(self, name):
        with self.server.connect(name) as handle:
            return read_all(handle)

    def read_session(self):
        """The content of each disk of the session."""
        return [self.read_disk(self.export(disk)) for disk in self.disks]

    def wait_until_closed(self):
        """Waits until the server has closed the session."""

        def is_closed():
            (session,) = self.coldrise.json("sessions")["sessions"]
            return not session["is_served"]

        wait_until(is_closed, "the session to be closed")

    def stop_server(self):
        if self.server is not None:
            self.server.kill()
            self.server = None

    def kill_server(self):
        """SIGKILL, then the replies sent before it; ends the load."""
        self.server.process.kill()
        self.load.settle()
        self.finish_load()
        self.stop_server()
        for disk in self.disks:
            disk.crashed()

    def close(self):
        """Ends the remaining processes; there are some only after a failure."""
        if self.sealing is not None:
            self.sealing.process.kill()
            self.sealing.process.wait()
        if self.server is not None:
            self.server.kill()

    # --------------------------------------------------------------- load

    def start_load(self):
        self.load = Load(
            self.rng,
            self.disks,
            self.server,
            {disk.name: self.export(disk) for disk in self.disks},
            connections_per_disk=self.rng.choice((1, 2, 3)),
        )

    def run_load(self, seconds, may_seal=False, now_and_then=None, to_a_flush=False):
        """Load for a time, sometimes with a seal in it. `to_a_flush` continues until a flush is
        answered: at that moment its data is in the greatest danger."""
        seal_after = None
        if may_seal and self.rng.random() < 0.4:
            seal_after = time.monotonic() + seconds * self.rng.random()

        def also():
            nonlocal seal_after
            if seal_after is not None and time.monotonic() > seal_after:
                seal_after = None
                self.begin_seal()
            self.look_at_seal()
            if now_and_then is not None:
                now_and_then()

        self.load.run(seconds, also)
        if self.sealing is not None:
            self._run_into_seal(also)
        if to_a_flush:
            before = [disk.flushed_tick for disk in self.disks]
            self.load.run(0.3, lambda: [disk.flushed_tick for disk in self.disks] != before)

    def run_load_until_space_is_prepared(self):
        """Ends while a layer's file grows: after many flushes the layer's own thread is writing
        the new space ahead."""
        disk = self.rng.choice(self.disks)
        cell = self.rng.randrange(disk.coarse_cells)

        def write_run():
            nonlocal cell
            cell = cell if cell + MAX_WRITE_BLOCKS <= disk.coarse_cells else 0
            assert self.load.write(disk, cell, MAX_WRITE_BLOCKS)
            cell += MAX_WRITE_BLOCKS

        def length_bytes():
            length = 0
            for path in (self.coldrise.repository / "layers").iterdir():
                # A seal removes the layer of a disk without writes.
                with contextlib.suppress(FileNotFoundError):
                    length += path.stat().st_size
            return length

        # More than the free space that the layer had at its opening.
        for _ in range(LAYER_SEGMENT_BLOCKS // MAX_WRITE_BLOCKS):
            write_run()
        for _ in range(FLUSHES_BEFORE_WRITTEN_SPACE):
            assert self.load.write(disk, self.rng.randrange(disk.coarse_cells), is_fua=True)
        before = length_bytes()
        for _ in range(2 * LAYER_SEGMENT_BLOCKS // MAX_WRITE_BLOCKS):
            write_run()
            if length_bytes() != before:
                self.counts["left_as_a_layer_grew"] += 1
                return

    def _run_into_seal(self, also):
        """Continues until the seal is over, or until it has begun to make files, or not at all."""
        layers = self.coldrise.repository / "layers"
        before = len(list(layers.iterdir()))
        choice = self.rng.choice(("over", "over", "making files", "now"))

        def is_far_enough():
            also()
            if self.sealing is None:
                return True
            return choice == "making files" and len(list(layers.iterdir())) > before

        if choice != "now":
            self.load.run(10, is_far_enough)
        if self.sealing is not None:
            # Its commit follows some milliseconds later.
            self.load.run(self.rng.random() * 0.03, also)

    def finish_load(self):
        self.counts["requests"] += self.load.requests
        self.load.connections.close()
        # The last replies came with the disconnect.
        self.load.settle()
        self.load = None

    def break_off_load(self):
        """Kills all clients while no request is in flight."""
        self.load.settle()
        for connection in self.load.connections.alive:
            connection.break_off()
        self.finish_load()

    # -------------------------------------------------------------- seals

    def begin_seal(self):
        began = self.clock.tick()
        for disk in self.disks:
            disk.observers[began] = 1
        process = self.coldrise.start(
            "--json", "seal", self.session, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.sealing = Sealing(process, began)

    def look_at_seal(self):
        if self.sealing is None or self.sealing.process.poll() is None:
            return
        sealing, self.sealing = self.sealing, None
        output, errors = sealing.process.communicate()
        for disk in self.disks:
            disk.observers.pop(sealing.began, None)
        assert sealing.process.returncode == 0, f"a live seal failed: {output}{errors}"
        address = self.note_seal(sealing.began, output)
        if self.rng.random() < 0.2:
            self.check_point(address)

    def end_seal(self):
        """Waits for the running seal, if there is one."""
        if self.sealing is not None:
            self.sealing.process.wait(timeout=CLI_DEADLINE_S)
            self.look_at_seal()

    def note_seal(self, began, output):
        """Records the answer to a seal requested at this tick; returns the point's address."""
        address = json.loads(output.strip().splitlines()[-1])["address"]
        self.points[address] = Point(PointOracle(self.disks, began, self.clock.tick()))
        for disk in self.disks:
            disk.end_flush(began)
        self.counts["seals"] += 1
        return address

    def give_up_seal(self, kill, believe_answer):
        """After a crash the running seal ends with or without a point. An answer after the power
        cut proves nothing."""
        if self.sealing is None:
            return
        sealing, self.sealing = self.sealing, None
        if kill:
            sealing.process.kill()
        output, _ = sealing.process.communicate(timeout=CLI_DEADLINE_S)
        if sealing.process.returncode == 0 and believe_answer:
            # It was answered, but perhaps by the command itself after the end of the server.
            address = json.loads(output.strip().splitlines()[-1])["address"]
            oracle = PointOracle(self.disks, sealing.began, self.clock.tick(), True)
            self.points[address] = Point(oracle)
            self.counts["seals"] += 1
            return
        self.counts["interrupted_seals"] += 1
        self.perhaps = PointOracle(self.disks, sealing.began, self.clock.tick(), True)

    def listed_points(self):
        machines = self.coldrise.json("list", MACHINE)["machines"]
        (machine,) = machines
        return {entry["address"]: entry for entry in machine["points"]}

    def check_list(self, perhaps):
        """The list contains exactly the expected points, and perhaps the interrupted one."""
        listed = self.listed_points()
        names = sorted(disk.name for disk in self.disks)
        for address, entry in listed.items():
            found = sorted(disk["disk"] for disk in entry["disks"])
            assert found == names, f"{address} has the disks {found}"
        missing = ({self.base_address} | set(self.points)) - set(listed)
        assert not missing, f"restore points are gone: {missing}"
        unknown = set(listed) - set(self.points) - {self.base_address}
        assert len(unknown) <= (perhaps is not None), f"restore points nobody made: {unknown}"
        for address in unknown:
            self.points[address] = Point(perhaps)
            self.counts["seals_found_after_a_crash"] += 1

    def check_point(self, address):
        point = self.points[address]
        contents = [self.read_disk(f"{address}/{disk.name}") for disk in self.disks]
        digests = [hashlib.blake2b(content).digest() for content in contents]
        if point.digests is None:
            violations, _ = point.oracle.judge(contents)
            if violations:
                raise CrashViolation([f"point {address}: {entry}" for entry in violations])
            # Only the bytes are needed from now on.
            point.oracle = None
            point.digests = digests
        assert digests == point.digests, f"restore point {address} has changed"
        self.counts["points_checked"] += 1

    # ------------------------------------------------------------- checks

    def check_crash(self, look_at_list=False):
        """Checks the session and the points after a crash."""
        perhaps, self.perhaps = self.perhaps, None
        for disk in self.disks:
            violations = disk.judge_crash(self.read_disk(self.export(disk)))
            if violations:
                raise CrashViolation(violations)
        new = [address for address, point in self.points.items() if point.digests is None]
        if perhaps is not None or look_at_list or new:
            self.check_list(perhaps)
            new = [address for address, point in self.points.items() if point.digests is None]
        old = [address for address in self.points if address not in new]
        for address in new + self.rng.sample(old, min(1, len(old))):
            self.check_point(address)

    def check_live(self):
        """Checks the session without a crash: every answered write is present, flushed or not."""
        for disk in self.disks:
            began = disk.begin_read()
            violations = disk.judge_read(self.read_disk(self.export(disk)), 0, began)
            disk.end_read(began)
            if violations:
                raise CrashViolation(violations)

    def check_all_points(self):
        self.check_list(None)
        for address in self.points:
            self.check_point(address)
        for disk, values in zip(self.disks, self.base_values):
            _, found = disk.values(self.read_disk(f"{self.base_address}/{disk.name}"))
            assert found == values, f"the backup {self.base_address} has changed"

    def interrupt_opening(self):
        """Opens the session and returns while the server may be anywhere in its recovery."""
        self.start_server()
        handles = []
        for disk in self.disks:
            handle = nbd.NBD()
            handle.set_export_name(self.export(disk))
            handle.aio_connect_unix(str(self.server.socket))
            handles.append(handle)
        # The requests to open must leave before the crash.
        end = time.monotonic() + self.rng.choice((0.002, 0.01, 0.03, 0.1)) * self.rng.random()
        while time.monotonic() < end:
            for handle in handles:
                if handle.aio_is_connecting():
                    handle.poll(1)
        return handles

    # ---------------------------------------------------------------- end

    def end_session(self):
        """Ends a session without a crash: its writes are in its point. Then a new session
        begins, on that point or on the backup."""
        self.start_server()
        self.check_crash()
        self.start_load()
        self.run_load(0.1)
        self.load.settle()
        self.finish_load()
        self.server.stop()
        discard = self.rng.random() < 0.2
        began = self.clock.tick()
        oracle = PointOracle(self.disks, began, self.clock.tick())
        ended = self.coldrise.json(
            "unpublish", self.session, *(["--discard"] if discard else [])
        )
        sessions = self.coldrise.json("sessions")["sessions"]
        assert sessions == [], f"the ended session is still there: {sessions}"
        self.start_server()
        values = self.base_values
        address = self.base_address
        if not discard:
            address = ended["address"]
            self.points[address] = Point(oracle)
            self.check_list(None)
            contents = [self.read_disk(f"{address}/{disk.name}") for disk in self.disks]
            values = [disk.values(content)[1] for disk, content in zip(self.disks, contents)]
        self.check_all_points()
        self.stop_server()
        self.publish(address, values)


def write_image(disk, values, path):
    """A sparse raw image that holds these values."""
    with open(path, "wb") as file:
        file.truncate(disk.size_bytes)
        for cell, value in enumerate(values):
            if value != ZERO:
                file.seek(disk.place(cell)[0])
                file.write(disk.content(cell, 1, value))
    assert path.stat().st_size % BLOCK != 0
