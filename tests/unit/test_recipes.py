"""Every shipped configuration loads, the paper's recipe holds the paper's numbers, an overlay changes what it names."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import yaml

from megatron_ac2.config_file import load_config, to_dict
from megatron_ac2.config_values import get

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OVERLAYS = sorted((EXAMPLES / "algorithms").glob("*.yaml"))
# A training configuration has a `sampling` section; supervised stages and data specifications do not.
RECIPES = [
    path
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    if path not in OVERLAYS and "sampling" in (yaml.safe_load(path.read_text()) or {})
]
QUICKSTART, PROOFS = EXAMPLES / "quickstart" / "train.yaml", EXAMPLES / "qwen3_4b_proofs.yaml"
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
    config = load_config(PROOFS)
    for key, value in PAPER.items():
        found = get(config, key)
        found = tuple(found) if isinstance(value, tuple) else found
        assert found == (value if isinstance(value, (str, bool, tuple)) else pytest.approx(value, rel=1e-12)), key


def test_the_paper_s_recipe_leaves_none_of_its_numbers_to_a_default():
    written = yaml.safe_load(PROOFS.read_text())
    for key in PAPER:
        node = written
        for part in key.split("."):
            assert part in node, key
            node = node[part]


def test_the_recipe_is_among_those_found():
    assert PROOFS in RECIPES and QUICKSTART in RECIPES


# What each overlay changes of the paper's recipe, and to what: nothing else may move, or an ablation is confounded.
GRPO = {"sampling.routing": "grpo", "entropy.enabled": False, "actor.dual_clip": None}
SYMMETRIC = {"actor.clip_high": 0.2}
BY_STD = {"estimator.divide_by_std": True}
CENTERED = {"actor.score_centering.enabled": True}
PLAIN = {"actor.loss": "policy_gradient", "entropy.enabled": False}


def importance(kind: str, low: float, high: float) -> dict[str, object]:
    bounds = {"actor.importance.low": low, "actor.importance.high": high}
    return {"actor.importance.kind": kind} | bounds


CHANGES = {
    "ac2": {},  # the recipe itself
    "ac2_singleton": {"estimator.kind": "singleton"},
    "ac2_no_audits": {"sampling.audit_fraction": 0.0},
    "ac2_stale_replay": {"replay.kind": "stale", "replay.capacity": 1920},
    "ac2_correct_only": {"replay.kind": "correct_only"},
    "ac2_global_only": {"readiness.kind": "global_only"},
    "ac2_terminal_gate": {"readiness.kind": "terminal_only"},
    "ac2_audit_demotion": {"readiness.demote_threshold": 0.36},
    "ac2_short_chunks": {"sampling.chunk_len": 2000},
    "ac2_fine_cuts": {"sampling.cut_grid": 2000},
    "ac2_soft_value": {"critic.value": "soft"},
    "ac2_no_references": {"critic.use_references": False},
    "ac2_reference_only_prompts": {"critic.reference_prompts": "reference_only"},
    "ac2_two_hot": {"critic.kind": "value_head", "critic.head": "two_hot"},
    "ac2_nstep_critic": {"critic.kind": "value_head", "critic.fit": "nstep"},
    "prefix_grpo": {"sampling.routing": "prefix_grpo"},
    "grpo": GRPO | SYMMETRIC | BY_STD
    | {"actor.aggregation": "sequence_mean", "actor.reference_kl.coefficient": 0.04},
    "dr_grpo": GRPO | SYMMETRIC | {"actor.aggregation": "budget_mean"},
    "rloo": PLAIN | {"sampling.routing": "grpo", "estimator.baseline": "leave_one_out", "actor.num_minibatches": 1,
                     "actor.aggregation": "budget_mean"},
    "dapo": GRPO | BY_STD | {"sampling.dynamic": True, "sampling.overlong_cache": 4096},
    "gspo": BY_STD | {"sampling.routing": "grpo", "entropy.enabled": False, "actor.loss": "gspo",
                      "actor.clip_low": 3e-4, "actor.clip_high": 4e-4, "actor.aggregation": "sequence_mean"},
    "cispo": BY_STD | {"sampling.routing": "grpo", "entropy.enabled": False, "actor.loss": "cispo",
                       "actor.clip_low": 1.0, "actor.clip_high": 4.0},
    "token_tis": importance("token_tis", 0.0, 2.0),
    "token_mis": importance("token_mis", 0.5, 5.0),
    "sequence_tis": importance("sequence_tis", 0.0, 2.0),
    "sequence_mis": importance("sequence_mis", 0.5, 5.0),
    "geometric_rejection": importance("geometric_rejection", 0.99, 1.01),
    "decoupled_ppo": {"actor.importance.kind": "token_is"},
    "reference_kl": {"actor.reference_kl.coefficient": 0.001},
    "asympo": {"actor.loss": "asympo", "actor.aggregation": "sequence_mean", "entropy.enabled": False},
    "score_centering": PLAIN | CENTERED,
    "score_centering_tis": PLAIN | CENTERED | importance("token_tis", 0.0, 2.0),
    "score_centering_mis": PLAIN | CENTERED | importance("token_mis", 0.5, 5.0),
    "score_centering_clip": CENTERED,
    "ppo_gae": GRPO | SYMMETRIC
    | {"estimator.kind": "gae", "critic.kind": "value_head", "critic.head": "mse", "critic.value_clip": 0.2},
    "brace": {"sampling.routing": "grpo", "estimator.kind": "brace", "critic.kind": "value_head",
              "critic.head": "mse"},
    "rfpo": {"sampling.routing": "grpo", "estimator.kind": "rfpo", "critic.kind": "value_head"},
    "filtered_sampling": {"sampling.top_p": 0.95, "sampling.top_k": 20},
}  # fmt: skip
# What an overlay writes out although the recipe holds it already: the numbers that define the algorithm.
CONSTANTS = {
    "ac2_stale_replay": {"replay.stale_every": 10},
    "ac2_correct_only": {"replay.correct_min_reward": 6 / 7},
    "ac2_nstep_critic": {"critic.nstep_max": 5, "critic.snapshot_every": 20},
    "grpo": {"actor.loss": "ppo", "actor.clip_low": 0.2, "actor.reference_kl.estimator": "k3"},
    "dapo": {"actor.clip_low": 0.2, "actor.clip_high": 0.28, "actor.aggregation": "token_mean"},
    "decoupled_ppo": {"actor.loss": "ppo", "actor.anchor": "proximal"},
    "asympo": {"actor.asympo_floor": 0.01},
    "score_centering": {"actor.score_centering.top_k": 128},
    "ppo_gae": {"estimator.gae_lambda": 0.95, "estimator.gamma": 1.0},
    "brace": {"estimator.brace_horizon": 100, "estimator.brace_rho_max": 1.2, "estimator.brace_c_max": 1.1,
              "estimator.gamma": 1.0, "estimator.brace_lambda": 1.0, "critic.value_clip": 0.5},
    "rfpo": {"estimator.rfpo_num_labelled": 512, "estimator.rfpo_label_fraction": 0.1},
}  # fmt: skip


def small_sizes(overlay: Path) -> list[str]:
    """What an overlay with sizes in tokens asks to be added on the quickstart, from its own comment."""
    lines = [line.removeprefix("# quickstart: ") for line in overlay.read_text().splitlines()]
    return [word for line in lines if line and not line.startswith("#") and "=" in line for word in line.split()]


def leaves(tree: dict, prefix: str = "") -> dict[str, object]:
    found = {}
    for name, node in tree.items():
        found |= leaves(node, f"{prefix}{name}.") if isinstance(node, dict) else {f"{prefix}{name}": node}
    return found


@cache
def flat(paths: tuple[Path, ...], overrides: tuple[str, ...] = ()) -> dict[str, object]:
    return leaves(to_dict(load_config(paths, [*INPUTS, *overrides])))


def changed(base: Path, overlay: Path, overrides: list[str]) -> dict[str, object]:
    before, after = flat((base,)), flat((base, overlay), tuple(overrides))
    return {key: after[key] for key in before | after if before[key] != after[key]}


def test_every_overlay_has_a_row_in_the_table():
    assert [path.stem for path in OVERLAYS] == sorted(CHANGES)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_changes_exactly_its_fields_of_the_paper_s_recipe(overlay):
    assert changed(PROOFS, overlay, []) == CHANGES[overlay.stem]
    for key, value in CONSTANTS.get(overlay.stem, {}).items():
        assert flat((PROOFS, overlay))[key] == value, key
        assert key in leaves(yaml.safe_load(overlay.read_text())), f"{key} is not written out"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_loads_on_the_quickstart_and_changes_it(overlay):
    found = changed(QUICKSTART, overlay, small_sizes(overlay))
    assert bool(found) == (overlay.stem != "ac2")
    # Beyond the recipe's changes: what the quickstart holds otherwise, and the sizes that the comment gives.
    sizes = {override.split("=")[0] for override in small_sizes(overlay)}
    assert found.keys() - CHANGES[overlay.stem].keys() - sizes <= {"critic.kind"}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_says_what_it_is_and_where_it_is_from(overlay):
    lines = overlay.read_text().splitlines()
    comment = [line for line in lines if line.startswith("#") and not line.startswith("# quickstart: ")]
    assert 1 <= len(comment) <= 3 and lines[: len(comment)] == comment
    assert "arXiv" in " ".join(comment) or "(2025)" in " ".join(comment) or "et al. 2025" in " ".join(comment)


@pytest.mark.parametrize("companion", ["token_tis", "token_mis", "sequence_mis", "reference_kl", "filtered_sampling"])
@pytest.mark.parametrize("algorithm", ["ac2", "grpo", "dr_grpo", "cispo", "ppo_gae", "brace", "ac2_singleton"])
def test_companions_go_on_top_of_algorithms(algorithm, companion):
    folder = EXAMPLES / "algorithms"
    load_config([QUICKSTART, folder / f"{algorithm}.yaml", folder / f"{companion}.yaml"], INPUTS)


def test_the_folder_s_readme_lists_every_overlay():
    text = (EXAMPLES / "algorithms" / "README.md").read_text()
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert listed == [path.name for path in sorted(OVERLAYS, key=lambda path: list(CHANGES).index(path.stem))]
