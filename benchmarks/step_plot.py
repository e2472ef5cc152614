"""Draws bench_step.py's picture: `step_plot.py PNG < JSON`; runs where matplotlib is."""

import json
import sys

import matplotlib  # pyright: ignore

matplotlib.use("Agg")  # pyright: ignore
import matplotlib.pyplot as plt  # pyright: ignore


def main(path: str) -> None:
    figure, axes = plt.subplots(figsize=(9, 6), dpi=120)  # pyright: ignore
    for name, points in json.load(sys.stdin).items():
        ours = name.startswith("ours")
        style = "-" if ours else "--" if name.startswith("C ") else ":"
        axes.plot(*zip(*points), style, marker="o", ms=3, lw=2 if name == "ours" else 1, label=name)  # noqa: B905
    axes.set(xscale="log", yscale="log", xlabel="environments (29 floats in, 71 out)")
    axes.set(ylabel="round trip of an empty step, median, us")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
