"""The table of tools/fp8_error.py: its numbers, by hand."""

from __future__ import annotations

import math

import torch

from tools.fp8_error import HEADINGS, Measured, row


def test_a_row_hand_worked() -> None:
    exact = Measured(0.5, torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 4.0]))
    found = Measured(0.75, torch.tensor([-1.0, -2.0 + math.log(2)]), torch.tensor([3.0, 5.0]))
    cells = row("mxfp8", "e4m3", found, exact).strip("| ").split(" | ")
    # log-probs off by 0 and log 2: mean 0.347; k3 of the second is 2 - 1 - log 2 = 0.307, halved; gradient 1 of 5
    assert cells == ["mxfp8", "e4m3", "0.7500", "3.5e-01", "0.69", "1.5e-01", "20.0 %"] and len(cells) == len(HEADINGS)
