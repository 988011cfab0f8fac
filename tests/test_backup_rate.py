"""backup --rate: the bytes that a backup reads per second."""

import random
import statistics
import time

from support.nbdserver import wait_until
from support.service import Coldrised
from test_service_jobs import idle, job, start, wait_for

MIB = 1 << 20


def source(path, size_bytes, hole_bytes=0):
    with path.open("wb") as file:
        file.write(random.Random(str(path)).randbytes(size_bytes))
        file.truncate(size_bytes + hole_bytes)
    return f"{path.stem}=raw:{path}"


def timed(coldrise, *arguments):
    """The seconds of a backup, and its answer."""
    started = time.monotonic()
    made = coldrise.json("backup", "web01", *arguments)
    return time.monotonic() - started, made


def test_all_disks_share_the_rate_and_holes_do_not_count(coldrise, tmp_path):
    disks = [source(tmp_path / "vda.raw", 3 * MIB, 200 * MIB), source(tmp_path / "vdb.raw", 2 * MIB)]
    # The other time of a backup: to open and to commit. Without the rate, reading takes no time.
    base_s, _ = timed(coldrise, *disks)
    took_s, made = timed(coldrise, *disks, "--rate", "2.5M")
    read_bytes = sum(disk["read_bytes"] for disk in made["disks"])
    assert read_bytes == 5 * MIB
    wanted_s = read_bytes / (2.5 * MIB)
    # A rate for each disk would take 0.6 of it, holes that count 40 times as long. A busy machine may take seconds more
    # than before to open and to commit.
    assert 0.85 * wanted_s <= took_s <= 5 * wanted_s + base_s, (took_s, base_s)


def test_reads_follow_the_rate_and_ctrl_c_ends_the_wait(coldrise, tmp_path):
    disk = source(tmp_path / "vda.raw", 40 * MIB)
    process = coldrise.start("backup", "web01", disk, "--rate", "1M")

    def read_bytes():
        with open(f"/proc/{process.pid}/io", encoding="ascii") as file:
            return int(file.read().split("rchar: ")[1].split()[0])

    # Opening takes its time on a busy machine, and reads less than that.
    wait_until(lambda: read_bytes() > MIB, "the first MiB")
    samples, started = [], time.monotonic()
    while time.monotonic() - started < 3:
        before = time.monotonic()
        samples.append((before, read_bytes(), time.monotonic()))
        time.sleep(0.02)
    # In no half second more than its share and the bucket's. A look itself may take long.
    rates = []
    for number, (before, read, _) in enumerate(samples):
        ahead = [other for other in samples[number:] if other[2] <= before + 0.5]
        if ahead:
            assert ahead[-1][1] - read <= 0.85 * MIB, "a burst"
            if ahead[-1][2] > before + 0.4:
                rates.append((ahead[-1][1] - read) / (ahead[-1][2] - before))
    # A backup does not catch up after waiting for a processor: that lowers some of the rates.
    rate = statistics.median(rates)
    assert 0.5 * MIB <= rate <= 1.2 * MIB, rate
    started = time.monotonic()
    process.terminate()
    assert process.wait(timeout=30) == 130
    # The rest would take half a minute.
    assert time.monotonic() - started < 15
    assert coldrise.json("list")["machines"] == []


def test_invalid_rates_are_refused(coldrise):
    for rate, said in (("0", "too slow: use 64K or more"), ("1K", "too slow: use 64K or more"), ("fast", "is not a size"),
                       ("-1", "is not a size"), ("10M/s", "is not a size"), ("99999999999T", "is too large"), ("", "is not a size")):
        done = coldrise.run("backup", "web01", "vda=raw:/missing", f"--rate={rate}")
        assert done.returncode == 2 and said in " ".join(done.stderr.split()), (rate, done.stderr)


def test_a_job_has_a_rate(coldrise, tmp_path):
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        for rate, status in [(0, 400), (1000, 400), (-1, 400), ("2M", 400), (2 * MIB, 201)]:
            new = job(tmp_path, "slow", ["web01"], rate_bytes_per_second=rate)
            answer = service.call("POST", "jobs", new)
            assert answer.status == status, (rate, answer.body)
        assert b"rate_bytes_per_second: 1000 is too slow" in service.call(
            "POST", "jobs", job(tmp_path, "slow", ["web01"], rate_bytes_per_second=1000)).body
        gc = {"name": "clean", "kind": "gc", "rate_bytes_per_second": MIB}
        assert service.call("POST", "jobs", gc).status == 400
        source(tmp_path / "web01.img", 4 * MIB)
        [run] = start(service, "slow")
        wait_for(lambda: idle(service), "the backup")
        done = service.get(f"runs/{run}")
        assert done["state"] == "ok" and f"--rate={2 * MIB}" in done["plan"]["arguments"]
        took_ms = done["result"]["ended_at_ms"] - done["plan"]["started_at_ms"]
        assert took_ms >= 1700
        wrong = {"kind": "backup", "machine": "web01", "disks": {"vda": f"raw:{tmp_path}/web01.img"},
                 "rate_bytes_per_second": 5}
        assert service.call("POST", "runs", wrong).status == 400
