"""The command line: what it prints where, with which exit status, and what it does not load before it must."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import posleak as pl
from posleak import __version__
from posleak.analyses.doctor.laws import Check
from posleak.cli import main
from posleak.cli.app import spoken_warnings
from posleak.cli.commands import app
from posleak.errors import InputError, PosleakWarning
from posleak.models import DEFAULT_MODEL, load
from posleak.models.memory import LIBRARY_BYTES
from posleak.models.parallel import ALONE
from posleak.runs.memory import memory_plan, weight_bytes
from posleak.runs.record import read_record
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.text import visible
from support.families import tiny

COMMANDS = [str(command.name) for command in app.registered_commands if not command.hidden]
RUNNING = ("measure", "trace", "claims", "advise", "origin", "doctor")
"""Commands that run a model."""

SMALL = ("--length", "48", "--prompts", "4")


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str


Posleak = Callable[..., Said]


@pytest.fixture
def posleak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Posleak:
    """Calls the entry point as the shell would, in an empty folder and with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSLEAK_CACHE", str(tmp_path / "cache"))

    def call(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["posleak", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 0
        captured = capsys.readouterr()
        return Said(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models on disk: one that passes, one with learned positions, one with a head of NaN, one with
    the BOS of a larger vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    tiny("llama").save_pretrained(str(folder / "llama"))
    tiny("gpt2", n_embd=30, n_layer=3, n_head=3, n_inner=41).save_pretrained(str(folder / "gpt2"))
    tiny("llama", bos_token_id=50256).save_pretrained(str(folder / "strange"))
    broken = tiny("llama")
    broken.get_parameter("model.layers.2.self_attn.k_proj.weight")[:] = torch.nan
    broken.save_pretrained(str(folder / "nan"))
    return folder


def test_help_lists_every_command(posleak: Posleak) -> None:
    said = posleak("--help")
    assert said.status == 0
    assert {"measure", "doctor", "models"} <= set(COMMANDS)
    for command in COMMANDS:
        assert f" {command} " in said.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(posleak: Posleak, command: str) -> None:
    said = posleak(command, "--help")
    assert said.status == 0
    assert f"posleak {command}" in said.out
    assert "Example" in said.out
    assert "--json" in said.out


@pytest.mark.parametrize("arguments", [["--help"], ["measure", "--help"], ["models"], ["--version"]])
def test_nothing_heavy_is_imported_before_it_is_needed(arguments: list[str]) -> None:
    program = (
        "import sys; from posleak.cli import main; sys.argv = ['posleak', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'xarray', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


WRONG = [
    *([command, "--length", "5"] for command in ("measure", "trace", "claims", "origin", "doctor")),
    *([command, "--prompts", "0"] for command in ("measure", "trace", "claims", "origin", "doctor")),
    *(["measure", "--edit", edit] for edit in ("nothing", "window=x", "sink=cut@x", "mask=off", "dtype=int8")),
    *(["measure", "--inputs", inputs] for inputs in ("nothing", "constant:x", "text:", "text:not-there.txt")),
    *(["measure", f"--{name}", "-1"] for name in ("origin", "density", "batch", "seed")),
    *([command, "--max-memory", "x"] for command in ("measure", "trace", "claims", "origin", "doctor")),
    *(["sweep", "architectures", *wrong] for wrong in (("--length", "5"), ("--prompts", "0"), ("--max-memory", "x"))),
    ["measure", "--edit", "window=8", "--edit", "window=9"],
    ["measure", "--dtype", "float3"],
    ["measure", "./not-there"],
    ["measure", "--metrics", "nothing"],
    ["trace", "--metrics", "sinks,nothing"],
    ["trace", "--donor", "nothing"],
    ["measure", "--metrics", "all", "--edit", "context=borrowed"],
    ["sweep", "nothing"],
    ["claims", "--paper", "nothing"],
    ["origin", "--tokens", "1"],
]
"""Calls that are wrong by themselves, whatever the model."""


def test_a_call_that_is_wrong_by_itself_is_refused_before_torch_is_imported() -> None:
    program = (
        "import json, sys; from posleak.cli import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['posleak', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as stopped: status = stopped.code\n"
        "    heavy = [m for m in ('torch', 'transformers', 'xarray', 'pyarrow') if m in sys.modules]\n"
        "    assert status == 2 and not heavy, (arguments, status, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, json.dumps(WRONG)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["measure", "trace"])
def test_what_others_measure_is_asked_for_by_name(posleak: Posleak, tmp_path: Path, command: str) -> None:
    tiny("llama").save_pretrained(str(tmp_path / "model"))
    size = ("--length", "64", "--prompts", "4", "--out", tmp_path / "run", "--metrics", "sinks,frames")
    said = posleak(command, tmp_path / "model", *size)
    assert said.status == 0
    assert "Star-likeness" in said.out
    assert "reference frame: " in said.out
    found = Run.load(tmp_path / "run").metrics
    assert found is not None
    assert {row.metric.meter for row in found.rows} == {"sinks", "frames"}


@pytest.mark.parametrize("command", ["measure", "claims"])
def test_a_warning_about_the_numbers_reaches_the_terminal_once(posleak: Posleak, tmp_path: Path, command: str) -> None:
    """It is known only after the measurement; conditions of `claims` do not repeat it."""
    tiny("gpt2", n_embd=30, n_layer=2, n_head=3, n_inner=41, n_positions=2048).save_pretrained(str(tmp_path / "table"))
    said = posleak(command, tmp_path / "table", "--length", "64", "--prompts", "6", "--out", tmp_path / "run")
    assert said.status == 0
    assert said.err.count("origin keys cannot be moved in every layer") == 1


def test_version(posleak: Posleak) -> None:
    assert posleak("--version").out == f"posleak {__version__}\n"


def test_measure_prints_a_table_that_a_person_can_read(posleak: Posleak, models: Path) -> None:
    said = posleak("measure", models / "llama", *SMALL)
    assert said.status == 0
    lines = said.out.splitlines()
    header = next(number for number, line in enumerate(lines) if line.split()[:2] == ["layer", "total"])
    assert [line.split()[0] for line in lines[header + 1 : header + 4]] == ["0", "1", "2"]
    assert lines[header].split() == ["layer", "total", "mask", "drift", "sink", "shares", "at", "0"]
    (inputs,) = (line for line in lines if "seed 0" in line)
    assert all(part in inputs for part in ("4 prompts", "48 tokens", "random", "token 1", "'auto'"))
    assert any(line.startswith("early queries") and "n=4" in line for line in lines)
    assert any(line.startswith("stabilisation") and "all ×" in line and "n=4" in line for line in lines)
    assert any("heads" in line and "sink" in line and "tokens" in line for line in lines)
    assert "95%" in said.out
    assert lines[-1].startswith("remainder ")
    assert " nats · run " in lines[-1]
    assert max(map(len, lines[:-1])) <= 120


def test_trace_ends_with_the_answer_and_reads_back_what_it_has(posleak: Posleak, models: Path, tmp_path: Path) -> None:
    asked = (models / "llama", "--length", "48", "--prompts", "4", "--by-layer", "--out", tmp_path / "trace")
    said = posleak("trace", *asked)
    assert said.status == 0
    lines = said.out.splitlines()
    header = next(line for line in lines if line.startswith("layer"))
    assert header.split()[:5] == ["layer", "total", "earlier", "here", "origin"]
    assert [line.split()[0] for line in lines if line.startswith(("early queries", "all queries"))] == ["early", "all"]
    assert any("up to layer" in line for line in lines)
    assert any("weighted by the attention" in line and "--json" in line for line in lines)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "trace").rglob("*"))
    found = json.loads(posleak("trace", *asked, "--json").out)
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "trace").rglob("*")) == before
    assert all(check in " ".join(said.out.split()) for check in found["checks"])
    assert found["definitions"] == 3
    assert found["origin"] == 4
    assert found["remainder"] < 1e-9
    assert found["by_layer"]["lent_up_to"] == [-1, 0, 1, 2]
    for layer in found["layers"]:
        shares = list(layer["share"].values())
        assert None in shares or sum(shares) == pytest.approx(1)


def test_measure_json_is_json_and_nothing_else(posleak: Posleak, models: Path, tmp_path: Path) -> None:
    said = posleak("measure", models / "llama", *SMALL, "--json")
    assert said.status == 0
    contract = json.loads(said.out)
    assert contract["model"] == str(models / "llama")
    assert (contract["length"], contract["prompts"], contract["seed"]) == (48, 4, 0)
    assert [layer["layer"] for layer in contract["layers"]] == [0, 1, 2]
    assert contract["remainder"] < 1e-9
    assert (tmp_path / contract["run"] / "run.json").is_file()
    assert json.loads(posleak("measure", models / "llama", *SMALL, "--json").out) == contract


def test_measure_resumes_and_refuses_by_folder(posleak: Posleak, models: Path, tmp_path: Path) -> None:
    assert posleak("measure", models / "llama", *SMALL, "--out", "here").status == 0
    said = posleak("measure", models / "llama", *SMALL, "--out", "here", "--seed", "1")
    assert said.status == 2
    assert all(part in said.err for part in ("here", "seed 0", "1", "--out", "--fresh"))
    assert posleak("measure", models / "llama", *SMALL, "--out", "here", "--seed", "1", "--fresh").status == 0
    assert json.loads((tmp_path / "here" / "run.json").read_text())["spec"]["seed"] == 1


def test_one_prompt_shows_dashes_and_warns(posleak: Posleak, models: Path) -> None:
    said = posleak("measure", models / "llama", "--length", "48", "--prompts", "1")
    assert said.status == 0
    assert said.err.startswith("warning too few prompts")
    assert "use --prompts " in said.err
    assert "–" in next(line for line in said.out.splitlines() if line.split()[:1] == ["0"])
    assert "nan" not in said.out.lower()
    contract = json.loads(posleak("measure", models / "llama", "--length", "48", "--prompts", "1", "--json").out)
    assert contract["layers"][0]["mask"] is None


def test_a_wrong_model_name_gets_the_nearest(posleak: Posleak) -> None:
    said = posleak("measure", "smolm2-135m")
    assert said.status == 2
    assert said.out == ""
    assert said.err.startswith("error smolm2-135m: no built-in model")
    assert "did you mean 'smollm2-135m'?" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("measure", "--length", "31"), "at least 32 tokens"),
        (("measure", "--prompts", "0"), "prompts is too small"),
        (("measure", "--density", "0"), "density is too small"),
        (("measure", "--inputs", "randm"), "did you mean 'random'?"),
        (("measure", "--edit", "widow=3"), "did you mean 'window'"),
        (("doctor", "--length", "31"), "at least 32 tokens"),
        (("doctor", "--prompts", "1"), "--prompts"),
        (("doctor", "--seed", "-1"), "seed is too small"),
        (("trace", "--length", "31"), "at least 32 tokens"),
        (("claims", "--length", "31"), "at least 32 tokens"),
        (("origin", "--length", "31"), "at least 32 tokens"),
        (("origin", "--batch", "-1"), "batch is too small"),
        (("origin", "--prompts", "2"), "--prompts"),
        (("origin", "--tokens", "1"), "--tokens"),
        (("origin", "--tokens", "1000000000"), "tokens is too large"),
        (("measure", "--density", "1000000000"), "density is too large"),
        (("measure", "--batch", "1000000000"), "batch is too large"),
        *(((name, "--length", str(10**12)), "length is too large") for name in RUNNING),
        *(((name, "--prompts", str(10**9)), "prompts is too large") for name in RUNNING),
        (("sweep", "knobs", "--length", "31"), "at least 32 tokens"),
        (("sweep", "knobs", "--prompts", "0"), "prompts is too small"),
        (("sweep", "knobs", "--length", str(10**12)), "length is too large"),
        (("sweep", "knobs", "--max-memory", "8 apples"), "not an amount of memory"),
        (("sweep", "architecture"), "did you mean 'architectures'"),
        (("sweep", "dtypes", "--model", "a", "--model", "b"), "fewer models"),
        *(((command, "--max-memory", "8 apples"), "not an amount of memory") for command in RUNNING),
        (("measure", "--lenght", "64"), "--lenght"),
        (("mesure",), "mesure"),
    ],
)
def test_a_wrong_call_stops_before_a_model_is_loaded(
    posleak: Posleak, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    forbid_loading(monkeypatch)
    said = posleak(*arguments)
    assert said.status == 2
    assert said.out == ""
    assert message in said.err


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("posleak.models.load", load)
    monkeypatch.setattr("posleak.sweeps.local.Local.run", load)


@pytest.mark.parametrize("command", RUNNING)
def test_numbers_are_checked_by_the_library_before_a_model_is_loaded(
    posleak: Posleak, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Which are too large is the library's to say; every command asks it in time."""
    seen: list[MeasureSpec] = []

    def refuse(spec: MeasureSpec) -> None:
        seen.append(spec)
        raise InputError("refused by the library")

    forbid_loading(monkeypatch)
    monkeypatch.setattr(MeasureSpec, "__post_init__", refuse)
    said = posleak(command, "--length", str(10**12), "--prompts", "1000000001", "--seed", "7")
    assert said.status == 2
    assert "refused by the library" in said.err
    assert (seen[0].length, seen[0].prompts, seen[0].seed) == (10**12, 1000000001, 7)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((command, "--out") for command in ("measure", "trace", "claims", "advise", "sweep", "report")),
        ("report", "--assets"),
    ],
)
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_path_is_not_the_current_folder(
    posleak: Posleak, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, option: str, empty: str
) -> None:
    forbid_loading(monkeypatch)
    said = posleak(command, *(["run"] if command in ("report", "sweep") else []), option, empty)
    assert said.status == 2
    assert f"'{option}'" in said.err
    assert "empty" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [("report", ""), ("compare", "a", ""), *((name, "") for name in RUNNING), ("sweep", "knobs", "--model", "")],
)
def test_an_empty_name_of_a_run_or_model_is_refused(
    posleak: Posleak, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    forbid_loading(monkeypatch)
    said = posleak(*arguments)
    assert said.status == 2
    assert "empty" in said.err


class Loaded(Exception):
    """In the place of a model."""


@pytest.mark.parametrize("command", ["measure", "trace", "claims", "advise", "origin", "doctor"])
def test_verify_reaches_the_loader(posleak: Posleak, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    asked: list[dict[str, Any]] = []

    def load(name: str, *, progress: object, **options: Any) -> None:
        asked.append(options)
        raise Loaded

    monkeypatch.setattr("posleak.models.load", load)
    posleak(command, "x", "--verify", "--dtype", "bfloat16")
    posleak(command, "x", "--max-memory", "8GB")
    first, second = {"verify": True, "dtype": "bfloat16", "max_memory": None}, {"max_memory": "8GB"}
    assert asked == [first, second]


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("origin", "posleak.origin"),
        ("doctor", "posleak.doctor"),
        ("sweep knobs", "posleak.sweeps.sweep.sweep"),
    ],
)
def test_a_limit_of_memory_reaches_the_library(
    posleak: Posleak, monkeypatch: pytest.MonkeyPatch, command: str, function: str
) -> None:
    asked: list[Any] = []

    def work(*_: object, **options: Any) -> None:
        asked.append(options["max_memory"])
        raise Loaded

    monkeypatch.setattr("posleak.models.load", lambda *_, **__: SimpleNamespace(ranks=ALONE))
    monkeypatch.setattr(function, work)
    posleak(*command.split(), "--max-memory", "8GB")
    posleak(*command.split())
    assert asked == ["8GB", None]


STRANGE = "x[/x]\x1b[31m :smile: \u202e"
"""Markup, an escape sequence, an emoji's name, and a mark that turns the direction of writing."""
SHOWN = r"x[/x]\x1b[31m :smile: \u202e"


@pytest.fixture(scope="module")
def strange(models: Path) -> Path:
    folder = models / STRANGE
    folder.parent.mkdir(parents=True)
    shutil.copytree(models / "llama", folder)
    return folder


@pytest.mark.parametrize(
    "arguments", [("measure", *SMALL), ("trace", *SMALL), ("claims", *SMALL), ("doctor", "--length", "48")]
)
def test_a_name_is_shown_as_it_is(posleak: Posleak, strange: Path, arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    said = posleak(command, strange, *options)
    assert said.status == 0
    assert SHOWN in said.out
    for text in (said.out, said.err):
        assert visible(text) == text


def test_json_holds_a_name_exactly_and_shows_it_visibly(posleak: Posleak, strange: Path) -> None:
    said = posleak("measure", strange, *SMALL, "--json")
    assert json.loads(said.out)["model"] == str(strange)
    assert visible(said.out) == said.out


def test_runs_are_compared_under_names_as_they_are(posleak: Posleak, strange: Path) -> None:
    for seed in ("0", "1"):
        assert posleak("measure", strange, *SMALL, "--seed", seed, "--out", f"{STRANGE[0]}{seed}").status == 0
    for form in ("table", "markdown", "latex"):
        said = posleak("compare", "x0", "x1", f"missing{STRANGE}".replace("/", ""), "--format", form)
        assert said.status == 0
        assert "\x1b" not in said.out
        assert "\u202e" not in said.out


@pytest.mark.parametrize("name", [STRANGE, "x[/x]"])
def test_a_model_that_is_not_there_is_named_as_it_is(posleak: Posleak, name: str) -> None:
    said = posleak("measure", name)
    assert said.status == 2
    assert visible(name) in said.err
    assert visible(said.err) == said.err


def test_a_warning_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with spoken_warnings():
        warnings.warn(STRANGE, PosleakWarning, stacklevel=1)
    assert capsys.readouterr().err == f"warning {SHOWN}\n"


def test_doctor_passes_with_status_0(posleak: Posleak, models: Path) -> None:
    said = posleak("doctor", models / "llama")
    assert said.status == 0
    assert "can be measured" in said.out
    assert "✗" not in said.out


def test_doctor_ends_with_status_3_where_the_model_breaks_a_law_on_purpose(posleak: Posleak, models: Path) -> None:
    said = posleak("doctor", models / "gpt2")
    assert said.status == 3
    assert ": L2 constant token, L" in one_line(said.out)
    assert any(line.startswith("!  L5 shift") for line in said.out.splitlines())
    assert "✗" not in said.out
    said = posleak("doctor", models / "gpt2", "--json")
    assert said.status == 3
    diagnosis = json.loads(said.out)
    assert diagnosis["ok"] is False
    assert diagnosis["verdict"] == "by design"
    assert {"L2 constant token", "L5 shift"} <= {check["id"] for check in diagnosis["checks"] if not check["ok"]}


def test_doctor_ends_with_status_1_where_a_check_fails_without_a_cause(
    posleak: Posleak, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "posleak.analyses.doctor.laws.closure", lambda passes: Check("L7 closure", 1.0, 1e-5, "relative", "…")
    )
    said = posleak("doctor", models / "gpt2")  # which breaks other laws on purpose
    assert said.status == 1
    assert "wrong" in said.out
    assert re.search(r"no cause.*: L7 closure", one_line(said.out))
    assert any(line.startswith("✗  L7 closure") for line in said.out.splitlines())
    assert any(line.startswith("!  L5 shift") for line in said.out.splitlines())


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_bos_outside_the_vocabulary(posleak: Posleak, models: Path) -> None:
    said = posleak("measure", models / "strange", *SMALL)
    assert said.status == 2
    assert "vocabulary" in said.err
    assert "--bos none" in said.err
    said = posleak("doctor", models / "strange", "--length", "48")
    assert said.status == 0
    note = one_line(said.out).partition("note: ")[2]
    assert "50256" in note
    assert "101 tokens" in note
    said = posleak("doctor", models / "strange", "--length", "48", "--bos", "50256")
    assert said.status == 2
    assert "--bos none" in said.err
    said = posleak("doctor", models / "strange", "--length", "48", "--bos", "7", "--json")
    diagnosis = json.loads(said.out)
    assert diagnosis["first_token"] == "token 7 in every prompt, by BOS policy '7'"
    assert diagnosis["notes"] == []


@pytest.mark.parametrize("command", ["measure", "doctor"])
def test_a_model_that_gives_no_numbers_is_a_failed_check(posleak: Posleak, models: Path, command: str) -> None:
    said = posleak(command, models / "nan")
    assert said.status == 1
    assert said.out == ""
    assert said.err.startswith("error layer 2: the attention logits are NaN or infinite")
    assert "heads [0, 1, 2]" in said.err


def test_models_lists_names_and_what_is_cached(posleak: Posleak) -> None:
    said = posleak("models")
    assert said.status == 0
    for name in ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b"):
        assert name in said.out
    entries = json.loads(posleak("models", "--json").out)["models"]
    assert [entry["cached"] for entry in entries if entry["packages"]] == [False, False, False]
    assert all(entry["cached"] for entry in entries if not entry["packages"]), "they come with posleak"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("measure", "--help"), "constant[:ID]"),
        (("measure", "--edit", "bos=[red]x"), "bos=zero|mean|noise[:SEED]|token:ID"),
        (("measure", "--edit", "sink=[red]x"), "sink=cut|freeze[@LAYERS.HEADS]"),
        (("measure", "./[bold]x[/bold]"), "./[bold]x[/bold]: no such file or folder"),
        (("sweep", "[bold]x"), "[bold]x: "),
        (("[bold]x",), "No such command '[bold]x'"),
    ],
)
def test_brackets_are_shown_as_they_are(posleak: Posleak, arguments: tuple[str, ...], shown: str) -> None:
    """rich would take them for markup, and swallow them."""
    said = posleak(*arguments)
    assert shown in said.out + said.err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("measure", "--prompts", "0"), "remedy: use --prompts 1 or more"),
        (("measure", "--density", "65"), "remedy: use --density 64 or less"),
        (("measure", "--edit", "window=x"), "remedy: as in --edit window=64+sink"),
        (("doctor", "--length", "31"), "remedy: use --length 32 or more"),
    ],
)
def test_a_bound_that_is_said_is_one_that_holds(posleak: Posleak, arguments: tuple[str, ...], remedy: str) -> None:
    assert remedy in posleak(*arguments).err


@pytest.mark.parametrize(("command", "place"), [("bench", "benchmarks"), ("zoo", "-m zoo"), ("study", "posleak sweep")])
def test_a_command_that_moved_names_its_new_place(posleak: Posleak, command: str, place: str) -> None:
    said = posleak(command, "train", "--json")
    assert said.status == 2
    assert place in said.err
    assert f" {command} " not in posleak("--help").out


def test_advise_names_its_folder_after_the_run_within_the_memory_limit(posleak: Posleak, models: Path) -> None:
    """The limit decides the batch, and the batch is part of the digest."""
    command = ("advise", models / "llama", "--inputs", "random", "--try", "scale", *SMALL)
    subject = load(models / "llama")
    room = memory_plan(subject, MeasureSpec(length=48, prompts=4, batch=2, loss=True)).total
    limit = room + weight_bytes(subject) + LIBRARY_BYTES
    for more, batch in ((), 4), (("--max-memory", str(limit)), 2):
        before = set(Path("runs").glob("*"))
        said = posleak(*command, *more)
        assert said.status == 0, said.err
        (folder,) = set(Path("runs").glob("*")) - before
        record = read_record(folder)
        assert record.spec.batch == batch
        assert folder.name.endswith(record.digest[:10])


PUBLIC = ("measure", "trace", "claims", "advise", "origin", "doctor")


@pytest.mark.parametrize("command", PUBLIC)
def test_options_have_the_defaults_of_the_function_in_python(command: str) -> None:
    (registered,) = (each for each in app.registered_commands if each.name == command)
    assert registered.callback is not None
    options = inspect.signature(registered.callback).parameters
    arguments = inspect.signature(getattr(pl, command)).parameters
    shared = {name for name in arguments if name in options} - {"metrics", "groups", "edits"}
    assert {"length", "prompts", "seed", "bos"} <= shared
    for name in shared:
        if arguments[name].default is not None:
            assert options[name].default == arguments[name].default, name
    assert options["model"].default == DEFAULT_MODEL


@pytest.mark.parametrize("command", PUBLIC)
def test_a_command_calls_the_public_function_once(
    posleak: Posleak, models: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    calls: list[dict[str, Any]] = []

    def work(subject: object, **options: Any) -> None:
        calls.append(options)
        raise Loaded

    monkeypatch.setattr(f"posleak.{command}", work)
    posleak(command, models / "llama", *SMALL, "--seed", "3", "--max-memory", "8GB")
    (options,) = calls
    assert {"length": 48, "prompts": 4, "seed": 3, "max_memory": "8GB"}.items() <= options.items()
    if "out" in options:
        assert (options["out"], options["root"]) == (None, "runs")
