"""`--loss`: the next token's loss at the sampled positions is the model's own, in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import posleak as pl
from posleak.errors import InputError, PosleakWarning
from posleak.probe import attach, native
from posleak.probe.native import token_losses
from posleak.runs.loss import loss_changes, loss_positions
from support.errors import raises
from support.families import tiny
from tools.census import read_page
from tools.shrink import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SUPPORTED = [name for name, row in read_page(PAGE.read_text(encoding="utf-8")).items() if row[1] == "supported"]
ASKED: dict[str, Any] = {"length": 64, "prompts": 4, "seed": 3}


def own_losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """[B, T − 1], from the logits of one plain call."""
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
    flat = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return flat.view(len(ids), -1)


def tokens(model: PreTrainedModel, length: int = 40) -> torch.Tensor:
    vocabulary = int(model.config.get_text_config().vocab_size)
    return torch.randint(3, vocabulary, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", SUPPORTED)
def test_it_is_the_models_own_loss_in_every_family(family: str) -> None:
    """Scales, soft caps and biases between the last state and the logits differ between families."""
    model = tiny_model(family)
    ids, at = tokens(model), [0, 3, 4, 11, 29, 38]  # a body that ran again, on these tokens alone, would give others
    with torch.no_grad(), attach(model) as probe:
        found = token_losses(model, probe.forward(ids), ids, at)
    expected = own_losses(model, ids)[:, at]
    assert float(expected.std()) > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_few_logits_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits at once, the losses are the same; and the head never sees more than that."""
    model = tiny("llama")
    ids, seen = tokens(model), list[int]()
    model.lm_head.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[1]))
    with attach(model) as probe:
        output = probe.forward(ids)
    found = []
    for several in (39, 4, 1):
        monkeypatch.setattr(native, "LOGIT_BYTES", several * 4 * len(ids) * model.config.vocab_size)
        seen.clear()
        found.append(token_losses(model, output, ids, list(range(39))))
        assert max(seen) == several
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0], found[2], rtol=1e-6, atol=1e-6)
    assert type(model.model).__name__ == "LlamaModel", "the body is back in its place"


def test_a_run_has_it_by_part_of_the_prompt_and_nothing_else_moves() -> None:
    subject = pl.load("zoo-text-rope")
    without, run = pl.measure(subject, "text:stdlib", **ASKED), pl.measure(subject, "text:stdlib", loss=True, **ASKED)
    assert without.loss is None
    assert run.loss is not None
    for name, array in without.data.items():
        np.testing.assert_array_equal(array.values, run.data[name].values)
    assert run.loss.positions == len(loss_positions(run.record.plan)) > 20
    assert set(run.loss.numbers) == {"all", "first", "middle", "end"}
    assert all(found.low < found.value < found.high and found.n == 4 for found in run.loss.numbers.values())


def test_it_is_what_the_model_reports_for_labels_at_those_positions() -> None:
    subject = pl.load("zoo-text-rope")
    ids = torch.randint(5, 90, (4, 64), generator=torch.Generator().manual_seed(1))
    with pytest.warns(PosleakWarning, match="given"):
        run = pl.measure(subject, ids.numpy(), loss=True)
    assert run.loss is not None
    at = torch.tensor(loss_positions(run.record.plan))
    labels = torch.full_like(ids, -100)
    labels[:, at + 1] = ids[:, at + 1]
    with torch.no_grad():
        own = subject.model(input_ids=ids, labels=labels).loss
    assert float(run.loss.numbers["all"].value) == pytest.approx(float(own), rel=1e-5)


def test_an_edit_that_changes_nothing_changes_no_bit_of_it() -> None:
    subject = pl.load("zoo-text-rope")
    runs = [
        pl.measure(subject, "text:stdlib", loss=True, edits=edits, **ASKED)
        for edits in ([], ["rope=ntk:1"], ["sink=cut"])
    ]
    same = loss_changes(runs[1].data, runs[0].data, runs[0].record.plan)
    assert all(found.value == found.low == found.high == 0 for found in (each.estimate for each in same.values()))
    assert loss_changes(runs[2].data, runs[0].data, runs[0].record.plan)["all"].value != 0


def test_it_is_refused_where_a_document_before_the_prompt_is_read() -> None:
    with raises(InputError, where="--loss", what="borrowed"):
        pl.measure("zoo-text-rope", loss=True, edits=["context=borrowed"], length=64, prompts=4)
