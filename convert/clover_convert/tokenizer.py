"""The tokenizer of a checkpoint as GGUF metadata: vocabulary, merges, special tokens, chat template.

Only what the engine reproduces exactly is accepted: byte-level BPE with a known pre-tokenizer (tokenizer.json), or sentencepiece's
BPE without normaliser (tokenizer.model). Anything else is refused by name.
"""

import reprlib

from clover_convert.tokenizer_bpe import bpe_metadata
from clover_convert.tokenizer_sentencepiece import sentencepiece_metadata
from clover_convert.vocabulary import CONTROL, check_text
from clover_cpp.errors import CheckpointError

# metadata key -> name of the token in tokenizer_config.json, and field of generation_config.json and config.json
SPECIAL = {
    "eos": ("eos_token", "eos_token_id"),
    "padding": ("pad_token", "pad_token_id"),
    "bos": ("bos_token", "bos_token_id"),
}
MORE_ENDS = ("eot", "eom")  # metadata keys of the second and third end token


def tokenizer_metadata(checkpoint, config):
    """Metadata (key, kind, value) of the tokenizer in a `Checkpoint`, padded to `config.vocab_size` tokens.

    tokenizer.json is used where there is one that is understood, else tokenizer.model. Raises CheckpointError where the tokenizer
    is missing, not understood, or at odds with config.json.
    """
    settings = checkpoint.json("tokenizer_config.json") or {}
    metadata, tokens, types, named, own = _vocabulary(checkpoint, settings, config.vocab_size)
    ids = {token: i for i, token in enumerate(tokens)}
    sources = [checkpoint.config, checkpoint.config.get("text_config") or {}]
    special = _special_ids(ids, settings, [checkpoint.json("generation_config.json") or {}, *sources], named)
    if ("tokenizer.ggml.add_bos_token", "bool", True) in metadata and "bos" not in special:
        raise CheckpointError("tokenizer_config.json: add_bos_token is true, but no file names a beginning-of-text token")
    if config.block:
        special["mask"] = _mask_id(ids, settings, sources)
        if special["mask"] in [special[name] for name in ("eos", *MORE_ENDS) if name in special]:
            raise CheckpointError(f"the mask token, {special['mask']}, is also an end-of-text token")
        types[special["mask"]] = CONTROL
    metadata.append(("tokenizer.ggml.token_type", "[i32]", types))
    metadata += [(f"tokenizer.ggml.{name}_token_id", "u32", number) for name, number in special.items()]
    metadata += [(f"{config.architecture}.{key}", "str", value) for key, value in own.items()]
    template = _chat_template(checkpoint, settings)
    if template is not None:
        metadata.append(("tokenizer.chat_template", "str", template))
    return metadata


def _vocabulary(checkpoint, settings, size):
    """(metadata, tokens, types, special tokens the file names, engine's own keys) from one of the two kinds of file."""
    raw, has_pieces = checkpoint.json("tokenizer.json"), checkpoint.has("tokenizer.model")
    if raw is None and not has_pieces:
        raise CheckpointError(f"no tokenizer.json and no tokenizer.model in {checkpoint.folder}")
    refused = ""
    if raw is not None:
        try:
            metadata, tokens, types, own = bpe_metadata(raw, size)
            return metadata, tokens, types, {}, own
        except CheckpointError as error:
            if not has_pieces:
                raise
            refused = f"{error}; "
    try:
        return sentencepiece_metadata(checkpoint, settings, size)
    except CheckpointError as error:
        raise CheckpointError(f"{refused}{error}") from error


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


def _special_ids(ids, settings, sources, known):
    """Metadata key -> id; `known`: key -> token that the vocabulary's own file names, used where no JSON file names one."""
    special = {name: ids[token] for name, token in known.items()}
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
        check_text(template, "the chat template")
    return template
