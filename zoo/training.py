"""Training of one model: resumable to the bit, with loss curve and checkpoints.

    FOLDER/training.json           the record: recipe, data, loss, versions; sealed
    FOLDER/checkpoint-0 … -STEPS   models in the layout of Hugging Face, by step
    FOLDER/config.json …           the trained model, once training has finished
    FOLDER/resume.safetensors      weights and optimiser state of an unfinished training

A step depends only on the weights, the optimiser state and its index. An interrupted training that resumes with the
same number of threads therefore ends with the same weights.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posleak._version import __version__
from posleak.errors import CheckError, RunError, warn
from posleak.files import Sealed, flush, remove, remove_leftovers, sole_writer, write_atomically, write_error
from posleak.typed import Number

from .recipe import Recipe, recipe_named
from .tokens import DataFacts, Tokens, byte_tokenizer
from .variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

RECORD, RESUME = "training.json", "resume.safetensors"
EVERY = 10
"""Steps that each point of the loss curve averages."""
KEEP = 20.0
"""Seconds between saves of an unfinished training."""


@dataclass(frozen=True)
class LossPoint:
    """Loss in nats per token after `step` steps."""

    step: int
    loss: Number


def training_name(variant: str, seed: int, recipe: Recipe) -> str:
    """Return the name of a training among those on the same data, with the steps if they differ from the recipe."""
    own = recipe_named(recipe.data).steps
    return f"{variant}-{seed}" + ("" if recipe.steps == own else f"-{recipe.steps}")


@dataclass(frozen=True)
class Training:
    """Record of a training: the content of training.json.

    curve       training loss, means over `EVERY` steps;  held_out: loss at every checkpoint
    seconds     wall-clock time;  threads: of torch, which affect the last bits of the weights
    """

    variant: str
    about: str
    seed: int
    recipe: Recipe
    data: DataFacts
    parameters: int
    threads: int
    versions: dict[str, str]
    curve: tuple[LossPoint, ...] = ()
    held_out: tuple[LossPoint, ...] = ()
    seconds: float = 0.0
    finished: bool = False

    @property
    def name(self) -> str:
        return training_name(self.variant, self.seed, self.recipe)

    @property
    def final_loss(self) -> float:
        """Held-out loss of the last checkpoint, in nats per token."""
        return self.held_out[-1].loss if self.held_out else float("nan")

    def up_to(self, step: int) -> Training:
        """Return the record as it was after `step` steps."""
        curve, held_out = ([each for each in points if each.step <= step] for points in (self.curve, self.held_out))
        return replace(self, curve=tuple(curve), held_out=tuple(held_out))

    def same_work(self, other: Training) -> bool:
        """Return whether variant, seed, recipe and data are the same."""
        return not self.differences(other)

    def differences(self, other: Training) -> list[str]:
        """Return the names of what differs from another training."""
        found = [name for name in ("variant", "seed", "recipe") if getattr(self, name) != getattr(other, name)]
        same = (self.data.data, self.data.sha256) == (other.data.data, other.data.sha256)
        return found if same else [*found, "text"]


TRAINING = Sealed("posleak training", 1, Training, "delete the folder and train again")


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a training: finished steps, current loss, estimated seconds left."""

    data: str
    name: str
    step: int
    steps: int
    loss: float
    left: float


OnTrainingProgress = Callable[[TrainingProgress], None]


@dataclass
class _Work:
    """State of a running training, with the losses since the last point of the curve."""

    model: PreTrainedModel
    optimiser: Any
    step: int = 0
    losses: list[float] = field(default_factory=list)


def train(
    variant: Variant,
    recipe: Recipe,
    seed: int,
    tokens: Tokens,
    folder: Path,
    *,
    watch: OnTrainingProgress = lambda reached: None,
    threads: int | None = None,
) -> Training:
    """Train a model into `folder`, or resume it there; return the record of a finished one."""
    with _threads(threads) as used:
        work = _work(variant.build(recipe, seed), recipe)
        asked = _asked(variant, seed, tokens, work, recipe, used)
        if (done := _known(folder, asked)) is not None and done.finished:
            return done
        with sole_writer(folder):
            return _begun(variant, tokens, folder, work, asked, watch)


def _begun(
    variant: Variant, tokens: Tokens, folder: Path, work: _Work, asked: Training, watch: OnTrainingProgress
) -> Training:
    """Start a training, or resume the one in the folder."""
    known, record = _known(folder, asked), asked
    remove_leftovers(folder, lambda name: name in (RECORD, RESUME))
    if known is not None and (folder / RESUME).is_file():
        _take_up(folder / RESUME, work)
        record = replace(known.up_to(work.step), threads=asked.threads, versions=asked.versions)
        if (known.threads, known.versions) != (asked.threads, asked.versions):
            warn(
                f"{folder}: training resumes with other versions or another number of threads; the last digits of the "
                "weights will differ from those of an uninterrupted training"
            )
    return _trained(variant, asked.seed, tokens, folder, work, record, watch)


def _trained(
    variant: Variant, seed: int, tokens: Tokens, folder: Path, work: _Work, record: Training, watch: OnTrainingProgress
) -> Training:
    recipe = record.recipe
    held = _prompts(variant, recipe, tokens.held_out(recipe.context))
    started, before, kept = time.monotonic(), record.seconds, time.monotonic()
    first = work.step
    while True:
        spent = before + time.monotonic() - started
        if work.step in recipe.kept_steps and work.step not in {point.step for point in record.held_out}:
            record = replace(record, held_out=(*record.held_out, LossPoint(work.step, held_out_loss(work.model, held))))
            _save_checkpoint(work.model, folder / f"checkpoint-{work.step}", variant, recipe)
        if work.step == recipe.steps:
            return _finish(folder, work, replace(record, seconds=spent), variant)
        batch = _prompts(variant, recipe, tokens.batch(seed, work.step, recipe.batch, recipe.context))
        work.losses.append(_step(work, recipe, batch))
        if not math.isfinite(work.losses[-1]):
            raise CheckError(
                "the training has diverged", where=record.name, got=f"loss {work.losses[-1]} at step {work.step}",
                remedy="lower the learning rate of the recipe",
            )  # fmt: skip
        if work.step % EVERY == 0:
            point = LossPoint(work.step, float(np.mean(work.losses)))
            work.losses.clear()
            record = replace(record, curve=(*record.curve, point))
            rate = (time.monotonic() - started) / (work.step - first)
            left = rate * (recipe.steps - work.step)
            watch(TrainingProgress(recipe.data, record.name, work.step, recipe.steps, point.loss, left))
            if time.monotonic() - kept > KEEP:
                _keep(folder, work, replace(record, seconds=before + time.monotonic() - started))
                kept = time.monotonic()


def _step(work: _Work, recipe: Recipe, batch: Tensor) -> float:
    """Make one optimiser step; return the loss of the batch before it."""
    import torch

    for group in work.optimiser.param_groups:
        group["lr"] = recipe.rate_at(work.step)
    found = loss(work.model, batch)
    work.optimiser.zero_grad(set_to_none=True)
    found.backward()
    torch.nn.utils.clip_grad_norm_(work.model.parameters(), recipe.clip)
    work.optimiser.step()
    work.step += 1
    return float(found.detach())


def loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy in nats."""
    from torch.nn.functional import cross_entropy

    logits = model(batch, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def held_out_loss(model: PreTrainedModel, prompts: Tensor) -> float:
    """Return the loss on held-out prompts, a few at a time."""
    import torch

    model.eval()
    with torch.no_grad():
        found = [float(loss(model, part)) for part in prompts.split(8)]
    model.train()
    return float(np.mean(found))


def _prompts(variant: Variant, recipe: Recipe, ids: np.ndarray) -> Tensor:
    """Return a batch as the variant reads it: a BOS replaces the token at position 0."""
    import torch

    if variant.bos:
        ids = ids.copy()
        ids[:, 0] = recipe.bos
    return torch.from_numpy(ids)


def _work(model: PreTrainedModel, recipe: Recipe) -> _Work:
    import torch

    model.train()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    return _Work(model, torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=True))


# -- the folder -----------------------------------------------------------------------------------------------------


def read_training(folder: Path) -> Training | None:
    """Return the record of a folder, finished or not; None if there is none."""
    return TRAINING.read(folder / RECORD) if (folder / RECORD).is_file() else None


def _known(folder: Path, asked: Training) -> Training | None:
    known = read_training(folder)
    if known is None or known.same_work(asked):
        return known
    raise RunError(
        "the folder holds another training", where=str(folder),
        got=f"another {' and '.join(known.differences(asked))}",
        remedy="choose another folder with --out, or delete this one; the text depends on the versions of packages",
    )  # fmt: skip


def _asked(variant: Variant, seed: int, tokens: Tokens, work: _Work, recipe: Recipe, threads: int) -> Training:
    import torch
    import transformers

    return Training(
        variant.name, variant.about, seed, recipe, tokens.facts, work.model.num_parameters(), threads,
        {"posleak": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
         "python": platform.python_version()},
    )  # fmt: skip


def _keep(folder: Path, work: _Work, record: Training) -> None:
    """Save an unfinished training. The record is written first; on resume it is cut to the step of the state."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    for name, weight in work.model.named_parameters():
        moments = work.optimiser.state[weight]
        tensors |= {f"weight.{name}": weight.detach(), **{f"{key}.{name}": moments[key] for key in _MOMENTS}}
    TRAINING.write(folder / RECORD, record)
    state = save(tensors, metadata={"step": str(work.step)})
    write_atomically(folder / RESUME, lambda path: path.write_bytes(state))


_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def _take_up(path: Path, work: _Work) -> None:
    """Load weights and optimiser state."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stored, torch.no_grad():
            work.step = int(stored.metadata()["step"])
            for name, weight in work.model.named_parameters():
                weight.copy_(stored.get_tensor(f"weight.{name}"))
                work.optimiser.state[weight] = {key: stored.get_tensor(f"{key}.{name}") for key in _MOMENTS}
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise RunError(
            "the state of an interrupted training cannot be read", where=str(path), got=str(error),
            remedy="delete this file: the training then starts again",
        ) from error  # fmt: skip


def _finish(folder: Path, work: _Work, record: Training, variant: Variant) -> Training:
    """Write the model, then the record, which marks the training as finished."""
    done = replace(record, finished=True)
    with _saved(work.model, folder, variant, record.recipe) as made:
        for path in sorted(made.iterdir()):
            os.replace(path, folder / path.name)
    TRAINING.write(folder / RECORD, done)
    remove(folder / RESUME)
    return done


def _save_checkpoint(model: PreTrainedModel, folder: Path, variant: Variant, recipe: Recipe) -> None:
    """Write a checkpoint atomically."""
    with _saved(model, folder, variant, recipe) as made:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)


@contextmanager
def _saved(model: PreTrainedModel, folder: Path, variant: Variant, recipe: Recipe) -> Iterator[Path]:
    """Yield a temporary folder next to `folder` with the model and, for text, a character tokenizer."""
    from posleak.models.pretrained import silence_transformers

    made = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(made, ignore_errors=True)
    try:
        with silence_transformers():
            model.save_pretrained(str(made))
            if recipe.data == "text":
                byte_tokenizer(bos=variant.bos).save_pretrained(str(made))
        for path in made.iterdir():
            flush(path)
        yield made
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Set the number of threads of torch; yield the number in use."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
