"""Time of `normscope --help` as a multiple of `python -c pass`, medians of interleaved runs.

    python benchmarks/startup.py [RUNS]

Exits with status 1 if the multiple is above 6.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 6.0


def seconds(command: list[str]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    """Print the two medians and their ratio."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 31
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "normscope --help": [str(Path(sys.executable).with_name("normscope")), "--help"],
    }
    for command in commands.values():
        seconds(command)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:<18} {1000 * median:7.1f} ms")
    ratio = medians["normscope --help"] / medians["python -c pass"]
    print(f"{'ratio':<18} {ratio:7.2f}    (at most {LIMIT:g})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
