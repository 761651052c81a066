"""Outcomes of the commands on every form of a model: adapters, wrappers, weights on disk, quantised, distributed.

    python -m tools.forms --write docs/forms.md

Each form is made from one small trained model that ships with posleak, and each command runs on it as users run it: it
works, or posleak refuses it with a sentence. Forms that are the same function as the plain model must give its numbers.
Forms in two processes run under torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import posleak as pl
from posleak.errors import PosleakError, PosleakWarning
from posleak.models.builtin import shipped_folder
from posleak.models.pretrained import silence_transformers
from posleak.runs.run import Run

from .markdown import table

MODEL = "zoo-text-rope"
SIZE: dict[str, Any] = {"length": 64, "prompts": 4}
COMMANDS: dict[str, Callable[[Any], object]] = {
    "measure": lambda subject: pl.measure(subject, **SIZE),
    "trace": lambda subject: pl.trace(subject, **SIZE),
    "circuit": lambda subject: pl.circuit(subject, **SIZE, nodes=2),
    "doctor": lambda subject: pl.doctor(subject),
    "advise": lambda subject: pl.advise(subject, **SIZE, groups=["window"]),
}
TORCHAO = Path(sys.prefix) / "torchao"
"""Where `make venv` installs torchao: transformers would import it into every process."""
WORKS = "works"
START = "POSLEAK_FORM"
"""Marks the line that a process of a form prints, and its environment."""


@dataclass(frozen=True)
class Form:
    """One form of the model.

    make       folder for its files -> what is passed to the commands
    same       the group of forms that are the same function, so that their numbers must agree; None: it is alone
    processes  number of processes that share the work
    path       folder of packages that it needs, which other forms must not import
    """

    title: str
    make: Callable[[Path], Any]
    same: str | None = "plain"
    processes: int = 1
    path: Path | None = None


@dataclass(frozen=True)
class FormOutcomes:
    """Outcomes on one form by command, and its largest difference in nats from the first form of its group."""

    title: str
    outcomes: Mapping[str, str]
    difference: float | None = None


def plain_model() -> Any:
    """Return the transformers model."""
    return pl.load(MODEL).model


def tokenized(model: Any, **more: Any) -> pl.Subject:
    """Return a subject with the model's tokenizer, which `advise` needs."""
    return pl.Subject.of(model, pl.load(MODEL).tokenizer, MODEL, **more)


def _lora(folder: Path) -> Any:
    """Save an adapter with random weights, and return the wrapped model."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(plain_model(), config)
    model.peft_config["default"].base_model_name_or_path = MODEL
    model.save_pretrained(str(folder))
    return model


def _adapter(folder: Path) -> Any:
    _lora(folder)
    return pl.load(folder)


def _merged(folder: Path) -> Any:
    return tokenized(_lora(folder).merge_and_unload())


def _prompt_tuning(folder: Path) -> Any:
    import peft

    return peft.get_peft_model(plain_model(), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def _compiled_layers(folder: Path) -> Any:
    model = plain_model()
    for layer in model.model.layers:
        layer.compile()
    return model


def _distributed(folder: Path) -> Any:
    _one_process(folder)
    return tokenized(torch.nn.parallel.DistributedDataParallel(_trainable()))


def _trainable() -> Any:
    model = plain_model()
    model.requires_grad_(True)
    return model


def _one_process(folder: Path) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)


def _fsdp1(folder: Path) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _one_process(folder)
    return FullyShardedDataParallel(plain_model(), device_id=torch.device("cpu"))


def _fsdp2(folder: Path) -> Any:
    from torch.distributed.fsdp import fully_shard

    import posleak.models.parallel

    posleak.models.parallel.join("data", None)
    model = plain_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return tokenized(model)


def _encoder_decoder(folder: Path) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=97, d_model=24, d_kv=6, d_ff=48, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def _own_tokenizer(folder: Path) -> Any:
    return pl.load(shipped_folder(MODEL), tokenizer=MODEL)


def _few_bytes(folder: Path) -> Any:
    weights = sum(parameter.numel() * 4 for parameter in plain_model().parameters())
    return pl.load(MODEL, max_memory=500 * 10**6 + weights - 1, notice=lambda line: None)


def _packable() -> Any:
    """Return a random model of the same sizes, but with an inner width that kernels of packed weights support."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = plain_model().config
    config.intermediate_size = 384
    return LlamaForCausalLM(config).eval()


def _bitsandbytes(**settings: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        _packable().save_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            quantization_config=BitsAndBytesConfig(**settings),
            dtype=torch.float32,
            trust_remote_code=False,
        )
        return tokenized(model.eval())

    return make


def _torchao(config: str, **settings: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        from torchao import quantization

        if "group" in settings:
            settings["granularity"] = quantization.PerGroup(settings.pop("group"))
        model = _packable()
        quantization.quantize_(model, getattr(quantization, config)(**settings))
        return tokenized(model)

    return make


FORMS = (
    Form("name or folder", lambda folder: shipped_folder(MODEL)),
    Form("model object", lambda folder: tokenized(plain_model())),
    Form("model object without a tokenizer", lambda folder: plain_model()),
    Form("`--tokenizer`", _own_tokenizer),
    Form("adapter (LoRA): folder, `--adapter`", _adapter, same="adapter"),
    Form("adapter: `PeftModel`", lambda folder: tokenized(_lora(folder)), same="adapter"),
    Form("adapter, merged", _merged, same="adapter"),
    Form("prompt tuning and its like", _prompt_tuning, same=None),
    Form("`torch.compile(model)`", lambda folder: tokenized(torch.compile(plain_model()))),
    Form("layers compiled in place", _compiled_layers),
    Form("`DataParallel`", lambda folder: tokenized(torch.nn.DataParallel(plain_model()))),
    Form("`DistributedDataParallel`", _distributed),
    Form("FSDP1", _fsdp1),
    Form("FSDP2 (`fully_shard`), two processes", _fsdp2, processes=2),
    Form("tensor parallel (`--parallel tensor`), two processes", lambda folder: pl.load(MODEL, parallel="tensor"),
         processes=2),
    Form("data parallel (`--parallel data`), two processes", lambda folder: pl.load(MODEL, parallel="data"),
         processes=2),
    Form("`--offload FOLDER`", lambda folder: pl.load(MODEL, offload=folder)),
    Form("weights larger than `--max-memory`", _few_bytes),
    Form("`--dtype bfloat16`", lambda folder: pl.load(MODEL, dtype="bfloat16"), same=None),
    Form("bitsandbytes 8-bit", _bitsandbytes(load_in_8bit=True), same=None),
    Form("bitsandbytes nf4", _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), same=None),
    Form("torchao int8 weight-only", _torchao("Int8WeightOnlyConfig"), same=None, path=TORCHAO),
    Form("torchao int8 with int8 activations", _torchao("Int8DynamicActivationInt8WeightConfig"), same=None,
         path=TORCHAO),
    Form("torchao int4 weight-only", _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, group=32),  # type: ignore[attr-defined]
         same=None, path=TORCHAO),
    Form("encoder-decoder (T5)", _encoder_decoder, same=None),
)  # fmt: skip


def run_form(form: Form, commands: Sequence[str] = tuple(COMMANDS)) -> FormOutcomes:
    """Run the commands on a form, in as many processes as it needs."""
    if START not in os.environ and (form.processes > 1 or form.path is not None):
        return _in_own_processes(form, commands)
    outcomes, difference = dict[str, str](), None
    with _own_group(), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), silence_transformers():
        warnings.simplefilter("ignore", PosleakWarning)
        try:
            subject = form.make(Path(folder))
        except PosleakError as error:
            return FormOutcomes(form.title, dict.fromkeys(commands, error.what))
        for name in commands:
            try:
                result = COMMANDS[name](subject)
            except PosleakError as error:
                outcomes[name] = error.what
                continue
            outcomes[name] = WORKS
            if isinstance(result, Run) and form.same is not None:
                difference = float(np.nanmax(np.abs(parts(result) - _parts_of_first(form.same))))
    return FormOutcomes(form.title, outcomes, difference)


@contextmanager
def _own_group() -> Iterator[None]:
    """Destroy the process group that the form creates: the caller's process may create another."""
    import torch.distributed as dist

    before = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not before:
            dist.destroy_process_group()


def parts(run: Run) -> NDArray[np.float64]:
    """Return the parts of a run at every pair, in nats."""
    return np.concatenate([run.data[name].values.ravel() for name in ("mask", "drift", "sink")])


@cache
def _parts_of_first(group: str) -> NDArray[np.float64]:
    """Return the parts of the first form of a group."""
    first = next(form for form in FORMS if form.same == group)
    with tempfile.TemporaryDirectory() as folder:
        return parts(pl.measure(first.make(Path(folder)), **SIZE))


def _in_own_processes(form: Form, commands: Sequence[str]) -> FormOutcomes:
    """Run one process per rank; the first one prints the outcomes. A command that fails ends its own processes only."""
    outcomes, difference = dict[str, str](), None
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(form.processes)]
    program = [sys.executable, *(torchrun if form.processes > 1 else []), "-m", "tools.forms", "--form", form.title]
    paths = [*map(str, filter(None, [form.path])), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), START: "1"}
    for names in [[name] for name in commands] if form.processes > 1 else [list(commands)]:
        asked = [word for name in names for word in ("--command", name)]
        done = subprocess.run(
            [*program, *asked], capture_output=True, text=True, check=False, timeout=600, env=environment
        )
        line = next((line for line in done.stdout.splitlines() if START in line), None)
        if line is None:
            raise RuntimeError(f"{form.title}, {names}: {done.stderr[-3000:]}")
        fields = json.loads(line.partition(START)[2])
        outcomes |= fields["outcomes"]
        difference = fields["difference"] if fields["difference"] is not None else difference
    return FormOutcomes(form.title, outcomes, difference)


def page(rows: Sequence[FormOutcomes]) -> str:
    """Return the generated part of docs/forms.md."""
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[FormOutcomes]) -> Iterator[str]:
    reasons = dict[str, int]()

    def cell(outcome: str) -> str:
        return outcome if outcome == WORKS else f"no [{reasons.setdefault(outcome, len(reasons) + 1)}]"

    def shown(row: FormOutcomes) -> str:
        return "" if row.difference is None else "0" if row.difference == 0 else f"{row.difference:.0e}"

    yield from table(
        ("form", *COMMANDS, "difference, nats"),
        [(row.title, *(cell(row.outcomes[name]) for name in COMMANDS), shown(row)) for row in rows],
    )
    yield ""
    yield from (f"{number}. {reason}" for reason, number in reasons.items())


def read_outcomes(part: str) -> dict[str, dict[str, str]]:
    """Return the outcomes of every form by command, with full reasons, from the generated part of the page."""
    listed = (line.partition(". ") for line in part.splitlines() if line[:1].isdigit())
    reasons = {f"no [{number}]": reason for number, _, reason in listed}
    found = dict[str, dict[str, str]]()
    for line in part.splitlines():
        title, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        if line.startswith("| ") and title != "form":
            found[title] = {name: reasons.get(text, text) for name, text in zip(COMMANDS, cells)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page whose generated part is replaced")
    parser.add_argument("--form", help="run one form")
    parser.add_argument("--command", action="append", help="run one command")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.form is not None:
        form = next(form for form in FORMS if form.title == given.form)
        print(START + json.dumps(vars(run_form(form, given.command or tuple(COMMANDS)))), flush=True)
        return
    rows = list[FormOutcomes]()
    for form in FORMS:
        rows.append(run_form(form))
        print(rows[-1], flush=True)
    if given.write is not None:
        from .markdown import replace_part

        given.write.write_text(replace_part(given.write.read_text(), "forms", page(rows)))


if __name__ == "__main__":
    main()
