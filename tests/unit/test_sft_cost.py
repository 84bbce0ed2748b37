from __future__ import annotations

import json

from megatron_ac2.config import ModelConfig
from megatron_ac2.report import COST_FILE
from megatron_ac2.sft import SftConfig, StageConfig, earlier_cost


def test_a_stage_adds_what_stages_of_the_same_head_had_cost(tmp_path):
    config = SftConfig(model=ModelConfig(path=str(tmp_path)), sft=StageConfig(head="value"))
    assert earlier_cost(config) == {}  # no stage of ours
    cost = {"steps": 900, "tokens": 7, "seconds": 1.5}
    (tmp_path / COST_FILE).write_text(json.dumps({"head": "value", **cost}))
    assert earlier_cost(config) == cost
    (tmp_path / COST_FILE).write_text(json.dumps({"head": "lm", **cost}))
    assert earlier_cost(config) == {}  # the policy's start, which its own role reports
