"""The tokenizer of the emulated engine's words counts as the engine counts, whatever the text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import invoke
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.load.prompts import tokenizer_files
from kvbench.processes.emulator import protocol

VOCAB = 512
FILES = tokenizer_files(VOCAB, 2048)
TEXTS = st.lists(
    st.one_of(st.integers(1, 999).map(lambda number: f"t{number}"), st.text(max_size=8)), max_size=8
).map(" ".join)


def encoded(words: str) -> list[int]:
    """By what stands in tokenizer.json: split at white space, then by its pattern, then looked up."""
    made: dict[str, Any] = FILES["tokenizer.json"]
    pattern = made["pre_tokenizer"]["pretokenizers"][1]["pattern"]["Regex"]
    vocab, unknown = made["model"]["vocab"], made["model"]["unk_token"]
    pieces = [piece for word in words.split() for piece in re.findall(pattern, word)]
    return [vocab.get(piece, vocab[unknown]) for piece in pieces]


def decoded(ids: list[int]) -> str:
    names = {number: word for word, number in FILES["tokenizer.json"]["model"]["vocab"].items()}
    return " ".join(names[number] for number in ids)


@given(st.lists(st.integers(1, VOCAB - 1), max_size=20))
def test_the_engines_tokens_are_its_tokens(tokens: list[int]) -> None:
    assert (encoded(protocol.decode(tokens)), protocol.encode(decoded(tokens), VOCAB)) == (tokens, tokens)


@given(TEXTS)
def test_of_any_other_text_the_engine_reads_as_many_tokens(words: str) -> None:
    """A foreign client makes tokens of a text, cuts them to a length, and sends what they decode to."""
    ids = encoded(words)
    sent = decoded(ids)
    assert (encoded(sent), len(protocol.encode(sent, VOCAB))) == (ids, len(ids))


def test_hugging_faces_library_reads_it_the_same_way(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    loaded = tokenizers.Tokenizer.from_str(json.dumps(FILES["tokenizer.json"]))
    for words in (" t1 t22 t511", "hello, t7x t999 at12 \u4e16", "", "a\nb"):
        ids = loaded.encode(words).ids
        assert ids == encoded(words)
        assert loaded.decode(ids) == decoded(ids)


def test_launch_writes_it_for_the_emulated_engine_only(tmp_path: Path) -> None:
    invoke("launch", "quickstart", "--print", "--tokenizer", str(tmp_path / "words")).succeeded()
    made = json.loads((tmp_path / "words" / "tokenizer.json").read_text())
    vocab = made["model"]["vocab"]
    assert all(vocab[f"t{number}"] == number for number in range(1, 8192))
    config = json.loads((tmp_path / "words" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    real = invoke("launch", "vllm-cpu-tiny", "--print", "--tokenizer", str(tmp_path / "none")).failed(2)
    assert "has its model's tokenizer" in real.err
    assert not (tmp_path / "none").exists()
