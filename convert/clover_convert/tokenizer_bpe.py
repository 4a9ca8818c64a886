"""A byte-level BPE vocabulary, tokenizer.json of Hugging Face's tokenizers, as GGUF metadata for llama.cpp's tokenizer "gpt2"."""

import reprlib

from clover_convert.vocabulary import CONTROL, NORMAL, USER_DEFINED, check_text, place
from clover_cpp.errors import CheckpointError

# llama.cpp's name -> regular expression of the Split pre-tokenizer, exactly
PRE_TOKENIZERS = {
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def bpe_metadata(raw, size):
    """(metadata, tokens, types, own) of a tokenizer.json (dict), padded to `size` tokens.

    metadata: (key, kind, value); tokens: [size] texts; types: [size] llama.cpp's token types (int), not yet in the metadata;
    own: {key after the architecture: text} of the engine's own keys. Raises CheckpointError where it is not understood.
    """
    try:
        pre, nfc, merges = _pre_tokenizer(raw), _is_nfc(raw), _merges(raw)
        tokens, types = _vocabulary(raw, size)
        _check_added_tokens(raw, nfc)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"tokenizer.json is malformed ({type(error).__name__}: {error})") from error
    metadata = [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", pre),
        ("tokenizer.ggml.tokens", "[str]", tokens),
        ("tokenizer.ggml.merges", "[str]", merges),
        ("tokenizer.ggml.add_bos_token", "bool", False),
    ]
    return metadata, tokens, types, {"tokenizer.normalizer": "nfc"} if nfc else {}


def _steps(node, field):
    """A component of tokenizer.json as a list: nothing, itself, or the members of a Sequence."""
    if node is None:
        return []
    return node[field] if node["type"] == "Sequence" else [node]


def _pre_tokenizer(raw):
    steps = _steps(raw.get("pre_tokenizer"), "pretokenizers")
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    if [step["type"] for step in steps] != ["Split", "ByteLevel"] or "Regex" not in steps[0]["pattern"]:
        kinds = ", ".join(step["type"] for step in steps) or "none"
        raise CheckpointError(
            f"tokenizer.json: unknown pre-tokenizer ({kinds}); known: a Split by regular expression, then ByteLevel"
        )
    for step, expected in zip(steps, (split, level), strict=True):
        for field, value in expected.items():
            if step.get(field, True if field == "use_regex" else value) != value:
                raise CheckpointError(
                    f"tokenizer.json: pre-tokenizer {step['type']} with {field} {step.get(field)!r} is not supported"
                )
    regex = steps[0]["pattern"]["Regex"]
    for name, known in PRE_TOKENIZERS.items():
        if regex == known:
            return name
    raise CheckpointError(f"tokenizer.json: unknown pre-tokenizer, its regular expression is {regex!r}")


def _is_nfc(raw):
    kinds = [step["type"] for step in _steps(raw.get("normalizer"), "normalizers")]
    if kinds not in ([], ["NFC"]):
        raise CheckpointError(f"tokenizer.json: normalizer {', '.join(kinds)} is not supported, only NFC")
    return bool(kinds)


def _merges(raw):
    model = raw["model"]
    if model.get("type", "BPE") != "BPE":
        raise CheckpointError(f"tokenizer.json: model {model['type']} is not supported, only BPE")
    for field in ("byte_fallback", "ignore_merges", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise CheckpointError(f"tokenizer.json: {field} {model[field]!r} is not supported")
    for step in _steps(raw.get("post_processor"), "processors"):
        if step["type"] != "ByteLevel":
            raise CheckpointError(f"tokenizer.json: post-processor {step['type']} is not supported")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    for pair in pairs:
        if len(pair) != 2 or any(not part or " " in part for part in pair):
            raise CheckpointError(f"tokenizer.json: merge {reprlib.repr(pair)} is not a pair of tokens without spaces")
        check_text("".join(pair), f"tokenizer.json: merge {reprlib.repr(pair)}")
    return [f"{left} {right}" for left, right in pairs]


def _vocabulary(raw, size):
    entries = [(content, number, NORMAL) for content, number in raw["model"]["vocab"].items()]
    for added in raw.get("added_tokens") or []:
        entries.append((added["content"], added["id"], CONTROL if added["special"] else USER_DEFINED))
    return place("tokenizer.json", entries, size)


def _check_added_tokens(raw, nfc):
    """The engine finds added tokens in the text as it stands, whatever is around them."""
    for added in raw.get("added_tokens") or []:
        for flag in ("lstrip", "rstrip", "single_word", *(["normalized"] if nfc else [])):
            if added.get(flag):
                raise CheckpointError(f"tokenizer.json: added token {added['content']!r} with {flag} is not supported")
