"""`measure`: one measurement, called from Python."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from posleak.edits import parse_edits
from posleak.errors import BusyError, InputError, PosleakError
from posleak.files import LOCK_FILE, file_lock
from posleak.inputs import Inputs
from posleak.metrics import parse_metrics
from posleak.models import AnyModel
from posleak.probe import Edit, Observer
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.signatures import checked

from .folder import chosen_folder
from .prepared import OnPrompts, PreparedRun
from .progress import OnProgress
from .record import is_finished
from .run import Run
from .spec import resolve_request


@checked
def measure(
    subject: AnyModel,
    inputs: Inputs = "random",
    *,
    length: int | None = None,
    prompts: int | None = None,
    seed: int = 0,
    bos: str | int = "auto",
    batch: int = 0,
    density: int = 1,
    origin: int = DEFAULT_ORIGIN,
    edits: str | Edit | Iterable[str | Edit] = (),
    metrics: str | Iterable[str] = (),
    loss: bool = False,
    observers: Observer | Iterable[Observer] = (),
    out: str | Path | None = None,
    root: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: OnPrompts | None = None,
    on_progress: OnProgress | None = None,
) -> Run:
    """Measure a subject's leakage of absolute position and decompose it into mask, drift and sink.

    subject      a Subject, a transformers model, or anything that `load` accepts: a name, folder, file or hub id
    inputs       source of the prompts: "random", "constant[:ID]", "text:PATH", "text:stdlib" or "backcopy"; or your own
                 prompts: a table of ids [B, T], a text or list of texts, a chat (list of messages) or list of chats
    length       tokens per prompt, including position 0 (default 512); your own prompts are truncated to `length`, or
                 must have equal lengths if it is not given
    prompts      number of prompts to use (default 16, or all of your own prompts)
    seed         random seed for the prompts and for edits that draw at random
    bos          token at position 0: "auto" (the config BOS), "tokenizer", "none", or a token. It is put before
                 texts; ids and chats are not changed
    batch        prompts per forward pass (0: about 4096 tokens)
    density      factor on the numbers of sampled queries, references and offsets
    origin       number of leading tokens treated as the origin
    edits        interventions: texts such as "window=64" (docs/edits.md), or objects of your own (posleak.probe.Edit)
    metrics      metrics of other papers from the same passes: "all", or names such as "sinks" (docs/metrics.md); the
                 results are in `run.metrics`
    loss         also compute the next-token loss at the sampled positions: `run.loss`
    observers    objects whose `observe(call, out)` is called for every attention call of every batch, after edits
    out          folder for the run: an unfinished run in it is resumed, a finished run of the same measurement is
                 loaded. Without it the run stays in memory, and `run.save` writes it
    root         parent of the folder if `out` is not given: the run goes to root/MODEL-DIGEST
    fresh        discard results in the folder and measure again
    max_memory   memory limit of the process, including the loaded model ("8GB", or bytes): batches are chosen to
                 fit, and an error is raised before the run if none fits
    progress     callback that receives (finished prompts, total prompts)
    on_progress  callback that receives a Progress at every layer

    Example: `posleak.measure("smollm2-135m", length=256, edits="window=64").heads.head(10)`
    """
    own_observers = _observers(observers)
    loaded, spec, given = resolve_request(
        subject, inputs, length=length, prompts=prompts, seed=seed, bos=bos, batch=batch, density=density,
        origin=origin, edits=parse_edits(edits), metrics=parse_metrics(metrics), loss=loss, max_memory=max_memory,
    )  # fmt: skip
    if out is not None and loaded.ranks.writes:
        _require_idle(Path(out), fresh)
    prepared = PreparedRun.of(loaded, spec, given, max_memory, observers=own_observers)
    folder = chosen_folder(out, root, lambda: prepared.folder_name, loaded.ranks, fresh=fresh)
    return prepared.run_with_warnings(
        folder, fresh=fresh, progress=progress or (lambda done, of: None), on_progress=on_progress
    )


def _require_idle(folder: Path, fresh: bool) -> None:
    """Raise a BusyError if another thread or process is measuring into the folder, before waiting for the model."""
    try:
        if (folder / LOCK_FILE).exists() and (fresh or not is_finished(folder)):
            with file_lock(folder / LOCK_FILE, wait=False):
                pass
    except BusyError:
        raise
    except (PosleakError, OSError):
        pass  # the measurement itself reports it


def _observers(observers: Observer | Iterable[Observer]) -> tuple[Observer, ...]:
    """Return one or several observers as a tuple; raise an InputError for other objects."""
    several = tuple(observers) if isinstance(observers, Iterable) else (observers,)
    for observer in several:
        if isinstance(observer, type) or not isinstance(observer, Observer):
            raise InputError(
                "not an observer", where="observers", got=f"{observer!r:.80}",
                expected="an object with a method observe(call, out)",
                remedy=f"pass an object of the class: {observer.__name__}()" if isinstance(observer, type) else None,
            )  # fmt: skip
    return several
