"""The last net under a command: whatever goes wrong becomes a short message on standard error and an exit status.

Errors that posleak raises on purpose say what to do. What nobody foresaw is said in one line, and its traceback is kept
in a file for a report; with POSLEAK_DEBUG=1 tracebacks are printed, too. Nothing heavy is imported here, so that the
net is there before the command line itself is imported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posleak._version import __version__
from posleak.errors import PosleakError
from posleak.text import one_line, visible

from .streams import OUT, give_up, gone, prepare_streams, writing_to

SUCCESS, FAILED, WRONG, BY_DESIGN, UNFORESEEN, STOPPED, UNREAD = 0, 1, 2, 3, 70, 130, 141
STATUSES = {
    SUCCESS: "success",
    FAILED: "a check failed: the numbers would be wrong, or `doctor` or `origin` found a law broken without cause",
    WRONG: "a call that cannot work as it is: the message says where, what was got, what was expected, and the remedy",
    BY_DESIGN: "`doctor` only: every number is right, and the model breaks a law on purpose, with the cause named",
    UNFORESEEN: "an error that posleak did not foresee: please report it; the message names a file with the traceback",
    STOPPED: "stopped with Ctrl-C; what is finished is kept",
    UNREAD: "whoever read the output went away, as in `posleak models | head -1`",
}
"""Exit statuses of the command line, and what they mean."""

DEBUG = "POSLEAK_DEBUG"
KEPT = 20
"""How many tracebacks are kept."""

NO_MEMORY = re.compile(r"out of memory|not enough memory|can(?:no|')t allocate memory|bad[_ ]alloc", re.IGNORECASE)
"""How libraries word it; torch's errors are plain RuntimeErrors on a CPU."""

Say = Callable[[str, str], None]
"""Shows a message after the word that says what it is: `error`, or nothing."""


class Passed(BaseException):
    """Carries an error through typer, which would turn it into an exit status of its own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Failure:
    """What a command says when it fails. `word` stands before the message; no message: it ends without a sound."""

    status: int
    message: str = ""
    word: str = "error"


@contextmanager
def net(say: Say | None = None) -> Iterator[None]:
    """Whatever is raised inside becomes a message and an exit status."""
    prepare_streams()
    try:
        try:
            yield
        except SystemExit:
            with writing_to(OUT):  # here, and not when the process ends, where nobody could say that it failed
                sys.stdout.flush()
            raise
        with writing_to(OUT):
            sys.stdout.flush()
    except SystemExit as stopped:
        if isinstance(stopped.__context__, BrokenPipeError):  # rich, showing typer's help, ends with status 1
            sys.exit(UNREAD)
        raise
    except BaseException as raised:
        error = raised.error if isinstance(raised, Passed) else raised
        found = failure(error)
        _show(found, error, say or say_plainly)
        sys.exit(found.status)


def failure(error: BaseException) -> Failure:
    """What to say about an error, and with which status to end."""
    if _interrupted(error):
        return Failure(STOPPED, "stopped; what is finished is kept: start the same command again", word="")
    if isinstance(error, PosleakError):
        return Failure(error.exit_status, str(error))
    if isinstance(error, BrokenPipeError) and (gone(sys.stdout) or gone(sys.stderr)):
        return Failure(UNREAD)
    if _is_no_memory(error):
        return Failure(WRONG, str(_no_memory(error)))
    if isinstance(error, OSError):
        return Failure(WRONG, str(_refused(error)))
    return Failure(UNFORESEEN, unforeseen(error))


def _interrupted(error: BaseException) -> bool:
    """Ctrl-C, or an error that came up while things were put in order after it."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        found = found.__context__
    return any(isinstance(each, KeyboardInterrupt) for each in chain)


def _is_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(one_line(error, 10_000)) is not None


def _no_memory(error: BaseException) -> PosleakError:
    return PosleakError(
        "there is not enough memory", got=one_line(error),
        remedy="use a shorter --length or a smaller --batch, set a limit with --max-memory, or load the model with "
        "--dtype bfloat16; what is finished is kept",
    )  # fmt: skip


def _refused(error: OSError) -> PosleakError:
    """What the system said, and about which file."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    said = error.strerror if error.errno is not None and error.strerror else one_line(error)
    if not names and gone(sys.stdout):
        names = [OUT]
    what = "reading or writing failed" if error.errno is None else "the system refused"
    return PosleakError(what, where=" -> ".join(names) or None, got=said)


# -- what nobody foresaw ---------------------------------------------------------------------------------------------


def is_of_the_model(error: Exception) -> bool:
    """May other work on the same model go on after it? Not without memory or a disk, which it would lack, too."""
    return not (_is_no_memory(error) or isinstance(error, OSError))


def unforeseen(error: BaseException) -> str:
    """What is said about an error that nobody foresaw; its traceback is kept."""
    return "\n".join(
        [
            f"something that posleak did not foresee: {one_line(error)}",
            f"  version: posleak {__version__}",
            f"  traceback: {_kept(error)}",
            "  remedy: please report it to the authors of posleak, with the version and that traceback",
        ]
    )


def _kept(error: BaseException) -> str:
    """Where the traceback is; or that it could not be kept, and how to see it."""
    for keep in (_into_cache, _into_temporary):
        with contextlib.suppress(Exception):  # nothing that goes wrong here may hide the error itself
            return str(keep(visible(f"{_circumstances()}\n{_traceback(error)}")))
    return f"no file could be written for it; set {DEBUG}=1 and start again to see it"


def _circumstances() -> str:
    return "\n".join(
        [
            f"posleak {__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"command: {sys.argv!r}",
            f"time: {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        ]
    )


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _into_cache(text: str) -> Path:
    """A new file among the cache's tracebacks, of which only the newest are kept."""
    from posleak.models.cache import cache_folder

    folder = cache_folder() / "errors"
    folder.mkdir(parents=True, exist_ok=True)
    path = _new_file(folder, text)
    with contextlib.suppress(OSError):  # another process may be removing the same files
        for old in sorted(folder.glob("traceback-*.txt"), key=lambda each: each.stat().st_mtime_ns)[:-KEPT]:
            old.unlink(missing_ok=True)
    return path


def _into_temporary(text: str) -> Path:
    return _new_file(Path(tempfile.gettempdir()), text)


def _new_file(folder: Path, text: str) -> Path:
    prefix = f"traceback-{time.strftime('%Y%m%d-%H%M%S')}-"
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".txt", dir=folder)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(name)


# -- saying it -------------------------------------------------------------------------------------------------------


def _show(found: Failure, error: BaseException, say: Say) -> None:
    """On standard error, as well as it goes; then both streams are left in order."""
    if found.message:
        with contextlib.suppress(Exception):
            if os.environ.get(DEBUG, "0") not in ("", "0"):
                say_plainly("", _traceback(error).rstrip())
        try:
            say(found.word, found.message)
        except Exception:
            with contextlib.suppress(Exception):
                say_plainly(found.word, found.message)
    for stream in (sys.stdout, sys.stderr):
        if gone(stream):
            give_up(stream)


def say_plainly(word: str, message: str) -> None:
    """Without colours."""
    sys.stderr.write(visible(f"{word} {message}" if word else message) + "\n")
    sys.stderr.flush()
