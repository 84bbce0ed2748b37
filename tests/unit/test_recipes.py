"""Every shipped configuration loads, and the paper's recipe holds the paper's numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from megatron_ac2.config_checks import get
from megatron_ac2.config_file import load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# A training configuration has a `sampling` section; supervised stages and data specifications do not.
RECIPES = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if "sampling" in (yaml.safe_load(path.read_text()) or {})]
INPUTS = ["model.path=m", "data.train=t.jsonl"]  # some recipes get these on the command line

PAPER = {
    "sampling.routing": "ac2",
    "sampling.num_fresh": 192,
    "sampling.num_prefixes": 192,
    "sampling.group_size": 16,
    "sampling.response_budget": 50_000,
    "sampling.chunk_len": 10_000,
    "sampling.cut_grid": 10_000,
    "sampling.cut_max_fraction": 0.9,
    "sampling.temperature": 0.8,
    "sampling.audit_fraction": 0.25,
    "replay.capacity": 256,
    "replay.target_capacity": 1_920,
    "replay.min_valid_for_target": 8,
    "readiness.global_threshold": 0.20,
    "readiness.local_threshold": 0.18,
    "readiness.window": 5,
    "readiness.reference_min_reward": 6 / 7,
    "actor.num_minibatches": 2,
    "actor.clip_low": 0.2,
    "actor.clip_high": 0.28,
    "actor.dual_clip": 3.0,
    "actor.optimizer.lr": 2e-6,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.grad_clip": 0.3,
    "entropy.enabled": True,
    "entropy.target": 0.28,
    "entropy.step": 0.02,
    "entropy.k_init": 0.06,
    "entropy.k_min": -0.08,
    "entropy.k_max": 0.08,
    "critic.kind": "generative",
    "critic.use_references": True,
    "critic.max_value_tokens": 4,
    "critic.batch_size": 768,
    "critic.updates_per_step": 1,
    "critic.optimizer.lr": 2 * math.sqrt(2) * 1e-6,
    "critic.optimizer.betas": (0.9, 0.999),
    "critic.optimizer.eps": 1e-8,
    "critic.optimizer.weight_decay": 0.0,
    "critic.optimizer.grad_clip": 0.2,
    "critic.lr_min": 5 * math.sqrt(2) * 1e-7,
    "critic.lr_ratio_limit": math.sqrt(2),
    "critic.lr_patience": 2,
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_recipe_loads(path):
    load_config(path, INPUTS)


def test_the_paper_s_recipe_number_by_number():
    config = load_config(EXAMPLES / "qwen3_4b_proofs.yaml")
    for key, value in PAPER.items():
        found = get(config, key)
        found = tuple(found) if isinstance(value, tuple) else found
        assert found == (value if isinstance(value, (str, bool, tuple)) else pytest.approx(value, rel=1e-12)), key


def test_the_paper_s_recipe_leaves_none_of_its_numbers_to_a_default():
    written = yaml.safe_load((EXAMPLES / "qwen3_4b_proofs.yaml").read_text())
    for key in PAPER:
        node = written
        for part in key.split("."):
            assert part in node, key
            node = node[part]


def test_the_recipe_is_among_those_found():
    assert EXAMPLES / "qwen3_4b_proofs.yaml" in RECIPES
