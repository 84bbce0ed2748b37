"""Distributed checkpoint: models, optimizers and the run's host state; atomic, verified, free of the parallel layout.

The folder must be one that every rank sees. Tensors are stored once each, in the model's shape, so a run may go on
under other tensor, pipeline and data degrees and with the other kind of optimizer (plain or distributed).
"""

from megatron_ac2.model.checkpoint_files import latest
from megatron_ac2.model.checkpoint_load import identity_problems, load_checkpoint
from megatron_ac2.model.checkpoint_save import CheckpointSaver, Kept, save_checkpoint

__all__ = ["CheckpointSaver", "Kept", "identity_problems", "latest", "load_checkpoint", "save_checkpoint"]
