"""Other people's model files, which may be damaged, may lie, or may want to run code. Each refusal by its message."""

from __future__ import annotations

import ast
import errno
import json
import os
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import posleak
from posleak.errors import ModelError, StorageError, TooLargeError, translate_errors
from posleak.models import (
    Identity,
    Subject,
    cache as caching,
    checkpoints,
    configs,
    gguf_file,
    hashing,
    load,
    memory,
    pretrained,
)
from posleak.models.sources import _licence
from posleak.models.subject import _to_stderr
from posleak.typed import from_json, plain
from support.errors import raises
from support.inputs_subject import byte_tokenizer
from support.models_tiny import WORDS, edit_config, logits, save, small_model, write_gguf

ROOT = Path(posleak.__file__).parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(small_model(), tmp_path / "model")


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """A model with a tokenizer."""
    words = byte_tokenizer()
    saved = save(small_model(vocab_size=len(words)), tmp_path / "spoken")
    words.save_pretrained(str(saved))
    return saved


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "gguf").mkdir()
    return write_gguf(small_model(), tmp_path / "gguf" / "tiny.gguf", WORDS)


def quietly(path: Path, cache: Path, **options: Any) -> Subject:
    return load(path, cache=cache, progress=lambda _message: None, **options)


def converted(gguf: Path, cache: Path) -> Path:
    quietly(gguf, cache)
    (made,) = (cache / "models").iterdir()
    return made


def flip_last_byte(path: Path) -> None:
    """Change one byte, and leave size and time of writing as they were."""
    stat, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def run(code: str, cache: Path, answer: str = "") -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with this on its terminal."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "POSLEAK_CACHE": str(cache)}
    environment["HF_MODULES_CACHE"] = str(cache / "modules")
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, input=answer, capture_output=True, text=True, check=False)


# -- 1. hashes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_one_changed_digit_in_a_converted_model_is_refused_by_name(name: str, gguf: Path, cache: Path) -> None:
    made = converted(gguf, cache)
    quietly(gguf, cache)
    flip_last_byte(made / name)
    for source in (gguf, made):
        with raises(ModelError, where=made / name, what="conversion", remedy=made) as caught:
            quietly(source, cache)
        assert caught.value.where == str(made / name)


def test_another_rope_base_in_the_cache_gives_no_other_numbers(gguf: Path, cache: Path) -> None:
    config = converted(gguf, cache) / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    with raises(ModelError, where=config, what="conversion", remedy=config.parent):
        quietly(gguf, cache)


@pytest.mark.parametrize("damage", ["cut", "missing", "one more"])
def test_converted_folder_with_other_files_is_refused_and_not_made_again(damage: str, gguf: Path, cache: Path) -> None:
    made = converted(gguf, cache)
    weights = made / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "missing":
        weights.unlink()
    else:
        (made / "added_tokens.json").write_text("{}")
    for _ in range(2):
        with raises(ModelError, where=made, remedy=f"delete the folder {made}"):
            quietly(gguf, cache)


def test_manifest_is_sealed_and_lists_every_file(gguf: Path, cache: Path) -> None:
    made = converted(gguf, cache)
    record = caching.read_manifest(made)
    assert record is not None
    assert set(record.files) == {path.name for path in made.iterdir()} - {caching.MANIFEST_FILE}
    assert record.files["config.json"].sha256 == hashing.file_sha256(made / "config.json")
    text = (made / caching.MANIFEST_FILE).read_text()
    (made / caching.MANIFEST_FILE).write_text(text.replace('"gguf"', '"hub"'))
    assert caching.read_manifest(made) is None
    with raises(ModelError, where=made, what=caching.MANIFEST_FILE):
        load(made, cache=cache)
    assert quietly(gguf, cache).identity.source == "gguf"  # converted again


def test_weights_of_a_converted_model_are_never_taken_from_memory(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(gguf, cache)
    read: list[tuple[str, Path | None]] = []
    true = hashing.file_sha256

    def spy(path: Path, memory: Path | None = None, *rest: Any) -> str:
        read.append((path.name, memory))
        return true(path, memory, *rest)

    monkeypatch.setattr(hashing, "file_sha256", spy)
    quietly(gguf, cache)
    assert ("model.safetensors", None) in read
    assert ("tiny.gguf", cache) in read


def sharded(folder: Path, place: str = "part") -> Path:
    """Move half of the weights into another file, and write an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], f"{place}/b.safetensors": names[1::2]}
    for name, held in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        save_file({key: tensors[key] for key in held}, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, held in files.items() for key in held}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_weights_in_a_subfolder_are_part_of_the_hash(folder: Path, cache: Path) -> None:
    sharded(folder)
    first = load(folder, cache=cache)
    assert torch.equal(logits(first.model), logits(small_model()))
    flip_last_byte(folder / "part" / "b.safetensors")
    assert load(folder, cache=cache).identity.weights_sha256 != first.identity.weights_sha256


def test_index_decides_which_weights_are_hashed(folder: Path, cache: Path) -> None:
    index = sharded(folder, ".")
    first = load(folder, cache=cache).identity.weights_sha256
    (folder / "c.safetensors").write_bytes((folder / "b.safetensors").read_bytes())
    assert load(folder, cache=cache).identity.weights_sha256 == first
    index.write_text(index.read_text().replace("./b.safetensors", "c.safetensors"))
    assert load(folder, cache=cache).identity.weights_sha256 != first


@pytest.mark.parametrize("name", ["/etc/hostname", "../other/model.safetensors", "a/../../x", "..\\x", "", "a\0b"])
def test_index_that_leaves_the_folder_is_refused(name: str, folder: Path, cache: Path) -> None:
    index = sharded(folder)
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with raises(ModelError, where="model.safetensors.index.json", what="outside", expected="relative"):
        load(folder, cache=cache)


def test_files_that_the_index_misses_are_named(folder: Path, cache: Path) -> None:
    index = sharded(folder)
    (folder / "part" / "b.safetensors").unlink()
    with raises(ModelError, where=index, got="part/b.safetensors"):
        load(folder, cache=cache)
    index.write_text('{"weight_map": [1, 2]}')
    with raises(ModelError, where=index, got="bytes", expected="weight_map"):
        load(folder, cache=cache)


def test_pickles_beside_another_safetensors_file_are_hashed(folder: Path, cache: Path) -> None:
    torch.save(small_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "adapter.safetensors")
    first = load(folder, allow_pickle=True, cache=cache).identity.weights_sha256
    torch.save({**small_model().state_dict(), "model.norm.weight": torch.zeros(24)}, folder / "pytorch_model.bin")
    assert load(folder, allow_pickle=True, cache=cache).identity.weights_sha256 != first


def test_distributed_checkpoint_beside_the_weights_is_refused(folder: Path, cache: Path) -> None:
    weights = folder / "model.safetensors"
    (folder / "shard-00000-model-00001-of-00001.safetensors").write_bytes(weights.read_bytes())
    with raises(ModelError, where=folder, what="distributed", remedy="save_pretrained"):
        load(folder, cache=cache)


def test_tokenizer_is_part_of_the_identity(spoken: Path, folder: Path, cache: Path) -> None:
    assert load(folder, cache=cache).identity.tokenizer_sha256 is None
    first = load(spoken, cache=cache).identity
    assert first.tokenizer_sha256 is not None
    (spoken / "special_tokens_map.json").write_text("{}")
    assert load(spoken, cache=cache).identity.tokenizer_sha256 != first.tokenizer_sha256


def test_tokenizer_object_is_part_of_the_identity() -> None:
    words, model = byte_tokenizer(), small_model(vocab_size=300)
    first = Subject.of(model, words).identity.tokenizer_sha256
    assert first == Subject.of(model, byte_tokenizer()).identity.tokenizer_sha256
    words.add_tokens(["<new>"])
    second = Subject.of(model, words).identity.tokenizer_sha256
    words.bos_token = "<new>"
    assert len({first, second, Subject.of(model, words).identity.tokenizer_sha256, None}) == 4
    assert Subject.of(model).identity.tokenizer_sha256 is None


def test_converted_tokenizer_does_not_tell_how_it_was_read(gguf: Path, cache: Path) -> None:
    settings = json.loads((converted(gguf, cache) / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & set(settings)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class C(LlamaConfig):
    model_type = "weird"
class M(LlamaForCausalLM):
    config_class = C
"""


def test_code_that_was_run_is_part_of_the_identity(folder: Path, cache: Path) -> None:
    edit_config(folder, model_type="weird", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    seen = set()
    for comment in ("# one\n", "# two\n"):
        (folder / "own.py").write_text(CODE + comment)
        ask = f"from posleak import load; print(load({str(folder)!r}, trust_remote_code=True).identity.code_sha256)"
        done = run(ask, cache)
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout.strip())
    assert len(seen) == 2
    assert "None" not in seen
    edit_config(folder, model_type="llama", auto_map={})
    assert load(folder, trust_remote_code=True, cache=cache).identity.code_sha256 is None


def test_digest_of_a_run_depends_on_tokenizer_and_code() -> None:
    from posleak.runs.record import IDENTITY_FIELDS

    assert {"tokenizer_sha256", "code_sha256"} <= set(IDENTITY_FIELDS)


# -- 2. the memory of hashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sha256": 5}', b'{"sha256": "short"}', b"\xff" * 9])
def test_damaged_memory_counts_as_none(content: bytes, folder: Path, cache: Path) -> None:
    first = load(folder, cache=cache).identity
    (record,) = (cache / "hashes").iterdir()
    record.write_bytes(content)
    assert load(folder, cache=cache).identity == first
    assert json.loads(record.read_bytes())["sha256"]


def test_flipped_byte_with_the_old_time_is_seen(folder: Path, cache: Path) -> None:
    first = load(folder, cache=cache).identity.weights_sha256
    flip_last_byte(folder / "model.safetensors")
    assert load(folder, cache=cache).identity.weights_sha256 != first


def test_verify_hashes_again(folder: Path, cache: Path) -> None:
    first = load(folder, cache=cache).identity.weights_sha256
    (record,) = (cache / "hashes").iterdir()
    record.write_text(json.dumps({"sha256": "0" * 64}))
    assert load(folder, cache=cache).identity.weights_sha256 != first
    assert load(folder, cache=cache, verify=True).identity.weights_sha256 == first


def test_verify_hashes_a_gguf_file_again(gguf: Path, cache: Path) -> None:
    quietly(gguf, cache)
    (record,) = (cache / "hashes").iterdir()
    record.write_text(json.dumps({"sha256": "0" * 64}))
    quietly(gguf, cache, verify=True)
    assert len(list((cache / "models").iterdir())) == 1


def test_memory_that_cannot_be_written_costs_nothing_else(folder: Path, cache: Path) -> None:
    cache.mkdir()
    (cache / "hashes").write_text("a file in the way")
    assert load(folder, cache=cache).identity.layers == 3


def test_leftovers_in_the_memory_are_removed(folder: Path, cache: Path) -> None:
    (cache / "hashes").mkdir(parents=True)
    (cache / "hashes" / ".abc.json.0123abcd.tmp").write_text("half")
    load(folder, cache=cache)
    assert not list((cache / "hashes").glob(".*.tmp"))


# -- 3. remote code -------------------------------------------------------------------------------------------------


def evil(folder: Path) -> Path:
    """Code that leaves a mark when it is run."""
    mark = folder / "MARK"
    (folder / "evil.py").write_text(
        f"open({str(mark)!r}, 'w').write('run')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class T(PreTrainedTokenizerFast): pass\n"
    )
    return mark


def test_neighbours_of_a_gguf_file_are_not_read(gguf: Path, cache: Path) -> None:
    mark = evil(gguf.parent)
    settings = {"auto_map": {"AutoTokenizer": [None, "evil.T"]}, "tokenizer_class": "T"}
    (gguf.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    done = run(f"from posleak import load; print(load({str(gguf)!r}).tokenizer)", cache, answer="y\n" * 9)
    assert done.returncode == 0, done.stderr
    assert "w91" in done.stdout or "TokenizersBackend" in done.stdout
    assert not mark.exists()
    assert "wish to run" not in done.stdout


@pytest.mark.parametrize("name", ["T", "AutoProcessor", "AutoModelForCausalLM", "AutoFeatureExtractor"])
def test_tokenizer_of_a_folder_runs_no_code_and_asks_nothing(name: str, folder: Path, cache: Path) -> None:
    mark = evil(folder)
    auto = dict.fromkeys(("AutoProcessor", "AutoFeatureExtractor", "AutoImageProcessor"), "evil.T")
    for file in ("preprocessor_config.json", "processor_config.json"):
        (folder / file).write_text(json.dumps({"auto_map": auto}))
    settings = {"tokenizer_class": name} | ({"auto_map": {"AutoTokenizer": [None, "evil.T"]}} if name == "T" else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    done = run(f"from posleak import load; load({str(folder)!r})", cache, answer="y\n" * 9)
    assert "ModelError" in done.stderr
    assert not mark.exists()
    assert "wish to run" not in done.stdout


def calls_without_trust(root: Path) -> Iterator[str]:
    """Calls that may run a stranger's code, and do not say whether they may."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "attr", None)
            if not isinstance(node, ast.Call) or name not in ("from_pretrained", "from_config"):
                continue
            if "PeftModel" in ast.unparse(node.func):  # takes a model that is loaded, and runs no code of a folder
                continue
            if "trust_remote_code" not in [keyword.arg for keyword in node.keywords]:
                yield f"{path.relative_to(root).as_posix()}:{node.lineno}"


def test_every_call_says_whether_code_may_run() -> None:
    own_configs = "tools/shrink.py"  # builds from configs of transformers that no file was read for
    assert [call for call in calls_without_trust(ROOT) if not call.startswith(own_configs)] == []


def test_the_test_above_can_fail(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("AutoModel.from_pretrained('x', revision='y')\n")
    assert list(calls_without_trust(tmp_path)) == ["a.py:1"]


KERNEL = "kernels-community/flash-attn2"


@pytest.mark.parametrize(
    "key",
    ["_attn_implementation", "attn_implementation", "experts_implementation", "_experts_implementation",
     "_attn_implementation_internal", "fusion_config"],
)  # fmt: skip
@pytest.mark.parametrize("value", [KERNEL, {"": KERNEL, "text_config": KERNEL}, "flash_attention_3", 5])
def test_kernels_that_a_config_names_are_not_used(key: str, value: object, folder: Path, cache: Path) -> None:
    edit_config(folder, **{key: value})
    subject = load(folder, cache=cache)
    assert subject.model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(subject.model), logits(small_model()))


def test_configs_inside_a_config_are_disarmed_too() -> None:
    remote = {"auto_map": {"AutoModel": "evil.M"}}
    inner: Any = transformers.LlamaConfig.from_dict({**remote, "attn_implementation": KERNEL})
    outer: Any = transformers.LlamaConfig.from_dict(remote)
    outer.deep = [{"x": inner}]
    configs.disarm(outer, trust_remote_code=False)
    assert inner._attn_implementation is None
    assert not hasattr(inner, "auto_map")
    assert not hasattr(outer, "auto_map")


def test_adapter_other_weights_and_foreign_code_are_refused(folder: Path, cache: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    with raises(ModelError, where=folder / "adapter_config.json", remedy="merge_and_unload"):
        load(folder, cache=cache)
    (folder / "adapter_config.json").unlink()
    edit_config(folder, transformers_weights="other.safetensors")
    with raises(ModelError, where=folder / "config.json", got=("transformers_weights", "other.safetensors")):
        load(folder, cache=cache)
    edit_config(folder, transformers_weights=None, auto_map={"AutoModelForCausalLM": "else/where--modeling.M"})
    with raises(ModelError, where=folder / "config.json", got="else/where--modeling.M"):
        load(folder, cache=cache, trust_remote_code=True)
    assert load(folder, cache=cache).identity.model_class == "LlamaForCausalLM"


def test_quantised_weights_that_need_kernels_need_trust(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda *_: True)
    with raises(
        ModelError, where=folder / "config.json", what="compiled code", got="'fp8'", remedy="--trust-remote-code"
    ):
        load(folder, cache=cache)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with raises(ModelError, where=folder, got="ImportError"):  # the package that it needs is named
        load(folder, cache=cache)


def test_transformers_reaches_no_hub_while_it_reads() -> None:
    from huggingface_hub import constants
    from transformers.dynamic_module_utils import resolve_trust_remote_code

    before = constants.HF_HUB_OFFLINE
    with pretrained.offline_transformers():
        assert constants.HF_HUB_OFFLINE
        with pytest.raises(ValueError, match="trust_remote_code"):
            resolve_trust_remote_code(None, "some/model", has_local_code=False, has_remote_code=True)
    assert before == constants.HF_HUB_OFFLINE


# -- 4. cards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: mit", "mit"),
        ("language: en\nlicense: 'apache-2.0'  # as before\ntags: [x]", "apache-2.0"),
        ("license: other\nlicense_name: llama3\nlicense_link: LICENSE", "llama3"),
        ("license:\n- cc-by-4.0\n- mit", "cc-by-4.0"),
        ("license:\nlanguage: en", None),
        ("model:\n  license: mit", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_licence_is_read_from_the_card(front: str, licence: str | None, end: str, tmp_path: Path) -> None:
    card = f"---\n{front}\n---\n# A model\nlicense: not this one\n"
    (tmp_path / "README.md").write_bytes(card.replace("\n", end).encode())
    assert _licence(tmp_path) == licence


def test_card_without_front_matter_or_end(tmp_path: Path) -> None:
    for card in (b"license: mit\n", b"---\nlicense: mit\n", b"\xff\xfe---\n", b""):
        (tmp_path / "README.md").write_bytes(card)
        assert _licence(tmp_path) is None


def test_card_that_would_explode_does_not(tmp_path: Path) -> None:
    levels = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    (tmp_path / "README.md").write_text(f"---\na0: &a0 [x]\n{levels}license: *a8\n---\n" + "x" * 10**7)
    tracemalloc.start()
    assert _licence(tmp_path) is None
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


# -- 5. messages instead of tracebacks ------------------------------------------------------------------------------


def test_damaged_tokenizer_file_is_named(spoken: Path, cache: Path) -> None:
    words = spoken / "tokenizer.json"
    whole = words.read_text()
    for damaged in (whole.replace('"vocab"', '"vocap"'), whole[:-20], whole.replace('"BPE"', '"BPF"')):
        words.write_text(damaged)
        with raises(ModelError, where=words, what="tokenizer") as caught:
            load(spoken, cache=cache)
        assert caught.value.where == str(words)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": "four"}, {"num_attention_heads": 0}, {"hidden_size": None}, {"rope_parameters": 5},
        {"rope_parameters": {"rope_type": "nonsense"}}, {"hidden_act": "nonsense"}, {"vocab_size": -1},
        {"auto_map": 5}, {"model_type": ["llama"]}, {"architectures": 5}, {"dtype": "nonsense"}, {"dtype": "nn"},
        {"layer_types": [1]}, {"num_key_value_heads": 3}, {"head_dim": 0}, {"quantization_config": 5},
        {"quantization_config": {"quant_method": "nonsense"}}, {"text_config": 5}, {"id2label": 5},
    ],
)  # fmt: skip
def test_odd_configs_load_or_are_refused_in_words(change: dict[str, Any], folder: Path, cache: Path) -> None:
    edit_config(folder, **change)
    try:
        load(folder, cache=cache)
    except ModelError as error:
        assert str(folder) in str(error)  # noqa: PT017
        assert error.remedy  # noqa: PT017


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04\x95", b"PK\x03\x04"])
def test_damaged_pickle_is_refused_in_words(content: bytes, folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with raises(ModelError, where=folder, what="transformers", remedy="again"):
        load(folder, cache=cache, allow_pickle=True)


def test_gguf_whose_metadata_contradicts_its_tensors(gguf: Path, cache: Path) -> None:
    data = gguf.read_bytes()
    for key, value in ((b"llama.feed_forward_length", 41), (b"llama.attention.head_count_kv", 4)):
        place = data.index(key) + len(key) + 4
        gguf.write_bytes(data[:place] + struct.pack("<I", value) + data[place + 4 :])
        with raises(ModelError, where=gguf):
            quietly(gguf, cache)
    assert list((cache / "unfinished").iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "~nobody-here/x", "/x" * 3000, "~" * 300])
def test_names_that_no_file_can_have(name: str, cache: Path) -> None:
    with pytest.raises(ModelError):
        load(name, cache=cache)
    with pytest.raises(ModelError):
        checkpoints(name)


@pytest.mark.parametrize("name", ["", None, 5, b"x"])
def test_what_is_no_name(name: Any, cache: Path) -> None:
    with raises(ModelError, where="load", got=repr(name), remedy="Subject.of"):
        load(name, cache=cache)


def odd_folder(tmp_path: Path) -> Path:
    """A folder whose name is not UTF-8."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff\x1b[31m"))
    path.mkdir()
    return path


def test_folder_whose_name_is_no_utf8(tmp_path: Path, cache: Path) -> None:
    with raises(ModelError, what="UTF-8", remedy="rename"):
        load(save(small_model(), odd_folder(tmp_path)), cache=cache)


def test_gguf_file_whose_name_is_no_utf8(tmp_path: Path, gguf: Path, cache: Path) -> None:
    other = odd_folder(tmp_path) / os.fsdecode(b"t\xfe.gguf")
    gguf.rename(other)
    first = quietly(other, cache).identity
    assert quietly(other, cache).identity == first
    record = caching.read_manifest(next((cache / "models").iterdir()))
    assert record is not None
    assert record.name == r"t\xfe.gguf"


@pytest.mark.parametrize("model", [None, "gpt2", torch.nn.Linear(2, 2), small_model])
def test_objects_that_are_no_models(model: Any) -> None:
    with raises(
        ModelError, where="Subject.of", got=type(model).__name__, expected="PreTrainedModel", remedy="posleak.load"
    ):
        Subject.of(model)


def test_object_that_is_no_tokenizer() -> None:
    with raises(ModelError, where="Subject.of", got="str 'gpt2'", expected="PreTrainedTokenizerBase"):
        Subject.of(small_model(), "gpt2")  # type: ignore[arg-type]


def test_model_that_cannot_be_described() -> None:
    model = small_model()
    vars(model.config)["vocab_size"] = "many"
    with raises(ModelError, where="me", got="ValueError"):
        Subject.of(model, name="me")


class PanicException(BaseException):
    """What Rust libraries raise is no Exception."""


@pytest.mark.parametrize("error", [TypeError("x\n  y"), ZeroDivisionError(), PanicException("unwrap"), Exception()])
def test_border_names_the_class_and_the_place(error: BaseException) -> None:
    with pytest.raises(ModelError) as caught, translate_errors("it broke", Path("a") / "b", "mend it"):
        raise error
    assert (caught.value.what, caught.value.where, caught.value.remedy) == ("it broke", "a/b", "mend it")
    assert str(caught.value.got).startswith(type(error).__name__)
    assert "\n" not in str(caught.value.got)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.ENOMEM, "no"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
     torch.OutOfMemoryError("CUDA out of memory."), Exception("Cannot allocate memory (os error 12)")],
)  # fmt: skip
def test_border_knows_when_memory_ran_out(error: Exception) -> None:
    with (
        raises(TooLargeError, what="memory", remedy=("bfloat16", "--offload", "--device-map auto")),
        translate_errors("it broke", "a", "mend it"),
    ):
        raise error


def test_border_lets_interruptions_and_own_errors_pass() -> None:
    for error in (KeyboardInterrupt(), SystemExit(), StorageError("own")):
        with pytest.raises(type(error)), translate_errors("it broke", "a", "mend it"):
            raise error


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EACCES, "no"), "read"),
        (OSError(errno.ENOSPC, "full"), "space"),
        (Exception("No space left on device (os error 28)"), "space"),
        (OSError(errno.ENAMETOOLONG, "long"), "shorter name"),
        (OSError(errno.ENOENT, "gone"), "mend it"),
    ],
)
def test_remedy_fits_the_reason(error: Exception, remedy: str) -> None:
    with raises(ModelError, where="a", got=error.args[-1], remedy=remedy), translate_errors("it broke", "a", "mend it"):
        raise error


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "space"), (errno.EROFS, "write"),
     (errno.ENOTDIR, "move")],
)  # fmt: skip
def test_cache_that_cannot_be_written_is_named_with_what_helps(
    number: int, remedy: str, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for where in ("file_lock", "require_disk_space", "publish"):
        with monkeypatch.context() as patch:
            patch.setattr(caching, where, fail)
            with raises(ModelError, where=cache, what="written", remedy=(remedy, "POSLEAK_CACHE")) as caught:
                quietly(gguf, cache)
            assert caught.value.where == str(cache)


def test_cache_that_is_a_file(gguf: Path, cache: Path) -> None:
    cache.write_text("in the way")
    with raises(ModelError, where=cache, what="written", remedy=("move", cache, "POSLEAK_CACHE")):
        quietly(gguf, cache)


# -- 6. absurd sizes ------------------------------------------------------------------------------------------------


@pytest.fixture
def soon() -> Iterator[None]:
    """What is refused is refused before long, and without much memory."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB


def gpt2() -> transformers.PreTrainedModel:
    sizes: dict[str, Any] = {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def gpt_neo() -> transformers.PreTrainedModel:
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 24, "num_layers": 2, "num_heads": 4}
    sizes |= {"max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]]}
    return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, bos_token_id=1, eos_token_id=2))


def ctrl() -> transformers.PreTrainedModel:
    sizes: dict[str, Any] = {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4, "dff": 40, "n_positions": 64}
    return transformers.CTRLLMHeadModel(transformers.CTRLConfig(**sizes))


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("make", "change", "fields"),
    [
        (small_model, {"num_hidden_layers": 10**12}, {"got": "num_hidden_layers = 1000000000000"}),
        (small_model, {"num_hidden_layers": 1500}, {"got": "1500 layers", "expected": 30}),
        (
            small_model,
            {"layer_types": ["full_attention"] * 1500, "num_hidden_layers": 1500},
            {"got": "1500 layers", "expected": 30},
        ),
        (small_model, {"layer_types": ["full_attention"] * 10**6}, {"got": "items of layer_types = 1000000"}),
        (small_model, {"notes": "x" * 40_000_000}, {"got": "40 MB", "expected": "34 MB"}),
        (small_model, {"eos_token_id": [1] * 10**6}, {"got": "items of eos_token_id = 1000000"}),
        (small_model, {"num_labels": 10**9}, {"got": "num_labels"}),
        (small_model, {"vocab_size": 10**9}, {"got": "parameters", "expected": "at most"}),
        (small_model, {"vocab_size": 10**7}, {"got": "parameters", "expected": "at most"}),
        (small_model, {"vocab_size": 10**18}, {"where": "absurd", "what": "no model"}),
        (small_model, {"intermediate_size": 10**9}, {"got": "parameters", "expected": "at most"}),
        (small_model, {"head_dim": 10**9}, {"got": "parameters", "expected": "at most"}),
        (gpt2, {"n_positions": 10**9}, {"got": "parameters", "expected": "at most"}),
        (gpt2, {"n_positions": 10**6}, {"got": "wpe.weight (64, 24) for (1000000, 24)"}),
        (gpt_neo, {"max_position_embeddings": 10**5}, {"what": "tables"}),
        (gpt_neo, {"attention_types": [[["global"], 10**12]]}, {"got": "a number in a list = 1000000000000"}),
        (ctrl, {"n_positions": 10**7}, {"what": "tables"}),
    ],
)
def test_absurd_configs_are_refused(
    make: Callable[[], transformers.PreTrainedModel],
    change: dict[str, Any],
    fields: dict[str, Any],
    tmp_path: Path,
    cache: Path,
) -> None:
    folder = save(make(), tmp_path / "absurd")
    edit_config(folder, **change)
    with raises(ModelError, **fields):
        load(folder, cache=cache)


@pytest.mark.usefixtures("soon")
def test_absurd_tokenizer_file_is_refused(spoken: Path, cache: Path) -> None:
    with (spoken / "tokenizer.json").open("ab") as words:
        words.truncate(10**9)
    with raises(ModelError, where=spoken / "tokenizer.json", got="1.0 GB", expected="134 MB"):
        load(spoken, cache=cache)


def test_model_that_fits_its_files_but_not_the_memory(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(folder, vocab_size=1_000_000)
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 100_000_000)
    with raises(TooLargeError, where=folder, got="192 MB", expected="100 MB"):
        load(folder, cache=cache)


def gguf_bytes(tensors: int = 0, keys: int = 0, body: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + body


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def table(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name.encode() + packed + struct.pack("<IQ", kind, offset)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("data", "got"),
    [
        (b"GGUF", "4 bytes"),
        (gguf_bytes(magic=b"FUGG"), "version"),
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes(tensors=2**64 - 1), "18446744073709551615 tensors"),
        (gguf_bytes(keys=10**12, body=bytes(1000)), "1000000000000 keys"),
        (gguf_bytes(keys=1, body=struct.pack("<Q", 2**63) + bytes(99)), "a text of 9223372036854775808 bytes"),
        (
            gguf_bytes(keys=1, body=key("k", 8, struct.pack("<Q", 10**15)) + bytes(99)),
            "a text of 1000000000000000 bytes",
        ),
        (gguf_bytes(keys=1, body=key("k", 9, struct.pack("<IQ", 4, 10**15)) + bytes(99)), "1000000000000000 items"),
        (gguf_bytes(keys=1, body=key("k", 9, struct.pack("<IQ", 8, 10**15)) + bytes(99)), "1000000000000000 strings"),
        (gguf_bytes(keys=1, body=key("k", 9, struct.pack("<IQ11Q", 8, 10, *[2**64 - 8] * 11))), "18446744073709551608"),
        (gguf_bytes(keys=1, body=key("k", 9, struct.pack("<IQ", 9, 1)) + bytes(99)), "an array of type 9"),
        (gguf_bytes(keys=1, body=key("k", 77, bytes(99))), "a value of type 77"),
        (gguf_bytes(keys=2, body=key("k", 0, b"1") * 2 + bytes(99)), "the key 'k' twice"),
        (gguf_bytes(keys=1, body=key("general.alignment", 4, bytes(4)) + bytes(99)), "general.alignment 0"),
        (gguf_bytes(tensors=1, body=struct.pack("<Q1sI", 1, b"t", 10**9) + bytes(99)), "1000000000 dimensions"),
        (gguf_bytes(tensors=1, body=table("t", [2**40, 2**40]) + bytes(99)), "of shape"),
        (gguf_bytes(tensors=1, body=table("t", [4], offset=10**12) + bytes(99)), "at byte 1000000000000"),
        (gguf_bytes(tensors=1, body=table("t", [4], kind=12345) + bytes(99)), "of type 12345"),
        (gguf_bytes(tensors=3, body=b"".join(table(n, [20]) for n in "abc") + bytes(120)), "' of shape"),
    ],
)
def test_gguf_headers_that_lie_are_refused(data: bytes, got: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "lie.gguf").write_bytes(data)
    with raises(ModelError, where=tmp_path / "lie.gguf", what="GGUF", got=got):
        quietly(tmp_path / "lie.gguf", cache)


def test_gguf_with_two_tensors_of_one_name_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "lie.gguf").write_bytes(gguf_bytes(tensors=2, body=table("t", [4]) * 2 + bytes(99)))
    with raises(ModelError, where=tmp_path / "lie.gguf", got="'t'", expected="different names"):
        quietly(tmp_path / "lie.gguf", cache)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("blocks", [0, 2, 4, 10**6, 2**32 - 1])  # without the key transformers takes 32 layers
def test_gguf_with_another_number_of_blocks_is_refused(blocks: int, gguf: Path, cache: Path) -> None:
    data, name = gguf.read_bytes(), b"llama.block_count"
    place = data.index(name) + len(name) + 4
    gguf.write_bytes(data[:place] + struct.pack("<I", blocks) + data[place + 4 :])
    with raises(ModelError, where=gguf, got=f"block_count = {blocks}", expected=3):
        quietly(gguf, cache)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", ["llama.embedding_length", "llama.feed_forward_length", "llama.vocab_size"])
def test_gguf_that_describes_a_huge_model_is_refused(name: str, gguf: Path, cache: Path) -> None:
    data = gguf.read_bytes()
    place = data.index(name.encode()) + len(name) + 4
    gguf.write_bytes(data[:place] + struct.pack("<I", 4 * 10**8) + data[place + 4 :])
    with raises(ModelError, where=gguf, got="parameters", expected="18,648"):
        quietly(gguf, cache)


def test_gguf_header_says_what_the_file_holds(gguf: Path) -> None:
    header = gguf_file.read_header(gguf)
    assert header.fields["llama.block_count"] == 3
    assert header.fields["general.architecture"] == "llama"
    assert header.fields["tokenizer.ggml.tokens"] == 97
    assert {tensor.name: tensor.shape for tensor in header.tensors}["token_embd.weight"] == (24, 97)
    assert sum(tensor.elements for tensor in header.tensors) == sum(p.numel() for p in small_model().parameters())


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "data",
    [
        b"", b"123", safetensors_bytes({"t": ENTRY}, bytes(8), length=2**63),
        safetensors_bytes([1], bytes(8)), safetensors_bytes({"t": 5}, bytes(8)), safetensors_bytes({"t": {}}, bytes(8)),
        safetensors_bytes({"t": ENTRY}, bytes(7)), safetensors_bytes({"t": ENTRY}, bytes(9)),
        safetensors_bytes({"t": {**ENTRY, "shape": [10**12]}}, bytes(8)),
        safetensors_bytes({"t": {**ENTRY, "shape": [-2]}}, bytes(8)),
        safetensors_bytes({"t": {**ENTRY, "shape": [10**18] * 100_000}}, bytes(8)),
        safetensors_bytes({"t": {**ENTRY, "shape": [2.0]}}, bytes(8)),
        safetensors_bytes({"t": {**ENTRY, "shape": 2}}, bytes(8)),
        safetensors_bytes({"t": {**ENTRY, "data_offsets": [0, 10**12]}}, bytes(8)),
        safetensors_bytes({"t": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
        safetensors_bytes({"t": {**ENTRY, "dtype": "X9", "shape": [10**12]}}, bytes(8)),
        safetensors_bytes({"a": ENTRY, "b": ENTRY}, bytes(8)),
        struct.pack("<Q", 1 << 26) + b"[" * (1 << 26),
    ],
)  # fmt: skip
def test_safetensors_headers_that_lie_are_refused(data: bytes, folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with raises(ModelError, where=folder / "model.safetensors", what="safetensors") as caught:
        load(folder, cache=cache)
    assert caught.value.where == str(folder / "model.safetensors")


# -- 7. limits of the process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_available_memory_is_within_the_limits_of_the_process(kind: str, cache: Path) -> None:
    code = (
        "import psutil, resource, torch; from posleak.models import available_bytes\n"
        "held = psutil.Process().memory_info()\n"
        f"resource.setrlimit(resource.{kind}, (held.vms + 10**9, resource.RLIM_INFINITY))\n"
        "print(available_bytes('cpu'), held.vms + 10**9 - held.data)"
    )
    done = run(code, cache)
    assert done.returncode == 0, done.stderr
    have, most = map(int, done.stdout.split())
    assert 0 < have <= (1_000_000_000 if kind == "RLIMIT_AS" else most)


def test_every_container_around_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("1:cpu:/x\n0::/a/b\n")
    monkeypatch.setattr(memory, "PROCESS_CGROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path)
    for folder, limit in ((tmp_path / "a" / "b", "max"), (tmp_path / "a", "5000"), (tmp_path, "max")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("1000")
        (folder / "memory.stat").write_text("inactive_file 0\n")
    assert memory.available_bytes("cpu") == 4000


def test_small_sizes_are_not_written_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 3000)
    with raises(TooLargeError, where="x", got="55 kB", expected="3.0 kB") as caught:
        memory.Target("cpu").require_memory(55_000, "x")
    assert "0.0" not in str(caught.value)


# -- 8. locks -------------------------------------------------------------------------------------------------------


def test_lock_is_held_by_one_at_a_time(cache: Path) -> None:
    inside: list[int] = []

    def work(number: int) -> None:
        with caching.lock(cache, "key"):
            inside.append(number)
            assert len(inside) == 1
            time.sleep(0.05)
            inside.pop()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert list((cache / "locks").iterdir()) == []


# -- 9. what a terminal would obey ----------------------------------------------------------------------------------


def test_messages_and_names_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _to_stderr("title \x1b]0;x\x07 of a model")
    assert "\x1b" not in capsys.readouterr().err
    subject = Subject.of(small_model(), name="a\x1b[2Jb\nc\udcff")
    for text in (subject.identity.short(), repr(subject)):
        assert "\x1b" not in text
        assert "\n" not in text
    assert subject.identity.name == "a\x1b[2Jb\nc\\xff"
    written = json.dumps(plain(subject.identity), ensure_ascii=False).encode()
    assert from_json(Identity, written) == subject.identity


def test_bounds_leave_real_models_alone() -> None:
    deepseek = {"num_hidden_layers": 61, "n_routed_experts": 256, "max_position_embeddings": 163_840}
    quantised = {"quantization_config": {"ignore": [f"model.layers.{n}.mlp" for n in range(20_000)]}}
    memory.require_plausible(Path("config.json"), {**deepseek, **quantised, "eos_token_id": [151_645, 262_143]})
