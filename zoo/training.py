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
from .tokens import DataFacts, Tokens, character_tokenizer
from .variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

RECORD, RESUME = "training.json", "resume.safetensors"
LOSS_INTERVAL = 10
"""Number of steps that each point of the loss curve averages."""
SAVE_INTERVAL = 20.0
"""Seconds between saves of an unfinished training."""


@dataclass(frozen=True)
class LossPoint:
    """Loss in nats per token after `step` steps."""

    step: int
    loss: Number


def training_name(variant: str, seed: int, recipe: Recipe) -> str:
    """Return the folder name of a training: VARIANT-SEED, with the number of steps if it is not the recipe's."""
    default = recipe_named(recipe.data).steps
    return f"{variant}-{seed}" + ("" if recipe.steps == default else f"-{recipe.steps}")


@dataclass(frozen=True)
class Training:
    """Record of a training: the content of training.json.

    curve       training loss, means over `LOSS_INTERVAL` steps;  held_out: loss at every checkpoint
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

    def differences(self, other: Training) -> list[str]:
        """Return which of variant, seed, recipe and text differ between two trainings."""
        names = [name for name in ("variant", "seed", "recipe") if getattr(self, name) != getattr(other, name)]
        same_text = (self.data.data, self.data.sha256) == (other.data.data, other.data.sha256)
        return names if same_text else [*names, "text"]


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
class _TrainingState:
    """State of a running training. `losses`: loss of each step since the last point of the curve."""

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
    on_progress: OnTrainingProgress = lambda progress: None,
    threads: int | None = None,
) -> Training:
    """Train a model in `folder`, or resume an interrupted training, and return its record.

    A finished training is not repeated. `on_progress` is called at every point of the loss curve.
    """
    with _threads(threads) as used_threads:
        state = _initial_state(variant.build(recipe, seed), recipe)
        new = _new_record(variant, seed, tokens, state, recipe, used_threads)
        if (stored := _stored_record(folder, new)) is not None and stored.finished:
            return stored
        with sole_writer(folder):
            return _start_or_resume(variant, tokens, folder, state, new, on_progress)


def _start_or_resume(
    variant: Variant, tokens: Tokens, folder: Path, state: _TrainingState, new: Training,
    on_progress: OnTrainingProgress,
) -> Training:  # fmt: skip
    """Start the training `new`, or resume it if the folder holds its state."""
    stored, record = _stored_record(folder, new), new
    remove_leftovers(folder, lambda name: name in (RECORD, RESUME))
    if stored is not None and (folder / RESUME).is_file():
        _load_state(folder / RESUME, state)
        record = replace(stored.up_to(state.step), threads=new.threads, versions=new.versions)
        if (stored.threads, stored.versions) != (new.threads, new.versions):
            warn(
                f"{folder}: training resumes with other versions or another number of threads; the last digits of the "
                "weights will differ from those of an uninterrupted training"
            )
    return _run_steps(variant, tokens, folder, state, record, on_progress)


def _run_steps(
    variant: Variant, tokens: Tokens, folder: Path, state: _TrainingState, record: Training,
    on_progress: OnTrainingProgress,
) -> Training:  # fmt: skip
    """Run the remaining steps, with checkpoints, loss curve and saved states; return the finished record."""
    recipe = record.recipe
    held_out = _prompts(variant, recipe, tokens.held_out(recipe.context))
    started, before, last_save = time.monotonic(), record.seconds, time.monotonic()
    first_step = state.step
    while True:
        spent = before + time.monotonic() - started
        if state.step in recipe.kept_steps and state.step not in {point.step for point in record.held_out}:
            point = LossPoint(state.step, held_out_loss(state.model, held_out))
            record = replace(record, held_out=(*record.held_out, point))
            _save_checkpoint(state.model, folder / f"checkpoint-{state.step}", variant, recipe)
        if state.step == recipe.steps:
            return _finish(folder, state, replace(record, seconds=spent), variant)
        batch = _prompts(variant, recipe, tokens.batch(record.seed, state.step, recipe.batch, recipe.context))
        state.losses.append(_step(state, recipe, batch))
        if not math.isfinite(state.losses[-1]):
            raise CheckError(
                "the training has diverged", where=record.name, got=f"loss {state.losses[-1]} at step {state.step}",
                remedy="lower the learning rate of the recipe",
            )  # fmt: skip
        if state.step % LOSS_INTERVAL == 0:
            point = LossPoint(state.step, float(np.mean(state.losses)))
            state.losses.clear()
            record = replace(record, curve=(*record.curve, point))
            rate = (time.monotonic() - started) / (state.step - first_step)
            left = rate * (recipe.steps - state.step)
            on_progress(TrainingProgress(recipe.data, record.name, state.step, recipe.steps, point.loss, left))
            if time.monotonic() - last_save > SAVE_INTERVAL:
                _save_state(folder, state, replace(record, seconds=before + time.monotonic() - started))
                last_save = time.monotonic()


def _step(state: _TrainingState, recipe: Recipe, batch: Tensor) -> float:
    """Make one optimiser step; return the loss of the batch before it."""
    import torch

    for group in state.optimiser.param_groups:
        group["lr"] = recipe.rate_at(state.step)
    batch_loss = loss(state.model, batch)
    state.optimiser.zero_grad(set_to_none=True)
    batch_loss.backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), recipe.clip)
    state.optimiser.step()
    state.step += 1
    return float(batch_loss.detach())


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
        losses = [float(loss(model, part)) for part in prompts.split(8)]
    model.train()
    return float(np.mean(losses))


def _prompts(variant: Variant, recipe: Recipe, ids: np.ndarray) -> Tensor:
    """Return a batch as the variant reads it: a BOS replaces the token at position 0."""
    import torch

    if variant.bos:
        ids = ids.copy()
        ids[:, 0] = recipe.bos
    return torch.from_numpy(ids)


def _initial_state(model: PreTrainedModel, recipe: Recipe) -> _TrainingState:
    """Return the state before the first step, with an optimiser that decays matrices only."""
    import torch

    model.train()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    return _TrainingState(model, torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=True))


# -- the folder -----------------------------------------------------------------------------------------------------


def read_training(folder: Path) -> Training | None:
    """Return the record of a folder, finished or not; None if there is none."""
    return TRAINING.read(folder / RECORD) if (folder / RECORD).is_file() else None


def _stored_record(folder: Path, new: Training) -> Training | None:
    """Return the record in a folder, None if there is none. Raise RunError if it describes another training."""
    stored = read_training(folder)
    if stored is None or not (differences := stored.differences(new)):
        return stored
    raise RunError(
        "the folder holds another training", where=str(folder),
        got=f"another {' and '.join(differences)}",
        remedy="choose another folder with --out, or delete this one; the text depends on the versions of packages",
    )  # fmt: skip


def _new_record(
    variant: Variant, seed: int, tokens: Tokens, state: _TrainingState, recipe: Recipe, threads: int
) -> Training:
    """Return the record of a training before its first step."""
    import torch
    import transformers

    return Training(
        variant.name, variant.about, seed, recipe, tokens.facts, state.model.num_parameters(), threads,
        {"posleak": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
         "python": platform.python_version()},
    )  # fmt: skip


def _save_state(folder: Path, state: _TrainingState, record: Training) -> None:
    """Save an unfinished training. The record is written first; on resume it is cut to the step of the state."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    for name, weight in state.model.named_parameters():
        moments = state.optimiser.state[weight]
        tensors |= {f"weight.{name}": weight.detach(), **{f"{key}.{name}": moments[key] for key in _MOMENTS}}
    TRAINING.write(folder / RECORD, record)
    data = save(tensors, metadata={"step": str(state.step)})
    write_atomically(folder / RESUME, lambda path: path.write_bytes(data))


_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def _load_state(path: Path, state: _TrainingState) -> None:
    """Load the weights and the optimiser state of an interrupted training."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stored, torch.no_grad():
            state.step = int(stored.metadata()["step"])
            for name, weight in state.model.named_parameters():
                weight.copy_(stored.get_tensor(f"weight.{name}"))
                state.optimiser.state[weight] = {key: stored.get_tensor(f"{key}.{name}") for key in _MOMENTS}
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise RunError(
            "the state of an interrupted training cannot be read", where=str(path), got=str(error),
            remedy="delete this file to start the training again",
        ) from error  # fmt: skip


def _finish(folder: Path, state: _TrainingState, record: Training, variant: Variant) -> Training:
    """Write the model, then the record, which marks the training as finished."""
    finished = replace(record, finished=True)
    with _saved_model(state.model, folder, variant, record.recipe) as temporary:
        for path in sorted(temporary.iterdir()):
            os.replace(path, folder / path.name)
    TRAINING.write(folder / RECORD, finished)
    remove(folder / RESUME)
    return finished


def _save_checkpoint(model: PreTrainedModel, folder: Path, variant: Variant, recipe: Recipe) -> None:
    """Write a checkpoint atomically."""
    with _saved_model(model, folder, variant, recipe) as temporary:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)


@contextmanager
def _saved_model(model: PreTrainedModel, folder: Path, variant: Variant, recipe: Recipe) -> Iterator[Path]:
    """Yield a temporary folder next to `folder` with the model and, for text, a character tokenizer."""
    from posleak.models.pretrained import silence_transformers

    temporary = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with silence_transformers():
            model.save_pretrained(str(temporary))
            if recipe.data == "text":
                character_tokenizer(bos=variant.bos).save_pretrained(str(temporary))
        for path in temporary.iterdir():
            flush(path)
        yield temporary
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Set the number of torch threads inside the context; yield the number in use."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
