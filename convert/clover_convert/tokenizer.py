"""The tokenizer of a checkpoint as GGUF metadata: vocabulary, merges, special tokens, chat template.

Only what the engine reproduces exactly is accepted: byte-level BPE with a known pre-tokenizer. Anything else is refused by name.
"""

import reprlib

from clover_cpp.errors import CheckpointError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

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

# metadata key -> name of the token in tokenizer_config.json, and field of generation_config.json and config.json
SPECIAL = {
    "eos": ("eos_token", "eos_token_id"),
    "padding": ("pad_token", "pad_token_id"),
    "bos": ("bos_token", "bos_token_id"),
}
MORE_ENDS = ("eot", "eom")  # metadata keys of the second and third end token


def tokenizer_metadata(checkpoint, config):
    """Metadata (key, kind, value) of the tokenizer in a `Checkpoint`, padded to `config.vocab_size` tokens.

    Raises CheckpointError where the tokenizer is missing, not understood, or at odds with config.json.
    """
    raw = checkpoint.json("tokenizer.json")
    if raw is None:
        raise CheckpointError(f"no tokenizer.json in {checkpoint.folder}")
    settings = checkpoint.json("tokenizer_config.json") or {}
    try:
        pre, nfc, merges = _pre_tokenizer(raw), _is_nfc(raw), _merges(raw)
        tokens, types = _vocabulary(raw, config.vocab_size)
        _check_added_tokens(raw, nfc)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"tokenizer.json is malformed ({type(error).__name__}: {error})") from error
    ids = {token: i for i, token in enumerate(tokens)}
    sources = [checkpoint.config, checkpoint.config.get("text_config") or {}]
    special = _special_ids(ids, settings, [checkpoint.json("generation_config.json") or {}, *sources])
    if config.block:
        special["mask"] = _mask_id(ids, settings, sources)
        if special["mask"] in [special[name] for name in ("eos", *MORE_ENDS) if name in special]:
            raise CheckpointError(f"the mask token, {special['mask']}, is also an end-of-text token")
        types[special["mask"]] = CONTROL
    metadata = [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", pre),
        ("tokenizer.ggml.tokens", "[str]", tokens),
        ("tokenizer.ggml.token_type", "[i32]", types),
        ("tokenizer.ggml.merges", "[str]", merges),
        ("tokenizer.ggml.add_bos_token", "bool", False),
    ]
    metadata += [(f"tokenizer.ggml.{name}_token_id", "u32", number) for name, number in special.items()]
    if nfc:
        metadata.append((f"{config.architecture}.tokenizer.normalizer", "str", "nfc"))
    template = _chat_template(checkpoint, settings)
    if template is not None:
        metadata.append(("tokenizer.chat_template", "str", template))
    return metadata


def _check_text(text, what):
    """JSON can hold what UTF-8 cannot: half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{what} is not valid Unicode") from error


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
        _check_text("".join(pair), f"tokenizer.json: merge {reprlib.repr(pair)}")
    return [f"{left} {right}" for left, right in pairs]


def _vocabulary(raw, size):
    entries = [(content, number, NORMAL) for content, number in raw["model"]["vocab"].items()]
    for added in raw.get("added_tokens") or []:
        entries.append((added["content"], added["id"], CONTROL if added["special"] else USER_DEFINED))
    tokens, types, ids = [None] * size, [UNUSED] * size, {}
    for content, number, kind in entries:
        if type(number) is not int or not 0 <= number < size:
            raise CheckpointError(f"tokenizer.json: token {content!r} has id {number}, the embedding has {size} rows")
        if tokens[number] not in (None, content):
            raise CheckpointError(f"tokenizer.json: tokens {tokens[number]!r} and {content!r} have the same id {number}")
        if ids.setdefault(content, number) != number:
            raise CheckpointError(f"tokenizer.json: token {content!r} has two ids, {ids[content]} and {number}")
        _check_text(content, f"tokenizer.json: token {content!r}")
        if not content or "\0" in content:
            raise CheckpointError(f"tokenizer.json: token {number} {'holds a zero byte' if content else 'is empty'}")
        tokens[number], types[number] = content, kind
    for i, token in enumerate(tokens):
        if token is None:
            tokens[i] = f"[PAD{i}]"
            if tokens[i] in ids:
                raise CheckpointError(f"tokenizer.json: token {tokens[i]!r} has the name of the unused id {i}")
    return tokens, types


def _check_added_tokens(raw, nfc):
    """The engine finds added tokens in the text as it stands, whatever is around them."""
    for added in raw.get("added_tokens") or []:
        for flag in ("lstrip", "rstrip", "single_word", *(["normalized"] if nfc else [])):
            if added.get(flag):
                raise CheckpointError(f"tokenizer.json: added token {added['content']!r} with {flag} is not supported")


def _token_id(ids, settings, field):
    """The id of a token that tokenizer_config.json names, or None."""
    token = settings.get(field)
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return None
    if not isinstance(content, str) or content not in ids:
        raise CheckpointError(f"tokenizer_config.json: {field} {reprlib.repr(content)} is not in the vocabulary")
    return ids[content]


def _field_ids(ids, sources, field):
    """The ids that the first of several JSON files with this field gives, as a list."""
    value = next((source[field] for source in sources if source.get(field) is not None), [])
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if type(number) is not int or not 0 <= number < len(ids):
            raise CheckpointError(f"{field} {reprlib.repr(number)} is not a token of the vocabulary of {len(ids)}")
    return numbers


def _special_ids(ids, settings, sources):
    special = {}
    for name, (token, field) in SPECIAL.items():
        candidates = _field_ids(ids, sources, field)
        named = _token_id(ids, settings, token)
        if named is not None:
            candidates = [named] + [number for number in candidates if number != named]
        if candidates:
            special[name] = candidates[0]
        if name == "eos":
            special.update(zip(MORE_ENDS, candidates[1:], strict=False))
            if len(candidates) > 1 + len(MORE_ENDS):
                raise CheckpointError(f"{len(candidates)} end tokens ({field}); a GGUF file holds {1 + len(MORE_ENDS)}")
    if "eos" not in special:
        raise CheckpointError("no end-of-text token: neither tokenizer_config.json nor config.json names one")
    return special


def _mask_id(ids, settings, sources):
    named = _token_id(ids, settings, "mask_token")
    stated = _field_ids(ids, sources, "mask_token_id")
    if named is None and not stated:
        raise CheckpointError("no mask token: config.json has no mask_token_id, tokenizer_config.json no mask_token")
    if named is not None and stated and stated[0] != named:
        raise CheckpointError(f"mask_token_id is {stated[0]} in config.json, but {named} in tokenizer_config.json")
    return stated[0] if stated else named


def _chat_template(checkpoint, settings):
    template = checkpoint.text("chat_template.jinja")
    if template is None:
        template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError("tokenizer_config.json: chat_template is not a text")
    if template is not None:
        _check_text(template, "the chat template")
    return template
