"""Critic targets and advantages by token: GAE, and BRACE under policy lag (docs/ALGORITHM.md §6).

One response of T tokens at a time, on the host: float64 inside, float32 out. The states are s_0 ... s_T, and token t
leads from s_t to s_{t+1}; `values` holds V(s_0) ... V(s_{T-1}), where the tokens were chosen. The convention of both
functions: no reward is given on the way, and the endpoint's value R is the value of s_T. R is the reward where the
response was finished (or used up its budget), and the critic's value where a chunk was cut: a length cut is never a
terminal state. So R is discounted by gamma^(T-s) seen from s; a reward paid with the last token instead would be
discounted once less, and gives the same at gamma = 1.

Targets may leave [0, 1] (by noise of the critic, and under BRACE by traces above 1): the caller clips them.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_ac2.types import UserError

# Keeps a product of traces from inf, so that a later factor 0 gives 0 and not NaN.
_LARGEST_PRODUCT = 1e300


def gae(values: np.ndarray, end_value: float, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16).

    values f[T] -> advantages float32[T], returns float32[T] = advantages + values, the critic's targets.
    gamma = lam = 1: R - V_t, and every return is R. lam = 0: gamma V_{t+1} - V_t.
    Raises UserError for gamma or lambda outside [0, 1].
    """
    _check_unit(("estimator.gamma", gamma), ("estimator.gae_lambda", lam))
    states = _with_end(values, end_value)
    advantages = _discounted_sums(gamma * states[1:] - states[:-1], gamma * lam)
    return advantages.astype(np.float32), (advantages + states[:-1]).astype(np.float32)


def brace(
    values: np.ndarray,
    end_value: float,
    ratios: np.ndarray,
    *,
    horizon: int,
    rho_max: float,
    c_max: float,
    lam: float,
    gamma: float,
    product_max: float,
) -> tuple[np.ndarray, np.ndarray]:
    """BRACE (arXiv 2609.09783): V-trace over the next `horizon` tokens, and from there on the endpoint itself.

    values f[T], ratios f[T] = policy / behaviour of each token -> targets float32[T], advantages float32[T]. With
    rho = min(rho_max, w), c = lam min(c_max, w), delta_t = rho_t (gamma V(s_{t+1}) - V(s_t)), j = min(s + horizon, T):
    target(s) = V(s) + sum_{t=s}^{j-1} gamma^(t-s) (prod_{i=s}^{t-1} c_i) delta_t
                     + (prod_{i=s}^{j-1} c_i) (gamma^(T-s) R - gamma^(j-s) V(s_j)),
    A_s = gamma target(s + 1) - V(s), target(T) = R. Ours: every product of c above is cut at `product_max`, in
    the sum too, for c_max^horizon may be huge (1.1^100 is 14,000); inf cuts none.
    ratios = 1 and gamma = lam = 1: R. horizon 0: gamma^(T-s) R. horizon >= T: V-trace (arXiv 1802.01561, eq. 1), the
    last term being 0. Takes O(T horizon). Raises UserError for a parameter out of range, ValueError for lengths that do
    not match or a ratio that is negative or NaN.
    """
    _check_unit(("estimator.gamma", gamma), ("estimator.brace_lambda", lam))
    _check_brace(horizon, rho_max, c_max, product_max)
    states, ratios = _with_end(values, end_value), np.asarray(ratios, dtype=np.float64)
    num_tokens = len(states) - 1
    if ratios.shape != (num_tokens,) or not (ratios >= 0).all():
        raise ValueError(f"brace: {num_tokens} tokens need as many ratios, none negative or NaN; found {ratios}")
    deltas = np.minimum(ratios, rho_max) * (gamma * states[1:] - states[:-1])
    traces = lam * np.minimum(ratios, c_max)
    corrections, products = _windowed_traces(deltas, traces, horizon, gamma, product_max)
    starts = np.arange(num_tokens)
    ends = np.minimum(starts + horizon, num_tokens)
    residuals = gamma ** (num_tokens - starts) * end_value - gamma ** (ends - starts) * states[ends]
    targets = states[:-1] + corrections + products * residuals
    advantages = gamma * np.append(targets[1:], end_value)[:num_tokens] - states[:-1]
    return targets.astype(np.float32), advantages.astype(np.float32)


def _windowed_traces(
    deltas: np.ndarray, traces: np.ndarray, horizon: int, gamma: float, product_max: float
) -> tuple[np.ndarray, np.ndarray]:
    """The sum over the window and the product over all of it, f64[T] each, for the window that begins at each token.

    One pass a distance from the window's begin, over all windows at once. Products are never divided: zeros are safe.
    """
    num_tokens = len(deltas)
    sums, products = np.zeros(num_tokens), np.ones(num_tokens)
    for distance in range(min(horizon, num_tokens)):
        inside = num_tokens - distance  # windows that still have a token at this distance
        weights = np.minimum(products[:inside], product_max)
        sums[:inside] += gamma**distance * weights * deltas[distance:]
        with np.errstate(over="ignore"):
            products[:inside] = np.minimum(products[:inside] * traces[distance:], _LARGEST_PRODUCT)
    return sums, np.minimum(products, product_max)


def _discounted_sums(terms: np.ndarray, factor: float) -> np.ndarray:
    """sums[t] = sum_{i >= t} factor^(i - t) terms[i], factor in [0, 1]: log2(T) passes that double what each covers."""
    sums, covered, weight = terms.copy(), 1, factor
    while covered < len(sums) and weight > 0:
        sums[:-covered] += weight * sums[covered:]
        covered, weight = 2 * covered, weight * weight
    return sums


def _with_end(values: np.ndarray, end_value: float) -> np.ndarray:
    """V(s_0) ... V(s_{T-1}), R: float64[T + 1]."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"token returns: one row of values is needed, found shape {values.shape}")
    return np.append(values, float(end_value))


def _check_unit(*fields: tuple[str, float]) -> None:
    problems = [f"{name}: found {value}, accepted: 0 to 1" for name, value in fields if not 0 <= value <= 1]
    if problems:
        raise UserError(problems)


def _check_brace(horizon: int, rho_max: float, c_max: float, product_max: float) -> None:
    problems = []
    if not horizon >= 0:
        problems.append(f"estimator.brace_horizon: found {horizon}, must be >= 0")
    for name, bound in (("brace_rho_max", rho_max), ("brace_c_max", c_max)):
        if not 0 < bound < math.inf:
            problems.append(f"estimator.{name}: found {bound}, must be a finite number above 0")
    if not product_max >= 1:
        problems.append(f"estimator.brace_product_max: found {product_max}, must be >= 1")
    if problems:
        raise UserError(problems)
