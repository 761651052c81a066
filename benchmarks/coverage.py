"""Coverage of 95% intervals: posleak's intervals, and alternatives that were rejected.

    python benchmarks/coverage.py simulate                      # synthetic prompts with known truth; four minutes
    python benchmarks/coverage.py real smollm2-135m --truth 384 # a model's own prompts; five minutes

`real` measures many prompts once. It draws subsets of n prompts and takes the estimate from all *other* prompts as the
truth. This truth has its own variance, n / (prompts − n) of that of the subset, so that a perfect 95% interval of 32
out of 384 prompts covers 94%. Subsets overlap and coverage is averaged over layers, so that its error is not known.

Both print a markdown table and write it into results/coverage.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from posleak.leakage import MIN_PROMPTS, Jackknife, Sampled
from posleak.leakage.power import of_gram

Array = NDArray[np.float64]
RESULTS = Path(__file__).parent / "results" / "coverage.json"
RESAMPLES = 400
NORMAL = NormalDist()


@dataclass(frozen=True)
class Draw:
    """Experiments of one regime: Gram matrices [T, n, n] or values [T, n]; a ratio has a denominator."""

    above: Array
    truth: float
    below: Array | None = None

    def number(self, of: Callable[[Array], Sampled]) -> Sampled:
        return of(self.above) if self.below is None else of(self.above) / of(self.below)


def replicated(x: Array) -> Sampled:
    jackknife = Jackknife(x.shape[1])
    return jackknife.inner(of_gram(x)) if x.ndim == 3 else jackknife.mean(x.T)


# Methods: experiments -> lower and upper ends of their intervals, [T] each.


def shipped(draw: Draw) -> tuple[Array, Array]:
    return draw.number(replicated).interval


def jackknife_t(draw: Draw) -> tuple[Array, Array]:
    """Return value ± t · standard error of the delete-one jackknife."""
    number = draw.number(replicated)
    without = number.samples[: number.n]
    half = stdtrit(number.n - 1, 0.975) * np.sqrt((number.n - 1) * without.var(0))
    return number.value - half, number.value + half


def weights(n: int) -> Array:
    """Return the weights of bootstrap resamples with at least two different prompts."""
    drawn = np.random.default_rng(n).multinomial(n, np.full(n, 1 / n), size=2 * RESAMPLES)
    found: Array = drawn[(drawn > 0).sum(1) > 1][:RESAMPLES].astype(float)
    return found


def weighted(x: Array, w: Array) -> tuple[Array, Array]:
    """Return the statistic of resamples [T, S] and its derivative by weight [T, S, n], without self-products."""
    if x.ndim == 2:
        value = x @ w.T / w.sum(1)
        return value, (x[:, None] - value[..., None]) / w.sum(1)[:, None]
    off = (x + x.swapaxes(1, 2)) / 2 * (1 - np.eye(x.shape[1]))
    sums, count = w @ off, w.sum(1) ** 2 - (w**2).sum(1)
    value = (sums * w).sum(-1) / count
    return value, 2 * (sums - value[..., None] * (w.sum(1)[:, None] - w)) / count[:, None]


def resampled(draw: Draw, w: Array) -> tuple[Array, Array]:
    """Return value and derivative of the statistic or ratio."""
    above, above_by = weighted(draw.above, w)
    if draw.below is None:
        return above, above_by
    below, below_by = weighted(draw.below, w)
    return above / below, (above_by - (above / below)[..., None] * below_by) / below[..., None]


def percentile(draw: Draw) -> tuple[Array, Array]:
    low, high = np.quantile(resampled(draw, weights(draw.above.shape[1]))[0], [0.025, 0.975], axis=1)
    return low, high


def bca(draw: Draw) -> tuple[Array, Array]:
    number, samples = draw.number(replicated), resampled(draw, weights(draw.above.shape[1]))[0]
    share = np.clip((samples < number.value[:, None]).mean(1), 0.5 / RESAMPLES, 1 - 0.5 / RESAMPLES)
    away = number.samples[: number.n].mean(0) - number.samples[: number.n]
    bend, middle = (away**3).sum(0) / (6 * (away**2).sum(0) ** 1.5), np.vectorize(NORMAL.inv_cdf)(share)
    ends = []
    for z in (NORMAL.inv_cdf(0.025), NORMAL.inv_cdf(0.975)):
        at = np.vectorize(NORMAL.cdf)(middle + (middle + z) / (1 - bend * (middle + z)))
        ends.append(np.array([np.quantile(row, p) for row, p in zip(samples, at, strict=True)]))
    return ends[0], ends[1]


def bootstrap_t(draw: Draw) -> tuple[Array, Array]:
    n = draw.above.shape[1]
    w = weights(n)
    value, by = resampled(draw, np.ones((1, n)))
    samples, samples_by = resampled(draw, w)
    error = np.sqrt((by**2).sum(-1) * n / (n - 1))[:, 0]
    errors = np.sqrt((w * samples_by**2).sum(-1) * n / (n - 1))
    low, high = np.quantile((samples - value) / np.maximum(errors, 1e-12), [0.025, 0.975], axis=1)
    return value[:, 0] - high * error, value[:, 0] - low * error


METHODS: dict[str, Callable[[Draw], tuple[Array, Array]]] = {
    "shipped": shipped, "jackknife-t": jackknife_t, "bootstrap-t": bootstrap_t, "BCa": bca, "percentile": percentile,
}  # fmt: skip


# Regimes: (generator, experiments, prompts) -> Draw. x is [T, n, pairs].

Regime = Callable[[np.random.Generator, int, int], Draw]


def gram(x: Array, y: Array) -> Array:
    found: Array = x @ y.swapaxes(1, 2) / x.shape[-1]
    return found


def power(make: Callable[[np.random.Generator, tuple[int, int, int]], Array], width: int, truth: float) -> Regime:
    def regime(rng: np.random.Generator, T: int, n: int) -> Draw:
        x = make(rng, (T, n, width))
        return Draw(gram(x, x), truth)

    return regime


def private(mean: float, width: int, scale: float = 1.0) -> Regime:
    return power(lambda rng, shape: mean + scale * rng.standard_normal(shape), width, mean**2)


def shared(mean: float, width: int) -> Regime:
    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
        directions = rng.standard_normal((shape[0], 3, width))
        return mean + rng.standard_normal((*shape[:2], 3)) @ directions + rng.standard_normal(shape)

    return power(make, width, mean**2)


def heavy(mean: float) -> Regime:
    return power(lambda rng, shape: mean + rng.standard_t(4, shape), 100, mean**2)


def one_heavy(mean: float) -> Regime:
    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
        direction = rng.standard_normal((shape[0], 1, shape[2]))
        return mean + rng.standard_t(4, (*shape[:2], 1)) * direction + rng.standard_normal(shape)

    return power(make, 50, mean**2)


def loud(mean: float) -> Regime:
    return power(
        lambda rng, shape: mean + np.exp(0.7 * rng.standard_normal((*shape[:2], 1))) * rng.standard_normal(shape),
        100, mean**2,
    )  # fmt: skip


def gain(spread: float) -> Regime:
    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
        return _gain(rng, shape, spread) + 0.5 * rng.standard_normal(shape)

    return power(make, 50, 1.0)


def _gain(rng: np.random.Generator, shape: tuple[int, int, int], spread: float) -> Array:
    """Return a factor for each prompt, with mean 1."""
    return np.exp(spread * rng.standard_normal((*shape[:2], 1)) - spread**2 / 2)


def share(part: float, opposite: float = 0.0, total: float = 1.0) -> Regime:
    """Make a part with components along and across the total; `opposite` noise is subtracted from the rest."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Draw:
        shape = (T, n, 60)
        along, across = rng.standard_normal((2, T, 1, 60))
        along *= total / np.sqrt((along**2).mean(-1, keepdims=True))
        across -= (along * across).mean(-1, keepdims=True) * along / total**2
        swapped = opposite * rng.standard_normal(shape)
        x = part * along + 0.5 * across + swapped + 0.7 * rng.standard_normal(shape)
        whole = x + (1 - part) * along - 0.5 * across - swapped + 0.7 * rng.standard_normal(shape)
        return Draw(gram(x, whole), part, gram(whole, whole))

    return regime


def share_of_two(part: float) -> Regime:
    """Make noise in two directions only."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Draw:
        one, two = (rng.standard_normal((T, n, 1)) * rng.standard_normal((T, 1, 60)) / 2 for _ in range(2))
        x = part + one
        whole = x + 1 - part + two + 0.6 * one
        return Draw(gram(x, whole), part, gram(whole, whole))

    return regime


def kept(factor: float, spread: float = 0.0) -> Regime:
    """Make the ratio of powers after / before, on the same prompts."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Draw:
        shape = (T, n, 60)
        before = _gain(rng, shape, spread) + rng.standard_normal(shape)
        after = factor * before + 0.3 * rng.standard_normal(shape)
        return Draw(gram(after, after), factor**2, gram(before, before))

    return regime


def slope(rise: float) -> Regime:
    """Make powers of twelve layers that share half of their noise."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Draw:
        depth, common, total = np.linspace(-0.5, 0.5, 12), rng.standard_normal((T, n, 40)), np.zeros((T, n, n))
        for at in depth:
            x = np.sqrt(0.2 + rise * (at + 0.5)) + 0.7 * common + 0.7 * rng.standard_normal((T, n, 40))
            total += at / (depth @ depth) * gram(x, x)
        return Draw(total, rise)

    return regime


def mean(make: Callable[[np.random.Generator, tuple[int, int]], Array], truth: float) -> Regime:
    return lambda rng, T, n: Draw(make(rng, (T, n)), truth)


REGIMES: dict[str, Regime] = {
    **{f"3 shared directions and private noise, 300 values, mean {m}": shared(m, 300) for m in (0, 0.5, 2)},
    **{f"3 shared directions and private noise, 11 values, mean {m}": shared(m, 11) for m in (0, 0.5, 2)},
    **{f"private noise, 300 values, mean {m}": private(m, 300) for m in (0, 0.1, 0.3, 1, 2)},
    **{f"private noise, 10 values, mean {m}": private(m, 10) for m in (0, 0.3, 1, 2)},
    **{f"two values, mean {m}": private(m, 2) for m in (0, 0.3, 1, 3)},
    **{f"one value, mean {m}": private(m, 1) for m in (0, 0.3, 1, 3)},
    "strong signal, small noise": private(3, 100, 0.1),
    **{f"noise with heavy tails (t of 4), mean {m}": heavy(m) for m in (0, 0.3, 1)},
    **{f"one shared direction with heavy tails, mean {m}": one_heavy(m) for m in (0, 0.3, 1)},
    **{f"prompts of unequal noise (lognormal 0.7), mean {m}": loud(m) for m in (0, 0.3, 1)},
    **{f"prompts of unequal signal (lognormal {s})": gain(s) for s in (0.3, 0.7)},
    **{f"share {p}": share(p) for p in (-0.3, 0, 0.5, 1)},
    "share 0.1, noise taken from the rest": share(0.1, opposite=2),
    "share 0.5 of a weak total": share(0.5, total=0.4),
    **{f"share {p}, two noise directions": share_of_two(p) for p in (0, 0.5)},
    **{f"kept {c**2:.2g}": kept(c) for c in (0, 0.3, 1, 2)},
    "kept 0.25, prompts of unequal signal": kept(0.5, spread=0.5),
    **{f"slope {k} over 12 layers": slope(k) for k in (0, 1)},
    "mean, normal": mean(lambda rng, shape: rng.standard_normal(shape), 0.0),
    "mean, heavy tails (t of 4)": mean(lambda rng, shape: rng.standard_t(4, shape), 0.0),
    "mean, bounded (beta 2, 5)": mean(lambda rng, shape: rng.beta(2, 5, shape), 2 / 7),
    "mean, exponential": mean(lambda rng, shape: rng.exponential(size=shape), 1.0),
    "mean, lognormal 1": mean(lambda rng, shape: np.exp(rng.standard_normal(shape)), float(np.exp(0.5))),
}


def covered(regime: Regime, n: int, methods: list[str], trials: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the coverage of each method with its binomial error; ratios count where posleak reports one."""
    rng, inside, some = (
        np.random.default_rng([seed, n]),
        {name: list[NDArray[np.bool_]]() for name in methods},
        max(1, 6000 // n),
    )
    for start in range(0, trials, some):
        draw = regime(rng, min(some, trials - start), n)
        clear = np.ones(len(draw.above), bool) if draw.below is None else replicated(draw.below).interval[0] > 0
        for name in methods:
            low, high = METHODS[name](draw)
            inside[name].append(((low <= draw.truth) & (draw.truth <= high))[clear])
    found = {name: np.concatenate(hits) for name, hits in inside.items()}
    return {
        name: {"covers": float(x.mean()), "error": float(np.sqrt(x.mean() * (1 - x.mean()) / len(x))), "of": len(x)}
        for name, x in found.items()
    }


def simulate(few: list[int], many: list[int], trials: int) -> dict[str, Any]:
    """Run the shipped method for all n, the others for `many` with a quarter of the experiments."""
    found = {}
    for seed, (name, regime) in enumerate(REGIMES.items()):
        found[name] = {n: covered(regime, n, ["shipped"], trials, seed) for n in (*few, *many)}
        for n in many:
            found[name][n] |= covered(regime, n, [m for m in METHODS if m != "shipped"], trials // 4, seed)
    columns = [(n, "shipped") for n in (*few, *many)] + [(n, m) for m in METHODS if m != "shipped" for n in many]
    print("| regime | " + " | ".join(f"{method}, n = {n}" for n, method in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, row in found.items():
        cells = (row[n][method] for n, method in columns)
        print(f"| {name} | " + " | ".join(f"{c['covers']:.1%} ± {c['error']:.1%}" for c in cells) + " |")
    return {"trials": trials, "trials of rejected methods": trials // 4, "resamples": RESAMPLES, "regimes": found}


NUMBERS = ("total", "mask", "drift", "sink", "residual")


def real(model: str, truth: int, length: int, subsets: int, sizes: list[int]) -> dict[str, Any]:
    """Powers, and shares of the total, of each layer and of the whole model."""
    import posleak
    from posleak.leakage import component

    data = posleak.measure(posleak.load(model), length=length, prompts=truth, seed=1).data

    def grams(name: str, other: str) -> Array:
        """Return Gram matrices by layer [L, B, B], means over heads."""
        x, y = (component(data, each).values for each in (name, other))
        return np.stack([layer_gram(x[:, layer], y[:, layer]) for layer in range(x.shape[1])])

    own = {name: grams(name, name) for name in NUMBERS}
    crossed = {name: grams(name, "total") for name in NUMBERS[1:]}
    own, crossed = ({k: np.concatenate([g, g.mean(0)[None]]) for k, g in d.items()} for d in (own, crossed))
    rng, hits = np.random.default_rng(0), dict[str, dict[int, list[Array]]]()
    for n in sizes:
        orders = np.stack([rng.permutation(truth) for _ in range(subsets)])
        rest = np.ones((subsets, truth))
        np.put_along_axis(rest, orders[:, :n], 0.0, axis=1)
        true = {
            name: of_the_rest(g, rest) for name, g in (own | {f"{k} in total": g for k, g in crossed.items()}).items()
        }
        for k, chosen in enumerate(orders[:, :n]):
            for name, (number, expected) in numbers(own, crossed, chosen, {c: x[k] for c, x in true.items()}).items():
                low, high = number.interval
                inside = np.where(np.isnan(low), np.nan, (low <= expected) & (expected <= high))
                hits.setdefault(name, {}).setdefault(n, []).append(inside)
    found = {name: {n: _places(each) for n, each in by_size.items()} for name, by_size in hits.items()}
    print("| number | " + " | ".join(f"{where}, n = {n}" for n in sizes for where in ("layers", "model")) + " |")
    print("|---|" + "---:|" * (2 * len(sizes)))
    for name, row in found.items():
        print(f"| {name} | " + " | ".join(f"{row[n][w]:.1%}" for n in sizes for w in ("layers", "model")) + " |")
    return {"model": model, "prompts": truth, "length": length, "subsets": subsets, "numbers": found}


def _places(inside: list[Array]) -> dict[str, float]:
    every = np.array(inside)
    return {"layers": float(np.nanmean(every[:, :-1])), "model": float(np.nanmean(every[:, -1]))}


def of_the_rest(gram: Array, rest: Array) -> Array:
    """Return ⟨x, y⟩ over the prompts with weight 1, for every row of `rest` [subsets, B]: [subsets, cells]."""
    count, own = rest.sum(1), np.diagonal(gram, axis1=-2, axis2=-1)
    sums = ((gram @ rest.T) * rest.T).sum(1) - own @ rest.T
    found: Array = (sums / (count * (count - 1))).T
    return found


def layer_gram(x: Array, y: Array) -> Array:
    """Return the mean over heads, queries and offsets [B, …] of the products of prompts: [B, B]."""
    there = np.isfinite(x[0]) & np.isfinite(y[0])
    found: Array = x[:, there] @ y[:, there].T / there.sum()
    return found


def numbers(
    own: dict[str, Array], crossed: dict[str, Array], chosen: NDArray[np.int64], true: dict[str, Array]
) -> dict[str, tuple[Sampled, Array]]:
    """Return powers and shares of the chosen prompts with their truths; cells are the layers, then the model."""
    jackknife = Jackknife(len(chosen))
    power = {name: jackknife.inner(of_gram(g[:, chosen[:, None], chosen])) for name, g in own.items()}
    part = {name: jackknife.inner(of_gram(g[:, chosen[:, None], chosen])) for name, g in crossed.items()}
    found = {f"power of {name}": (number, true[name]) for name, number in power.items()}
    return found | {
        f"share of {name}": (number.over(power["total"]), true[f"{name} in total"] / true["total"])
        for name, number in part.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How often 95% intervals contain the truth.")
    what = parser.add_subparsers(dest="what", required=True)
    made_up = what.add_parser("simulate")
    made_up.add_argument("--trials", type=int, default=2000)
    measured = what.add_parser("real")
    measured.add_argument("model")
    measured.add_argument("--truth", type=int, default=384, help="prompts to measure")
    measured.add_argument("--length", type=int, default=64)
    measured.add_argument("--subsets", type=int, default=200)
    asked = parser.parse_args()
    if asked.what == "simulate":
        found = simulate([MIN_PROMPTS, MIN_PROMPTS + 1, 6], [8, 16, 64], asked.trials)
    else:
        found = real(asked.model, asked.truth, asked.length, asked.subsets, [4, 8, 16, 32])
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**kept, asked.what: found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
