"""One AdamW's moments and hyper-parameters, apart from the weights they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron_ac2.config_training import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamState:
    """Moments, step count and hyper-parameters of one AdamW, over the weights of one or more Megatron optimizers.

    Moments start at zero, there before the first step.
    """

    def __init__(self, config: OptimizerConfig, parts: Sequence[MegatronOptimizer]):
        self.config = config
        self.lr = config.lr
        self.num_steps = 0
        self.moments: defaultdict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)
        for part in parts:
            for parameter in part.get_parameters():
                self.moments[parameter] = {moment: torch.zeros_like(parameter.data) for moment in MOMENTS}
        self._write_num_steps(parts)

    def put_in(self, parts: Sequence[MegatronOptimizer]) -> None:
        """Make the next step one of this state. Norm weights (one axis) take no weight decay: Megatron's groups."""
        for part in parts:
            part.optimizer.state = self.moments
            for group in part.optimizer.param_groups:
                group["lr"] = self.lr
                group["betas"] = tuple(self.config.betas)
                group["eps"] = self.config.eps
                group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
                if _counts_per_parameter(part):
                    group["fused"] = True  # one pass over weights, gradients and moments
                else:
                    group["step"] = self.num_steps

    def state_dict(self) -> dict[str, float]:
        return {"num_steps": self.num_steps, "lr": self.lr, "config_lr": self.config.lr}

    def load_state_dict(self, saved: Mapping[str, float], parts: Sequence[MegatronOptimizer]) -> None:
        """The saved learning rate counts unless the run's configuration now asks for another than the saved run's."""
        self.num_steps = int(saved["num_steps"])
        if saved["config_lr"] == self.config.lr:
            self.lr = float(saved["lr"])
        self._write_num_steps(parts)

    def _write_num_steps(self, parts: Sequence[MegatronOptimizer]) -> None:
        if _counts_per_parameter(parts[0]):
            for state in self.moments.values():
                state["step"] = torch.tensor(float(self.num_steps))  # one each: AdamW adds to it in place


def _counts_per_parameter(megatron: MegatronOptimizer) -> bool:
    """torch's AdamW keeps `step` with every parameter's moments, the fused ones of Transformer Engine in the group."""
    return isinstance(megatron.optimizer, torch.optim.Adam)
