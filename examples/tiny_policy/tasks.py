"""Questions for the shipped policy, the tool calls that answer them, and the answers.

Everything is drawn from one seeded `random.Random`. A question belongs to the held-out split or to training by
its hash alone, so the two can never share one. Calculator responses come from the real calculator, its errors
included; `words.txt` holds the words of the string questions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agentloop.errors import ToolError
from agentloop_tools.calculator import calculator, evaluate
from agentloop_tools.python import PythonTool

WORDS = tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split())
HELD_OUT_SHARE = 64  # one question in so many is held out

DEFINITIONS = {spec.name: spec.definition() for spec in (calculator.spec, PythonTool().spec)}
_ARGUMENT = {"calculator": "expression", "python": "code"}


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call, and what the tool answers."""

    tool: str
    argument: str
    response: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the tools on offer, the calls of a good policy, and the answer."""

    family: str
    question: str
    tools: tuple[str, ...]
    calls: tuple[Call, ...]
    answer: str


def is_held_out(question: str) -> bool:
    """Whether the question is kept from training."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """An endless, reproducible stream from one split; training questions may repeat."""
    rng = Random(seed)
    makers = [maker for maker, _ in FAMILIES]
    weights = [weight for _, weight in FAMILIES]
    while True:
        problem = rng.choices(makers, weights)[0](rng)
        if is_held_out(problem.question) == held_out:
            yield problem


def dialogue(problem: Problem) -> list[dict[str, Any]]:
    """The conversation of a good policy, as OpenAI chat messages; ends with the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
    for call in problem.calls:
        function = {"name": call.tool, "arguments": {_ARGUMENT[call.tool]: call.argument}}
        tool_calls = [{"type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": tool_calls})
        messages.append({"role": "tool", "content": call.response})
    return [*messages, {"role": "assistant", "content": f"The answer is {problem.answer}."}]


def held_out_tasks(num_tasks: int, seed: int) -> Iterator[dict[str, Any]]:
    """Distinct held-out problems as RolloutTask objects, the answer as `reference`."""
    seen: set[str] = set()
    for problem in problems(seed, held_out=True):
        if len(seen) == num_tasks:
            return
        if problem.question not in seen:
            seen.add(problem.question)
            yield {
                "task_id": f"{problem.family}-{len(seen):03d}",
                "messages": [{"role": "user", "content": problem.question}],
                "tools": list(problem.tools),
                "loop": "tool_loop",
                "reward": "exact_match",
                "reference": problem.answer,
            }


def write_held_out_tasks(file: Path, num_tasks: int = 256, seed: int = 1) -> None:
    """Write the shipped tasks, one JSON object a line."""
    lines = [json.dumps(task, ensure_ascii=False) for task in held_out_tasks(num_tasks, seed)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


# --- calls ------------------------------------------------------------------------------------------------


def calculate(expression: str) -> Call:
    """A calculator call with the response that the policy reads."""
    try:
        return Call("calculator", expression, evaluate(expression))
    except ToolError as error:
        return Call("calculator", expression, f"Error: {error}")


def _problem(rng: Random, family: str, question: str, calls: list[Call]) -> Problem:
    answer = calls[-1].response.strip("'")
    used = {call.tool for call in calls}
    tools = tuple(DEFINITIONS) if len(used) > 1 or rng.random() < 0.4 else tuple(used)
    return Problem(family, question, tools, tuple(calls), answer)


# --- one call ---------------------------------------------------------------------------------------------

_ASK = (
    "What is {}?",
    "Calculate {}.",
    "Compute {}.",
    "How much is {}?",
    "Evaluate {}.",
    "Please work out {}.",
    "{} = ?",
    "Can you tell me what {} is?",
)
_STORIES: tuple[tuple[str, str], ...] = (
    ("A box holds {a} pens. How many pens are in {b} boxes?", "{a} * {b}"),
    ("There are {a} rows of {b} chairs and {c} more chairs. How many chairs are there?", "{a} * {b} + {c}"),
    ("Mia has {a} coins and finds {b} more. How many coins does she have now?", "{a} + {b}"),
    ("Tom had {big} stamps and gave away {a}. How many stamps are left?", "{big} - {a}"),
    ("{n} apples are shared by {d} children. How many apples does each child get?", "{n} / {d}"),
    ("A ticket costs {a} dollars. What do {b} tickets cost with a fee of {c} dollars?", "{a} * {b} + {c}"),
    ("A farm has {a} cows, {b} goats and {c} hens. How many animals is that?", "{a} + {b} + {c}"),
    ("{n} eggs go into boxes of {d}. How many boxes are filled?", "{n} / {d}"),
)
_EXPRESSIONS = (
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "{n} / {d}",
    "{big} // {d}",
    "{big} % {d}",
    "{d} ** {k}",
    "{a} * {b} + {c}",
    "{a} * {b} - {c}",
    "{a} + {b} + {c}",
    "{big} - {a} - {b}",
    "({a} + {b}) * {c}",
    "({big} - {a}) * {d}",
    "{a} + {b} * {c}",
    "({a} + {b}) * ({c} + {d})",
)


def _number(rng: Random) -> int:
    return rng.randint(2, rng.choice((20, 100, 1000)))


def _numbers(rng: Random) -> dict[str, int]:
    a, b, c = _number(rng), _number(rng), _number(rng)
    divisor = rng.randint(2, 25)
    return {
        "a": a,
        "b": b,
        "c": c,
        "d": divisor,
        "n": divisor * rng.randint(2, 200),
        "big": a + b + rng.randint(1, 999),
        "k": rng.randint(2, 4),
    }


def one_call(rng: Random) -> Problem:
    """An expression or a short story that one calculator call answers."""
    numbers = _numbers(rng)
    if rng.random() < 0.35:
        story, expression = rng.choice(_STORIES)
        question, expression = story.format(**numbers), expression.format(**numbers)
    else:
        expression = rng.choice(_EXPRESSIONS).format(**numbers)
        question = rng.choice(_ASK).format(expression)
    return _problem(rng, "one_call", question, [calculate(expression)])


# --- dependent calls --------------------------------------------------------------------------------------

_FRAMES: dict[int, tuple[str, ...]] = {
    2: (
        "{0}, then {1}.",
        "{0}. Then {1}.",
        "First {0}, then {1}.",
        "{0} and {1}. What do you get?",
        "What do you get if you {0} and then {1}?",
        "In two steps: {0}, then {1}.",
    ),
    3: (
        "{0}, then {1}, then {2}.",
        "{0}. Then {1}. Finally {2}.",
        "First {0}, then {1}, and finally {2}.",
        "{0}, {1} and {2}. What do you get?",
        "What do you get if you {0}, then {1}, and then {2}?",
        "In three steps: {0}, then {1}, then {2}.",
    ),
}


def _first_step(rng: Random) -> tuple[str, str]:
    """What to do first, in words and as an expression."""
    numbers = _numbers(rng)
    words, expression = rng.choice(
        (
            ("multiply {a} by {b}", "{a} * {b}"),
            ("add {a} and {b}", "{a} + {b}"),
            ("add {a} to {b}", "{b} + {a}"),
            ("subtract {a} from {big}", "{big} - {a}"),
            ("divide {n} by {d}", "{n} / {d}"),
            ("start with {a}, multiply it by {d}", "{a} * {d}"),
            ("take {a} times {d}", "{a} * {d}"),
        )
    )
    return words.format(**numbers), expression.format(**numbers)


def _next_step(rng: Random, value: int) -> tuple[str, str]:
    """What to do with `value`, in words and as an expression; the value stays a modest whole number."""
    operand = _number(rng)
    divisors = [d for d in range(2, 13) if value % d == 0]
    choices = [("add", "+", operand)]
    if value > operand:
        choices.append(("subtract", "-", operand))
    if value < 20_000:
        choices.append(("multiply by", "*", rng.randint(2, 30)))
    if divisors and value > 0:
        choices.append(("divide by", "/", rng.choice(divisors)))
    verb, operator, operand = rng.choice(choices)
    if verb.endswith(" by") and rng.random() < 0.5:
        verb = verb.replace(" by", " the result by")
    return f"{verb} {operand}", f"{value} {operator} {operand}"


def _chain(rng: Random, words: str, calls: list[Call], num_calls: int) -> str:
    """Extend `calls` to `num_calls` good ones, each from the result before; returns the question."""
    steps = [words]
    while len(steps) < num_calls:
        words, expression = _next_step(rng, int(calls[-1].response))
        steps.append(words)
        calls.append(calculate(expression))
    question = rng.choice(_FRAMES[num_calls]).format(*steps)
    return question[0].upper() + question[1:]


def two_calls(rng: Random) -> Problem:
    """Two calculator calls, the second on the first one's result."""
    words, expression = _first_step(rng)
    calls = [calculate(expression)]
    question = _chain(rng, words, calls, 2)
    return _problem(rng, "two_calls", question, calls)


def three_calls(rng: Random) -> Problem:
    """Three calculator calls, each on the result before."""
    words, expression = _first_step(rng)
    calls = [calculate(expression)]
    question = _chain(rng, words, calls, 3)
    return _problem(rng, "three_calls", question, calls)


# --- recovery from a tool error ---------------------------------------------------------------------------

_REFUSED: tuple[tuple[str, str], ...] = (
    ("{a} x {b}", "{a} * {b}"),
    ("{a} \u00d7 {b}", "{a} * {b}"),
    ("{a} x {b} + {c}", "{a} * {b} + {c}"),
    ("{a} \u00d7 {b} - {c}", "{a} * {b} - {c}"),
    ("{d}^{k}", "{d} ** {k}"),
    ("{d}^{k} + {c}", "{d} ** {k} + {c}"),
    ("{n} ÷ {d}", "{n} / {d}"),
    ("{n} ÷ {d} + {c}", "{n} / {d} + {c}"),
    ("{n} : {d}", "{n} / {d}"),
    ("{percent}% of {hundreds}", "{percent} * {hundreds} / 100"),
    ("[{a} + {b}] * {c}", "({a} + {b}) * {c}"),
    ("{a} plus {b}", "{a} + {b}"),
    ("{big} minus {a}", "{big} - {a}"),
    ("{a} times {b}", "{a} * {b}"),
)


def recovery(rng: Random) -> Problem:
    """An expression in a notation that the calculator refuses: called as written, then corrected."""
    numbers = _numbers(rng)
    numbers |= {"percent": rng.randint(1, 99), "hundreds": 100 * rng.randint(1, 60)}
    written, corrected = rng.choice(_REFUSED)
    written, corrected = written.format(**numbers), corrected.format(**numbers)
    calls = [calculate(written), calculate(corrected)]
    if not calls[0].response.startswith("Error: "):
        raise ValueError(f"the calculator accepts {written!r}")
    if rng.random() < 0.25:
        question = _chain(rng, f"compute {written}", calls, 2)
    else:
        question = rng.choice(_ASK).format(written)
    return _problem(rng, "recovery", question, calls)


# --- strings ----------------------------------------------------------------------------------------------

# The word stands last, or before a comma: see the pre-tokenizer in folder.py.
_LENGTH = ("How many letters are in {word}?", "How long is the word {word}?", "Count the letters of {word}.")
_COUNT = (
    "How many times does the letter {letter} occur in {word}?",
    "Count the letter {letter} in {word}.",
    "How often is there a {letter} in {word}?",
)
_REVERSE = ("Reverse the word {word}.", "Spell backwards: {word}.", "What is the reverse of {word}?")
_UPPER = ("Write in capital letters: {word}.", "Use upper case for {word}.", "What are the capitals of {word}?")
_SORT = ("Sort the letters of {word}.", "In alphabetical order, what are the letters of {word}?")
_REPLACE = ("Replace every {letter} by {other} in {word}.", "In {word}, change each {letter} to {other}.")

_STRINGS: tuple[tuple[tuple[str, ...], str, Callable[[str, str, str], str]], ...] = (
    (_LENGTH, 'len("{word}")', lambda word, letter, other: str(len(word))),
    (_COUNT, '"{word}".count("{letter}")', lambda word, letter, other: str(word.count(letter))),
    (_REVERSE, '"{word}"[::-1]', lambda word, letter, other: repr(word[::-1])),
    (_UPPER, '"{word}".upper()', lambda word, letter, other: repr(word.upper())),
    (_SORT, '"".join(sorted("{word}"))', lambda word, letter, other: repr("".join(sorted(word)))),
    (
        _REPLACE,
        '"{word}".replace("{letter}", "{other}")',
        lambda word, letter, other: repr(word.replace(letter, other)),
    ),
)


def _string_call(rng: Random, kinds: int) -> tuple[str, Call]:
    """A question on a word and the python call that answers it; of the first `kinds` kinds."""
    word = rng.choice(WORDS)
    letter = rng.choice(word)
    other = rng.choice([c for c in "abcdefghijklmnopqrstuvwxyz" if c != letter])
    questions, code, run = rng.choice(_STRINGS[:kinds])
    names = {"word": word, "letter": letter, "other": other}
    call = Call("python", code.format(**names), run(word, letter, other))
    return rng.choice(questions).format(**names), call


def strings(rng: Random) -> Problem:
    """One python call on a word."""
    question, call = _string_call(rng, len(_STRINGS))
    return _problem(rng, "strings", question, [call])


def mixed(rng: Random) -> Problem:
    """A python call that counts letters, then a calculator call on its result."""
    question, call = _string_call(rng, 2)
    words, expression = _next_step(rng, int(call.response))
    question = f"{question} Then {words}." if question.endswith("?") else f"{question[:-1]}, then {words}."
    return _problem(rng, "mixed", question, [call, calculate(expression)])


FAMILIES: tuple[tuple[Callable[[Random], Problem], float], ...] = (
    (one_call, 0.22),
    (two_calls, 0.24),
    (three_calls, 0.16),
    (recovery, 0.20),
    (strings, 0.12),
    (mixed, 0.06),
)
"""How each family is made, and its share."""
