#!/usr/bin/env python3
"""Measure tinyvllm, llama.cpp and candle's own quantised Llama: same files, same machine, in turns.

    python scripts/benchmark.py model-q4_0.gguf model-q4_k_m.gguf

builds what is missing (tinyvllm and the candle baseline with cargo; llama.cpp for this machine from
the source package of llama-cpp-python, which takes some minutes) and then runs the engines one after
another, round after round, so that a change of the machine's speed meets all of them. It writes
results.md, results.json and chart.svg, and prints the table and every command.

A run counts as contested if other processes used more than --max-foreign-cpu cores meanwhile; contested
runs are left out where there are others and marked where there are none. scripts/random_gguf.py makes
files to measure with. Needs Python 3.9 or later and cargo, nothing else.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import venv
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
ENGINES = ["tinyvllm", "llama.cpp", "candle"]
COLOURS = {"tinyvllm": "#c2410c", "llama.cpp": "#64748b", "candle": "#cbd5e1"}


def say(text):
    print(text, file=sys.stderr, flush=True)


def call(command, **options):
    say("$ " + " ".join(map(str, command)))
    subprocess.run([str(part) for part in command], check=True, **options)


# Building


def build_tinyvllm(arguments):
    call(["cargo", "build", "--release", "--bin", "tinyvllm"], cwd=REPOSITORY)
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    return target / "release" / "tinyvllm"


def build_candle(arguments):
    """candle chooses its kernels while compiling, so it is compiled for this machine."""
    program = arguments.work / "candle" / "release" / "candle_baseline"
    if not program.exists():
        flags = (os.environ.get("RUSTFLAGS", "") + " -C target-cpu=native").strip()
        environment = os.environ | {"CARGO_TARGET_DIR": str(arguments.work / "candle"), "RUSTFLAGS": flags}
        call(["cargo", "build", "--release", "--locked"], cwd=REPOSITORY / "scripts/candle_baseline", env=environment)
    return program


def build_llama_cpp(arguments):
    """llama.cpp's benchmarks, compiled for this machine; returns the folder with the programs."""
    programs = arguments.work / "llama.cpp" / "bin"
    if (programs / "llama-batched-bench").exists():
        return programs
    tools = arguments.work / "venv"
    if not tools.exists():
        venv.create(tools, with_pip=True)
    python = tools / "bin" / "python"
    call([python, "-m", "pip", "install", "-q", "cmake", "ninja", "scikit-build-core"])
    package = LLAMA_CPP_PYTHON.split("==")[0]
    options = ["--no-binary", package, "--no-deps", "--no-build-isolation", "-d", arguments.work]
    call([python, "-m", "pip", "download", "-q", *options, LLAMA_CPP_PYTHON])
    archive = next(arguments.work.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(arguments.work)
    source = archive.with_name(archive.name.removesuffix(".tar.gz")) / "vendor" / "llama.cpp"
    path = f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    off = [f"-D{name}=OFF" for name in ("BUILD_SHARED_LIBS", "LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES")]
    build = arguments.work / "llama.cpp"
    configure = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_SERVER=OFF", *off]
    if arguments.without_amx:
        flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        configure += [f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]
    call(["cmake", "-G", "Ninja", "-S", source, "-B", build, *configure], env=environment)
    call(["cmake", "--build", build, "--target", "llama-bench", "llama-batched-bench"], env=environment)
    return programs


# Running


class Cpu:
    """How many cores others used while something ran. Linux only; elsewhere unknown."""

    def __init__(self):
        self.before = self.now()

    @staticmethod
    def now():
        own = os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, mine

    def foreign(self):
        after = self.now()
        if after is None or self.before is None:
            return 0.0
        wall, busy, mine = (b - a for a, b in zip(self.before, after))
        return max(0.0, (busy - mine) / max(wall, 1e-9))


def wait_until_idle(arguments):
    deadline = time.monotonic() + arguments.wait
    while time.monotonic() < deadline:
        cpu = Cpu()
        time.sleep(1.0)
        if cpu.foreign() <= arguments.max_foreign_cpu:
            return


class Runner:
    """Runs commands, keeps each once for the record, and notes how contested the machine was."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.commands = []
        self.samples = []

    def run(self, engine, model, command, environment=None):
        command = [str(part) for part in command]
        shown = " ".join([*(f"{k}={v}" for k, v in (environment or {}).items()), *command])
        if shown not in self.commands:
            self.commands.append(shown)
        wait_until_idle(self.arguments)
        cpu = Cpu()
        environment = os.environ | (environment or {})
        finished = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        foreign = cpu.foreign()
        if finished.returncode:
            say(f"{engine} failed on {model.name}: {finished.stderr.strip()[-500:]}")
            return None, foreign
        return finished.stdout, foreign

    def note(self, engine, model, measure, rate, foreign):
        self.samples.append(
            {"engine": engine, "model": model.name, "measure": measure, "rate": rate, "foreign_cpu": round(foreign, 2)}
        )
        say(f"  {model.name}  {measure:<24} {engine:<10} {rate:8.1f} tokens/s  (others: {foreign:.2f} cores)")


def measures(arguments):
    prompts = [0, *arguments.depths] if arguments.prompt else []
    names = [prompt(arguments, depth) for depth in prompts]
    names += [generation(arguments, size) for size in arguments.batch_sizes]
    return names + [generation(arguments, 1, depth) for depth in arguments.depths]


def prompt(arguments, depth=0):
    return f"prompt of {arguments.prompt}" + (f" at context {depth}" if depth else "")


def generation(arguments, batch_size, depth=0):
    return "generate" + (f", {batch_size} at once" if batch_size > 1 else "") + (f" at context {depth}" if depth else "")


def run_tinyvllm(runner, model, program):
    a = runner.arguments
    command = [program, "bench", "--model", model, "--threads", a.threads, "--repeats", 1, "--json", "--quiet"]
    command += ["--output-len", a.generate]
    depths = ",".join(map(str, [0, *a.depths]))
    sizes = ",".join(map(str, a.batch_sizes))
    plans = [["--prompt-lens", a.prompt, "--prompt-depths", depths, "--batch-sizes", sizes, "--context-lens", a.context]]
    if a.depths:
        plans += [["--prompt-lens", 0, "--batch-sizes", 1, "--context-lens", depths.removeprefix("0,")]]
    for plan in plans:
        output, foreign = runner.run("tinyvllm", model, [*command, *plan])
        if output is None:
            return
        report = json.loads(output)
        for entry in report["prompts"]:
            runner.note("tinyvllm", model, prompt(a, entry["depth"]), entry["tokens_per_second"]["median"], foreign)
        for entry in report["generations"]:
            depth = 0 if entry["context_len"] == a.context else entry["context_len"]
            measure = generation(a, entry["batch_size"], depth)
            runner.note("tinyvllm", model, measure, entry["tokens_per_second"]["median"], foreign)
            kept = {key: entry[key] for key in ("bandwidth_fraction", "bytes_per_second")}
            runner.samples[-1] |= kept | {"peak_memory_bytes": report["peak_memory_bytes"]}


def run_llama_cpp(runner, model, programs):
    a = runner.arguments
    bench = [programs / "llama-bench", "-m", model, "-t", a.threads, "-r", 1, "-o", "json"]

    def measure(name, *options):
        output, foreign = runner.run("llama.cpp", model, [*bench, *options])
        if output is not None:
            runner.note("llama.cpp", model, name, json.loads(output)[0]["avg_ts"], foreign)

    if a.prompt:
        measure(prompt(a), "-p", a.prompt, "-n", 0)
    if 1 in a.batch_sizes:
        measure(generation(a, 1), "-p", 0, "-n", a.generate, "-d", a.context)
    for depth in a.depths:
        if a.prompt:
            measure(prompt(a, depth), "-p", a.prompt, "-n", 0, "-d", depth)
        measure(generation(a, 1, depth), "-p", 0, "-n", a.generate, "-d", depth)
    batches = [size for size in a.batch_sizes if size > 1]
    if batches:
        # In whole chunks and with some to spare: what does not fit is skipped without a word.
        cache = (max(batches) * (a.context + a.generate) // 512 + 2) * 512
        command = [programs / "llama-batched-bench", "-m", model, "-t", a.threads, "-c", cache]
        command += ["-npp", a.context, "-ntg", a.generate, "-npl", ",".join(map(str, batches))]
        output, foreign = runner.run("llama.cpp", model, [*command, "--output-format", "jsonl"])
        for line in (output or "").splitlines():
            if line.startswith("{"):
                entry = json.loads(line)
                runner.note("llama.cpp", model, generation(a, entry["pl"]), entry["speed_tg"], foreign)


def run_candle(runner, model, program):
    a = runner.arguments
    generate = a.generate if 1 in a.batch_sizes else 0
    command = [program, model, "--prompt", a.prompt, "--depth", a.context, "--generate", generate]
    output, foreign = runner.run("candle", model, command, {"RAYON_NUM_THREADS": str(a.threads)})
    if output is None:
        return
    report = json.loads(output)
    if a.prompt:
        runner.note("candle", model, prompt(a), report["prompt"], foreign)
    if generate:
        runner.note("candle", model, generation(a, 1), report["generation"], foreign)


# Reporting


def summary(arguments, samples, model, measure, engine):
    """Median, minimum, maximum, number of runs, and whether they were contested; None without runs."""
    wanted = {"model": model, "measure": measure, "engine": engine}
    found = [s for s in samples if all(s[key] == value for key, value in wanted.items())]
    if not found:
        return None
    quiet = [s for s in found if s["foreign_cpu"] <= arguments.max_foreign_cpu]
    used = quiet or found
    rates = [s["rate"] for s in used]
    shares = [s["bandwidth_fraction"] for s in used if "bandwidth_fraction" in s]
    return {
        "median": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
        "num_runs": len(rates),
        "contested": not quiet,
        "bandwidth_fraction": statistics.median(shares) if shares else None,
    }


def cell(found):
    if found is None:
        return ""
    spread = f" ({found['min']:.1f}–{found['max']:.1f})" if found["num_runs"] > 1 else ""
    mark = "\\*" if found["contested"] else ""
    return f"{found['median']:.1f}{spread}{mark}"


def ratio(ours, theirs):
    return f"{ours['median'] / theirs['median']:.2f}" if ours and theirs else ""


def markdown(arguments, runner, models, engines):
    others = [engine for engine in engines if engine != "tinyvllm"]
    header = ["file", "tokens/s", *engines, *(f"÷ {engine}" for engine in others), "of memory bandwidth"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    any_contested = any_disturbed = False
    for model in models:
        for measure in measures(arguments):
            found = {engine: summary(arguments, runner.samples, model.name, measure, engine) for engine in engines}
            if not any(found.values()):
                continue
            any_contested |= any(entry and entry["contested"] for entry in found.values())
            ours = found.get("tinyvllm")
            share = ours and ours["bandwidth_fraction"]
            row = [model.stem, measure, *(cell(found[engine]) for engine in engines)]
            row += [ratio(ours, found[engine]) for engine in others]
            any_disturbed |= bool(share and share > 1)
            share = f"{share:.0%}" + ("†" if share > 1 else "") if share else ""
            lines.append("| " + " | ".join([*row, share]) + " |")
    lines += ["", f"{machine()}, {arguments.threads} threads; median (range) of up to {arguments.rounds} rounds in turns;"]
    lines += [f"generation of {arguments.generate} tokens per sequence from context {arguments.context}."]
    if any_contested:
        lines += ["\\* other processes used the machine during every one of these runs."]
    if any_disturbed:
        lines += ["† the measure of the bandwidth was disturbed: generation read faster."]
    lines += ["", "```sh", *runner.commands, "```", ""]
    return "\n".join(lines)


def machine():
    try:
        text = Path("/proc/cpuinfo").read_text()
        name = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} CPUs, {platform.system()}"


def chart(arguments, runner, models, engines):
    """Bars, one group for each file and measure; the fastest engine of a group fills the width."""
    width, left, bar, gap = 860, 250, 15, 14
    parts, y = [], 44
    for model in models:
        for measure in measures(arguments):
            found = {engine: summary(arguments, runner.samples, model.name, measure, engine) for engine in engines}
            found = {engine: entry for engine, entry in found.items() if entry}
            if not found:
                continue
            longest = max(entry["median"] for entry in found.values())
            middle = y + len(found) * bar / 2
            parts.append(f'<text x="{left - 10}" y="{middle}" text-anchor="end">{escape(model.stem)}</text>')
            parts.append(f'<text x="{left - 10}" y="{middle + 13}" text-anchor="end" class="dim">{escape(measure)}</text>')
            for engine, entry in found.items():
                length = (width - left - 130) * entry["median"] / longest
                parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar - 2}" fill="{COLOURS[engine]}"/>')
                parts.append(f'<text x="{left + length + 6:.1f}" y="{y + bar - 4}">{entry["median"]:.1f}</text>')
                y += bar
            y += gap
    legend = "".join(
        f'<rect x="{left + 110 * i}" y="14" width="12" height="12" fill="{COLOURS[engine]}"/>'
        f'<text x="{left + 110 * i + 18}" y="24">{engine}</text>'
        for i, engine in enumerate(engines)
    )
    style = "text{font:12px sans-serif;fill:#1f2937}.dim{fill:#6b7280}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 10}" viewBox="0 0 {width} {y + 10}">'
        f"<style>{style}</style>"
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="10" y="24">tokens per second</text>{legend}'
        + "".join(parts)
        + "</svg>\n"
    )


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="+", type=Path, help="GGUF files; candle takes the Llama architecture only")
    p.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    p.add_argument("--prompt", type=int, default=512, help="prompt tokens; 0 measures no prompts (default %(default)s)")
    p.add_argument("--context", type=int, default=128, help="tokens before generation (default %(default)s)")
    p.add_argument("--generate", type=int, default=64, help="tokens to generate (default %(default)s)")
    p.add_argument("--batch-sizes", default="1,4,8", help="sequences at once (default %(default)s)")
    p.add_argument("--depths", default="", help="also a prompt and a generation after this many tokens, such as 1900")
    p.add_argument("--wait", type=float, default=60, help="seconds to wait for an idle machine before each run")
    p.add_argument("--max-foreign-cpu", type=float, default=0.15, help="cores that others may use (default %(default)s)")
    p.add_argument("--work", type=Path, default=REPOSITORY / "target" / "benchmark", help="folder for builds and results")
    p.add_argument("--tinyvllm", type=Path, help="this program instead of building it")
    p.add_argument("--llama-cpp", type=Path, help="folder with llama-bench, instead of building it")
    p.add_argument(
        "--without-amx",
        action="store_true",
        help="build llama.cpp without AMX, with which 0.3.36 stops at an assertion for latent attention",
    )
    p.add_argument("--candle", type=Path, help="this candle_baseline instead of building it")
    arguments = p.parse_args()
    arguments.batch_sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    arguments.depths = [int(depth) for depth in arguments.depths.split(",") if depth]
    arguments.engines = arguments.engines.split(",")
    for engine in arguments.engines:
        if engine not in ENGINES:
            p.error(f"{engine} is none of {', '.join(ENGINES)}")
    for model in arguments.models:
        if not model.is_file():
            p.error(f"{model} is not a file")
    if arguments.rounds < 1:
        p.error("--rounds must be at least 1")
    if "tinyvllm" not in arguments.engines:
        p.error("--engines must name tinyvllm: the ratios are its own")
    if not shutil.which("cargo") and not arguments.tinyvllm:
        p.error("cargo is not on the path")
    return arguments


def main():
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    known = {
        "tinyvllm": (run_tinyvllm, arguments.tinyvllm, build_tinyvllm),
        "llama.cpp": (run_llama_cpp, arguments.llama_cpp, build_llama_cpp),
        "candle": (run_candle, arguments.candle, build_candle),
    }
    engines = []
    for name in arguments.engines:
        run, given, build = known[name]
        engines.append((name, run, given or build(arguments)))
    runner = Runner(arguments)
    for number in range(arguments.rounds):
        say(f"round {number + 1} of {arguments.rounds}")
        for model in arguments.models:
            # Each round begins with another engine, so that none always meets the machine first.
            for turn in range(len(engines)):
                _, run, program = engines[(turn + number) % len(engines)]
                run(runner, model, program)
        # After every round, so that an interrupted measurement leaves what it found.
        table = write_results(arguments, runner)
    print(table)
    say(f"written: {arguments.work}/results.md, results.json, chart.svg")


def write_results(arguments, runner):
    table = markdown(arguments, runner, arguments.models, arguments.engines)
    results = {"machine": machine(), "threads": arguments.threads, "commands": runner.commands, "samples": runner.samples}
    (arguments.work / "results.md").write_text(table)
    (arguments.work / "results.json").write_text(json.dumps(results, indent=1))
    (arguments.work / "chart.svg").write_text(chart(arguments, runner, arguments.models, arguments.engines))
    return table


if __name__ == "__main__":
    main()
