"""Optimizer states, gradients and weights that leave the device between steps change no bit of training."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import torchrun

CASES = Path(__file__).with_name("offload_cases.py")


def test_training_with_offload_is_training_without(tiny_untied: Path, tiny_tied: Path, tmp_path: Path) -> None:
    output = torchrun(CASES, 2, tiny_untied, tiny_tied, tmp_path, timeout=300)
    assert output.count("passed ") == 5 and output.count("done") == 2
