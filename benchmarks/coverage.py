"""Coverage of 95% intervals: posleak's intervals, and alternatives that were rejected.

    python -m benchmarks.coverage simulate                      # synthetic prompts with known truth; four minutes
    python -m benchmarks.coverage real smollm2-135m             # a model's own prompts; ten minutes

`real` measures many prompts once. The number of all prompts is the truth, and subsets of n prompts are drawn from them
without replacement, each weighted by its own attention. The truth therefore has no sampling error. Its variance is
smaller than that of independent prompts by the factor 1 − n / prompts, so that a perfect 95% interval of 32 out of 768
prompts covers 95.5%. Subsets overlap and coverage is averaged over layers, so that its standard error is not known.

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
from scipy.special import softmax, stdtrit

from posleak.leakage import MIN_PROMPTS, Estimate, Jackknife, Sampled
from posleak.leakage.power import of_gram

Array = NDArray[np.float64]
RESULTS = Path(__file__).parent / "results" / "coverage.json"
RESAMPLES = 400
NORMAL = NormalDist()


@dataclass(frozen=True)
class Experiments:
    """T simulated experiments of one regime, with n prompts each.

    numerator     Gram matrices [T, n, n] or values [T, n]
    truth         true value of the statistic
    denominator   as the numerator; None if the statistic is not a ratio
    """

    numerator: Array
    truth: float
    denominator: Array | None = None

    @property
    def statistic(self) -> Sampled:
        """Statistic of each experiment, with its jackknife replicates."""
        numerator = jackknifed(self.numerator)
        return numerator if self.denominator is None else numerator / jackknifed(self.denominator)


def jackknifed(x: Array) -> Sampled:
    """Return power or mean of every experiment, with its jackknife replicates."""
    jackknife = Jackknife(x.shape[1])
    return jackknife.inner(of_gram(x)) if x.ndim == 3 else jackknife.mean(x.T)


# Methods: experiments -> lower and upper ends of their intervals, [T] each.


def shipped(experiments: Experiments) -> tuple[Array, Array]:
    """Return the intervals of posleak."""
    return experiments.statistic.interval


def jackknife_t(experiments: Experiments) -> tuple[Array, Array]:
    """Return value ± t · standard error of the delete-one jackknife."""
    statistic = experiments.statistic
    delete_one = statistic.samples[: statistic.n]
    half_width = stdtrit(statistic.n - 1, 0.975) * np.sqrt((statistic.n - 1) * delete_one.var(0))
    return statistic.value - half_width, statistic.value + half_width


def bootstrap_weights(n: int) -> Array:
    """Return the weights of bootstrap resamples with at least two different prompts, [S, n]."""
    drawn = np.random.default_rng(n).multinomial(n, np.full(n, 1 / n), size=2 * RESAMPLES)
    valid: Array = drawn[(drawn > 0).sum(1) > 1][:RESAMPLES].astype(float)
    return valid


def weighted(x: Array, w: Array) -> tuple[Array, Array]:
    """Return the statistic of resamples [T, S] and its derivative by weight [T, S, n], without self-products."""
    if x.ndim == 2:
        value = x @ w.T / w.sum(1)
        return value, (x[:, None] - value[..., None]) / w.sum(1)[:, None]
    off = (x + x.swapaxes(1, 2)) / 2 * (1 - np.eye(x.shape[1]))
    sums, count = w @ off, w.sum(1) ** 2 - (w**2).sum(1)
    value = (sums * w).sum(-1) / count
    return value, 2 * (sums - value[..., None] * (w.sum(1)[:, None] - w)) / count[:, None]


def resampled(experiments: Experiments, w: Array) -> tuple[Array, Array]:
    """Return value and derivative of the statistic or ratio."""
    numerator, numerator_by = weighted(experiments.numerator, w)
    if experiments.denominator is None:
        return numerator, numerator_by
    denominator, denominator_by = weighted(experiments.denominator, w)
    ratio = numerator / denominator
    return ratio, (numerator_by - ratio[..., None] * denominator_by) / denominator[..., None]


def percentile(experiments: Experiments) -> tuple[Array, Array]:
    """Return the percentile intervals of the bootstrap."""
    samples, _ = resampled(experiments, bootstrap_weights(experiments.numerator.shape[1]))
    low, high = np.quantile(samples, [0.025, 0.975], axis=1)
    return low, high


def bca(experiments: Experiments) -> tuple[Array, Array]:
    """Return the bias-corrected and accelerated intervals of the bootstrap."""
    statistic = experiments.statistic
    samples, _ = resampled(experiments, bootstrap_weights(experiments.numerator.shape[1]))
    share = np.clip((samples < statistic.value[:, None]).mean(1), 0.5 / RESAMPLES, 1 - 0.5 / RESAMPLES)
    influence = statistic.samples[: statistic.n].mean(0) - statistic.samples[: statistic.n]
    acceleration = (influence**3).sum(0) / (6 * (influence**2).sum(0) ** 1.5)
    bias = np.vectorize(NORMAL.inv_cdf)(share)
    ends = []
    for z in (NORMAL.inv_cdf(0.025), NORMAL.inv_cdf(0.975)):
        levels = np.vectorize(NORMAL.cdf)(bias + (bias + z) / (1 - acceleration * (bias + z)))
        ends.append(np.array([np.quantile(row, level) for row, level in zip(samples, levels, strict=True)]))
    return ends[0], ends[1]


def bootstrap_t(experiments: Experiments) -> tuple[Array, Array]:
    """Return the studentised intervals of the bootstrap."""
    n = experiments.numerator.shape[1]
    w = bootstrap_weights(n)
    value, by = resampled(experiments, np.ones((1, n)))
    samples, samples_by = resampled(experiments, w)
    error = np.sqrt((by**2).sum(-1) * n / (n - 1))[:, 0]
    errors = np.sqrt((w * samples_by**2).sum(-1) * n / (n - 1))
    low, high = np.quantile((samples - value) / np.maximum(errors, 1e-12), [0.025, 0.975], axis=1)
    return value[:, 0] - high * error, value[:, 0] - low * error


METHODS: dict[str, Callable[[Experiments], tuple[Array, Array]]] = {
    "shipped": shipped, "jackknife-t": jackknife_t, "bootstrap-t": bootstrap_t, "BCa": bca, "percentile": percentile,
}  # fmt: skip


# Regimes: (generator, number of experiments, number of prompts) -> Experiments. x is [T, n, pairs].

Regime = Callable[[np.random.Generator, int, int], Experiments]


def gram(x: Array, y: Array) -> Array:
    """Return the Gram matrices of x and y [T, n, pairs], means over pairs: [T, n, n]."""
    matrices: Array = x @ y.swapaxes(1, 2) / x.shape[-1]
    return matrices


def power(make: Callable[[np.random.Generator, tuple[int, int, int]], Array], width: int, truth: float) -> Regime:
    """Return the regime of a power, from a function that draws the values of all prompts."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Experiments:
        x = make(rng, (T, n, width))
        return Experiments(gram(x, x), truth)

    return regime


def private_noise(mean: float, width: int, scale: float = 1.0) -> Regime:
    """Return independent noise in every prompt."""
    return power(lambda rng, shape: mean + scale * rng.standard_normal(shape), width, mean**2)


def shared_directions(mean: float, width: int) -> Regime:
    """Return noise in three directions that all prompts share, plus independent noise."""

    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
        directions = rng.standard_normal((shape[0], 3, width))
        return mean + rng.standard_normal((*shape[:2], 3)) @ directions + rng.standard_normal(shape)

    return power(make, width, mean**2)


def heavy_tails(mean: float) -> Regime:
    """Return independent noise with a t distribution of 4 degrees of freedom."""
    return power(lambda rng, shape: mean + rng.standard_t(4, shape), 100, mean**2)


def shared_heavy_tails(mean: float) -> Regime:
    """Return noise with heavy tails in one direction that all prompts share, plus independent noise."""

    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
        direction = rng.standard_normal((shape[0], 1, shape[2]))
        return mean + rng.standard_t(4, (*shape[:2], 1)) * direction + rng.standard_normal(shape)

    return power(make, 50, mean**2)


def unequal_noise(mean: float) -> Regime:
    """Return noise whose scale differs between prompts."""
    return power(
        lambda rng, shape: mean + np.exp(0.7 * rng.standard_normal((*shape[:2], 1))) * rng.standard_normal(shape),
        100, mean**2,
    )  # fmt: skip


def unequal_signal(spread: float) -> Regime:
    """Return a signal whose scale differs between prompts."""

    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
        return _factors(rng, shape, spread) + 0.5 * rng.standard_normal(shape)

    return power(make, 50, 1.0)


def _factors(rng: np.random.Generator, shape: tuple[int, int, int], spread: float) -> Array:
    """Return a lognormal factor for each prompt, with mean 1."""
    return np.exp(spread * rng.standard_normal((*shape[:2], 1)) - spread**2 / 2)


def share(part: float, opposite: float = 0.0, total: float = 1.0) -> Regime:
    """Return a share. The part has components along and across the total; `opposite` is noise taken from the rest."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Experiments:
        shape = (T, n, 60)
        along, across = rng.standard_normal((2, T, 1, 60))
        along *= total / np.sqrt((along**2).mean(-1, keepdims=True))
        across -= (along * across).mean(-1, keepdims=True) * along / total**2
        swapped = opposite * rng.standard_normal(shape)
        x = part * along + 0.5 * across + swapped + 0.7 * rng.standard_normal(shape)
        whole = x + (1 - part) * along - 0.5 * across - swapped + 0.7 * rng.standard_normal(shape)
        return Experiments(gram(x, whole), part, gram(whole, whole))

    return regime


OFFSETS, PEAK = 12, 1.5
"""Offsets of a simulated head, and the standard deviation of its logits over them."""


def attention_weighted(mean: float, coupling: float, part: float | None = None) -> Regime:
    """Return a power, or the share of a part, weighted by attention that is estimated from the same prompts.

    The attention of a prompt is a softmax of logits with noise; `coupling` of this noise is in the component, too.
    """
    profile = PEAK * np.random.default_rng(0).standard_normal(OFFSETS)
    signal = mean * (1 + 0.5 * np.random.default_rng(1).standard_normal(OFFSETS))

    def attention(noise: Array) -> Array:
        weights: Array = softmax(profile + noise, axis=-1)
        return weights

    expected = attention(np.random.default_rng(2).standard_normal((200_000, OFFSETS))).mean(0)

    def regime(rng: np.random.Generator, T: int, n: int) -> Experiments:
        noise, own = rng.standard_normal((2, T, n, OFFSETS))
        root = np.sqrt(attention(noise).mean(1, keepdims=True) * OFFSETS)
        x = signal + coupling * noise + own
        if part is None:
            return Experiments(gram(x * root, x * root), float(expected @ signal**2))
        whole = x + (1 / part - 1) * signal + 0.5 * rng.standard_normal(x.shape)
        return Experiments(gram(x * root, whole * root), part, gram(whole * root, whole * root))

    return regime


def share_of_two(part: float) -> Regime:
    """Return a share with noise in two directions only."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Experiments:
        one, two = (rng.standard_normal((T, n, 1)) * rng.standard_normal((T, 1, 60)) / 2 for _ in range(2))
        x = part + one
        whole = x + 1 - part + two + 0.6 * one
        return Experiments(gram(x, whole), part, gram(whole, whole))

    return regime


def power_ratio(factor: float, spread: float = 0.0) -> Regime:
    """Return the ratio of powers after / before an edit, on the same prompts."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Experiments:
        shape = (T, n, 60)
        before = _factors(rng, shape, spread) + rng.standard_normal(shape)
        after = factor * before + 0.3 * rng.standard_normal(shape)
        return Experiments(gram(after, after), factor**2, gram(before, before))

    return regime


def slope(rise: float) -> Regime:
    """Return the slope over twelve layers whose powers share half of their noise."""

    def regime(rng: np.random.Generator, T: int, n: int) -> Experiments:
        depth, common, total = np.linspace(-0.5, 0.5, 12), rng.standard_normal((T, n, 40)), np.zeros((T, n, n))
        for at in depth:
            x = np.sqrt(0.2 + rise * (at + 0.5)) + 0.7 * common + 0.7 * rng.standard_normal((T, n, 40))
            total += at / (depth @ depth) * gram(x, x)
        return Experiments(total, rise)

    return regime


def sample_mean(make: Callable[[np.random.Generator, tuple[int, int]], Array], truth: float) -> Regime:
    """Return the regime of a mean over prompts."""
    return lambda rng, T, n: Experiments(make(rng, (T, n)), truth)


REGIMES: dict[str, Regime] = {
    **{f"3 shared directions and private noise, 300 values, mean {m}": shared_directions(m, 300) for m in (0, 0.5, 2)},
    **{f"3 shared directions and private noise, 11 values, mean {m}": shared_directions(m, 11) for m in (0, 0.5, 2)},
    **{f"private noise, 300 values, mean {m}": private_noise(m, 300) for m in (0, 0.1, 0.3, 1, 2)},
    **{f"private noise, 10 values, mean {m}": private_noise(m, 10) for m in (0, 0.3, 1, 2)},
    **{f"two values, mean {m}": private_noise(m, 2) for m in (0, 0.3, 1, 3)},
    **{f"one value, mean {m}": private_noise(m, 1) for m in (0, 0.3, 1, 3)},
    "strong signal, small noise": private_noise(3, 100, 0.1),
    **{f"noise with heavy tails (t of 4), mean {m}": heavy_tails(m) for m in (0, 0.3, 1)},
    **{f"one shared direction with heavy tails, mean {m}": shared_heavy_tails(m) for m in (0, 0.3, 1)},
    **{f"prompts of unequal noise (lognormal 0.7), mean {m}": unequal_noise(m) for m in (0, 0.3, 1)},
    **{f"prompts of unequal signal (lognormal {s})": unequal_signal(s) for s in (0.3, 0.7)},
    **{f"share {p}": share(p) for p in (-0.3, 0, 0.5, 1)},
    "share 0.1, noise taken from the rest": share(0.1, opposite=2),
    "share 0.5 of a weak total": share(0.5, total=0.4),
    **{f"share {p}, two noise directions": share_of_two(p) for p in (0, 0.5)},
    **{
        f"weighted by attention, mean {m}, coupling {c}": attention_weighted(m, c)
        for m in (0, 0.3, 1)
        for c in (0, 0.5, 1)
    },
    **{f"weighted by attention, share {p}, coupling 1": attention_weighted(1, 1, p) for p in (0.3, 0.6)},
    **{f"kept {c**2:.2g}": power_ratio(c) for c in (0, 0.3, 1, 2)},
    "kept 0.25, prompts of unequal signal": power_ratio(0.5, spread=0.5),
    **{f"slope {k} over 12 layers": slope(k) for k in (0, 1)},
    "mean, normal": sample_mean(lambda rng, shape: rng.standard_normal(shape), 0.0),
    "mean, heavy tails (t of 4)": sample_mean(lambda rng, shape: rng.standard_t(4, shape), 0.0),
    "mean, bounded (beta 2, 5)": sample_mean(lambda rng, shape: rng.beta(2, 5, shape), 2 / 7),
    "mean, exponential": sample_mean(lambda rng, shape: rng.exponential(size=shape), 1.0),
    "mean, lognormal 1": sample_mean(lambda rng, shape: np.exp(rng.standard_normal(shape)), float(np.exp(0.5))),
}


def coverage(regime: Regime, n: int, methods: list[str], trials: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the coverage of each method with its binomial error. Ratios count only if posleak would report them."""
    rng, chunk = np.random.default_rng([seed, n]), max(1, 6000 // n)
    hits = {name: list[NDArray[np.bool_]]() for name in methods}
    for start in range(0, trials, chunk):
        drawn = regime(rng, min(chunk, trials - start), n)
        reported = np.ones(len(drawn.numerator), bool)
        if drawn.denominator is not None:
            reported = jackknifed(drawn.denominator).interval[0] > 0
        for name in methods:
            low, high = METHODS[name](drawn)
            hits[name].append(((low <= drawn.truth) & (drawn.truth <= high))[reported])
    inside = {name: np.concatenate(chunks) for name, chunks in hits.items()}
    return {
        name: {"covers": float(x.mean()), "error": float(np.sqrt(x.mean() * (1 - x.mean()) / len(x))), "of": len(x)}
        for name, x in inside.items()
    }


def simulate(few: list[int], many: list[int], trials: int) -> dict[str, Any]:
    """Return the coverage in all regimes. The rejected methods run for `many` only, with a quarter of the trials."""
    results = {}
    for seed, (name, regime) in enumerate(REGIMES.items()):
        results[name] = {n: coverage(regime, n, ["shipped"], trials, seed) for n in (*few, *many)}
        for n in many:
            results[name][n] |= coverage(regime, n, [m for m in METHODS if m != "shipped"], trials // 4, seed)
    columns = [(n, "shipped") for n in (*few, *many)] + [(n, m) for m in METHODS if m != "shipped" for n in many]
    print("| regime | " + " | ".join(f"{method}, n = {n}" for n, method in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, row in results.items():
        cells = (row[n][method] for n, method in columns)
        print(f"| {name} | " + " | ".join(f"{c['covers']:.1%} ± {c['error']:.1%}" for c in cells) + " |")
    return {"trials": trials, "trials of rejected methods": trials // 4, "resamples": RESAMPLES, "regimes": results}


def real(model: str, prompts: int, length: int, subsets: int, sizes: list[int]) -> dict[str, Any]:
    """Return the coverage of powers and shares in both norms, for each layer and for the whole model."""
    import posleak

    run = posleak.measure(posleak.load(model), length=length, prompts=prompts, seed=1)
    truth, rng = decompositions(run, np.arange(prompts)), np.random.default_rng(0)
    hits = dict[str, dict[int, list[Array]]]()
    for n in sizes:
        for _ in range(subsets):
            chosen = rng.choice(prompts, n, replace=False)
            for name, (low, high) in {k: (x.low, x.high) for k, x in decompositions(run, chosen).items()}.items():
                expected = truth[name].value
                inside = np.where(np.isnan(low), np.nan, (low <= expected) & (expected <= high))
                hits.setdefault(name, {}).setdefault(n, []).append(inside)
    results = {name: {n: _mean_coverage(each) for n, each in by_size.items()} for name, by_size in hits.items()}
    print("| number | " + " | ".join(f"{where}, n = {n}" for n in sizes for where in ("layers", "model")) + " |")
    print("|---|" + "---:|" * (2 * len(sizes)))
    for name, row in results.items():
        print(f"| {name} | " + " | ".join(f"{row[n][w]:.1%}" for n in sizes for w in ("layers", "model")) + " |")
    return {"model": model, "prompts": prompts, "length": length, "subsets": subsets, "numbers": results}


def decompositions(run: Any, chosen: NDArray[np.int64]) -> dict[str, Estimate]:
    """Return powers and shares of the chosen prompts, weighted by their own attention: of layers, then of the model.

    This is what a run of these prompts alone would report.
    """
    from posleak.leakage import component
    from posleak.leakage.summary import SHARED, Decomposition, Products

    data, jackknife = run.data.isel(prompt=chosen), Jackknife(len(chosen))
    parts = {
        name: component(data, name) for name in ("total", *SHARED) if name in data or name in ("total", "residual")
    }
    products = Products.by_queries(parts, data["weight"])["all"]
    layers, whole = (Decomposition.of(products.averaged(axes), jackknife).norms for axes in ((1,), (0, 1)))
    estimates = dict[str, Estimate]()
    for norm, of_layers in layers.items():
        for quantity in ("power", "share"):
            for name, layer in getattr(of_layers, quantity).items():
                one = getattr(whole[norm], quantity)[name]
                value, low, high = (np.atleast_1d(end) for end in (one.value, one.low, one.high))
                model = Estimate(value, low, high, one.n)
                estimates[f"{quantity} of {name}, {norm}"] = Estimate.concatenate([layer, model])
    return estimates


def _mean_coverage(inside: list[Array]) -> dict[str, float]:
    """Return the mean over subsets and layers, and the mean over subsets for the whole model."""
    every = np.array(inside)
    return {"layers": float(np.nanmean(every[:, :-1])), "model": float(np.nanmean(every[:, -1]))}


def main() -> None:
    """Parse the command line, run the simulation or the measurement, and store its results."""
    parser = argparse.ArgumentParser(description="Measure how often 95% intervals contain the true value.")
    commands = parser.add_subparsers(dest="what", required=True)
    simulated = commands.add_parser("simulate")
    simulated.add_argument("--trials", type=int, default=2000)
    measured = commands.add_parser("real")
    measured.add_argument("model")
    measured.add_argument("--prompts", type=int, default=768, help="number of prompts from which subsets are drawn")
    measured.add_argument("--length", type=int, default=64)
    measured.add_argument("--subsets", type=int, default=200)
    options = parser.parse_args()
    if options.what == "simulate":
        results = simulate([MIN_PROMPTS, MIN_PROMPTS + 1, 6], [8, 16, 64], options.trials)
    else:
        results = real(options.model, options.prompts, options.length, options.subsets, [4, 8, 16, 32])
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**stored, options.what: results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
