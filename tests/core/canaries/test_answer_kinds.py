"""What a canary's answer is judged to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.canaries.answer_kinds import CanaryAnswer, CanaryResult, judge_canaries, noise_under_load
from kvbench.core.canaries.pool import CanaryPool
from kvbench.core.metrics.equal_answers import Noise
from kvbench.core.records import Outputs, RequestRecord, TokenChoice

RIGHT = tuple(" ".join(f"t{prompt}{place}" for place in range(8)) for prompt in range(100, 120))
POOL = CanaryPool("aggregated", (64, 8), ((64, 8),) * len(RIGHT), 1, 1000, Outputs(RIGHT, 0.1))
NOISY = replace(POOL, answers=Outputs(RIGHT, 0.1, repeats=(Outputs((*RIGHT[:4], "other words " * 3), 0.1),)))


def answered(
    index: int, text: str, canary: int | None = None, *, sent_s: float | None = None
) -> RequestRecord:
    encoded = text.encode()
    sent = float(index) if sent_s is None else sent_s
    return RequestRecord(
        f"r{index}", sent, 64, 8, sent_s=sent, first_token_s=sent + 0.1, last_token_s=sent + 0.5,
        output_len=8, text_crc=crc32(encoded), text_bytes=len(encoded), canary=canary,
        text=text if canary is not None else "",
    )  # fmt: skip


def only(result: CanaryResult) -> tuple[str, str]:
    (wrong,) = result.wrong
    return wrong.kind, wrong.whose


@given(st.lists(st.integers(0, len(RIGHT) - 1), max_size=20, unique=True))
def test_right_answers_are_right(numbers: list[int]) -> None:
    records = [answered(place, RIGHT[number], number) for place, number in enumerate(numbers)]
    result = judge_canaries(POOL, records)
    assert (result.checked, result.wrong, result.noisy) == (len(numbers), (), 0)


def test_another_canary_s_answer_is_whose_it_is() -> None:
    records = [answered(0, RIGHT[1], 0), answered(1, RIGHT[1], 1, sent_s=0.2)]
    assert only(judge_canaries(POOL, records)) == ("another_prompt", "that of r1")


def test_an_answer_to_a_request_that_had_ended_is_stale() -> None:
    records = [answered(0, RIGHT[1], 1), answered(9, RIGHT[1], 0)]
    assert only(judge_canaries(POOL, records)) == ("stale", "that of r0, which had ended 8.50 s before")
    of_earlier_trial = [answered(9, RIGHT[1], 0)]
    assert only(judge_canaries(POOL, of_earlier_trial)) == ("stale", "that of canary prompt 1")


def test_an_ordinary_request_s_answer_is_known_by_its_checksum() -> None:
    theirs = "words that nobody expected at all"
    others = [answered(index, f"others' words {index}") for index in range(10, 20)]
    same_time = [answered(1, theirs, sent_s=4.9), answered(5, theirs, 0), *others]
    assert only(judge_canaries(POOL, same_time)) == ("another_prompt", "that of r1")
    before = [answered(1, theirs), answered(5, theirs, 0), *others]
    assert only(judge_canaries(POOL, before))[0] == "stale"


def test_crossed_streams_are_found_by_who_got_the_right_answer() -> None:
    records = [answered(1, RIGHT[0]), answered(1, "what was due to the other one", 0)]
    records[1].request_id = "mine"
    assert only(judge_canaries(POOL, records)) == ("another_prompt", "crossed with r1")


def test_cut_and_garbage_tell_from_where() -> None:
    cut = judge_canaries(POOL, [answered(0, RIGHT[0][:20], 0)]).wrong[0]
    assert (cut.kind, cut.at_char) == ("cut", 20)
    garbage = judge_canaries(POOL, [answered(0, RIGHT[0][:20] + "?" * 30, 0)]).wrong[0]
    assert (garbage.kind, garbage.at_char) == ("garbage", 20)
    assert "from character 21 on" in garbage.text()
    assert RIGHT[0][:40] in garbage.text()


@given(st.text(max_size=60))
def test_every_other_text_is_wrong_or_begins_as_it_should(text: str) -> None:
    result = judge_canaries(POOL, [answered(0, text, 0)])
    assert result.checked == 1
    assert bool(result.wrong) == (not text.startswith(RIGHT[0]))


def test_what_failed_is_no_answer() -> None:
    failed = replace(answered(0, "", 0), error="timeout")
    result = judge_canaries(POOL, [failed, answered(1, RIGHT[1], 99)])
    assert (result.checked, result.unanswered, result.wrong) == (0, 2, ())


def test_an_aborted_answer_is_no_corrupt_answer() -> None:
    aborted = replace(answered(0, RIGHT[0][:20], 0), error="aborted")
    result = judge_canaries(POOL, [aborted])
    assert (result.checked, result.unanswered, result.wrong) == (0, 1, ())


def test_what_happened_around_is_told() -> None:
    broken = replace(answered(3, ""), error="reset")
    wrong = judge_canaries(
        POOL, [broken, answered(4, "nonsense and more of it", 0), answered(5, "x" * 20, sent_s=3.8)]
    ).wrong
    assert "1 others were in flight" in wrong[0].around
    assert "1 × reset, last r3" in wrong[0].around


def test_what_is_asked_beside_the_load_is_judged_as_well() -> None:
    canaries = [CanaryAnswer(2, RIGHT[2], "a"), CanaryAnswer(3, RIGHT[4], "b", when="end_of_cell")]
    result = judge_canaries(POOL, [], canaries)
    assert result.checked == 2
    assert only(result)[0] == "stale"
    assert CanaryAnswer.from_json(asdict(canaries[1])) == canaries[1]


def test_a_server_that_differs_from_itself_is_judged_by_how_often() -> None:
    honest = [answered(n, RIGHT[n] if n > 3 else "other words " * 3, n) for n in range(20)]
    assert judge_canaries(POOL, honest).wrong
    result = judge_canaries(NOISY, honest)
    assert (result.wrong, result.noisy) == ((), 4)
    assert result.power > judge_canaries(POOL, honest).power
    broken = [answered(n, f"garbage of request {n}", n) for n in range(20)]
    assert len(judge_canaries(replace(NOISY, under_load=Noise(100, 4)), broken).wrong) == 20


def test_another_prompt_s_answer_is_no_noise() -> None:
    records = [answered(0, RIGHT[1], 0), answered(1, RIGHT[1], 1, sent_s=0.2)]
    assert only(judge_canaries(NOISY, records))[0] == "another_prompt"


def test_margins_decide_where_log_probabilities_are_told() -> None:
    def choices(gap: float) -> tuple[TokenChoice, ...]:
        return (TokenChoice("yes, and so on", {"yes, and so on": -0.1, "no, not at all": -0.1 - gap}),)

    again = Outputs(("yes, and so on",), 0.1, (choices(0.3),))
    for gap, refused in ((0.05, False), (3.0, True)):
        answers = Outputs(
            ("yes, and so on",), 0.1, (choices(gap),), (replace(again, choices=(choices(gap + 0.1),)),)
        )
        pool = replace(POOL, answers=answers)
        result = judge_canaries(pool, [answered(0, "no, not at all", 0)])
        assert (bool(result.wrong), result.noisy) == (refused, not refused)


def test_the_reference_s_own_garbage_is_its_noise_and_its_crossed_answers_are_wrong() -> None:
    records = [answered(0, "some other garbage", 0), answered(1, RIGHT[1], 1)]
    result = judge_canaries(POOL, records, of_reference=True)
    assert (result.wrong, result.noisy) == ((), 1)
    later = noise_under_load(POOL, [result])
    assert later != POOL
    assert judge_canaries(later, records, of_reference=True) == result
    crossed = [answered(0, RIGHT[1], 0), answered(1, RIGHT[1], 1, sent_s=0.2)]
    assert judge_canaries(POOL, crossed, of_reference=True).wrong


def test_a_long_answer_is_compared_as_far_as_it_is_known() -> None:
    half = replace(
        POOL, lengths=((64, 1000),), answers=Outputs(("the beginning \N{REPLACEMENT CHARACTER}",), 0.1)
    )
    assert not judge_canaries(half, [answered(0, "the beginning éand all the rest of it", 0)]).wrong
    assert judge_canaries(half, [answered(0, "the begimming and all the rest of it", 0)]).wrong


def test_an_empty_right_answer_proves_nothing() -> None:
    pool = replace(POOL, answers=Outputs(("", *RIGHT[1:]), 0.1))
    result = judge_canaries(pool, [answered(0, "whatever came", 0), answered(1, RIGHT[1], 1)])
    assert (result.checked, result.unanswered) == (1, 1)


def test_half_a_character_at_the_end_may_be_left_out_of_a_stream() -> None:
    pool = replace(POOL, answers=Outputs((RIGHT[0] + "\N{REPLACEMENT CHARACTER}", *RIGHT[1:]), 0.1))
    assert not judge_canaries(pool, [answered(0, RIGHT[0], 0)]).wrong


CANNED = "the very same text for every prompt"
LONG = replace(POOL, lengths=((64, 16),) * len(RIGHT), cell_lengths=(64, 16))


def idle(first: Sequence[str], again: Sequence[str]) -> CanaryPool:
    return replace(LONG, answers=Outputs(tuple(first), 0.1, repeats=(Outputs(tuple(again), 0.1),)))


def test_one_text_for_several_prompts_in_one_asking_and_not_in_the_next_is_wrong() -> None:
    """As from a server that gives every second request a canned answer, idle or not."""
    first = [CANNED if place % 2 else text for place, text in enumerate(RIGHT)]
    again = [CANNED if place % 3 else text for place, text in enumerate(RIGHT)]
    result = judge_canaries(idle(first, again), [])
    assert {canary.kind for canary in result.wrong} == {"another_prompt"}
    assert "the same text for 16 canary prompts" in result.wrong[0].text()


def test_texts_that_several_prompts_honestly_have_are_noise() -> None:
    """The same prompts get them each time, or few do not, or they are short."""
    shared = [CANNED if place % 2 else text for place, text in enumerate(RIGHT)]
    few = [*RIGHT[:4], *shared[4:]]
    assert not judge_canaries(idle(shared, shared), []).wrong
    assert not judge_canaries(idle(shared, few), []).wrong
    changed = [CANNED[:31] if place % 3 else text for place, text in enumerate(RIGHT)]
    short = [CANNED[:31] if place % 2 else text for place, text in enumerate(RIGHT)]
    assert not judge_canaries(idle(short, changed), []).wrong
    pool = idle(shared, [CANNED if place % 3 else text for place, text in enumerate(RIGHT)])
    assert not judge_canaries(replace(pool, lengths=POOL.lengths), []).wrong
