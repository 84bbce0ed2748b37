"""What every entry point does around its work: user errors without a traceback, one exit status on every rank."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from megatron_ac2.types import UserError


def run_entry_point(work: Callable[[], int]) -> None:
    """Run `work` and end the process with its status. 2: a mistake of the user's; 1: an error of ours.

    Leaves through `os._exit`: engine and process-group destructors may hang or abort at interpreter exit, after all
    that matters has been written. torchrun ends the other ranks as soon as one has left with a status other than 0.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        status = work()
    except UserError as error:
        status = 2
        where = f"error (rank {rank}): " if rank else "error: "
        print("\n".join(where + problem for problem in error.problems), file=sys.stderr)
    except BaseException as error:
        status = 1 if not isinstance(error, SystemExit) else int(error.code or 0)
        if status:
            print(f"[rank {rank}]", file=sys.stderr)
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
