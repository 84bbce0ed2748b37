"""What a memory plan is made from: a configuration, the models it names, and a number of GPUs."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from megatron_ac2.config import Config, critic_kind, critic_parallel
from megatron_ac2.config_checks import check_config
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.config_values import get
from megatron_ac2.memory.plan import plan_memory
from megatron_ac2.memory.result import MemoryPlan
from megatron_ac2.model.build import check_layout, load_hf_config
from megatron_ac2.model.experts import expert_tensor_degree
from megatron_ac2.parallel.topology import check_world
from megatron_ac2.types import UserError


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is made from."""

    config: Config
    hf_config: PretrainedConfig
    critic_hf_config: PretrainedConfig | None
    num_gpus: int

    def plan(self) -> MemoryPlan:
        return plan_memory(self.config, self.hf_config, self.critic_hf_config, self.num_gpus)

    def changed(self, fields: Mapping[str, Any]) -> Question | None:
        """With other values of "section.field"; None if they are impossible."""
        config = copy.deepcopy(self.config)
        for key, value in fields.items():
            section, _, name = key.rpartition(".")
            target = get(config, section)
            if isinstance(target, dict):
                target[name] = value
            else:
                setattr(target, name, value)
        other = Question(config, self.hf_config, self.critic_hf_config, self.num_gpus)
        return None if check_config(config) or other.problems() else other

    def problems(self) -> list[str]:
        """Why the models cannot be cut so, or not over so many GPUs."""
        layouts = {"actor": (self.hf_config, self.config.parallel)}
        if self.critic_hf_config is not None:
            layouts["critic"] = (self.critic_hf_config, critic_parallel(self.config))
        found = []
        for hf_config, parallel in layouts.values():
            found += check_layout(hf_config, parallel) + check_world(parallel, self.num_gpus)
        return list(dict.fromkeys(found))


def read_question(config: Config, num_gpus: int) -> Question:
    """`num_gpus` 0: as few as the layout has. Raises `UserError` for a model or a layout that cannot be."""
    hf_config = load_hf_config(config.model.path)
    critic_hf_config = None
    if critic_kind(config) == "value_head":
        critic_hf_config = load_hf_config(config.critic.path) if config.critic.path else hf_config
    question = Question(config, hf_config, critic_hf_config, num_gpus or fewest_gpus(config.parallel))
    if problems := question.problems():
        raise UserError(problems)
    return question


def fewest_gpus(parallel: ParallelConfig) -> int:
    """That the layout can be laid over."""
    experts = parallel.expert * expert_tensor_degree(parallel)
    return parallel.pipeline * math.lcm(parallel.tensor * parallel.context, experts)
