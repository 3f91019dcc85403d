"""What `import dubito` costs beyond `import torch`: CPU seconds, fresh processes, interleaved, medians.

Run `python benchmarks/import_time.py [runs]`; exits 1 where the difference is above the budget.
"""

import os
import statistics
import subprocess
import sys

BUDGET = 0.3
PROBE = "import time; start = time.process_time(); import {module}; print(time.process_time() - start)"


def cpu_seconds(module: str) -> float:
    """CPU seconds (user and system) that importing a module takes in a fresh interpreter."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(run.stdout)


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    times: dict[str, list[float]] = {"torch": [], "dubito": []}
    for module in times:  # the first import also writes bytecode and warms the file cache
        cpu_seconds(module)
    for _ in range(runs):
        for module, seconds in times.items():
            seconds.append(cpu_seconds(module))
    torch, dubito = (statistics.median(seconds) for seconds in times.values())
    print(f"import torch  {torch:.3f} s CPU (median of {runs})")
    print(f"import dubito {dubito:.3f} s CPU, {dubito - torch:+.3f} s; budget +{BUDGET} s")
    return int(dubito - torch > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
