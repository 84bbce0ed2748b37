"""`megatron-ac2 COMMAND ...`: the same as `python -m megatron_ac2.COMMAND ...`.

Under torchrun take the module: `torchrun --nproc_per_node=8 -m megatron_ac2.train my.yaml`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "a run: CONFIG.yaml [OVERLAY.yaml ...] [section.field=value ...]",
    "sft": "a supervised stage, of a policy or of a critic: CONFIG.yaml ...",
    "doctor": "what is missing here, and what is wrong with a configuration: [CONFIG.yaml ...]",
    "memory": "what each GPU of a layout would hold: CONFIG.yaml ... --gpus N",
    "quickstart": "all of it in small, on this machine's CPU",
}


def usage() -> str:
    rows = "\n".join(f"  {name:<12}{does}" for name, does in COMMANDS.items())
    return f"{__doc__.strip()}\n\n{rows}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status, where the command itself does not end the process."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command not in COMMANDS:
        print(f"error: command: found {command!r}, accepted: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv = [command, *rest]
    runpy.run_module(f"megatron_ac2.{command}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
