"""Draw the curves of one or several runs: python tools/plot_run.py runs/ac2 runs/grpo --out curves.png"""

from __future__ import annotations

import argparse
import sys

from megatron_ac2.plots import plot_runs
from megatron_ac2.types import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="folders that hold a metrics.jsonl")
    parser.add_argument("--out", default="curves.png", help="the picture; its suffix picks the format")
    parser.add_argument("--title", default=None)
    arguments = parser.parse_args()
    try:
        print(plot_runs(arguments.runs, arguments.out, arguments.title))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
