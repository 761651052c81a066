"""Table of time and memory: the option `--profile`."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from posleak.show.lines import prose
from posleak.show.terminal import table


def profile_table(profile: dict[str, Any]) -> Group:
    """Return seconds by stage, the share of the model's own forward pass, and memory compared with its plan."""
    stages = table(("stage", "seconds", "share", "times"), right=("seconds", "share", "times"))
    for row in profile["stages"]:
        stages.add_row(row["stage"], f"{row['seconds']:.2f}", f"{row['share']:.1%}", str(row["entries"]))
    stages.add_row("all", f"{profile['seconds']:.2f}", "100%", "1")
    memory, share = profile["memory"], profile["forward_share"]
    lines = [
        "nothing was measured: the folder has this run already (--fresh measures again)" if not share
        else f"the model's own forward pass: {share:.0%} of the {profile['measuring_seconds']:.1f} s of measuring, "
        f"{profile['forward_share_of_command']:.0%} of the whole command",
        f"peak memory above the loaded model: {memory['peak_mb']:.0f} MB"
        + ("" if memory["planned_mb"] is None else f", planned {memory['planned_mb']:.0f} MB"),
    ]  # fmt: skip
    return Group(stages, *(prose(line, style="dim") for line in lines))
