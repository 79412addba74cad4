"""What `import visionpos` costs beside `import torch`: subprocesses in turns, and median ratios.

Run: .venv/bin/python benchmarks/import_cost.py [pairs]
"""

import statistics
import subprocess
import sys
import time

LIMIT = 1.1


def seconds(statement: str) -> float:
    """Return the wall time of a fresh interpreter that runs one statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def measure(pairs: int) -> tuple[float, float, float]:
    """Return the median seconds of torch, of visionpos, and the median of the paired ratios."""
    for statement in ("import torch", "import visionpos"):
        seconds(statement)  # fills the disk cache and writes the .pyc files
    torch_s: list[float] = []
    visionpos_s: list[float] = []
    for index in range(pairs):  # who goes first alternates, so that a drift of the machine cancels
        for name in ("tv", "vt")[index % 2]:
            if name == "t":
                torch_s.append(seconds("import torch"))
            else:
                visionpos_s.append(seconds("import visionpos"))
    ratios = [ours / theirs for ours, theirs in zip(visionpos_s, torch_s, strict=True)]
    return statistics.median(torch_s), statistics.median(visionpos_s), statistics.median(ratios)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    torch_s, visionpos_s, ratio = measure(pairs)
    print(f"import torch      {torch_s:.3f} s (median of {pairs})")
    print(f"import visionpos  {visionpos_s:.3f} s")
    print(f"ratio             {ratio:.3f} (median of pairs; at most {LIMIT} wanted)")


if __name__ == "__main__":
    main()
