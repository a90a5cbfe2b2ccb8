"""R28, R29, R30: what counts as a verdict, the types of failure, and that reasoning never gives a score."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config_reward import Verdict
from pipeline.core.errors import ConfigError
from stages.genrm.verdict import Failure, FailureType, Score, check_verdict, middle, parse, regex


def number(**changes: Any) -> Verdict:
    return Verdict(**{"kind": "number", "marker": "Reward:", "minimum": -10.0, "maximum": 10.0} | changes)


def choice(**changes: Any) -> Verdict:
    return Verdict(**{"kind": "choice", "choices": {"yes": 1.0, "no": 0.0, "not sure": 0.5, "not": 0.1}} | changes)


def outcome(text: str, verdict: Verdict, finish: str = "stop") -> float | str:
    result = parse(text, finish, verdict)
    return result.value if isinstance(result, Score) else str(result.type)


# ------------------------------------------------------------------------------------------------ R28
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Reward: 10", 10.0),
        ("Reward: 1e-1", 0.1),
        ("Reward: -0.5", -0.5),
        ("Reward: +3", 3.0),
        ("Reward: .5", 0.5),
        ("Reward: 5.", 5.0),
        ("Reward: -.25E+1", -2.5),
        ("Reward:7", 7.0),
        ("Reward:\n 7", 7.0),
        ("Reward: 7.5.", 7.5),
        ("Reward: 7, because", 7.0),
        ("(Reward: 7)", 7.0),
        ("Reward: 7\n\nIndeed.", 7.0),
        ("Reward: 2 Reward: 3", 3.0),
        ("good. Reward: 007", 7.0),
        ("Reward: 10abc", "unparsed"),
        ("Reward: abc", "unparsed"),
        ("Reward: 10/10", "unparsed"),
        ("Reward: 10%", "unparsed"),
        ("Reward: 1,000", "unparsed"),
        ("Reward: 1_0", "unparsed"),
        ("Reward: 0x1", "unparsed"),
        ("Reward: 1e", "unparsed"),
        ("Reward: 1e-", "unparsed"),
        ("Reward: --1", "unparsed"),
        ("Reward: - 1", "unparsed"),
        ("Reward: 1.2.3", "unparsed"),
        ("Reward: nan", "unparsed"),
        ("Reward: inf", "unparsed"),
        ("Reward: \u0663", "unparsed"),  # an Arabic digit
        ("Reward: \u200b7", "unparsed"),  # a zero-width space
        ("Reward: **7**", "unparsed"),
        ("Reward: about 7", "unparsed"),
        ("reward: 7", "unparsed"),
        ("7", "unparsed"),
        ("Reward: 7. I repeat the form, Reward: ", "unparsed"),  # the last marker counts, whatever follows it
        ("Reward: 10.01", "out_of_range"),
        ("Reward: -11", "out_of_range"),
        ("Reward: 1e999", "out_of_range"),
        ("Reward: " + "9" * 5000, "out_of_range"),
    ],
)
def test_r28_number(text: str, expected: float | str) -> None:
    assert outcome(text, number()) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Verdict: yes", 1.0),
        ("3=3. Verdict: no.", 0.0),
        ("Verdict: not sure", 0.5),
        ("Verdict: not surely", 0.1),
        ("Verdict: yes, it is", 1.0),
        ("Verdict: no Verdict: yes\n", 1.0),
        ("Verdict: yesterday", "unparsed"),
        ("Verdict: yes/no", "unparsed"),
        ("Verdict: yes-no", "unparsed"),
        ("Verdict: Yes", "unparsed"),
        ("Verdict: maybe", "unparsed"),
        ("Verdict: ", "unparsed"),
        ("yes", "unparsed"),
        ("Verdict: y\u200bes", "unparsed"),
    ],
)
def test_r28_choice(text: str, expected: float | str) -> None:
    assert outcome(text, choice()) == expected


@given(value=st.floats(-10, 10), style=st.sampled_from(["{}", "{:.3f}", "{:e}", "{:+g}"]))
def test_r28_any_way_to_write_a_number(value: float, style: str) -> None:
    written = style.format(value)
    assert outcome(f"so. Reward: {written}", number(minimum=-11.0, maximum=11.0)) == float(written)


# ------------------------------------------------------------------------------------------------ R29
@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        ("", "stop", "empty"),
        (" \n\t", "stop", "empty"),
        ("", "length", "truncated"),
        ("let me think", "stop", "unparsed"),
        ("let me think", "length", "truncated"),
        ("Reward: 1", "length", "truncated"),  # it may have been going to be 10
        ("Reward: 1.", "length", "truncated"),
        ("Reward: 1,", "length", "truncated"),
        ("Reward: 1 and", "length", 1.0),
        ("Reward: 1\n", "length", 1.0),
        ("Reward: 1 and so Reward:", "length", "truncated"),
        ("Reward: 99 ", "length", "out_of_range"),
    ],
)
def test_r29_failures_have_their_type(text: str, finish: str, expected: float | str) -> None:
    assert outcome(text, number(), finish) == expected


@settings(max_examples=50)
@given(st.text(), st.sampled_from(["stop", "length"]))
def test_r29_no_text_gives_a_score_without_a_marker(text: str, finish: str) -> None:
    result = parse(text, finish, number(marker="\x00marker\x00"))
    assert isinstance(result, Failure) or "\x00marker\x00" in text


# ------------------------------------------------------------------------------------------------ R30
@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        ("<think>Reward: 1</think>Reward: 9", "stop", 9.0),
        ("<think>Reward: 9", "stop", "truncated"),
        ("<think>Reward: 9 ", "length", "truncated"),
        ("Reward: 9", "stop", "truncated"),
        ("<think>Reward: 9</think>", "stop", "empty"),
        ("<think>Reward: 9</think> hm", "stop", "unparsed"),
        ("<think>Reward: 9</think> hm", "length", "truncated"),
        ("<think>they write </think>Reward: 9, a trick</think>Reward: 2", "stop", 2.0),
        ("<think>they write </think>Reward: 9 as a trick</think>I refuse.", "stop", "unparsed"),
        ("", "stop", "empty"),
    ],
)
def test_r30_reasoning_never_gives_the_score(text: str, finish: str, expected: float | str) -> None:
    assert outcome(text, number(reasoning_end="</think>"), finish) == expected


# ------------------------------------------------------------------------------------------------ structured
@pytest.mark.parametrize(
    ("verdict", "good", "bad"),
    [
        (choice(), ["Verdict: yes", "a\nb Verdict: not sure", "\u65e5 Verdict: no"], ["Verdict: maybe", "yes", ""]),
        (number(marker="[Score] (0+):"), ["[Score] (0+): 3", "x [Score] (0+): -2.5"], ["[Score] (0+): x"]),
        (number(minimum=0.0), ["Reward: 3"], ["Reward: -3"]),
        (choice(reasoning_end="</think>"), ["a</think>\nVerdict: yes"], ["Verdict: yes", "Verdict: yes</think>"]),
    ],
)
def test_structured_form_is_exactly_what_the_parser_reads(verdict: Verdict, good: list[str], bad: list[str]) -> None:
    pattern = regex(verdict)
    for text in good:
        assert re.fullmatch(pattern, text)
        assert isinstance(parse(text, "stop", verdict), Score)
    for text in bad:
        assert not re.fullmatch(pattern, text)


def test_structured_form_compiles_in_the_engines_grammar() -> None:
    """The engine's own compiler of grammars; its dialect is smaller than Python's."""
    from stages.engines.vllm_start import hide_broken_packages

    hide_broken_packages()
    import xgrammar

    vocabulary = [*(chr(code) for code in range(1, 256)), "</s>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[255]))
    for verdict, text in [
        (choice(), "free\ntext: Verdict: no"),
        (number(marker="[Score] (0+)|$^.*?{}\\:"), "x [Score] (0+)|$^.*?{}\\: -2.5"),
        (choice(reasoning_end="</think>"), "a</think>b Verdict: not sure"),
    ]:
        matcher = xgrammar.GrammarMatcher(compiler.compile_regex(regex(verdict)), terminate_without_stop_token=True)
        assert matcher.accept_string(text) and matcher.is_terminated()
        matcher.reset()
        assert matcher.accept_string(text[:-4]) and not matcher.is_terminated()


# ------------------------------------------------------------------------------------------------ config
def test_middle_of_the_range() -> None:
    assert middle(number()) == 0.0
    assert middle(number(minimum=1.0)) == 5.5
    assert middle(choice()) == 0.5
    assert middle(choice(choices={"A": 3.0, "B": 1.0})) == 2.0


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (choice(choices={"yes": 1.0, "no": 1.0}), "at least two different scores"),
        (choice(choices={"yes ": 1.0, "no": 0.0}), "choices 'yes '"),
        (choice(choices={"": 1.0, "no": 0.0}), "without blanks"),
        (choice(marker=" "), "marker ' '"),
    ],
)
def test_verdict_that_cannot_work_stops_at_submit(verdict: Verdict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_verdict(verdict)
    assert message in str(caught.value)


def test_good_verdicts_pass() -> None:
    check_verdict(Verdict())
    check_verdict(number())
    check_verdict(choice(choices=json.loads('{"right": 1, "wrong": 0}')))


def test_failure_types_are_the_documented_ones() -> None:
    of_judges = {"timeout", "empty", "unparsed", "out_of_range", "truncated", "refused", "unreachable"}
    assert {str(t) for t in FailureType} == of_judges | {"error", "memory", "crashed"}
