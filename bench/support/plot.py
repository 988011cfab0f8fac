"""Plots of results, for docs/."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Mapping, Sequence


def space_plot(
    target: Path, sizes: Sequence[str], series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> None:
    """Plots reduction and restore time over the chunk size: for each name its
    reductions (n : 1) and its restore times in seconds."""
    with _two_plots(target) as (left, right):
        for name, (reductions, restores) in series.items():
            left.plot(sizes, reductions, marker="o", label=name)
            right.plot(sizes, restores, marker="o", label=name)
        left.set_title("Reduction of seven points")
        right.set_title("Restore of the seventh")
        right.set_ylabel("seconds")
        left.legend(loc="lower left")


def copies_plot(
    target: Path,
    sizes: Sequence[str],
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    theirs: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> None:
    """Plots reduction (n : 1) and restore (MB/s) over the chunk size; of `theirs` only the smallest and the largest
    size are known."""
    with _two_plots(target) as (left, right):
        for number, (name, figures) in enumerate(series.items()):
            for axes, values in zip((left, right), figures):
                axes.plot(sizes, values, marker="o", color=f"C{number}", label=name)
        for number, (name, figures) in enumerate(theirs.items()):
            for axes, values in zip((left, right), figures):
                axes.plot((sizes[0], sizes[-1]), values, marker="x", linestyle=":", color=f"C{number}", label=f"appliance, {name}")
        left.set_title("Reduction")
        right.set_title("Restore")
        right.set_ylabel("MB/s")
        right.set_yscale("log")
        right.set_ylim(bottom=10)
        left.legend(loc="lower left", fontsize="small")


@contextmanager
def _two_plots(target: Path) -> Iterator[tuple]:
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "coldrise"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axes in (left, right):
        axes.set_xlabel("chunk size")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("data : stored")
    yield left, right
    for axes in (left, right):
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
