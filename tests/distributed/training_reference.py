"""The training cases and what they must give: float64 transformers, one sequence at a time, losses written out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from megatron_ac2.algorithm import value_prompt
from megatron_ac2.config import Config
from megatron_ac2.config_training import OptimizerConfig
from megatron_ac2.types import CriticExample, CriticState, DenseExample, Problem, TrainSequence
from tests.distributed import tiny_families
from tools.quickstart_model import train_tokenizer

TEMPERATURE, CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.8, 0.2, 0.3, 3.0
SEPARATOR_ID, HEAD_SEED, MAX_CONTEXT_LEN = 3, 5, 60
MODEL_MAX_LEN = 400
HEADS = {"bce": 1, "mse": 1, "two_hot": 11}  # outputs
VALUE_CLIP = 0.05
# A large eps: AdamW's first step is then a smooth function of the gradient, not its sign.
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-2, grad_clip=0.3)
Gradients = dict[str, torch.Tensor]


def make_config() -> Config:
    config = Config()
    config.sampling.temperature = TEMPERATURE
    config.sampling.response_budget = 40
    config.actor.clip_low, config.actor.dual_clip = CLIP_LOW, DUAL_CLIP
    config.critic.max_context_len = MAX_CONTEXT_LEN
    return config


def write_policy(folder: Path, tied: bool, num_layers: int = 2) -> Path:
    """A model and its tokenizer."""
    tokenizer = train_tokenizer(["user assistant\n", value_prompt._QUESTION, value_prompt._REFERENCE])
    config = tiny_families.qwen3(
        tied,
        vocab_size=len(tokenizer),  # 448: no multiple of 128, so that padded columns are at work
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.15,
    )
    tokenizer.save_pretrained(folder)
    return tiny_families.write_model(config, folder, 17 + tied, noise=0)


def load_reference_model(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def token_logprobs(model: Qwen3ForCausalLM, ids: np.ndarray, start: int, temperature: float) -> torch.Tensor:
    """[len - start, V]: log-probs that predict ids[start:]."""
    logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, start - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def chosen(logprobs: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    return logprobs.gather(-1, torch.from_numpy(ids.astype(np.int64))[:, None])[:, 0]


@torch.no_grad()
def make_sequences(model: Qwen3ForCausalLM) -> list[TrainSequence]:
    """Seven sequences of 9 to 45 tokens: both signs, one of weight 0, some of the empty prefix, behavior well off."""
    rng = np.random.default_rng(0)
    shapes = [(5, 20), (12, 9), (3, 6), (30, 15), (8, 1), (6, 25), (10, 10)]
    sequences = []
    for index, (num_context, num_new) in enumerate(shapes):
        ids = rng.integers(0, model.config.vocab_size, num_context + num_new).astype(np.int32)
        exact = chosen(token_logprobs(model, ids, num_context, TEMPERATURE), ids[num_context:]).numpy()
        behavior = (exact + rng.normal(0, 0.7, num_new)).astype(np.float32)
        weight = 0.0 if index == 3 else 1.0
        advantages = np.full(num_new, (-1.0) ** index * (1 + index), dtype=np.float32)
        sequences.append(TrainSequence(ids, num_context, behavior, advantages, weight, empty_prefix=index % 3 == 0))
    return sequences


def make_problem() -> Problem:
    return Problem("p", np.arange(5, 12, dtype=np.int32), "What is 2 + 2?", {})


def make_states() -> list[CriticState]:
    """The third context is too long with its reference; two of the five others have one."""
    rng = np.random.default_rng(1)
    lengths = [(4, None), (17, 6), (40, 30), (0, None), (25, 9), (9, None)]
    states = []
    for response_len, reference_len in lengths:
        response = rng.integers(20, 400, response_len).astype(np.int32)
        reference = None if reference_len is None else rng.integers(20, 400, reference_len).astype(np.int32)
        states.append(CriticState(make_problem(), response, reference))
    return states


def make_examples() -> list[CriticExample]:
    weights, values = [1.0, 0.5, 1.0, 0.5, 0.25, 1.0], [0.3, 1.0, 0.2, 0.0, 0.7, 0.9]
    return [CriticExample(*terms) for terms in zip(make_states(), values, weights, strict=True)]


def make_dense_examples() -> list[DenseExample]:
    states = make_states()
    return [
        DenseExample(states[1], np.array([0, 5, 17]), np.array([0.1, 0.5, 1.0], dtype=np.float32), 0.5),
        DenseExample(states[4], np.array([25, 3]), np.array([0.0, 0.6], dtype=np.float32), 2.0),
        DenseExample(states[2], np.array([1]), np.array([0.5], dtype=np.float32), 1.0),  # too long
    ]


def make_nstep_examples() -> list[DenseExample]:
    """Up to three targets a row, some on the grid. A fresh head says about 0.5, so that a value leaves 0.3 and 0.62 by
    more than the clip, with targets on either side; the second example has no old values, and one target a row."""
    states = make_states()
    targets = np.array([[0.1, 0.95, 0.2], [0.5, 0.33, np.nan], [1.0, np.nan, 0.0]], dtype=np.float32)
    old_values = np.array([0.3, 0.52, 0.62], dtype=np.float32)
    return [
        DenseExample(states[1], np.array([0, 5, 17]), targets, 0.5, ~np.isnan(targets), old_values),
        DenseExample(states[4], np.array([25, 3]), np.array([0.0, 0.64], dtype=np.float32), 2.0),
        DenseExample(states[2], np.array([1]), np.array([[0.5, 0.6]], dtype=np.float32)),  # too long
    ]


def as_last_token(examples: Iterable[CriticExample]) -> list[DenseExample]:
    return [
        DenseExample(e.state, np.array([len(e.state.response_ids)]), np.array([e.value], dtype=np.float32), e.weight)
        for e in examples
    ]


def gradients_of(model: torch.nn.Module, loss: torch.Tensor, rename: str = "") -> Gradients:
    model.zero_grad()
    loss.backward()
    return {rename + name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def policy_loss(model: Qwen3ForCausalLM, sequences: list[TrainSequence], on_policy: bool) -> torch.Tensor:
    """Mean over the tokens of weighted sequences; the proximal policy is the current one, or else the behavior one."""
    terms = []
    for s in sequences:
        if s.weight == 0:
            continue
        logp = chosen(token_logprobs(model, s.token_ids, s.num_context, TEMPERATURE), s.token_ids[s.num_context :])
        proximal = logp.detach() if on_policy else torch.from_numpy(s.behavior_logprobs).double()
        ratio = (logp - proximal).exp()
        advantage = float(s.advantages[0])
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
        if advantage < 0:
            loss = torch.minimum(loss, torch.full_like(loss, -advantage * DUAL_CLIP))
        terms.append(loss)
    return torch.cat(terms).mean()


@torch.no_grad()
def score_reference(model: Qwen3ForCausalLM, sequences: list[TrainSequence]) -> dict[str, float]:
    entropies, empty, gaps = [], [], []
    for s in sequences:
        logp = token_logprobs(model, s.token_ids, s.num_context, TEMPERATURE)
        entropies.append(-(logp.exp() * logp).sum(-1))
        empty += [entropies[-1]] if s.empty_prefix else []
        gaps.append(chosen(logp, s.token_ids[s.num_context :]) - torch.from_numpy(s.behavior_logprobs))
    gap, ratio = torch.cat(gaps), torch.cat(gaps).exp()
    return {
        "num_tokens": len(gap),
        "entropy": torch.cat(entropies).mean().item(),
        "empty_prefix_entropy": torch.cat(empty).mean().item(),
        "mismatch/mean_abs": gap.abs().mean().item(),
        "mismatch/max_abs": gap.abs().max().item(),
        "mismatch/k1": -gap.mean().item(),
        "mismatch/k3": (ratio - 1 - gap).mean().item(),
        "mismatch/ratio_above_2": (ratio > 2).double().mean().item(),
        "mismatch/ratio_below_half": (ratio < 0.5).double().mean().item(),
        "mismatch/ess": (ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())).item(),
    }


def optimizer_step(model: Qwen3ForCausalLM, gradients: Gradients) -> dict[str, object]:
    """One clipped AdamW step; norm weights (one axis) take no weight decay. Changes `model`."""
    grad_norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name] * min(1.0, OPTIMIZER.grad_clip / grad_norm)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps).step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    update_norm = torch.stack([(weights[name] - before[name]).norm() for name in weights]).norm().item()
    return {"norms": {"grad_norm": grad_norm, "update_norm": update_norm}, "weights": weights}


class ReferenceCritic(torch.nn.Module):
    def __init__(self, folder: Path, num_outputs: int = 1):
        super().__init__()
        self.model = load_reference_model(folder).model
        hidden = self.model.config.hidden_size
        draw = torch.randn(num_outputs, hidden, generator=torch.Generator().manual_seed(HEAD_SEED)) / hidden
        self.value_head = torch.nn.Linear(hidden, num_outputs, bias=False, dtype=torch.float64)
        self.value_head.weight.data.copy_(draw)

    def logits(self, ids: np.ndarray) -> torch.Tensor:
        hidden = self.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        return self.value_head(hidden)


def context_of(state: CriticState) -> np.ndarray:
    reference = [] if state.reference_ids is None else [*state.reference_ids, SEPARATOR_ID]
    return np.array([*reference, *state.problem.prompt_ids, *state.response_ids])


def value_of(head: str, logits: torch.Tensor) -> torch.Tensor:
    """logits [..., outputs] -> values [...]."""
    if head != "two_hot":
        return logits[..., 0].sigmoid()
    return (logits.softmax(-1) * torch.arange(11, dtype=torch.float64) / 10).sum(-1)


def target_loss(head: str, logits: torch.Tensor, target: float, old_value: float | None) -> torch.Tensor:
    """Of one target at one position; logits [outputs]."""
    if head == "two_hot":
        low = min(int(target * 10), 9)
        share = target * 10 - low  # the rest goes to the grid value below
        logprobs = logits.log_softmax(-1)
        return -(1 - share) * logprobs[low] - share * logprobs[low + 1]
    value = value_of(head, logits)
    if head == "bce":
        return -target * value.log() - (1 - target) * (1 - value).log()
    squared = (value - target) ** 2
    if old_value is not None:
        clipped = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
        squared = torch.maximum(squared, (clipped - target) ** 2)
    return squared / 2


def value_reference(critic: ReferenceCritic, examples: list[DenseExample], head: str = "bce") -> dict[str, object]:
    losses, values, targets, weights = [], [], [], []
    for example in examples:
        ids = context_of(example.state)
        if len(ids) > MAX_CONTEXT_LEN:
            continue
        logits = critic.logits(ids)
        for row, position in enumerate(example.positions):
            at = logits[len(ids) - 1 - len(example.state.response_ids) + position]
            known = [float(target) for target in np.atleast_1d(example.targets[row]) if not np.isnan(target)]
            old_value = None if example.old_values is None else float(example.old_values[row])
            losses.append(torch.stack([target_loss(head, at, target, old_value) for target in known]).mean())
            values.append(value_of(head, at).detach())
            targets.append(sum(known) / len(known))
            weights.append(example.weight)
    w, v, t = torch.tensor(weights).double(), torch.stack(values), torch.tensor(targets).double()
    mean = lambda x: ((w * x).sum() / w.sum()).item()  # noqa: E731
    loss = (w * torch.stack(losses)).sum() / w.sum()
    residual, spread = mean((t - v) ** 2) - mean(t - v) ** 2, mean(t**2) - mean(t) ** 2
    metrics = {"loss": loss.item(), "mae": mean((t - v).abs()), "explained_variance": 1 - residual / spread}
    return {"metrics": {**metrics, "num_labels": len(w)}, "gradients": gradients_of(critic, loss)}


def nstep_reference(folder: Path) -> dict[str, dict[str, object]]:
    critics = {outputs: ReferenceCritic(folder, outputs) for outputs in set(HEADS.values())}
    return {head: value_reference(critics[outputs], make_nstep_examples(), head) for head, outputs in HEADS.items()}


def generative_reference(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, examples: list[CriticExample], config: Config
) -> dict[str, object]:
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for e in examples:
        remaining = config.sampling.response_budget - len(e.state.response_ids)
        prompt = value_prompt.build_value_prompt(
            tokenizer, e.state.problem.question, e.state.response_ids, remaining, e.state.reference_ids
        )
        reply = value_prompt.value_ids(tokenizer, e.value)
        ids = np.concatenate([prompt, reply])
        if len(ids) > MODEL_MAX_LEN:
            continue
        nll = -chosen(token_logprobs(model, ids, len(prompt), 1.0), reply).sum()
        total, weight = total + e.weight * nll / 4, weight + e.weight
    loss = total / weight
    return {"loss": loss.item(), "gradients": gradients_of(model, loss)}


def build_reference(folder: Path) -> dict[str, object]:
    model, config = load_reference_model(folder), make_config()
    sequences = make_sequences(model)
    policy = {
        name: policy_loss(model, chosen_sequences, on_policy)
        for name, chosen_sequences, on_policy in (
            ("on_policy", sequences, True),
            ("clipped", sequences, False),
            ("single", sequences[:1], False),
        )
    }
    critic = ReferenceCritic(folder)
    with torch.no_grad():
        values = [value_of("bce", critic.logits(context_of(state))[-1]).item() for state in make_states()]
    policies = {name: {"loss": loss.item(), "gradients": gradients_of(model, loss)} for name, loss in policy.items()}
    generative = generative_reference(model, AutoTokenizer.from_pretrained(folder), make_examples(), config)
    return {
        "sequences": [dataclasses.asdict(s) for s in sequences],
        "score": score_reference(model, sequences),
        "policy": policies,
        "values": values,
        "value_update": value_reference(critic, as_last_token(make_examples())),
        "value_dense": value_reference(critic, make_dense_examples()),
        "value_nstep": nstep_reference(folder),
        "generative": generative,
        "step": optimizer_step(load_reference_model(folder), policies["on_policy"]["gradients"]),
    }
