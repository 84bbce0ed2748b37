"""Score centering (Marek, Ryabinin, arXiv 2609.20807): takes the sampler's drift out of a policy gradient.

The engine samples from q, the trainer differentiates p. With token weights w = f(p / q), E_q[w grad log p] is not 0,
so that even a constant advantage moves the policy. The centred score subtracts that mean:
`w_y grad log p_y - sum_v q_v f(p_v / q_v) grad log p_v`. Only the sampler's k likeliest tokens H are recorded. Outside
of H, q is taken to be rho p, and sum_v p_v grad log p_v = 0 turns the tail's sum into one over H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ac2.algorithm.importance import mass_function
from megatron_ac2.algorithm.ratios import wide

_LEAST_TAIL = 1e-6  # where H holds all, both tails are rounding errors, and their ratio must not be


def score_centering(
    top_current: Tensor, top_behavior: Tensor, kind: str, low: float | None = None, high: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """C = sum_{v in H} sg[q_v f(p_v / q_v) - alpha p_v] log p_v, to be added to a policy loss as A * C.

    top_current [..., T, k]: log p_v, differentiable. top_behavior [..., T, k]: log q_v, -inf outside of what the
    sampler could draw: no part of H, and nothing is read there. Both in nats at the sampling temperature.
    rho = max(1 - sum_H q, 1e-6) / max(1 - sum_H p, 1e-6), alpha = rho f(1 / rho). kind: a token kind of importance.py,
    its bounds as there.
    Exact where H is the whole vocabulary, where the tail is q = rho p, and under top-p or top-k sampling if H is all
    that was left and the caller renormalised p on it. 0 for token_is.
    Returns (C [..., T], signals [..., T]: head_mass_q = sum_H q, head_mass_p = sum_H p).
    Raises UserError for a kind that is no function of one token's ratio.
    """
    mass = mass_function(kind, low, high)
    log_q = wide(top_behavior).detach()
    head = log_q > -torch.inf
    log_p = wide(top_current).masked_fill(~head, 0.0)
    with torch.no_grad():
        q = log_q.exp()
        p = log_p.exp() * head
        head_q, head_p = q.sum(dim=-1), p.sum(dim=-1)
        rho = (1.0 - head_q).clamp(min=_LEAST_TAIL) / (1.0 - head_p).clamp(min=_LEAST_TAIL)
        alpha = mass(torch.ones_like(rho), rho).unsqueeze(-1)
        coefficients = mass(p, q) - alpha * p
    centre = (coefficients * log_p).sum(dim=-1)
    return centre, {"head_mass_q": head_q, "head_mass_p": head_p}
