"""Samples, interleaved runs, ratios and targets.

A row of the result is one measurement of several contestants. Each contestant has one
sample per round; a ratio is always computed within a round, so that slow drift of the
machine (heat, neighbours, page cache) cancels out.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Callable, Mapping

COLDRISE = "coldrise"


class Failure(Exception):
    """A sample failed; the message says what, where and why."""


@dataclass(frozen=True)
class Spread:
    """Median and extremes of some samples, in the unit of the samples."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: list[float]) -> "Spread":
        return Spread(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True)
class Target:
    """The target of a row.

    `at_least` or `at_most` is a ratio to the contestant `against` or, if `against`
    is None, a limit in the row's own unit. Exactly one of the two is set.
    """

    against: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a target is either at_least or at_most")

    def is_met(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        return value <= self.at_most

    def text(self, unit: str) -> str:
        sign, limit = ("≥", self.at_least) if self.at_least is not None else ("≤", self.at_most)
        return f"{sign} {limit:g}" + (f" {unit}" if self.against is None else "")


@dataclass
class Row:
    """One measurement: `samples` holds one list per contestant with one entry per round,
    which is None if the contestant failed in that round."""

    measurement: str
    title: str
    subject: str
    unit: str
    samples: dict[str, list[float | None]]
    targets: list[Target] = field(default_factory=list)
    command: str = ""
    note: str = ""

    def values(self, name: str) -> list[float]:
        return [sample for sample in self.samples.get(name, []) if sample is not None]

    def spread(self, name: str) -> Spread | None:
        values = self.values(name)
        return Spread.of(values) if values else None

    def ratio(self, against: str) -> Spread | None:
        """Coldrise divided by `against`, round by round."""
        pairs = zip(self.samples.get(COLDRISE, []), self.samples.get(against, []))
        ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        return Spread.of(ratios) if ratios else None

    def verdict(self, target: Target) -> tuple[Spread | None, bool | None]:
        """The ratio or value for the target, and whether its median reaches it; None if
        either side was not measured."""
        spread = self.spread(COLDRISE) if target.against is None else self.ratio(target.against)
        return spread, None if spread is None else target.is_met(spread.median)


# The result of one run of a contestant: one number per row title.
Sample = Mapping[str, float]
Contestant = Callable[[], Sample]


def interleave(
    contestants: Mapping[str, Contestant],
    rounds: int,
    on_sample: Callable[[str, int, Sample], None],
    on_failure: Callable[[str, Exception], None],
) -> dict[str, list[Sample | None]]:
    """Runs A B C, A B C, … and returns the samples of each contestant by round.

    A contestant that fails is reported once and removed; the others continue.
    """
    results: dict[str, list[Sample | None]] = {name: [] for name in contestants}
    failed: set[str] = set()
    for turn in range(rounds):
        for name, run in contestants.items():
            if name in failed:
                results[name].append(None)
                continue
            try:
                sample = run()
            except (Failure, OSError, ValueError, KeyError) as error:
                failed.add(name)
                results[name].append(None)
                on_failure(name, error)
            else:
                results[name].append(sample)
                on_sample(name, turn, sample)
    return results


def column(results: Mapping[str, list[Sample | None]], title: str) -> dict[str, list[float | None]]:
    """The samples of one row from the result of `interleave`, without contestants that
    never produced this row."""
    columns = {
        name: [None if sample is None else sample.get(title) for sample in samples]
        for name, samples in results.items()
    }
    return {name: values for name, values in columns.items() if any(v is not None for v in values)}
