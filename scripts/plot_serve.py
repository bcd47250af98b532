#!/usr/bin/env python3
"""Plots results of `tinyvllm bench serve` (or `vllm bench serve`): pip install matplotlib

    for rate in 1 2 4 8 inf; do
        tinyvllm bench serve --request-rate $rate --save-result --save-detailed --result-dir results
    done
    python scripts/plot_serve.py results/*.json --output serve.png

One picture: latency over throughput with a point for each file, and, of files that were written with
--save-detailed, how the times to the first token and between tokens are distributed.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def read(path):
    """A result, or an error that names the file."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        result["output_throughput"], result["request_rate"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path} is no result of bench serve: {type(error).__name__}: {error}")
    return result


def label(result):
    """What distinguishes the runs."""
    concurrency = result.get("max_concurrency")
    return f"{result['request_rate']} req/s" + (f", at most {concurrency}" if concurrency else "")


def by_throughput(axes, results, metric, title):
    """Median and highest percentile of a latency over the throughput that was reached."""
    results = [result for result in results if f"median_{metric}_ms" in result]
    results.sort(key=lambda result: result["output_throughput"])
    if results:
        tokens = [result["output_throughput"] for result in results]
        axes.plot(tokens, [result[f"median_{metric}_ms"] for result in results], "o-", label="median")
        percentiles = {
            key for key in results[0] if key.startswith("p") and key.endswith(f"_{metric}_ms")
        }
        for key in sorted(percentiles, key=lambda key: float(key[1:].split("_")[0])):
            if all(key in result for result in results):
                axes.plot(tokens, [result[key] for result in results], "s--", label=key.split("_")[0])
        for result in results:
            place = (result["output_throughput"], result[f"median_{metric}_ms"])
            axes.annotate(f"{result['request_rate']}", place, textcoords="offset points", xytext=(4, 4), fontsize=7)
        axes.legend()
    axes.set(xlabel="output tokens/s", ylabel="ms", title=f"{title} (points: requests/s asked for)", ylim=(0, None))


def distribution(axes, results, times, title):
    """The share of times that are at most so long."""
    is_empty = True
    for result in results:
        milliseconds = sorted(1e3 * time for time in times(result))
        if milliseconds:
            is_empty = False
            shares = [(index + 1) / len(milliseconds) for index in range(len(milliseconds))]
            axes.step(milliseconds, shares, where="post", label=label(result))
    if is_empty:
        axes.text(0.5, 0.5, "no file has --save-detailed", ha="center", transform=axes.transAxes)
    else:
        axes.legend(fontsize=7)
    axes.set(xlabel="ms", ylabel="share of all", title=title, ylim=(0, 1))


def succeeded(result, key):
    """The entries of a detailed list whose requests did not fail."""
    entries = result.get(key) or []
    errors = result.get("errors") or [""] * len(entries)
    return [entry for entry, error in zip(entries, errors) if not error]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="JSON files of --save-result")
    parser.add_argument("--output", default="serve.png", help="picture to write; the ending says the format")
    args = parser.parse_args()
    results = [read(path) for path in args.files]

    figure, grid = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    by_throughput(grid[0][0], results, "ttft", "Time to first token")
    by_throughput(grid[0][1], results, "tpot", "Time per output token")
    distribution(grid[1][0], results, lambda result: succeeded(result, "ttfts"), "Time to first token")
    all_gaps = lambda result: [gap for gaps in succeeded(result, "itls") for gap in gaps]
    distribution(grid[1][1], results, all_gaps, "Time between events with output")
    models = sorted({str(result.get("model_id")) for result in results})
    figure.suptitle(", ".join(models))
    figure.savefig(args.output, dpi=120)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
