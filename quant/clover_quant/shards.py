"""Names of a model's files, where it has several (llama.cpp, tools/gguf-split)."""

import pathlib
import re

NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def names(name, count):
    """File names of a model of `count` files, from the name of the whole."""
    if count == 1:
        return [name]
    stem = re.sub(r"\.gguf$", "", name)
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def paths(first):
    """Paths of all files of the model whose only or first one is `first`, by its name; they need not exist."""
    first = pathlib.Path(first)
    match = NAME.fullmatch(first.name)
    if not match or int(match["number"]) != 1 or int(match["count"]) < 2:
        return [first]
    return [first.with_name(name) for name in names(match["stem"], int(match["count"]))]


def others(path):
    """Paths beside a file of a split model that belong to a split of it into another number of files."""
    path = pathlib.Path(path)
    own = NAME.fullmatch(path.name)
    matches = ((other, NAME.fullmatch(other.name)) for other in sorted(path.parent.iterdir()))
    return [other for other, match in matches if own and match and match["stem"] == own["stem"] and match["count"] != own["count"]]
