"""The net under the command line: whatever happens, a short message, an exit status, and a terminal left in order.

Faults are put into `posleak models`, which needs no torch, so that most tests run the real entry point in a process of
its own.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from posleak import __version__
from posleak.cli import failures
from posleak.cli.failures import STATUSES, failure
from posleak.errors import CheckError, InputError
from posleak.show.lines import PlainConsole
from posleak.show.notebook import compact_html
from posleak.show.terminal import literal, table
from posleak.show.unexpected import TRACEBACKS_KEPT as KEPT

START = "import sys\nfrom posleak.__main__ import main\nsys.argv[0] = 'posleak'\n"
FAULT = """\
import posleak.models.builtin as builtin
def list_models():
    {}
builtin.list_models = list_models
"""


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str


@dataclass
class Shell:
    """Runs posleak as a shell would, in an empty folder with an empty cache."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def command(self, arguments: tuple[str | bytes, ...], fault: str | None = None) -> list[str | bytes]:
        if fault is None:
            return [sys.executable, "-m", "posleak", *arguments]
        return [sys.executable, "-c", f"{fault}{START}main()", *arguments]

    def env(self) -> dict[str, str]:
        own = {"POSLEAK_CACHE": str(self.cache), "PYTHONPATH": os.pathsep.join(sys.path)}
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LC_", "LANG"))}
        return {**kept, "LC_ALL": "C.UTF-8", **own, **self.environment}

    def __call__(self, *arguments: str | bytes, fault: str | None = None) -> Said:
        done = subprocess.run(
            self.command(arguments, fault), capture_output=True, env=self.env(), cwd=self.folder, check=False
        )
        return Said(done.returncode, done.stdout.decode(), done.stderr.decode())

    def pipeline(self, line: str, fault: str | None = None) -> Said:
        """A line of bash in which `posleak` stands for the command; the status is posleak's."""
        words = " ".join(_quoted(os.fsdecode(word)) for word in self.command(("models",), fault))
        script = f'posleak() {{ {words} "$@"; }}; {line}; exit ${{PIPESTATUS[0]}}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, env=self.env(), cwd=self.folder, check=False)
        return Said(done.returncode, done.stdout.decode(), done.stderr.decode())

    def on_terminal(self, *arguments: str, fault: str | None = None, when: str = "", press: str = "") -> Said:
        """With a terminal for standard error; as soon as it shows `when`, the key `press` is pressed there."""
        main, terminal = pty.openpty()
        process = subprocess.Popen(
            self.command(arguments, fault), stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, cwd=self.folder,
            env={**self.env(), "TERM": "xterm"}, start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(terminal)
        assert process.stdout is not None
        shown = _read(main, press.encode(), when.encode())
        out = process.stdout.read().decode()
        process.stdout.close()
        os.close(main)
        return Said(process.wait(30), out, shown.decode(errors="replace"))


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _take_terminal() -> None:
    """Standard input is the terminal that this session obeys, so that Ctrl-C reaches it; and it is heard, which it is
    not in work that a shell has put into the background."""
    import fcntl
    import signal
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read(descriptor: int, press: bytes, when: bytes, patience: float = 600.0) -> bytes:
    """Everything that is written to the terminal until it is closed."""
    shown, ends = b"", time.monotonic() + patience
    while time.monotonic() < ends:
        if not select.select([descriptor], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            return shown
        if not piece:
            return shown
        shown += piece
        if press and when in shown:
            os.write(descriptor, press)
            press = b""
    raise AssertionError(f"the command did not end; it showed {shown!r}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSLEAK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def fault(raised: str) -> str:
    return FAULT.format(f"raise {raised}")


# -- what nobody foresaw ---------------------------------------------------------------------------------------------


def test_an_unforeseen_error_is_said_in_one_line_with_the_place_of_its_traceback(shell: Shell) -> None:
    said = shell("models", fault=fault(r"KeyError('a\nb\x1b[31m')"))
    assert said.status == 70
    assert said.out == ""
    first, version, where, remedy = said.err.splitlines()
    assert first.startswith("error ")
    assert "KeyError: " in first
    assert "\x1b" not in said.err
    assert version == f"  version: posleak {__version__}"
    assert "report" in remedy
    kept = Path(where.removeprefix("  traceback: "))
    assert kept.parent == shell.cache / "errors"
    text = kept.read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" in text
    assert "in list_models" in text
    assert __version__ in text
    assert "\x1b" not in text


def test_the_traceback_is_printed_where_that_is_asked_for(shell: Shell) -> None:
    assert "Traceback" not in shell("models", fault=fault("KeyError('x')")).err
    shell.environment["POSLEAK_DEBUG"] = "1"
    said = shell("models", fault=fault("KeyError('x')"))
    assert said.status == 70
    assert "Traceback (most recent call last)" in said.err
    assert said.err.splitlines()[-4].startswith("error ")


def test_deep_recursion_falls_into_the_net(shell: Shell) -> None:
    said = shell("models", fault="import json\n" + FAULT.format("return json.loads('[' * 100_000)"))
    assert said.status == 70
    assert "RecursionError" in said.err


def test_errors_that_are_no_exceptions_fall_into_the_net(shell: Shell) -> None:
    """A panic of a library that is written in Rust is one."""
    said = shell("models", fault="class Panic(BaseException): pass\n" + fault("Panic('called unwrap on None')"))
    assert said.status == 70
    assert "Panic: called unwrap on None" in said.err


def test_an_end_of_file_is_no_wish_to_abort(shell: Shell) -> None:
    """typer takes an EOFError for a user who closed the input; a file that is cut short raises it, too."""
    said = shell("models", fault=fault("EOFError('Ran out of input')"))
    assert said.status == 70
    assert "EOFError: Ran out of input" in said.err


def test_only_the_newest_tracebacks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSLEAK_CACHE", str(tmp_path))
    folder = tmp_path / "errors"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for age in range(KEPT + 5):
        path = folder / f"traceback-{age}.txt"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    message = failure(KeyError("x")).message
    kept = {path.name for path in folder.glob("traceback-*")}
    assert len(kept) == KEPT
    assert Path(re.findall("traceback: (.*)", message)[0]).name in kept
    assert {"traceback-0.txt", f"traceback-{KEPT - 2}.txt"} < kept
    assert f"traceback-{KEPT - 1}.txt" not in kept
    assert (folder / "notes.txt").exists()


def test_where_the_cache_cannot_be_written_the_traceback_goes_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POSLEAK_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    message = failure(KeyError("x")).message
    assert len(found := list(tmp_path.glob("traceback-*.txt"))) == 1
    assert str(found[0]) in message
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    found_none = failure(KeyError("x"))
    assert "POSLEAK_DEBUG=1" in found_none.message
    assert "traceback-" not in found_none.message
    assert found_none.status == 70


def test_an_error_in_saying_it_does_not_hide_it(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(word: str, message: str) -> None:
        raise RuntimeError("no rich today")

    with pytest.raises(SystemExit) as stopped, failures.error_handler(broken):
        raise InputError("too short", where="plan")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error plan: too short\n"


# -- what has a remedy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raised",
    [
        "MemoryError",
        'RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can\'t allocate memory: you tried")',
        "RuntimeError('DefaultCPUAllocator: not enough memory: you tried to allocate 4398046511104 bytes.')",
        "type('OutOfMemoryError', (RuntimeError,), {})('CUDA out of memory. Tried to allocate 20.00 MiB')",
        "OSError(12, 'Cannot allocate memory')",
    ],
)
def test_too_little_memory_names_the_remedy(shell: Shell, raised: str) -> None:
    said = shell("models", fault=fault(raised))
    assert said.status == 2
    assert said.err.startswith("error ")
    assert "memory" in said.err.splitlines()[0]
    for option in ("--length", "--batch", "--max-memory", "--dtype bfloat16"):
        assert option in said.err
    assert not (shell.cache / "errors").exists()


def test_torch_itself_is_understood() -> None:
    import torch

    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert failure(raised.value).status == 2
    assert failure(torch.OutOfMemoryError("CUDA out of memory.")).status == 2
    assert "enough memory" in failure(raised.value).message


def test_any_other_runtime_error_is_not_taken_for_too_little_memory() -> None:
    assert failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied")).status == 70


def test_a_file_that_the_system_refuses_is_named_with_the_systems_words(shell: Shell) -> None:
    said = shell("models", fault=fault(r"PermissionError(13, 'Permission denied', '/a/[/x]\x1b[31m')"))
    assert said.status == 2
    assert said.err.startswith("error /a/[/x]\\x1b[31m: ")
    assert said.err.endswith("  got: Permission denied\n")
    assert len(said.err.splitlines()) == 2


def test_an_error_of_reading_without_a_number_says_its_class(shell: Shell) -> None:
    said = shell("models", fault=fault("OSError('no such repository')"))
    assert said.status == 2
    assert "OSError: no such repository" in said.err


def test_a_full_disk_under_standard_output_is_said(shell: Shell) -> None:
    """The list of models is longer than what Python keeps back, so that the disk is full while it is printed."""
    assert Path("/dev/full").is_char_device()
    for arguments in ("", "--json"):
        said = shell.pipeline(f"posleak {arguments} > /dev/full")
        assert said.status == 2
        assert said.err.startswith("error standard output: ")
        assert said.err.endswith("  got: No space left on device\n")


def test_posleaks_own_errors_keep_their_status() -> None:
    assert failure(CheckError("parity")).status == 1
    assert failure(InputError("too short", where="plan")).message == "plan: too short"


# -- typer's own errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("measure", "--lenght", "64"), ("mesure",), ("measure", "--length", "many")])
def test_usage_errors_look_as_before(shell: Shell, arguments: tuple[str, ...]) -> None:
    said = shell(*arguments)
    assert said.status == 2
    assert said.err.startswith("Usage: ")
    assert "─ Error ─" in said.err


def test_usage_errors_show_arguments_as_they_are(shell: Shell) -> None:
    said = shell("measure", "--\x1b[31m[/x]")
    assert said.status == 2
    assert r"\x1b[31m[/x]" in said.err
    assert "\x1b" not in said.err


def test_no_arguments_show_help(shell: Shell) -> None:
    said = shell()
    assert said.status == 2
    assert "Commands" in said.out
    for status in STATUSES:
        assert str(status) in said.out


# -- streams that somebody closed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["", "--json", "--help"])
def test_a_reader_that_goes_away_is_no_error(shell: Shell, arguments: str, unbuffered: str) -> None:
    shell.environment["PYTHONUNBUFFERED"] = unbuffered
    said = shell.pipeline(f"posleak {arguments} | true")
    assert (said.status, said.out, said.err) == (141, "", "")


def test_a_broken_pipe_elsewhere_is_not_hidden(shell: Shell) -> None:
    said = shell("models", fault=fault("BrokenPipeError(32, 'Broken pipe')"))
    assert said.status == 2
    assert "Broken pipe" in said.err


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(shell: Shell, closed: str) -> None:
    said = shell.pipeline(f"posleak --json {closed}")
    assert said.status == 0
    assert said.err == ""


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------

STOPPED = failure(KeyboardInterrupt()).message


def test_ctrl_c_is_one_line(shell: Shell) -> None:
    said = shell("models", fault=fault("KeyboardInterrupt"))
    assert (said.status, said.out, said.err) == (130, "", STOPPED + "\n")


def test_an_error_while_things_are_put_in_order_after_ctrl_c_is_ctrl_c(shell: Shell) -> None:
    work = "try: raise KeyboardInterrupt\n    finally: raise RuntimeError('half-open')"
    said = shell("models", fault=FAULT.format(work))
    assert (said.status, said.err) == (130, STOPPED + "\n")


@pytest.mark.parametrize("module", ["typer", "rich.console", "posleak.cli.sweep"])
def test_ctrl_c_while_the_command_line_is_imported_is_one_line(shell: Shell, module: str) -> None:
    blocked = f"""\
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
"""
    said = shell("models", fault=blocked)
    assert (said.status, said.out, said.err) == (130, "", STOPPED + "\n")


def test_a_broken_installation_is_a_message(shell: Shell) -> None:
    said = shell("models", fault="import sys\nsys.modules['typer'] = None\n")
    assert said.status == 70
    assert "ModuleNotFoundError" in said.err
    assert len(said.err.splitlines()) == 4


WAITING = """\
import time
import posleak.models.subject as subject
def load(name, progress, **options):
    progress("reading [/x]\\x1b]0;title\\x07 now")
    time.sleep(60)
subject.load = load
"""
WAITING_LIGHTLY = "import time\nfrom posleak.cli.app import working\n" + FAULT.format(
    "with working('reading now'): time.sleep(60)"
)


def test_ctrl_c_during_a_line_of_status_leaves_the_terminal_clean(shell: Shell) -> None:
    said = shell.on_terminal("measure", "[/x]\x1b[31m", fault=WAITING, when=" now", press="\x03")
    assert said.status == 130
    assert said.out == ""
    assert r"reading [/x]\x1b]0;title\x07 now" in said.err
    assert "\x1b]0;" not in said.err
    assert "\x1b[31m" not in said.err
    assert said.err.rfind("\x1b[?25h") > said.err.rfind("\x1b[?25l") >= 0
    assert said.err.rstrip().endswith(STOPPED)
    assert "Traceback" not in said.err


def test_an_interrupted_beginning_of_a_line_of_status_leaves_the_cursor(shell: Shell) -> None:
    interrupted = WAITING_LIGHTLY + (
        "import rich.live\n"
        "def refresh_never(*_): raise KeyboardInterrupt\n"
        "rich.live._RefreshThread = refresh_never\n"
    )  # fmt: skip
    said = shell.on_terminal("models", fault=interrupted)
    assert said.status == 130
    assert said.err.rfind("\x1b[?25h") > said.err.rfind("\x1b[?25l") >= 0
    assert said.err.rstrip().endswith(STOPPED)


# -- terminals that cannot show everything ---------------------------------------------------------------------------

ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENTRY = {
    "name": "a[/x]\x1b[31m\udcff", "stands_for": "caf\xe9 0.5–0.7 −1 ×4 🙂", "packages": ("w",), "size_mb": 1,
    "licence": "…", "cached": False, "path": None,
}  # fmt: skip
LISTED = FAULT.format(f"return [builtin.ModelListing(**{ENTRY!a})]")


@pytest.mark.parametrize("command", ["", "measure", "report"])
def test_help_can_be_read_on_an_ascii_terminal(shell: Shell, command: str) -> None:
    shell.environment.update(ASCII)
    said = shell(*([command] if command else []), "--help")
    assert said.status == 0
    assert said.out.isascii()
    assert "posleak" in said.out


def test_results_can_be_read_on_an_ascii_terminal(shell: Shell) -> None:
    shell.environment.update(ASCII)
    said = shell("models", fault=LISTED)
    assert said.status == 0
    assert said.out.isascii()
    for text in (r"a[/x]\x1b[31m\xff", "0.5-0.7 -1 x4", r"caf\u00e9", "..."):
        assert text in " ".join(said.out.split())


def test_json_is_json_on_every_terminal(shell: Shell) -> None:
    said = shell("models", "--json", fault=LISTED)
    shell.environment.update(ASCII)
    in_ascii = shell("models", "--json", fault=LISTED)
    assert in_ascii.out.isascii()
    assert "caf\xe9" in said.out
    assert json.loads(in_ascii.out) == json.loads(said.out)
    entry = json.loads(said.out)["models"][0]
    assert entry["name"].startswith("a[/x]\x1b[31m")
    assert entry["stands_for"] == ENTRY["stands_for"]


@pytest.mark.parametrize("encoding", [{}, ASCII, {"PYTHONIOENCODING": "latin-1"}], ids=["utf-8", "ascii", "latin-1"])
def test_arguments_that_are_not_unicode_are_no_error_of_encoding(shell: Shell, encoding: dict[str, str]) -> None:
    shell.environment.update(encoding)
    for arguments in ((b"mod\xff",), (b"measure", b"--le\xff"), (b"report", b"")):
        said = shell(*arguments)
        assert said.status == 2
        assert "─ Error ─" in said.err or "- Error -" in said.err
    said = shell("models", fault=fault(r"PermissionError(13, 'Permission denied', '/a/\udcff')"))
    assert said.status == 2
    assert said.err.splitlines()[0].startswith(r"error /a/\xff: ")


def test_a_status_line_on_an_ascii_terminal_has_a_spinner_of_ascii(shell: Shell) -> None:
    shell.environment.update(ASCII)
    said = shell.on_terminal("models", fault=WAITING_LIGHTLY, when=" now", press="\x03")
    assert said.status == 130
    assert re.search(r"[-\\|/]\S* reading ", said.err)
    assert r"\u28" not in said.err


# -- the console -----------------------------------------------------------------------------------------------------


def shown(print_something: Callable[[PlainConsole], None]) -> str:
    stream = io.StringIO()
    print_something(PlainConsole(file=stream, force_terminal=True, width=60, color_system="truecolor"))
    return stream.getvalue()


def test_a_console_obeys_no_markup_and_no_escapes_but_its_own() -> None:
    said = shown(lambda console: console.print("[bold]a[/x] :smile: \x1b[31m\x9b", Text("b\x1b]0;t\x07", "bold")))
    assert said == "[bold]a[/x] :smile: \\x1b[31m\\x9b \x1b[1mb\\x1b]0;t\x1b[0m\n"


def test_strings_in_tables_are_literal_on_any_console() -> None:
    made = table(["name [x]", "why"])
    made.add_row("[/x]", "[red]not red[/red]")
    stream = io.StringIO()
    Console(file=stream, width=60).print(made)
    assert "[/x]" in stream.getvalue()
    assert "[red]not red[/red]" in stream.getvalue()
    assert "name [x]" in stream.getvalue()


def test_columns_have_room_for_what_is_spelled_out() -> None:
    made = table(["name", "styled"])
    made.add_row("a\x1b[31m\udcff", Text("b\x9b").append("c\x1b", style="bold"))
    assert r"a\x1b[31m\xff  b\x9b" in shown(lambda console: console.print(made))
    text = literal(Text("b\x9b").append("c\x1b", style="bold"))
    assert [text.plain[span.start : span.end] for span in text.spans] == [r"c\x1b"]


def test_a_notebook_shows_names_as_they_are() -> None:
    said = compact_html("<b>\u202ename\x1b", ["fact\x9b"], {})
    assert r"&lt;b&gt;\u202ename\x1b" in said
    assert r"fact\x9b" in said


# -- where it starts -------------------------------------------------------------------------------------------------


def test_the_command_and_the_module_start_at_the_same_place() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"posleak": "posleak.__main__:main"}


def test_sigint_has_its_usual_number() -> None:
    assert failures.INTERRUPTED == 128 + signal.SIGINT
    assert failures.BROKEN_PIPE == 128 + signal.SIGPIPE
