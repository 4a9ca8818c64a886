"""Long lists of names, shortened without leaving one out: `layers.{0..39}.mlp.experts.{0..255}.down_proj.weight`."""

import re

NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.|$)")  # a whole part of a dotted name


def folded(names):
    """All the names in one text, those that differ in their numbers only written together; the order is that of first mention."""
    families = {}
    for name in dict.fromkeys(names):
        numbers = tuple(int(number) for number in NUMBER.findall(name))
        families.setdefault(tuple(NUMBER.split(name)[::2]), set()).add(numbers)
    texts = [_text(parts, product) for parts, numbers in families.items() for product in _products(numbers)]
    return ", ".join(texts)


def _products(tuples):
    """Lists of value sets, one for each place; their products are disjoint and together make up `tuples`."""
    if () in tuples:
        return [[]]
    tails = {}
    for first, *tail in tuples:
        tails.setdefault(first, set()).add(tuple(tail))
    heads = {}
    for first in sorted(tails):
        heads.setdefault(frozenset(tails[first]), []).append(first)
    return [[firsts, *rest] for tail, firsts in heads.items() for rest in _products(tail)]


def _text(parts, places):
    return parts[0] + "".join(_ranges(values) + part for values, part in zip(places, parts[1:], strict=True))


def _ranges(values):
    """Sorted numbers as text: 7, {0..3,5}."""
    runs = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in runs]
    return texts[0] if len(values) == 1 else "{" + ",".join(texts) + "}"
