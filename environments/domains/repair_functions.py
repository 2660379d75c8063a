"""The small functions that `code_repair` breaks: each with the tests a policy may see and a generator of hidden inputs.

They are ordinary functions of this module, so their source (by `inspect`) is the oracle's answer and calling them gives the
expected values. Rules for adding one: pure, deterministic, terminating for every small input, arguments and results made of
JSON-able builtins and tuples, a docstring that says all there is to know. Which names are held out is fixed in HELDOUT; no
function may be in both splits, nor a near copy of one in the other.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs
# The broken functions are shown to policies with a small context: annotations would cost more than they explain.

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def clamp(value, low, high):
    """Return value limited to the range low..high."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def count_vowels(text):
    """Return how many letters of text are vowels (aeiou, any case)."""
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count


def running_total(numbers):
    """Return the list of sums of the first 1, 2, ... numbers."""
    total = 0
    totals = []
    for number in numbers:
        total += number
        totals.append(total)
    return totals


def second_largest(numbers):
    """Return the second largest distinct number, or None when there is none."""
    distinct = sorted(set(numbers))
    if len(distinct) < 2:
        return None
    return distinct[-2]


def is_palindrome(text):
    """Return whether the letters and digits of text read the same both ways, ignoring case."""
    kept = [letter.lower() for letter in text if letter.isalnum()]
    return kept == kept[::-1]


def digit_sum(number):
    """Return the sum of the decimal digits of a whole number, ignoring its sign."""
    number = abs(number)
    total = 0
    while number > 0:
        total += number % 10
        number //= 10
    return total


def fizzbuzz(number):
    """Return 'FizzBuzz', 'Fizz' or 'Buzz' for multiples of 15, 3 or 5, else the number as text."""
    if number % 15 == 0:
        return "FizzBuzz"
    if number % 3 == 0:
        return "Fizz"
    if number % 5 == 0:
        return "Buzz"
    return str(number)


def chunks(items, size):
    """Split items into lists of the given size; the last one may be shorter."""
    result = []
    for start in range(0, len(items), size):
        result.append(items[start : start + size])
    return result


def leap_year(year):
    """Return whether year is a leap year of the Gregorian calendar."""
    if year % 400 == 0:
        return True
    return year % 4 == 0 and year % 100 != 0


def unique_in_order(items):
    """Return the items without repetitions, keeping the first of each."""
    seen = []
    for item in items:
        if item not in seen:
            seen.append(item)
    return seen


def word_counts(text):
    """Return a dict from each word of text to how often it occurs."""
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def longest_run(items):
    """Return the length of the longest run of equal neighbours."""
    best = 0
    current = 0
    previous = None
    for item in items:
        current = current + 1 if item == previous else 1
        previous = item
        best = max(best, current)
    return best


def gcd(a, b):
    """Return the greatest common divisor of two positive numbers."""
    while b != 0:
        a, b = b, a % b
    return a


def is_prime(number):
    """Return whether number is prime."""
    if number < 2:
        return False
    for divisor in range(2, number):
        if divisor * divisor > number:
            break
        if number % divisor == 0:
            return False
    return True


def rotate_left(items, steps):
    """Return items with the first `steps` of them moved to the end (steps is not negative)."""
    if len(items) == 0:
        return items
    cut = steps % len(items)
    return items[cut:] + items[:cut]


def mean_rounded(numbers):
    """Return the mean of the numbers as a whole number, rounded down; 0 for an empty list."""
    if len(numbers) == 0:
        return 0
    return sum(numbers) // len(numbers)


def caesar(text, shift):
    """Shift every lower-case letter by `shift` places in the alphabet; leave the rest."""
    result = ""
    for letter in text:
        if "a" <= letter <= "z":
            result += chr((ord(letter) - 97 + shift) % 26 + 97)
        else:
            result += letter
    return result


def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = 0
    j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]


def triangle_kind(a, b, c):
    """Return 'none', 'equilateral', 'isosceles' or 'scalene' for three side lengths."""
    if a + b <= c or a + c <= b or b + c <= a:
        return "none"
    if a == b and b == c:
        return "equilateral"
    if a == b or b == c or c == a:
        return "isosceles"
    return "scalene"


def count_between(numbers, low, high):
    """Return how many numbers lie in low..high, both ends included."""
    count = 0
    for number in numbers:
        if low <= number <= high:
            count += 1
    return count


def run_lengths(text):
    """Return the runs of text as a list of [letter, length]."""
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs


def binary_search(numbers, target):
    """Return the position of target in a sorted list of distinct numbers, or -1."""
    low = 0
    high = len(numbers) - 1
    while low <= high:
        middle = (low + high) // 2
        if numbers[middle] == target:
            return middle
        if numbers[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def grade(points):
    """Return 'A' from 90 points, 'B' from 75, 'C' from 50, else 'F'."""
    if points >= 90:
        return "A"
    if points >= 75:
        return "B"
    if points >= 50:
        return "C"
    return "F"


def fibonacci(count):
    """Return the first `count` Fibonacci numbers, starting 0, 1."""
    numbers = []
    a, b = 0, 1
    for _ in range(count):
        numbers.append(a)
        a, b = b, a + b
    return numbers


def transpose(rows):
    """Turn the rows of a rectangular table into its columns."""
    if len(rows) == 0:
        return []
    columns = []
    for index in range(len(rows[0])):
        columns.append([row[index] for row in rows])
    return columns


def balanced(text):
    """Return whether the round brackets of text are balanced."""
    depth = 0
    for letter in text:
        if letter == "(":
            depth += 1
        if letter == ")":
            depth -= 1
        if depth < 0:
            return False
    return depth == 0


def to_binary(number):
    """Return a number that is not negative in binary digits, '0' for zero."""
    if number == 0:
        return "0"
    digits = ""
    while number > 0:
        digits = str(number % 2) + digits
        number //= 2
    return digits


def largest_gap(numbers):
    """Return the largest difference of neighbours in sorted order; 0 for fewer than two numbers."""
    ordered = sorted(numbers)
    gap = 0
    for index in range(1, len(ordered)):
        gap = max(gap, ordered[index] - ordered[index - 1])
    return gap


def title_case(text):
    """Return text with every word's first letter in upper case and the rest in lower case."""
    words = []
    for word in text.split(" "):
        words.append(word[:1].upper() + word[1:].lower())
    return " ".join(words)


def dot_product(left, right):
    """Return the sum of the products of two lists of equal length."""
    total = 0
    for index in range(len(left)):
        total += left[index] * right[index]
    return total


@dataclass(frozen=True, kw_only=True)
class Repairable:
    """A function, visible argument tuples, and how one hidden argument tuple is drawn."""

    function: Callable[..., Any]
    visible: tuple[tuple[Any, ...], ...]
    draw: Callable[[random.Random], tuple[Any, ...]]


HELDOUT = frozenset(
    {
        "count_between",
        "run_lengths",
        "binary_search",
        "grade",
        "fibonacci",
        "balanced",
        "to_binary",
        "largest_gap",
        "title_case",
    }
)


def _ints(r: random.Random, low: int = -9, high: int = 20, most: int = 8) -> list[int]:
    return [r.randint(low, high) for _ in range(r.randint(0, most))]


def _text(r: random.Random, letters: str, most: int = 10) -> str:
    return "".join(r.choice(letters) for _ in range(r.randint(0, most)))


def _pair(r: random.Random) -> tuple[Any, ...]:
    left = _ints(r)
    return left, [r.randint(-9, 9) for _ in left]


def _table(r: random.Random) -> tuple[Any, ...]:
    width = r.randint(1, 4)
    return ([[r.randint(0, 9) for _ in range(width)] for _ in range(r.randint(0, 4))],)


def _search(r: random.Random) -> tuple[Any, ...]:
    numbers = sorted(set(_ints(r)))
    return numbers, r.choice(numbers) if numbers and r.random() < 0.7 else r.randint(-9, 20)


REPAIRABLE: dict[str, Repairable] = {
    entry.function.__name__: entry
    for entry in (
        Repairable(
            function=clamp,
            visible=((5, 0, 3), (-2, 0, 3), (2, 0, 3)),
            draw=lambda r: (r.randint(-9, 20), r.randint(-3, 3), r.randint(4, 9)),
        ),
        Repairable(
            function=count_vowels, visible=(("banana",), ("SKY",), ("Idea",)), draw=lambda r: (_text(r, "aeiouAEIOUbcdxyz "),)
        ),
        Repairable(function=running_total, visible=(([1, 2, 3],), ([],), ([5, -5, 4],)), draw=lambda r: (_ints(r),)),
        Repairable(function=second_largest, visible=(([3, 1, 2],), ([4, 4],), ([7, 7, 5],)), draw=lambda r: (_ints(r, 0, 6),)),
        Repairable(function=is_palindrome, visible=(("Anna",), ("ab",), ("n o-N",)), draw=lambda r: (_text(r, "aAb ,", 5),)),
        Repairable(function=digit_sum, visible=((123,), (0,), (-45,)), draw=lambda r: (r.randint(-9999, 9999),)),
        Repairable(function=fizzbuzz, visible=((15,), (9,), (10,), (7,)), draw=lambda r: (r.randint(1, 60),)),
        Repairable(function=chunks, visible=(([1, 2, 3], 2), ([], 3), ([1, 2], 1)), draw=lambda r: (_ints(r), r.randint(1, 4))),
        Repairable(
            function=leap_year,
            visible=((2024,), (1900,), (2000,), (2023,)),
            draw=lambda r: (r.choice((100, 4, 1)) * r.randint(15, 24) * r.choice((1, 4)),),
        ),
        Repairable(
            function=unique_in_order, visible=(([1, 2, 1],), ([],), (["b", "a", "b"],)), draw=lambda r: (_ints(r, 0, 4),)
        ),
        Repairable(function=word_counts, visible=(("a b a",), ("",), ("x",)), draw=lambda r: (_text(r, "ab  ", 14),)),
        Repairable(function=longest_run, visible=(([1, 1, 2],), ([],), ([3, 2, 2, 2],)), draw=lambda r: (_ints(r, 0, 1, 10),)),
        Repairable(function=gcd, visible=((12, 18), (7, 5), (9, 3)), draw=lambda r: (r.randint(1, 90), r.randint(1, 90))),
        Repairable(function=is_prime, visible=((2,), (9,), (13,), (1,)), draw=lambda r: (r.randint(0, 60),)),
        Repairable(
            function=rotate_left, visible=(([1, 2, 3], 1), ([], 2), ([1, 2], 3)), draw=lambda r: (_ints(r), r.randint(0, 9))
        ),
        Repairable(function=mean_rounded, visible=(([1, 2, 4],), ([],), ([10],)), draw=lambda r: (_ints(r),)),
        Repairable(
            function=caesar,
            visible=(("abc", 1), ("xyz", 3), ("a-B", 2)),
            draw=lambda r: (_text(r, "abmyzAZ {`"), r.randint(-30, 30)),
        ),
        Repairable(
            function=merge_sorted,
            visible=(([1, 3], [2]), ([], [1]), ([2, 4], [1, 3, 5])),
            draw=lambda r: (sorted(_ints(r)), sorted(_ints(r))),
        ),
        Repairable(
            function=triangle_kind,
            visible=((3, 3, 3), (3, 4, 5), (2, 2, 3), (1, 2, 3)),
            draw=lambda r: (r.randint(1, 5), r.randint(1, 5), r.randint(1, 5)),
        ),
        Repairable(
            function=count_between,
            visible=(([1, 2, 3], 2, 3), ([], 0, 1), ([5, 1], 1, 4)),
            draw=lambda r: (_ints(r, 0, 9), r.randint(0, 4), r.randint(4, 9)),
        ),
        Repairable(function=run_lengths, visible=(("aab",), ("",), ("abb",)), draw=lambda r: (_text(r, "ab"),)),
        Repairable(function=binary_search, visible=(([1, 3, 5], 5), ([], 1), ([2, 4], 3), ([1, 3, 5], 1)), draw=_search),
        Repairable(
            function=grade,
            visible=((90,), (75,), (50,), (49,)),
            draw=lambda r: (r.choice((0, 49, 50, 51, 74, 75, 76, 89, 90, 91, r.randint(0, 100))),),
        ),
        Repairable(function=fibonacci, visible=((5,), (0,), (2,)), draw=lambda r: (r.randint(0, 15),)),
        Repairable(function=transpose, visible=(([[1, 2], [3, 4]],), ([],), ([[1, 2, 3]],)), draw=_table),
        Repairable(function=balanced, visible=(("(a)",), (")(",), ("((",), ("",)), draw=lambda r: (_text(r, "()a", 6),)),
        Repairable(function=to_binary, visible=((5,), (0,), (8,)), draw=lambda r: (r.randint(0, 200),)),
        Repairable(function=largest_gap, visible=(([1, 5, 2],), ([],), ([4, 9],)), draw=lambda r: (_ints(r),)),
        Repairable(function=title_case, visible=(("hello world",), ("aBC",), ("",)), draw=lambda r: (_text(r, "abCD  "),)),
        Repairable(function=dot_product, visible=(([1, 2], [3, 4]), ([], []), ([2], [-5])), draw=_pair),
    )
}
