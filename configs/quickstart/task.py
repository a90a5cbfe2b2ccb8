"""The digit-sort task: problems, demonstrations, wrong answers and critiques. Pure Python, no heavy import.

    prompt    4793                        a problem: 3 to 8 digits
    response  3749;3479                   drafts, then the answer: what follows the last ';'
    judged    4793 Answer: 3479$          what the judge reads (`judge.jinja` renders it)
    critique  33447799$$ Verdict: right   pairs of (expected, given) up to the first difference, then the verdict

A problem is *held out* by the hash of its prompt, whatever stream drew it: held-out problems are used to measure and
never to train. Only prompts are held out; a short answer may happen to spell one.
"""

import hashlib
import random
import re
from collections.abc import Callable

DIGITS = "0123456789"
MIN_DIGITS = 3
MAX_DIGITS = 8
STOP_PROBABILITY = 0.3  # length = 3 + geometric(0.3), cut at 8
MAX_ANSWER_CHARS = 12  # the judge reads no more of an answer; judge.jinja cuts at the same place
MAX_DRAFTS = 5
HELD_OUT_MODULUS = 10  # one prompt in ten is held out


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out tenth, which no model is trained on."""
    return int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def draw_problem(rng: random.Random, *, held_out: bool) -> str:
    """A random problem from the chosen side of the hold-out split."""
    while True:
        length = MIN_DIGITS
        while length < MAX_DIGITS and rng.random() > STOP_PROBABILITY:
            length += 1
        problem = "".join(rng.choice(DIGITS) for _ in range(length))
        if is_held_out(problem) == held_out:
            return problem


def solve(problem: str) -> str:
    """The one right answer."""
    return "".join(sorted(problem))


def final_answer(response: str) -> str:
    """What follows the last ';' of a response."""
    return response.rsplit(";", 1)[-1]


def judged_answer(response: str) -> str:
    """The final answer as the judge sees it: cut, and free of '$', which marks the end of the answer."""
    return final_answer(response)[:MAX_ANSWER_CHARS].replace("$", " ")


# ------------------------------------------------------------------------------------------------ wrong answers
# Each mistake takes the digits of an answer (two at least) and returns other characters; some may change nothing.
def drop_one(digits: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(digits))
    return digits[:at] + digits[at + 1 :]


def repeat_one(digits: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(digits))
    return digits[: at + 1] + digits[at:]


def insert_one(digits: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(digits) + 1)
    longer = [*digits[:at], rng.choice(DIGITS), *digits[at:]]
    return sorted(longer) if rng.random() < 0.5 else longer


def copy_neighbour(digits: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(digits) - 1)
    source, target = rng.sample((at, at + 1), 2)
    return sorted([*digits[:target], digits[source], *digits[target + 1 :]])


def replace_one(digits: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(digits))
    return [*digits[:at], rng.choice(DIGITS), *digits[at + 1 :]]


def swap_neighbours(digits: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(digits) - 1)
    return [*digits[:at], digits[at + 1], digits[at], *digits[at + 2 :]]


def shift_one(digits: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(digits))
    shifted = min(9, max(0, int(digits[at]) + rng.choice((-1, 1))))
    return sorted([*digits[:at], str(shifted), *digits[at + 1 :]])


def unrelated(digits: list[str], rng: random.Random) -> list[str]:
    return sorted(rng.choice(DIGITS) for _ in digits)


def distinct_only(digits: list[str], rng: random.Random) -> list[str]:
    return sorted(set(digits))


def shuffle_all(digits: list[str], rng: random.Random) -> list[str]:
    return rng.sample(digits, len(digits))


def cut_short(digits: list[str], rng: random.Random) -> list[str]:
    return digits[: rng.randrange(len(digits))]


def junk(digits: list[str], rng: random.Random) -> list[str]:
    return [rng.choice(DIGITS + "= ") for _ in range(rng.randint(0, MAX_ANSWER_CHARS + 2))]


# Dropped and repeated digits lead: a policy drifts to them when its judge copies the answer instead of recomputing it.
MISTAKES: dict[Callable[[list[str], random.Random], list[str]], float] = {
    drop_one: 0.24,
    repeat_one: 0.22,
    copy_neighbour: 0.10,
    replace_one: 0.10,
    insert_one: 0.08,
    swap_neighbours: 0.08,
    shift_one: 0.06,
    unrelated: 0.04,
    distinct_only: 0.02,
    shuffle_all: 0.02,
    cut_short: 0.02,
    junk: 0.02,
}


def make_mistake(answer: str, rng: random.Random) -> str:
    """The answer with one mistake of a random kind (now and then a harmless one)."""
    (mistake,) = rng.choices(list(MISTAKES), weights=list(MISTAKES.values()))
    return "".join(mistake(list(answer), rng))


def wrong_answer(problem: str, rng: random.Random) -> str:
    """A plausible wrong answer: one mistake, in a quarter of the cases two."""
    truth = solve(problem)
    while True:
        wrong = make_mistake(truth, rng)
        if rng.random() < 0.25 and len(wrong) > 1 and wrong.isdigit():
            wrong = make_mistake(wrong, rng)
        if wrong != truth:
            return wrong[:MAX_ANSWER_CHARS]


# ------------------------------------------------------------------------------------------------ what models learn
def demonstrate(problem: str, rng: random.Random, *, error_rate: float) -> str:
    """A sloppy demonstrator's response: up to five drafts, then an answer, wrong with probability `error_rate`."""
    truth = solve(problem)
    parts: list[str] = []
    while len(parts) < MAX_DRAFTS and rng.random() < 0.5:
        draft = make_mistake(truth, rng) if rng.random() < 0.6 else truth
        parts.append(draft[: MAX_DIGITS + 2])
    parts.append(wrong_answer(problem, rng) if rng.random() < error_rate else truth)
    return ";".join(parts)


def critique(problem: str, answer: str) -> str:
    """What the judge writes: it recomputes the answer digit by digit beside the given one, then gives its verdict."""
    truth = solve(problem)
    pairs = ""
    for expected, given in zip(truth + "$", answer + "$", strict=False):
        pairs += expected + given
        if expected != given:
            break
    return f"{pairs} Verdict: {'right' if answer == truth else 'wrong'}"


def parse_verdict(text: str) -> float | None:
    """1.0 for right, 0.0 for wrong, None when the text holds no verdict."""
    match = re.search(r"Verdict: (right|wrong)", text)
    return None if match is None else float(match.group(1) == "right")
