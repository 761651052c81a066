"""Stub subjects for the tests of inputs: a Llama with one small layer, and tokenizers built in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
PROBE_WORDS = ["the", "position", "of", "a", "word"]
WORDS = [f"w{number}" for number in range(400)]


def model(vocab_size: int = 32, **config: Any) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            **({"bos_token_id": 1, "eos_token_id": 2} | config),
        )
    )


def word_tokenizer(prepend: str = "") -> Any:
    """Return a tokenizer with one token per word: ids 0-3 are special, then the words of the probe, then w0, w1, …"""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + PROBE_WORDS + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if prepend:
        tokens = [(token, vocabulary[token]) for token in set(prepend.split())]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{prepend} $A </s>", special_tokens=[*tokens, ("</s>", vocabulary["</s>"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def byte_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer, which encodes any text; `<|end|>` is special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the position of a word in the text of the library"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def stub_subject(tokenizer: Any = None, vocab_size: int | None = None, **config: Any) -> Any:
    """Return an object with the two attributes of a Subject that inputs read."""
    rows = vocab_size or (32 if tokenizer is None else len(tokenizer))
    return SimpleNamespace(model=model(rows, **config), tokenizer=tokenizer)
