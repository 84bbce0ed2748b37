"""Policy losses by token: small pure functions, neither reduced nor weighted; objective.py puts them together.

Each returns (loss [..., T], signals): a signal is a detached tensor [..., T] that is summed into a metric. Log-probs
are in nats, at the sampling temperature; gradients reach `current` only. Half precision is computed in float32, float64
stays float64. A function without a `mask` works token by token and leaves masked tokens to its caller; one with it
reads nothing where it is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ac2.algorithm.ratios import MAX_LOG_RATIO, bounded_exp, sequence_means, to_tokens, wide

Signals = dict[str, Tensor]
KL_ESTIMATORS = ("k1", "k2", "k3")


def policy_gradient(current: Tensor, advantages: Tensor) -> tuple[Tensor, Signals]:
    """-A log pi (REINFORCE, Williams 1992). current, advantages [..., T]."""
    return -wide(advantages).detach() * wide(current), {}


def ppo(
    current: Tensor, anchor: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Signals]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = pi / anchor; for A < 0 at most -A dual_clip.

    Schulman et al. 2017 (arXiv 1707.06347, eq. 7) with two bounds (clip-higher, arXiv 2503.14476) and dual clip (arXiv
    1912.09729; None: none). All [..., T]. Signals: ratio, kl_k1 and kl_k3 (of KL(anchor || pi), on the anchor's
    samples), and clip_low, clip_high, dual_clip: 1 where that bound took the token's gradient.
    """
    log_ratio = wide(current) - wide(anchor).detach()
    advantages = wide(advantages).detach()
    ratio = bounded_exp(log_ratio)
    loss, signals = _clipped(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
        signals["dual_clip"] = (advantages < 0) & (ratio.detach() > dual_clip)
    return loss, signals | _distance(log_ratio)


def cispo(
    current: Tensor, anchor: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Signals]:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi: the ratio is clipped, no token loses its gradient.

    MiniMax-M1, arXiv 2506.13585, section 3.1; clip_low 1 is its setting without a lower bound. All [..., T]. Signals as
    `ppo`; clip_low and clip_high are 1 where the ratio was cut, whatever the advantage.
    """
    log_ratio = (wide(current) - wide(anchor)).detach()
    ratio = bounded_exp(log_ratio)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -ratio.clamp(low, high) * wide(advantages).detach() * wide(current)
    signals = {"ratio": ratio, "clip_low": ratio < low, "clip_high": ratio > high}
    return loss, signals | _distance(log_ratio)


def gspo(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Signals]:
    """PPO's clipped loss with the sequence's ratio s = exp(mean_t log(pi_t / anchor_t)), arXiv 2507.18071.

    The GSPO-token form, s_t = sg[s] pi_t / sg[pi_t]. With equal advantages in a sequence and sequence-mean aggregation,
    value and gradient are those of the sequence form, min(s A, clip(s) A). All [..., T]; sequences whole. The
    paper's bounds are far tighter than PPO's: clip_low 3e-4, clip_high 4e-4. Signals as `ppo`, `ratio` being s; the
    KL estimates are by token.
    """
    keep = mask != 0
    current = wide(current).masked_fill(~keep, 0.0)
    log_ratio = current - wide(anchor).detach().masked_fill(~keep, 0.0)
    means = sequence_means(log_ratio, sequence_ids, num_sequences, mask)
    log_s = to_tokens(means, sequence_ids, mask, log_ratio.dtype) + (current - current.detach())
    advantages = wide(advantages).detach().masked_fill(~keep, 0.0)
    loss, signals = _clipped(bounded_exp(log_s), advantages, clip_low, clip_high)
    return loss, signals | _distance(log_ratio)


def asympo(
    current: Tensor, advantages: Tensor, sequence_ids: Tensor, num_sequences: int, mask: Tensor, *, floor: float
) -> tuple[Tensor, Signals]:
    """A l_t / sg[max(mean_t l_t, floor)] with l_t = -log pi_t: needs no behaviour log-probs.

    ASymPO, arXiv 2606.03070 (experimental; docs/ALGORITHM.md §6). current, advantages, sequence_ids, mask [..., T];
    sequences whole; floor in nats. The paper's loss is this one under sequence-mean aggregation. Signal: nll_floored, 1
    where the floor took the place of the sequence's mean.
    """
    keep = mask != 0
    nll = -wide(current).masked_fill(~keep, 0.0)
    means = sequence_means(nll, sequence_ids, num_sequences, mask)
    scale = to_tokens(means, sequence_ids, mask, nll.dtype)
    advantages = wide(advantages).detach().masked_fill(~keep, 0.0)
    return advantages * nll / scale.clamp(min=floor), {"nll_floored": (scale < floor) & keep}


def reference_kl(current: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """An estimate [..., T] of KL(pi || reference) at tokens sampled from pi, differentiated as it stands.

    Schulman, "Approximating KL divergence" (2020), with x = log(reference / pi): k1 = -x, k2 = x^2 / 2,
    k3 = e^x - 1 - x. As a loss, what counts is the gradient's mean over pi's samples, and only k2's is that of
    KL(pi || reference): k1's is 0 (E grad log pi: noise, no pull), k3's is that of KL(reference || pi). Nothing is done
    about that here, as in verl's kl_loss_type k1, k2 and k3 (its k1+ and k3+ have k2's gradient) and TRL's GRPO (k3).
    """
    x = wide(reference).detach() - wide(current)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    # Constant above the bound. With the exponential alone bounded, the -x would be left, which pulls away.
    x = x.clamp(max=MAX_LOG_RATIO)
    return x.exp() - 1.0 - x


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Signals]:
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    ratio = ratio.detach()
    signals = {
        "ratio": ratio,
        "clip_low": (advantages < 0) & (ratio < low),
        "clip_high": (advantages > 0) & (ratio > high),
    }
    return loss, signals


def _distance(log_ratio: Tensor) -> Signals:
    log_ratio = log_ratio.detach()
    return {"kl_k1": -log_ratio, "kl_k3": bounded_exp(log_ratio) - 1.0 - log_ratio}
