"""Every file of a repository damaged in every way: nothing wrong is served, and verify
names what cannot be read; and after a repair backups go on.

The short form takes a sample; `make test-mutations` takes everything.
"""

import collections
import concurrent.futures
import fnmatch
import random
import threading
import time

import pytest

from support.mutation.fixture import Fixture
from support.mutation.judge import Judge
from support.mutation.mutate import mutations

WORKERS = 2


@pytest.fixture(scope="module")
def damaged(request, tmp_path_factory):
    """Encrypted only for the long form: each mutation opens it six times, and each time derives the key."""
    is_encrypted = not request.config.getoption("--mutations")
    return Fixture(tmp_path_factory.mktemp("mutations"), is_encrypted)


def spread(numbers, found, limit):
    """A sample in which every file has its share, and every kind of mutation."""
    groups = collections.defaultdict(list)
    for mutation in found:
        groups[mutation.path, mutation.kind].append(mutation)
    for group in groups.values():
        numbers.shuffle(group)
    chosen = []
    while len(chosen) < min(limit, len(found)):
        for group in groups.values():
            if group:
                chosen.append(group.pop())
    numbers.shuffle(chosen)
    return chosen[:limit]


def test_damage_is_named_and_never_served(request, damaged, tmp_path):
    option = request.config.getoption
    seed = option("--mutation-seed")
    numbers = random.Random(seed)
    found = mutations(damaged, numbers, option("--mutation-positions"))
    pattern = option("--mutation-files")
    found = [mutation for mutation in found if fnmatch.fnmatch(mutation.path, pattern)]
    total = len(found)
    if option("--mutations"):
        found = spread(numbers, found, option("--mutations"))
    began, done, broken = time.monotonic(), collections.Counter(), []
    local, lock = threading.local(), threading.Lock()
    made = iter(range(WORKERS))

    def judge(number, mutation):
        if not hasattr(local, "judge"):
            with lock:
                local.judge = Judge(damaged, tmp_path / f"judge{next(made)}")
        # A mount takes as long as everything else; it is always made for mutations near clients'
        # files.
        with_files = mutation.path.startswith(("live/", "layers/")) or number % 8 == 0
        with_repair = mutation.path.startswith("db/")
        try:
            verdict = local.judge.judge(mutation, with_files, with_repair)
        except Exception as error:  # pylint: disable=broad-except
            with lock:
                done["could not be judged"] += 1
                broken.append(f"{mutation}: {type(error).__name__}: {error}")
                print(broken[-1], flush=True)
            return
        with lock:
            done[verdict.outcome] += 1
            done[f"{mutation.kind}: {verdict.outcome}"] += 1
            for text in verdict.broken:
                broken.append(f"{mutation}: {text}")
                print(broken[-1], flush=True)
            if sum(done.values()) % 400 == 0:
                print(f"{sum(done.values()) // 2} of {len(found)}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for task in [pool.submit(judge, *pair) for pair in enumerate(found)]:
            task.result()
    summary = ", ".join(f"{name} {count}" for name, count in sorted(done.items(), key=str))
    print(f"{len(found)} of {total} mutations: {summary}; {time.monotonic() - began:.0f} s", flush=True)
    assert not broken, f"{len(broken)} promises broken, first: {broken[0]}"
