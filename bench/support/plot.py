"""Plots of results, for docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping, Sequence


def space_plot(
    target: Path, sizes: Sequence[str], series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> None:
    """Plots reduction and restore time over the chunk size: for each name its
    reductions (n : 1) and its restore times in seconds."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "coldrise"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, (reductions, restores) in series.items():
        left.plot(sizes, reductions, marker="o", label=name)
        right.plot(sizes, restores, marker="o", label=name)
    left.set_title("Reduction of seven points")
    left.set_ylabel("data : stored")
    right.set_title("Restore of the seventh")
    right.set_ylabel("seconds")
    for axes in (left, right):
        axes.set_xlabel("chunk size")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(loc="lower left")
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
