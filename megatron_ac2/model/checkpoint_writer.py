"""Megatron's torch_dist format, written by threads of this process.

Megatron's own writer forks a process a file and spawns another that imports the main module anew (seconds, with vLLM in
it); if one of them dies, the save waits for ever. torch's writer does neither, and tells every rank of one's failure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch.distributed import checkpoint


class InProcessSave(SaveShardedStrategy):
    """For `dist_checkpointing.save`: translated as TorchDistSaveShardedStrategy does, saved by torch.distributed."""

    def __init__(self, num_threads: int = 2):
        super().__init__("torch_dist", 1)
        self.num_threads = num_threads

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """A collective. Raises CheckpointException on every rank if a rank cannot write."""
        main_replicas_only = True
        tensors, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, main_replicas_only)
        checkpoint.save(
            torch_dist.mcore_to_pyt_state_dict(tensors, False),
            storage_writer=checkpoint.FileSystemWriter(checkpoint_dir, thread_count=self.num_threads, sync_files=True),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    def can_handle_sharded_objects(self) -> bool:
        return True
