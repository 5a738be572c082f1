"""Corpora of all formats are read as their sources describe them, and what is wrong in them is said."""

import gzip
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import invoke, kvbench
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.sessions.corpus import CorpusFigures
from kvbench.core.sessions.corpus_formats import grown_blocks
from kvbench.errors import InputError, KvbenchError
from kvbench.planning.corpus_files import FORMATS, load_corpus

EXCERPT = Path(__file__).parents[2] / "recorded/agentic/excerpt.jsonl.gz"
WHOLE = Path(__file__).parents[4] / "shared/data/agentic-traces/traces.jsonl.gz"
"""36 conversations of kv-cache-tester, where they lie beside the checkout."""

HELPED = {
    "id": "helped",
    "block_size": 4,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "s", "in": 9, "out": 2, "hash_ids": [1, 2, 3], "api_time": 2.0},
        {
            "t": 3.0,
            "type": "subagent",
            "agent_id": "one",
            "requests": [
                {"t": 4.0, "type": "n", "in": 4, "out": 1, "hash_ids": [9], "api_time": 1.0},
                {"t": 7.0, "type": "n", "in": 8, "out": 1, "hash_ids": [9, 8], "api_time": 2.0},
            ],
        },
        {"t": 10.0, "type": "s", "in": 16, "out": 3, "hash_ids": [1, 2, 5, 6], "think_time": 8.0},
        {"t": 14.0, "type": "s", "in": 16, "out": 3, "hash_ids": [1, 2, 5, 7], "think_time": 9.0},
    ],
}


def written(folder: Path, *rows: Any, name: str = "corpus.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_recorded_conversation_with_a_subagent(tmp_path: Path) -> None:
    corpus = load_corpus(written(tmp_path, HELPED))
    (session,) = corpus.sessions
    first, second, third = session.turns
    (helper,) = first.subagents
    assert [turn.sent_s for turn in session.turns] == [0.0, 10.0, 14.0]
    assert [turn.sent_s + helper.start_s for turn in helper.turns] == [4.0, 7.0]
    # Its first request came two seconds after its parent's answer, the second two after its own.
    assert [turn.think_time_s for turn in helper.turns] == [2.0, 2.0]
    # It was answered at 9; what is recorded since the parent's own answer is longer.
    assert second.think_time_s == 1.0
    # Nobody says when the answer before ended: it was sent four seconds ago.
    assert third.think_time_s == 4.0
    assert first.blocks.tolist() == [1, 2]  # the third is no whole block
    assert (corpus.block_tokens, corpus.scope, session.subagent_count()) == (4, "session", 1)


def test_a_subagent_that_nobody_began_is_left_out_and_said(tmp_path: Path) -> None:
    late = {**HELPED, "requests": HELPED["requests"][1:]}  # type: ignore[index]
    corpus = load_corpus(written(tmp_path, late))
    assert corpus.sessions[0].subagent_count() == 0
    assert any("1 sub-agents before their session's first request" in note for note in corpus.notes)


def test_a_folder_and_a_file_of_many_lines_are_the_same(tmp_path: Path) -> None:
    one = written(tmp_path, HELPED, {**HELPED, "id": "other"})
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("helped", "other"):
        (folder / f"{name}.json").write_text(json.dumps({**HELPED, "id": name}, indent=1))
    packed = tmp_path / "corpus.gz"
    packed.write_bytes(gzip.compress(one.read_bytes()))
    found = [CorpusFigures(load_corpus(path)).spreads() for path in (one, folder, packed)]
    assert found[0] == found[1] == found[2]


def test_aiperf_sessions(tmp_path: Path) -> None:
    system = {"role": "system", "text": "s" * 400}
    first = {"text": "x" * 800, "output_length": 50}
    again = {"text": "y" * 40, "output_length": 7, "delay": 1500}
    (session,) = load_corpus(written(tmp_path, {"session_id": "a", "turns": [system, first, again]})).sessions
    assert [(turn.input_len, turn.output_len) for turn in session.turns] == [(300, 50), (360, 7)]
    assert [turn.think_time_s for turn in session.turns] == [0.0, 1.5]
    assert session.turns[1].blocks[:4].tolist() == session.turns[0].blocks.tolist()


def test_aiperf_answers_need_a_length(tmp_path: Path) -> None:
    path = written(tmp_path, {"session_id": "a", "turns": [{"text": "hello"}]})
    with pytest.raises(InputError, match=r"corpus\.jsonl:1, turns\[0\]: output_length") as error:
        load_corpus(path)
    assert "--output-len" in error.value.hint
    assert load_corpus(path, output_len=9).sessions[0].turns[0].output_len == 9


def test_sharegpt_conversations(tmp_path: Path) -> None:
    sizes = [("system", 40), ("human", 80), ("gpt", 20), ("gpt", 8), ("human", 4), ("gpt", 400)]
    talk = [{"from": who, "value": "é" * (size // 2)} for who, size in sizes]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "q", "conversations": talk}, {"id": "r", "conversations": talk[:1]}]))
    corpus = load_corpus(path)
    (session,) = corpus.sessions
    # What gpt adds of its own accord is part of the next prompt.
    assert [(turn.input_len, turn.output_len) for turn in session.turns] == [(30, 5), (38, 100)]
    assert any("1 conversations without an answer" in note for note in corpus.notes)


def test_lengths_alone(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "input_len": 640, "output_len": 10, "offset_s": 3.5},
        {"session_id": "b", "input_len": 65, "output_len": 1},
        {"session_id": "a", "input_len": 700, "output_len": 10, "think_time_s": 2},
        {"session_id": "a", "input_len": 128, "output_len": 10},
    ]
    a, b = load_corpus(written(tmp_path, *rows)).sessions
    assert (a.start_s, b.start_s) == (3.5, 0.0)
    assert [len(turn.blocks) for turn in a.turns] == [10, 10, 2]
    assert a.turns[0].blocks.tolist() == a.turns[1].blocks.tolist()
    assert not set(a.turns[2].blocks.tolist()) & set(a.turns[1].blocks.tolist())  # it began anew


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 90)), max_size=12), st.integers(1, 70))
def test_grown_blocks_are_whole_and_begin_as_before(lengths: list[tuple[int, int]], size: int) -> None:
    found = [block.tolist() for block in grown_blocks(lengths, size)]
    assert [len(blocks) for blocks in found] == [input_len // size for input_len, _ in lengths]
    for place in range(1, len(found)):
        grows = lengths[place][0] >= sum(lengths[place - 1])
        shared = len(found[place - 1]) if grows else 0
        assert found[place][:shared] == found[place - 1][:shared]
        assert not set(found[place][shared:]) & {number for before in found[:place] for number in before}


def test_a_parquet_table_is_read_row_by_row(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 20}]
    rows = [{"id": "a", "conversations": talk}, {"id": "b", "conversations": talk}]
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    as_json = load_corpus(written(tmp_path, *rows))
    assert CorpusFigures(load_corpus(path)).spreads() == CorpusFigures(as_json).spreads()
    lengths: list[dict[str, float | None]] = [
        {"session_id": 7, "input_len": 640, "output_len": 10, "think_time_s": None},
        {"session_id": 7, "input_len": 700, "output_len": 10, "think_time_s": 2.5},
    ]
    pq.write_table(pa.Table.from_pylist(lengths), path)
    (session,) = load_corpus(path).sessions
    assert [(turn.input_len, turn.think_time_s) for turn in session.turns] == [(640, 0.0), (700, 2.5)]
    path.write_bytes(b"PAR1 no table")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        load_corpus(path)


def test_mooncake_requests_share_by_their_ids(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
    ]
    corpus = load_corpus(written(tmp_path, *rows))
    assert (corpus.block_tokens, corpus.scope) == (512, "corpus")
    assert [session.start_s for session in corpus.sessions] == [0.0, 2.0]
    assert (CorpusFigures(corpus).together.found(), CorpusFigures(corpus).together.blocks) == (2, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no session"),
        ("[]", "it has no session"),
        ("{", "is not JSON"),
        ('{"id": 1}', "unknown format with the keys"),
        ("7\n", "must be a JSON object"),
        ('{"requests": []}', "block_size must be a whole number"),
        ('{"block_size": 64, "requests": []}', "it has no request"),
        ('{"block_size": 64, "requests": [{"t": 0, "in": 1, "out": 1.5}]}', "out must be a whole number"),
        ('{"block_size": 64, "requests": [{"t": -1, "in": 1, "out": 1}]}', "t must be a time of at least 0"),
        ('{"block_size": 4, "requests": [{"t": 0, "in": 4, "out": 1, "hash_ids": [1, 2]}]}', "cover more"),
        ('{"block_size": 4, "hash_id_scope": "x", "requests": []}', "must be local or global"),
        ('{"turns": 5}', "turns must be a list"),
        ('{"conversations": [{"from": "gpt"}]}', "value must be a text, not missing"),
        ('{"session_id": "a", "input_len": 3}', "output_len must be a whole number"),
        ('{"session_id": NaN}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_corpus(path)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode), st.sampled_from(("auto", *FORMATS)))
def test_no_file_does_more_than_be_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, kind: str
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_bytes(data)
    with pytest.raises(KvbenchError):
        load_corpus(path, kind)


def test_the_excerpt_as_json_and_as_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "reuse.png"
    gb = ("--model", "tiny", "--gb", "0.1", "--tokens", "50000")
    done = invoke("corpus", str(EXCERPT), "--json", "--plot", str(picture), *gb).succeeded()
    data = json.loads(done.out)
    assert (data["sessions"], data["requests"], data["found_blocks"], data["blocks"]) == (3, 24, 16543, 19753)
    assert [row["tokens"] for row in data["capacities"]] == [48828, 50000, None]
    assert data["capacities"][0]["gb"] == pytest.approx(0.1, rel=1e-4)
    assert data["capacities"][-1]["alone"] == data["capacities"][-1]["together"] == 16543 / 19753
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_excerpt_on_a_terminal() -> None:
    done = kvbench("corpus", str(EXCERPT)).succeeded("16,543 of 19,753 blocks of 64 tokens, 83.7 %")
    assert "unlimited" in done.out


def test_sessions_that_are_made_are_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl.gz"
    done = invoke("corpus", str(EXCERPT), "--generate", "12", "--seed", "5", "--write", str(path), "--json")
    assert done.status == 0, done.err
    made, read = json.loads(done.out), json.loads(invoke("corpus", str(path), "--json").out)
    assert made["sessions"] == 12
    assert made["source"] == "12 sessions generated like excerpt.jsonl.gz (seed 5)"
    assert {**read, "source": "", "notes": []} == {**made, "source": "", "notes": []}
    again = tmp_path / "again.jsonl.gz"
    invoke("corpus", str(EXCERPT), "--generate", "12", "--seed", "5", "--write", str(again))
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gb", "80"), "depends on the model"),
        (("--model", "llama-9"), "unknown model"),
        (("--format", "parquet"), "unknown corpus format"),
        (("--plot", "reuse.pdf"), "is not a picture's name"),
        (("--write", "made.jsonl.gz"), "--write requires generated sessions"),
        (("--generate", "3", "--write", "made.csv"), "--write requires generated sessions"),
        (("--generate", "3", "--write", "nowhere/made.jsonl.gz"), "does not exist"),
        (("--generate", "100000000"), "or fewer"),
        (("--tokens", "few"), "not a whole number"),
    ],
)
def test_bad_options_are_exit_2(options: tuple[str, ...], message: str) -> None:
    invoke("corpus", str(EXCERPT), *options).failed(2, message)


@pytest.mark.heavy
@pytest.mark.skipif(not WHOLE.exists(), reason="the whole corpus is not part of the repository")
def test_the_whole_corpus_to_the_block() -> None:
    figures = CorpusFigures(load_corpus(WHOLE))
    assert (len(figures.corpus.sessions), len(figures.turns)) == (36, 1478)
    assert (figures.together.found(), figures.together.blocks) == (2_639_457, 2_782_431)
    spreads = figures.spreads()
    assert (spreads["prompt_tokens"].median, spreads["output_tokens"].median) == (106_029.5, 218.0)
    for capacity in (3_000, 30_000):
        cache: OrderedDict[int, None] = OrderedDict()
        found = 0
        for prompt in figures.prompts.prompts:
            blocks = prompt.tolist()
            while_known = [block in cache for block in blocks]
            found += while_known.index(False) if False in while_known else len(blocks)
            for block in reversed(blocks):
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > capacity:
                cache.popitem(last=False)
        assert figures.together.found(capacity) == found
