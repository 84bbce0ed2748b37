"""vLLM's CPU worker for one replica over several torchrun ranks, with shared memory of its own."""

from __future__ import annotations

import secrets
from pathlib import Path

from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_ac2.parallel.collectives import barrier, broadcast_object

_SHARED_MEMORY = Path("/dev/shm")


class TorchrunCPUWorker(CPUWorker):
    """vLLM 0.32 names its segments after the init method, "env://" under torchrun, and never removes them.

    So two jobs on a machine would share memory, and the remains of a killed one stop the next ("errno: 17"). Here the
    name is this job's, and it goes as soon as all ranks have the segment mapped.
    """

    def init_device(self) -> None:
        token = broadcast_object(secrets.token_hex(8))
        self.distributed_init_method = f"env://{token}"
        try:
            super().init_device()
            barrier()
        finally:
            for segment in _SHARED_MEMORY.glob(f"{token}*"):
                segment.unlink(missing_ok=True)
