"""Recipes: which type each tensor is stored in.

A recipe is a TOML file:

    description = "..."
    file_type = "Q4_K_M"        # general.file_type of the GGUF, llama.cpp's name
    default = "q4_k"            # type of the matrices that no rule names
    rank = 40                   # where it stands among the shipped ones: fit.choose takes the highest that fits
    rules = [                   # the first that applies decides
        { match = "blk.*.ffn_down*", layers = "more", importance = false, type = "q6_k" },
    ]

match: pattern of GGUF tensor names (*, ? and [0-2]). layers: only these of the model's n: "first K", "first 1/K" (n/K, rounded
down), or "more": the first and last eighth, and every third between (as llama-quantize gives more bits to, src/llama-quant.cpp).
importance: only with, or only without, an importance matrix. Where there is no `output.weight`, the embedding takes its rule.
"""

import dataclasses
import fnmatch
import importlib.resources
import pathlib
import re

from clover_cpp import ggml
from clover_cpp.errors import ArgumentError

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

# llama.h, enum llama_ftype
FILE_TYPES = {
    "ALL_F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9,
    "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29, "IQ3_XXS": 23, "IQ3_XS": 22, "IQ3_S": 26,
    "IQ3_M": 27, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4_MOE": 38,
}  # fmt: skip

# The file type of a model whose matrices are all of one type, where it is not the type's own name.
PURE = {
    "f32": "ALL_F32", "q2_k": "Q2_K", "q3_k": "Q3_K_S", "q4_k": "Q4_K_S", "q5_k": "Q5_K_S", "mxfp4": "MXFP4_MOE",
}  # fmt: skip

# What takes the place of a type of 256-blocks in rows that do not divide into them, as in llama-quantize; then float16.
FALLBACK = {
    "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
    "iq1_s": "iq4_nl", "iq1_m": "iq4_nl", "iq2_xxs": "iq4_nl", "iq2_xs": "iq4_nl", "iq2_s": "iq4_nl",
    "iq3_xxs": "iq4_nl", "iq3_s": "iq4_nl", "iq4_xs": "iq4_nl",
}  # fmt: skip

OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"
LAYERS = re.compile(r"more|first ([1-9]\d{0,3})|first 1/([1-9]\d{0,3})")
SHIPPED = importlib.resources.files("clover_quant") / "recipes"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule; fields as in the file, `type` the name of a ggml type in lower case."""

    match: str
    type: str
    layers: str | None = None
    importance: bool | None = None

    def applies(self, name, n_layers, importance):
        """Whether it decides about the tensor `name` of a model of n_layers."""
        if not fnmatch.fnmatchcase(name, self.match) or self.importance not in (None, importance):
            return False
        if self.layers is None:
            return True
        layer = re.match(r"blk\.(\d+)\.", name)
        return layer is not None and self._in_layers(int(layer[1]), n_layers)

    def of_no_layer(self, names, n_layers):
        """Whether it names matrices of layers, but its part of n_layers is less than one."""
        named = any(name.startswith("blk.") and fnmatch.fnmatchcase(name, self.match) for name in names)
        return named and self.layers is not None and not any(self._in_layers(layer, n_layers) for layer in range(n_layers))

    def _in_layers(self, layer, n_layers):
        if self.layers == "more":
            eighth = n_layers // 8
            return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
        count, part = LAYERS.fullmatch(self.layers).groups()
        return layer < (int(count) if count else n_layers // int(part))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe by its name; `file_type` is the number for general.file_type; `path` of the file, if it is not a shipped one."""

    name: str
    description: str
    file_type: int
    default: str
    rules: tuple = ()
    rank: int = 0
    path: str | None = None

    def types(self, tensors, n_layers, importance=None):
        """The `ggml.Type` of each tensor, a list.

        tensors: objects with `name` (GGUF name), `shape` (row-major) and `f32` (never smaller than float32). importance: the
        matrix, or None where there is none. Raises ArgumentError where a type cannot be used without one, or a rule of a file of
        one's own decides about no matrix of the model, with or without importance: none is of that name in these layers, or earlier
        rules take them all. (It is no error where the model has too few layers for a part of them.)
        """
        tied = all(tensor.name != OUTPUT for tensor in tensors)
        names = [OUTPUT if tied and tensor.name == EMBEDDING else tensor.name for tensor in tensors]
        if self.path:
            self._check_rules([name for name, tensor in zip(names, tensors, strict=True) if not tensor.f32], n_layers)
        return [self._type(*pair, n_layers, importance is not None) for pair in zip(names, tensors, strict=True)]

    def _check_rules(self, names, n_layers):
        deciding = {id(self._rule(name, n_layers, importance)) for name in names for importance in (False, True)}
        for i, rule in enumerate(self.rules, 1):
            if id(rule) not in deciding and not rule.of_no_layer(names, n_layers):
                raise ArgumentError(
                    f"{self.path}: rule {i}: {rule.match!r} decides about no matrix: none has such a name in its layers, or "
                    "earlier rules take them all (norms, gates and routers stay float32)"
                )

    def _rule(self, name, n_layers, importance):
        return next((rule for rule in self.rules if rule.applies(name, n_layers, importance)), None)

    def _type(self, name, tensor, n_layers, importance):
        if tensor.f32:
            return ggml.types()["f32"]
        rule = self._rule(name, n_layers, importance)
        kind = rule.type if rule else self.default
        if tensor.shape[-1] % ggml.types()[kind].block:
            kind = FALLBACK.get(kind, kind)
            if tensor.shape[-1] % ggml.types()[kind].block:
                kind = "f16"
        found = ggml.types()[kind]
        if found.needs_importance and not importance:
            raise ArgumentError(f"recipe {self.name}: type {kind} of tensor {tensor.name} needs an importance matrix")
        return found


def names():
    """Names of the shipped recipes."""
    return sorted(file.name.removesuffix(".toml") for file in SHIPPED.iterdir() if file.name.endswith(".toml"))


def by_rank():
    """Names of the shipped recipes, the best first."""
    return sorted(names(), key=lambda name: -load(name).rank)


def source(name):
    """The text of a shipped recipe's file; name in any case. Raises ArgumentError for an unknown one."""
    if name.lower() not in names():
        raise ArgumentError(f"no recipe {name!r} is shipped; there are {', '.join(names())}")
    return (SHIPPED / f"{name.lower()}.toml").read_text(encoding="utf-8")


def load(name):
    """The `Recipe` of a shipped recipe's name or a ggml type's name, in any case, or of the path of a TOML file.

    Raises ArgumentError for an unknown name, or a file that is no recipe: it names the file and the key at fault.
    """
    text, lower = str(name), str(name).lower()
    if lower in names():
        return _parse(lower, source(lower))
    if lower in ggml.NUMBERS:
        return Recipe(lower, f"every matrix in {lower}", FILE_TYPES[PURE.get(lower, lower.upper())], lower)
    if not lower.endswith(".toml"):
        known = ", ".join([*names(), *(kind for kind in ggml.NUMBERS if kind not in names())])
        raise ArgumentError(f"unknown type {text!r}; known: {known}; or the path of a recipe (.toml)")
    path = pathlib.Path(name)
    try:
        return _parse(path.stem, path.read_text(encoding="utf-8-sig"), text)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error


def _parse(name, text, path=None):
    where = path or f"recipe {name}"
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ArgumentError(f"{where}: not valid TOML ({error})") from error
    _check_keys(where, raw, {"description": str, "file_type": str, "default": str}, {"rules": list, "rank": int})
    if raw["file_type"] not in FILE_TYPES:
        raise ArgumentError(f"{where}: unknown file_type {raw['file_type']!r}; known: {', '.join(FILE_TYPES)}")
    _check_type(where, raw["default"])
    rules = tuple(_rule(f"{where}: rule {i}", rule) for i, rule in enumerate(raw.get("rules", []), 1))
    return Recipe(name, raw["description"], FILE_TYPES[raw["file_type"]], raw["default"].lower(), rules, raw.get("rank", 0), path)


def _rule(where, raw):
    if not isinstance(raw, dict):
        raise ArgumentError(f"{where}: not a table")
    _check_keys(where, raw, {"match": str, "type": str}, {"layers": str, "importance": bool})
    _check_type(where, raw["type"])
    if "layers" in raw and not LAYERS.fullmatch(raw["layers"]):
        raise ArgumentError(f'{where}: layers {raw["layers"]!r} is none of "more", "first K", "first 1/K"')
    return Rule(**{**raw, "type": raw["type"].lower()})


def _check_keys(where, raw, needed, possible):
    for key in needed:
        if key not in raw:
            raise ArgumentError(f"{where}: {key!r} is missing")
    for key, value in raw.items():
        kind = {**needed, **possible}.get(key)
        if kind is None:
            raise ArgumentError(f"{where}: unknown key {key!r}")
        if not isinstance(value, kind):
            raise ArgumentError(f"{where}: {key!r} must be a {kind.__name__}")


def _check_type(where, name):
    if name.lower() not in ggml.NUMBERS:
        raise ArgumentError(f"{where}: unknown type {name!r}; known: {', '.join(ggml.NUMBERS)}")
