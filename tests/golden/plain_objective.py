"""The objective once more, in plain Python over lists, in f64: what the parts are compared with.

A unit is a dict of numbers. A loss is a function of `x`, the log-prob that is differentiated, and of the
unit, whose `logp` is the same number where the formula stops the gradient.
"""

from __future__ import annotations

import random
from math import exp, fsum, log

import numpy as np

NAN = float("nan")
LIMIT = 20.0


def clip(x, low, high):
    return min(max(x, low), high)


def ratio(d):
    return exp(clip(d, -LIMIT, LIMIT))


def ppo(x, u, clip_low=0.2, clip_high=0.2, dual_clip=None, rho=None):
    a, rho = u["A"], ratio(x - u["prox"]) if rho is None else rho
    value = max(-a * rho, -a * clip(rho, 1 - clip_low, 1 + clip_high))
    return min(value, -a * dual_clip) if dual_clip is not None and a < 0 else value


def raft_pp(x, u, **args):
    return ppo(x, u, **args) if u["A"] > 0 else 0.0


def gspo(x, u, clip_low=3e-4, clip_high=4e-4):
    return ppo(x, u, clip_low, clip_high, rho=ratio(u["mean"] + (x - u["logp"])))


def gmpo(x, u, clip_low=0.4, clip_high=0.4):
    slope = gmpo_term(x, u, clip_low, clip_high) - gmpo_term(u["logp"], u, clip_low, clip_high)
    return -u["A"] * ratio(u["mean"] + slope)


def gmpo_term(x, u, clip_low=0.4, clip_high=0.4):
    d = x - u["prox"]
    return min(d, clip_high) if u["A"] > 0 else max(d, -clip_low)


def cispo(x, u, clip_low=1.0, clip_high=4.0):
    return -clip(ratio(u["logp"] - u["prox"]), 1 - clip_low, 1 + clip_high) * u["A"] * x


def sapo(x, u, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if u["A"] > 0 else tau_negative
    z = tau * (ratio(x - u["prox"]) - 1)
    return -u["A"] * 4 / tau / (1 + exp(-z))


def dppo(x, u, divergence="tv", bound_low=0.15, bound_high=0.15):
    p, q = exp(u["prox"]), exp(u["logp"])
    if divergence == "tv":
        far = abs(q - p)
    else:
        far = p * (u["prox"] - u["logp"]) + (1 - p) * (log(max(1 - p, 1e-8)) - log(max(1 - q, 1e-8)))
    rises, falls = u["A"] > 0 and q > p and far > bound_high, u["A"] < 0 and q < p and far > bound_low
    return 0.0 if rises or falls else -u["A"] * ratio(x - u["prox"])


def kimi(x, u, tau=0.1):
    """Its sum over an answer, and the slope of that sum, are those of -A Σ logp + tau/2 (Σ logp - prox)²."""
    return -u["A"] * x + tau * u["sum"] * ((x - u["prox"]) - (u["logp"] - u["prox"]) / 2)


def kimi_token(x, u, tau=0.1):
    return -u["A"] * x + tau / 2 * (x - u["prox"]) ** 2


def topr(x, u, level="sequence"):
    d = u["sum"] if level == "sequence" else u["logp"] - u["beh"]
    return -(min(ratio(d), 1) if u["A"] < 0 else 1) * u["A"] * x


def reinforce(x, u):
    return -u["A"] * x


LOSSES = {
    f.__name__: f for f in (ppo, raft_pp, gspo, gmpo, cispo, sapo, dppo, kimi, kimi_token, topr, reinforce)
}
TERMS = {
    "gspo": lambda x, u, **_: x - u["prox"],
    "gmpo": gmpo_term,
    "kimi": lambda x, u, **_: x - u["prox"],
    "topr": lambda x, u, **_: x - u["beh"],
}
"""What the sum and the mean over the episode are of."""


def weight(u):
    return ratio(u["prox"] - u["beh"])


def decoupled(units, cap=5.0, level="token"):
    if level == "token":
        return [min(weight(u), cap) for u in units]
    return [
        min(ratio(fsum(v["prox"] - v["beh"] for v in units if v["episode"] == u["episode"])), cap)
        for u in units
    ]


def tis(units, cap=2.0, level="token"):
    return decoupled(units, cap, level)


def icepop(units, low=0.5, high=5.0):
    return [w if low <= w <= high else 0.0 for w in map(weight, units)]


def divergence(kind, d):
    """Of a unit sampled from p, with d = log p - log q."""
    return {"k1": d, "k2": d * d / 2, "k3": ratio(-d) - 1 + d}[kind]


def slope_of_divergence(kind, d):
    return {"k1": 1.0, "k2": d, "k3": 1 - (exp(-d) if abs(d) < LIMIT else 0.0)}[kind]


def mis(units, estimator="k3", low=None, high=0.05, cap=5.0):
    found = []
    for u in units:
        values = [divergence(estimator, v["beh"] - v["prox"]) for v in units if v["episode"] == u["episode"]]
        mean = fsum(values) / len(values)
        kept = (-high if low is None else low) <= mean <= high
        found.append(min(weight(u), cap) if kept else 0.0)
    return found


def m2po(units, threshold=0.04, cap=5.0):
    """Takes the largest away one by one, of those that are pushed outward."""
    outward = [u["A"] * (u["prox"] - u["beh"]) > 0 for u in units]
    moments = [(u["prox"] - u["beh"]) ** 2 for u in units]
    left = sorted(moment for moment, out in zip(moments, outward, strict=True) if out)
    while left and fsum(left) / len(left) > threshold:
        largest = left[-1]
        left = [value for value in left if value != largest]
    most = left[-1] if left else -1.0
    return [
        0.0 if out and moment > most else min(weight(u), cap)
        for u, moment, out in zip(units, moments, outward, strict=True)
    ]


def bypass(units):
    return [1.0] * len(units)


none = bypass
CORRECTIONS = {f.__name__: f for f in (decoupled, tis, icepop, mis, m2po, bypass)} | {"none": none}


def token(u, units, **_):
    return 1 / len(units)


def sequence(u, units, **_):
    rows = {v["row"] for v in units}
    return 1 / (sum(v["row"] == u["row"] for v in units) * len(rows))


def rollout(u, units, **_):
    episodes = {v["episode"] for v in units}
    return 1 / (sum(v["episode"] == u["episode"] for v in units) * len(episodes))


def constant(u, units, length):
    return 1 / (length * len({v["episode"] for v in units}))


NORMALISERS = {f.__name__: f for f in (token, sequence, rollout, constant)}


def with_means(units, loss, args):
    """The unmasked units with `mean`, where the loss is defined over episodes."""
    if loss not in TERMS:
        return units
    found = []
    for u in units:
        terms = [TERMS[loss](v["logp"], v, **args) for v in units if v["episode"] == u["episode"]]
        found.append(u | {"sum": fsum(terms), "mean": fsum(terms) / len(terms)})
    return found


def slope(f, x, h=1e-6):
    return (f(x + h) - f(x - h)) / (2 * h)


def case(seed):
    """Ragged units: episodes of one unit and of several rows, groups of one, groups without variance, masked
    units full of NaN, ratios far beyond every clip."""
    rng = random.Random(seed)
    spread = rng.choice([0.02, 0.3, 1.0, 1.0, 12.0])
    units, row, episode = [], 0, 0

    def f32(x):
        return float(np.float32(x))

    for group in range(rng.randint(1, 3)):
        size = rng.choice([1, 2, 3])
        rewards = [rng.choice([0.0, 1.0]) for _ in range(size)] if rng.random() < 0.8 else [1.0] * size
        mean = fsum(rewards) / size
        for reward in rewards:
            for _ in range(rng.choice([1, 1, 2])):
                for _ in range(rng.choice([1, 2, 3, 6])):
                    prox = f32(-rng.expovariate(1.0) - 1e-3)
                    u = {
                        "episode": episode,
                        "group": group,
                        "row": row,
                        "prox": prox,
                        "logp": f32(min(prox + rng.gauss(0, spread), -1e-4)),
                        "beh": f32(min(prox + rng.gauss(0, spread), -1e-4)),
                        "ref": f32(min(prox + rng.gauss(0, spread), -1e-4)),
                        "entropy": f32(rng.random()),
                        "A": f32(1.5 * (reward - mean)) if rng.random() < 0.9 else f32(rng.gauss(0, 1)),
                        "mask": rng.random() > 0.2,
                    }
                    units.append(u)
                row += 1
            episode += 1
    if not any(u["mask"] for u in units):
        units[0]["mask"] = True
    for u in units:
        if not u["mask"]:
            u.update(prox=NAN, logp=NAN, beh=NAN, ref=NAN, entropy=NAN, A=NAN)
    return units
