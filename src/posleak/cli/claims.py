"""`posleak claims`: the paper's claims on one model, each with effect, interval and verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .app import Json, emit, err, out, spoken_warnings
from .profile import Profile, ProfileOption
from .subject import Load, model_command
from .tables import profile_table

if TYPE_CHECKING:
    from posleak.runs import ClaimsRun

MARKS = {"supported": "[green]✓[/]", "contradicted": "[red]✗[/]", "inconclusive": "[yellow]?[/]", "not applicable": "–"}


@model_command("claims")
def claims_command(
    load: Load,
    length: Annotated[int, typer.Option(help="Tokens per prompt, position 0 included.")] = 256,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts; all conditions read the same ones.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of tokens and of intervals.")] = 0,
    bos: Annotated[str, typer.Option(help="Position 0: auto, tokenizer, none, or a token.")] = "auto",
    inputs: Annotated[str, typer.Option(help="random, or text:PATH, or text:stdlib.")] = "random",
    folder: Annotated[Path | None, typer.Option("--out", help="Run folder. Default: runs/MODEL-FINGERPRINT.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Test again what the folder has already.")] = False,
    profile: ProfileOption = False,
    as_json: Json = False,
) -> None:
    """Every claim of the paper on this model: effect, interval, verdict, and how it was tested.

    Example: `posleak claims smollm2-135m`
    """
    with Profile(profile) as spent:
        from posleak.probe import default_plan
        from posleak.runs import MeasureSpec, claims, default_folder

        default_plan(length)
        subject = load()
        place = folder or default_folder(subject, MeasureSpec(inputs, bos, length, prompts, seed))
        with spent.measuring(subject), spoken_warnings(), err.status("claims") as status:
            found = claims(
                subject, out=place, fresh=fresh, progress=status.update, length=length, prompts=prompts, seed=seed,
                bos=bos, inputs=inputs,
            )  # fmt: skip
    cost = spent.as_dict(found.run.record, planned=False)  # the plan is that of the baseline alone
    if as_json:
        emit(found.as_dict() | ({} if cost is None else {"profile": cost}))
        return
    out.print(claims_table(found))
    if cost is not None:
        out.print(profile_table(cost))


def claims_table(found: ClaimsRun) -> Group:
    """One line a claim and its number below the sentence, in 80 columns."""
    spec, record = found.run.record["spec"], found.run.record
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, width in (("", 1), ("claim", 44), ("effect, with its 95% interval", 31)):
        table.add_column(name, width=width or None)
    for entry in found.findings:
        table.add_row(MARKS[entry["verdict"]], escape(f"{entry['number']}. {entry['claim']}"), effect(entry))
    facts = f"{spec['prompts']} prompts of {spec['length']} tokens · {spec['inputs']} · seed {spec['seed']}"
    return Group(
        Text(record["identity"]["name"], style="bold"),
        Text(f"{facts} · {record['inputs']['first_token']}", style="dim"),
        table,
        Text("✓ supported  ✗ contradicted  ? inconclusive  – not applicable", style="dim"),
        Text(f"details and methods: claims.json in {found.run.path}", style="dim"),
    )


def effect(entry: dict[str, Any]) -> Text:
    """`39% (22% … 50%) removed, n=16`, or why there is none."""
    if entry["effect"] is None:
        return Text(str(entry["reason"] or "could not be estimated").splitlines()[0], style="dim")
    share = entry["unit"].startswith("share")
    value, low, high = (show(entry[name], share) for name in ("effect", "low", "high"))
    text = Text(value, style="bold")
    unit = entry["unit"].removeprefix("share ") if share else entry["unit"]
    text.append(f" ({low} … {high}) {unit}, n={entry['n']}", style="dim")
    return text


def show(value: float | None, share: bool = False) -> str:
    if value is None or math.isnan(value):
        return "–"
    if share:
        return f"{value:.0%}" if abs(value) >= 0.1 else f"{value:.1%}"
    return f"{value:.1e}" if value and abs(value) < 1e-2 else f"{value:.3g}"
