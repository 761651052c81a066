"""What a researcher does in a notebook: any model, any prompts, own edits and observers, and results at hand."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from markupsafe import escape

import posleak as pl
from posleak import edits as stage
from posleak.analyses.claims.examination import ClaimsRun
from posleak.analyses.claims.lab import Lab
from posleak.edits import NamedEdit, Site, parse_edit
from posleak.edits.objects import FORWARDED
from posleak.errors import InputError, ModelError, PosleakWarning, RunError
from posleak.inputs import GivenPrompts, prepare, read_given
from posleak.leakage import by_head
from posleak.probe import Call, Edit
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from support.errors import raises
from support.families import subject, tiny
from support.inputs_subject import byte_tokenizer, stub_subject, word_tokenizer
from support.runs_tiny import assert_same_bits, files

SMALL: dict[str, Any] = {"length": 48, "prompts": 5, "batch": 2, "seed": 3}
LAYERS, BATCHES = 3, 3
IDS = np.random.default_rng(0).integers(3, 101, (6, 60))
GIVEN = "the prompts were given"


@contextmanager
def given() -> Iterator[None]:
    """Something is measured on given prompts: one warning, which says what that means."""
    with pytest.warns(PosleakWarning) as caught:
        yield
    assert [GIVEN in str(each.message) for each in caught] == [True]
    assert caught[0].filename == __file__, "it points at the line of the user"


@pytest.fixture(scope="module")
def unsaved_run(llama: pl.Subject) -> Run:
    return pl.measure(llama, **SMALL)


# -- the subject ------------------------------------------------------------------------------------------------------


def test_a_model_in_memory_and_a_name_are_subjects(
    unsaved_run: Run, llama: pl.Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSLEAK_CACHE", str(tmp_path / "cache"))
    assert_same_bits(pl.measure(llama.model, **SMALL), unsaved_run)
    tiny("llama").save_pretrained(str(tmp_path / "model"))  # saving changes the config
    for name in (tmp_path / "model", str(tmp_path / "model")):
        assert_same_bits(pl.measure(name, **SMALL), unsaved_run)
    assert pl.doctor(llama.model, short=True).ok
    assert pl.origin(llama.model, length=48, prompts=3, tokens=20).prompts == 3


@pytest.mark.parametrize("name", ["measure", "trace", "claims", "doctor", "origin"])
def test_what_is_no_model_is_refused_with_what_would_do(name: str) -> None:
    with raises(ModelError, where="subject", got="int 3", expected="a Subject", remedy="Subject.of(model, tokenizer)"):
        getattr(pl, name)(3)


def test_a_sweep_takes_models_in_memory_by_their_names(llama: pl.Subject, tmp_path: Path) -> None:
    swept = pl.sweep("dtypes", models=llama, length=48, prompts=4, out=tmp_path)
    assert [row.cell.label for row in swept.balance.rows] == [
        "tiny-llama", "tiny-llama · dtype=bfloat16", "tiny-llama · dtype=float16",
    ]  # fmt: skip
    assert repr(swept).startswith("Sweep(dtypes: 3 finished")
    with raises(InputError, where="models", got="object, object", remedy="Subject.of(model, tokenizer, name="):
        pl.sweep("architectures", models=[llama.model, llama.model], out=tmp_path)
    wrong: Any = llama
    with raises(InputError, where="sweep", got="Subject(tiny-llama", remedy="models=[model]"):
        pl.sweep(wrong, out=tmp_path)
    with raises(InputError, where="dtypes", got="another", expected=1):
        pl.sweep("dtypes", models=[llama, "another"], out=tmp_path)


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_length_and_a_number_of_prompts_beside_ids_cut_them(llama: pl.Subject) -> None:
    with given():
        cut = pl.measure(llama, IDS, length=48, prompts=4)
    assert (cut.record.spec.length, cut.record.spec.prompts, cut.prompts) == (48, 4, 4)
    assert GIVEN in cut.record.warnings[0]
    for same in (torch.from_numpy(IDS[:4, :48]), list(IDS[:4, :48]), IDS[:4, :48].tolist()):
        with given():
            assert_same_bits(pl.measure(llama, same), cut)


UNEQUAL = [[5] * 40, [5] * 50, [5] * 40]


@pytest.mark.parametrize(
    ("inputs", "options", "fields"),
    [
        (UNEQUAL, {}, {"got": "40, 50, 40 tokens", "remedy": "length=40"}),
        (UNEQUAL, {"length": 45}, {"got": ("length=45", "40, 40 tokens", "prompts 0, 2"), "remedy": "length=40"}),
        (IDS, {"prompts": 7}, {"where": "prompts", "got": ("prompts=7", 6), "expected": "1 to 6"}),
        (IDS, {"prompts": 0}, {"where": "prompts", "expected": "1 to 6"}),
        (IDS, {"length": "64"}, {"where": "length", "got": "'64'"}),
        (IDS, {"bos": "none"}, {"where": "bos", "got": "'none'", "remedy": "column 0"}),
        (IDS, {"bos": 7}, {"where": "bos", "got": 7, "remedy": "column 0"}),
        (IDS[0], {}, {"got": "shape (60,)", "expected": "[B, T]", "remedy": "[ids]"}),
        (IDS / 2, {}, {"got": "float64", "expected": "integers"}),
        ([], {}, {"got": "shape (0,)", "expected": "B at least 1"}),
        ("random", {"length": "64"}, {"what": "length", "got": "'64'"}),
        ("random", {"prompts": 4.5}, {"what": "prompts", "got": 4.5}),
        ("radnom", {}, {"got": "'radnom'", "remedy": "'random'"}),
        ("Random", {}, {"got": "'Random'", "remedy": "'random'"}),
        ("texts:book.txt", {}, {"got": "'texts:book.txt'", "expected": "text:PATH"}),
        ("", {}, {"got": "''", "expected": "text:PATH"}),
        ("a text that is read", {}, {"what": ("text", "tokenizer"), "remedy": "Subject.of(model, tokenizer)"}),
        ([{"role": "user", "content": "hello"}], {}, {"what": ("chat", "tokenizer"), "remedy": "Subject.of"}),
        ({"role": "user", "content": "hello"}, {}, {"got": "dict", "remedy": "[message]"}),
        ({"input_ids": IDS}, {}, {"got": "dict", "remedy": "input_ids"}),
        (["a text", IDS[0]], {}, {"got": "list", "remedy": "one kind"}),
        (None, {}, {"got": "NoneType"}),
        (Path("book.txt"), {}, {"got": "book.txt", "remedy": '"text:book.txt"'}),
    ],
)  # fmt: skip
def test_invalid_prompts_are_refused_with_the_remedy(
    llama: pl.Subject, inputs: Any, options: dict[str, Any], fields: dict[str, object]
) -> None:
    with raises(InputError, **fields):
        pl.measure(llama, inputs, **options)


def test_the_name_of_a_file_is_not_read_as_a_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("w1 w2")
    with raises(InputError, got=tmp_path / "book.txt", remedy=f"text:{tmp_path / 'book.txt'}"):
        read_given(stub_subject(word_tokenizer()), str(tmp_path / "book.txt"))


def test_texts_are_read_after_one_bos() -> None:
    who = stub_subject(word_tokenizer(prepend="<s>"))
    found = read_given(who, ["w0 w1 w2", "<s> w3 w4"], length=3)
    assert (found.kind, found.table.tolist()) == ("texts", [[1, 9, 10], [1, 12, 13]])
    prompts = prepare(who, found, length=3, seed=0)
    assert prompts.batch([0, 1]).tolist() == found.table.tolist()
    facts = prompts.describe()
    assert (facts.source, facts.bos, facts.bos_id) == ("texts", "auto", 1)
    assert facts.first_token == "token 1 '<s>' in every prompt, by BOS policy 'auto'"
    assert read_given(who, "w0 w1", bos="none").table.tolist() == [[9, 10]]
    assert read_given(who, ["w0 w1"], bos="w9").table.tolist() == [[18, 9, 10]]
    assert read_given(who, "w0 w1", bos="tokenizer").table.tolist() == [[1, 9, 10]]
    with raises(InputError, got="4, 2 tokens", remedy="length=2"):
        read_given(who, ["w0 w1 w2", "w3"])


def test_words_of_sources_inside_a_list_are_texts() -> None:
    assert read_given(stub_subject(word_tokenizer()), ["random"], bos="none").kind == "texts"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    " {{ m.role }} {{ m.content }}{% endfor %}"
)


def test_chats_are_written_by_the_template_alone() -> None:
    who = stub_subject(word_tokenizer(prepend="<s>"))
    chat = [{"role": "w7", "content": "w0 w1"}, {"role": "w8", "content": "w2"}]
    with raises(InputError, what="chat template", remedy="tokenizer.chat_template"):
        read_given(who, chat)
    who.tokenizer.chat_template = TEMPLATE
    found = read_given(who, chat)
    assert (found.kind, found.table.tolist()) == ("chats", [[1, 16, 9, 10, 17, 11]]), (
        "one BOS, which the template writes"
    )
    assert read_given(who, [chat, chat[::-1]], length=5).table.tolist() == [[1, 16, 9, 10, 17], [1, 17, 11, 16, 9]]
    assert prepare(who, found, length=6, seed=0).describe().source == "chats"
    with raises(InputError, where="bos", what="chat", got="'none'"):
        read_given(who, chat, bos="none")
    with raises(InputError, where="inputs", got="TemplateError: no system"):
        read_given(who, [{"role": "system", "content": "w1"}])


def test_texts_are_measured_as_their_ids_are() -> None:
    tokenizer = byte_tokenizer()
    who = pl.Subject.of(tiny("llama", vocab_size=len(tokenizer), bos_token_id=7, eos_token_id=0), tokenizer, "reads")
    once = ("the position of a word in the text ", "a library has many words, and each its own place ")
    texts = [text * 9 for text in (*once, once[1] + once[0], once[0] + once[1])]
    ids = [[7, *tokenizer(text)["input_ids"]][:40] for text in texts]
    with given():
        read = pl.measure(who, texts, length=40)
    with given():
        assert_same_bits(read, pl.measure(who, ids))


def test_the_warning_counts_the_places_that_are_alike() -> None:
    table = np.array([[1, 5, 6, 7], [2, 5, 8, 7], [3, 5, 6, 7]])
    prompts = prepare(stub_subject(), GivenPrompts.of_ids(table), length=4, seed=0)
    assert "2 of the 3 positions" in str(prompts.caution)
    assert prepare(stub_subject(), "random", length=4, seed=0).caution is None
    other = prepare(stub_subject(), table[:, ::-1], length=4, seed=0)
    assert (prompts.policy, other.policy) == ("none", 7)
    assert prepare(stub_subject(), "random", length=4, seed=0).policy == "auto"


def test_given_prompts_are_traced_and_tested_as_they_stand(llama: pl.Subject) -> None:
    with given():
        traced = pl.trace(llama, IDS, length=48, prompts=4)
    assert traced.ordinary.record.inputs.source == "ids"
    assert traced.ordinary.record.spec.prompts == traced.branches.prompts == 4
    lab = Lab(llama, MeasureSpec("given", length=60, prompts=6), given=GivenPrompts.of_ids(IDS))
    assert np.array_equal(lab.ids, IDS)
    with raises(InputError, where="bos=none", remedy="bos=random"):
        parse_edit("bos=none").prompts(lab.tokens)


# -- edits and observers ----------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Which calls there were, of how many prompts, and with which scaling."""

    calls: list[tuple[int, int, float]] = field(default_factory=list)

    def observe(self, call: Call, out: torch.Tensor) -> None:
        self.calls.append((call.index, len(out), call.scaling))


class Halved(Edit):
    def edit(self, call: Call) -> Call:
        return replace(call, scaling=call.scaling / 2)


@dataclass(frozen=True)
class Softer(NamedEdit):
    factor: float

    site: ClassVar[Site] = Site.LOGITS

    @property
    def text(self) -> str:
        return f"softer={self.factor}"

    def edit(self, call: Call) -> Call:
        return replace(call, scaling=call.scaling / self.factor)


@pytest.fixture
def registered() -> Iterator[None]:
    kind = stage.EditKind(
        "softer", "softer=F", "scales", "nothing", "softer=2", lambda value, scope: Softer(float(value))
    )
    stage.register(kind)
    yield
    del stage.KINDS["softer"]


def test_one_edit_needs_no_list(llama: pl.Subject) -> None:
    one, many = (pl.measure(llama, **SMALL, edits=edits) for edits in ("window=16", ["window=16"]))
    assert one.record.spec.edit_texts == ("window=16",)
    assert one.record.digest == many.record.digest
    assert_same_bits(one, many)


def test_own_edits_act_and_are_named(llama: pl.Subject, registered: None) -> None:
    own = pl.measure(llama, **SMALL, edits=[Halved(), "window=16"])
    assert own.record.spec.edit_texts == ("window=16", "Halved")
    assert_same_bits(own, pl.measure(llama, **SMALL, edits=["softer=2.0", "window=16"]))
    twice = pl.measure(llama, **SMALL, edits=[Halved(), Halved()])
    assert_same_bits(twice, pl.measure(llama, **SMALL, edits=Softer(4.0)))
    local = type("Local", (Halved,), {})
    digests = [pl.measure(llama, **SMALL, edits=local()).record.digest for _ in range(2)]
    assert digests[0] != digests[1], "nothing describes a local class"
    assert "Halved" in repr(own)
    assert own.as_dict()["edits"] == ["window=16", "Halved"]


def test_an_own_edit_is_asked_everything_that_a_named_one_is(llama: pl.Subject) -> None:
    """What it says of its factor on queries becomes the part `scaling`, as for `scale=logn`."""
    named = parse_edit("scale=logn")
    own = type("Scaled", (Edit,), {name: staticmethod(getattr(named, name)) for name in ("edit", "temperature")})()
    scaled = pl.measure(llama, **SMALL, edits=own)
    assert "scaling" in scaled.data
    assert_same_bits(scaled, pl.measure(llama, **SMALL, edits="scale=logn"))
    assert set(FORWARDED) >= {name for name in vars(Edit) if not name.startswith("_")} - {"installed"}


def test_a_run_under_an_own_edit_is_written_only_if_its_text_makes_it_again(
    llama: pl.Subject, tmp_path: Path, registered: None
) -> None:
    other = type("Other", (Softer,), {"text": "softer=3.0"})(2.0)  # its text makes another edit
    local = type("Local", (Halved,), {})()
    for edit, text in ((local, "Local"), (other, "softer=3.0")):
        with raises(RunError, where=tmp_path / "run", got=text, expected="registered", remedy="NamedEdit"):
            pl.measure(llama, **SMALL, edits=edit, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with raises(RunError, where=tmp_path / "run", got="Local", expected="registered", remedy="NamedEdit"):
        pl.measure(llama, **SMALL, edits=local).save(tmp_path / "run")
    written = pl.measure(llama, **SMALL, edits=Softer(2.0), out=tmp_path / "run")
    assert_same_bits(Run.load(tmp_path / "run"), written)
    again = pl.measure(llama, **SMALL, edits="softer=2.0", out=tmp_path / "run")
    assert again.record.digest == written.record.digest


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [(Halved, {"got": "Halved", "remedy": "Halved()"}), (3, {"got": 3}), ([None], {"got": None})],
)
def test_objects_other_than_edits_are_refused(llama: pl.Subject, wrong: Any, fields: dict[str, object]) -> None:
    with raises(InputError, where="edits", expected="posleak.probe.Edit", **fields):
        pl.measure(llama, **SMALL, edits=wrong)


def test_an_own_edit_that_shows_the_future_is_refused(llama: pl.Subject) -> None:
    future = type("Future", (Halved,), {"causal": False})()
    with raises(InputError, where="--edit Future", what="queries", remedy="window="):
        pl.measure(llama, **SMALL, edits=future)


def test_observers_see_every_call_of_every_batch_after_edits(llama: pl.Subject, unsaved_run: Run) -> None:
    plain, edited = Seen(), Seen()
    assert_same_bits(pl.measure(llama, **SMALL, observers=plain), unsaved_run)
    pl.measure(llama, **SMALL, edits=Halved(), observers=[edited])
    order = [(layer, size) for size in (2, 2, 1) for layer in range(LAYERS)]
    assert [call[:2] for call in plain.calls] == [call[:2] for call in edited.calls] == order
    assert [call[2] / 2 for call in plain.calls] == [call[2] for call in edited.calls]


def test_observers_are_not_passed_by(llama: pl.Subject, tmp_path: Path) -> None:
    pl.measure(llama, **SMALL, out=tmp_path / "run")
    seen = Seen()
    with raises(RunError, where=tmp_path / "run", what="observers", remedy="--fresh"):
        pl.measure(llama, **SMALL, out=tmp_path / "run", observers=[seen])
    pl.measure(llama, **SMALL, out=tmp_path / "run", observers=[seen], fresh=True)
    assert len(seen.calls) == LAYERS * BATCHES
    wrongs: list[Any] = [Seen, Halved(), 3]
    for wrong in wrongs:
        with raises(InputError, where="observers", got=repr(wrong), expected="observe(call, out)"):
            pl.measure(llama, **SMALL, observers=wrong)


# -- results ----------------------------------------------------------------------------------------------------------


def test_a_run_is_saved_as_out_writes_it(unsaved_run: Run, llama: pl.Subject, tmp_path: Path) -> None:
    saved = unsaved_run.save(tmp_path / "saved")
    written = pl.measure(llama, **SMALL, out=tmp_path / "out")
    assert files(tmp_path / "saved") == files(tmp_path / "out")
    assert_same_bits(saved, written)
    assert saved.record.files.keys() == written.record.files.keys()
    loaded = Run.load(tmp_path / "saved")
    assert_same_bits(loaded, unsaved_run)
    assert loaded.record == replace(written.record, created=loaded.record.created, finished=loaded.record.finished,
                                    files=loaded.record.files)  # fmt: skip
    assert unsaved_run.path is None
    assert pl.measure(llama, **SMALL, out=tmp_path / "saved").path == tmp_path / "saved"


def test_an_occupied_folder_is_refused(unsaved_run: Run, tmp_path: Path) -> None:
    unsaved_run.save(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    with raises(RunError, where=tmp_path / "run", remedy="another folder"):
        unsaved_run.save(tmp_path / "run")
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.nc").write_text("mine")
    with raises(RunError, where=tmp_path / "other", what="run.json", got="results.nc"):
        unsaved_run.save(tmp_path / "other")
    assert (tmp_path / "other" / "results.nc").read_text() == "mine"


def test_heads_are_ranked_by_unbiased_power(unsaved_run: Run, tmp_path: Path) -> None:
    table, power = unsaved_run.heads, unsaved_run.summary.heads["all"].power
    assert len(table) == power["total"].value.size
    assert (np.diff(table["total"]) <= 0).all()
    for row in table.itertuples():
        for name in ("total", "mask", "drift", "sink", "residual"):
            cell = power[name][row.call, row.head]
            found = (getattr(row, name), getattr(row, f"{name}_low"), getattr(row, f"{name}_high"))
            assert found == (cell.value, cell.low, cell.high)
        assert row.sink_attention == unsaved_run.summary.sink_attention[row.layer, row.head].value
        assert row.n == SMALL["prompts"]
    unsaved_run.save(tmp_path / "run")
    stored = pq.read_table(tmp_path / "run" / "heads.parquet").to_pandas()
    stored = stored[stored["norm"] == "attention"]
    chosen = stored[(stored["component"] == "total") & (stored["quantity"] == "power") & (stored["queries"] == "all")]
    assert sorted(chosen["value"], reverse=True) == table["total"].tolist()
    assert table.attrs["units"]["total"] == "nats²"


def test_heads_that_do_not_exist_have_no_row(unsaved_run: Run) -> None:
    profile = replace(unsaved_run.summary.profile, value=unsaved_run.summary.profile.value.copy())
    profile.value[1, 2] = np.nan  # as in a layer with two heads beside layers with three
    found = by_head(replace(unsaved_run.summary, profile=profile))
    assert len(found) == len(unsaved_run.heads) - 1
    assert not ((found["layer"] == 1) & (found["head"] == 2)).any()


def test_split_keeps_the_noise_or_the_prompts(unsaved_run: Run) -> None:
    parts, each = pl.split(unsaved_run), pl.split(unsaved_run, prompts=True)
    assert each.dims == ("component", "prompt", "layer", "head", "query", "offset")
    assert np.array_equal(each.mean("prompt").values, parts.values, equal_nan=True)
    errors = each.values.std(axis=1, ddof=1) / SMALL["prompts"] ** 0.5
    assert parts["se"].dims == parts.dims
    np.testing.assert_allclose(parts["se"].values, errors, rtol=1e-12)
    assert np.isfinite(parts["se"].sel(component="drift", query=5, offset=1)).all()
    with pytest.warns(PosleakWarning, match="prompts=4"):
        one = pl.measure(subject(), length=32, prompts=1)
    assert np.isnan(pl.split(one)["se"]).all()


def test_pictures_are_shown_and_saved(unsaved_run: Run, tmp_path: Path) -> None:
    picture = unsaved_run.plot()
    shown = picture._repr_html_()
    assert shown.startswith("<svg")
    assert all(name in shown for name in ("tiny-llama", "mask", "drift", "sink", "attention to position 0"))
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")):
        assert picture.save(tmp_path / name).read_bytes().startswith(start)
    with raises(InputError, got=tmp_path / "a.txt", expected=".png | .svg | .pdf"):
        picture.save(tmp_path / "a.txt")


def test_results_print_themselves_in_a_line(unsaved_run: Run, llama: pl.Subject, tmp_path: Path) -> None:
    low, high = (float(getattr(unsaved_run.summary.model["all"].power["total"], end)) for end in ("low", "high"))
    assert repr(unsaved_run).startswith("Run(tiny-llama: 5 prompts of 48 tokens, random; total ")
    assert low < high
    assert "…" in repr(unsaved_run)
    assert repr(unsaved_run).endswith(" nats²; in memory)")
    assert repr(unsaved_run.save(tmp_path / "here")).endswith(f"{tmp_path / 'here'})")
    traced = pl.trace(llama, length=48, prompts=4)
    assert "earlier " in repr(traced)
    assert traced.plot()._repr_html_().count("by source") == 1
    results = [unsaved_run, traced, llama, pl.doctor(llama, short=True)]
    results.append(pl.origin(llama, length=48, prompts=3, tokens=20))
    results += [unsaved_run.plot(), ClaimsRun(unsaved_run, ()), pl.compare([unsaved_run, unsaved_run])]
    for each in results:
        assert "\n" not in repr(each)
        assert len(repr(each)) < 250
        assert repr(each).startswith(f"{type(each).__name__}(")


def test_a_report_says_how_to_repeat_what_no_command_line_can(llama: pl.Subject, tmp_path: Path) -> None:
    with given():
        own = pl.measure(llama, IDS, length=48, prompts=4, edits=["window=16", Halved()])
    page = pl.report(own, tmp_path / "page.html").read_text(encoding="utf-8")
    said = re.search(r'class="command">(.*?)</code>', page)
    assert said is not None
    assert html.unescape(said[1]) == (
        "posleak.measure('tiny-llama', ids_that_were_given, length=48, prompts=4, seed=0, bos='auto', origin=4, "
        "batch=4, density=1, edits=['window=16', Halved])"
    )


HOSTILE = "<script>window.pwned=1</script>\x1b[2J&amp;"


def test_results_show_themselves_as_tables_with_everything_escaped(unsaved_run: Run, llama: pl.Subject) -> None:
    subject = pl.Subject.of(llama.model, name=HOSTILE)
    runs = [pl.measure(subject, **SMALL, edits=edits) for edits in ((), "window=16")]
    diagnosis = replace(pl.doctor(subject, short=True), notes=(HOSTILE,), first_token=HOSTILE)
    check = replace(diagnosis.checks[0], id=HOSTILE, why=HOSTILE)
    diagnosis = replace(diagnosis, checks=(check, *diagnosis.checks[1:]))
    compared = [pl.compare(runs, by=by) for by in ("model", "layer", "head")]
    results: list[Any] = [diagnosis, unsaved_run.summary, runs[0], *compared]
    for each in results:
        shown = each._repr_html_()
        assert "<script" not in shown
        assert "\x1b" not in shown
        assert ("&lt;script&gt;" in shown) == (each is not unsaved_run.summary)
        tags = re.findall(r"<(/?)(\w+)", shown)
        for tag in {name for _, name in tags} - {"br"}:
            assert tags.count(("", tag)) == tags.count(("/", tag)), tag


def test_a_comparison_in_a_notebook_has_the_rows_of_its_tables(unsaved_run: Run, llama: pl.Subject) -> None:
    compared = pl.compare([unsaved_run, pl.measure(llama, **SMALL, edits="window=16")], by="head")
    shown = compared._repr_html_()
    assert shown.count("<tr>") == len(compared.shown) + 1
    for row in compared.shown:
        value, interval = row.texts("total")
        cell = f"<td style='text-align:left'><b>{value}</b> <small>{interval}</small></td>"
        assert f">{compared.place(row)}</td>{cell}" in shown
    assert escape(compared.legend) in shown


def test_a_diagnosis_in_a_notebook_has_every_check_and_the_verdict(llama: pl.Subject) -> None:
    diagnosis = pl.doctor(llama, short=True)
    shown = diagnosis._repr_html_()
    assert shown.count("<tr>") == len(diagnosis.checks) + 1
    assert escape(diagnosis.sentence) in shown
    for check in diagnosis.checks:
        assert f">{escape(check.id)}</td>" in shown
        assert f">{escape(check.why)}</td>" in shown
