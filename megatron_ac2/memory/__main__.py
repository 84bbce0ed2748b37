"""What a GPU must hold for a configuration, and which cards can. Needs neither a GPU nor weights, only config.json.

usage: python -m megatron_ac2.memory BASE.yaml [OVERLAY.yaml ...] [section.field=value ...] [--gpus N] [--json]

--gpus: of the whole job; default: WORLD_SIZE, or one data-parallel rank's. --json: bytes, for programs.
The exit status is 1 for a configuration that cannot be read or laid out, 2 if it fits on none of the cards.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from megatron_ac2.config_file import load_config, split_arguments
from megatron_ac2.types import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=int(os.environ.get("WORLD_SIZE", "0")))
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about apex
        from megatron_ac2.memory.question import read_question
        from megatron_ac2.memory.report import show
        from megatron_ac2.memory.result import CARDS, as_dict
    try:
        paths, overrides = split_arguments(rest)
        question = read_question(load_config(paths, overrides), options.gpus)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    plan = question.plan()
    if options.json:
        print(json.dumps(as_dict(plan), indent=2))
    else:
        show(question, plan, Console(highlight=False, soft_wrap=True))
    return 0 if any(plan.problem(card) is None for card in CARDS.values()) else 2


if __name__ == "__main__":
    sys.exit(main())
