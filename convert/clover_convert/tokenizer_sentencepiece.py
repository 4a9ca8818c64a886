"""The vocabulary of a sentencepiece `tokenizer.model` as GGUF metadata, for llama.cpp's tokenizer "llama" (SPM).

Facts about the file: sentencepiece's sentencepiece_model.proto. What llama.cpp's SPM would tokenise otherwise than
sentencepiece is refused by name: it has neither normaliser, nor white-space clean-up, nor unused pieces, and its merges may
end in any token of the vocabulary, sentencepiece's only in normal ones.
"""

import math
import reprlib

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as proto

from clover_convert.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, place
from clover_cpp.errors import CheckpointError

FILE = "tokenizer.model"
Piece = proto.ModelProto.SentencePiece
TYPES = {
    Piece.NORMAL: NORMAL,
    Piece.UNKNOWN: UNKNOWN,
    Piece.CONTROL: CONTROL,
    Piece.USER_DEFINED: USER_DEFINED,
    Piece.BYTE: BYTE,
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "\u2581"
UNUSED_SCORE = -10000.0


def sentencepiece_metadata(checkpoint, settings, size):
    """(metadata, tokens, types, special, own) of the checkpoint's tokenizer.model, padded to `size` tokens.

    metadata: (key, kind, value); tokens: [size] texts; types: [size] llama.cpp's token types (int), not yet in the metadata;
    special: metadata key -> text of the token that the model itself names; own: {key after the architecture: text} of the engine's
    own keys. settings: tokenizer_config.json.
    Raises CheckpointError where the file is damaged, or llama.cpp would not reproduce it.
    """
    raw = checkpoint.bytes(FILE)
    model = proto.ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError as error:
        raise CheckpointError(f"{FILE} is damaged: not a sentencepiece model") from error
    if not model.IsInitialized() or not model.pieces or not model.HasField("trainer_spec"):
        raise CheckpointError(f"{FILE} is damaged: not a sentencepiece model")
    _check_model(model)
    if settings.get("add_eos_token"):
        raise CheckpointError("tokenizer_config.json: add_eos_token is not supported: no answer can follow")
    entries = [(piece.piece, i, _type(piece, i)) for i, piece in enumerate(model.pieces)]
    added = _added_tokens(checkpoint, settings, entries)
    always, own = _space_prefix(model, settings, entries)
    tokens, types = place(FILE, entries + added, size)
    _check_merges(tokens, types)
    scores = [piece.score for piece in model.pieces] + [UNUSED_SCORE] * (size - len(model.pieces))
    trainer = model.trainer_spec
    ids = {"bos": trainer.bos_id, "eos": trainer.eos_id, "unknown": trainer.unk_id, "padding": trainer.pad_id}
    special = {name: tokens[i] for name, i in ids.items() if 0 <= i < len(model.pieces) and types[i] in (CONTROL, UNKNOWN)}
    metadata = [
        ("tokenizer.ggml.model", "str", "llama"),
        ("tokenizer.ggml.pre", "str", "default"),
        ("tokenizer.ggml.tokens", "[str]", tokens),
        ("tokenizer.ggml.scores", "[f32]", scores),
        ("tokenizer.ggml.add_bos_token", "bool", bool(settings.get("add_bos_token", False))),
        ("tokenizer.ggml.add_eos_token", "bool", False),
        ("tokenizer.ggml.add_space_prefix", "bool", always),
    ]
    return metadata, tokens, types, special, own


def _type(piece, number):
    if piece.type not in TYPES:
        raise CheckpointError(f"{FILE}: piece {number}, {piece.piece!r}, is of the type UNUSED, which llama.cpp would produce")
    if math.isnan(piece.score):
        raise CheckpointError(f"{FILE}: the score of piece {number}, {piece.piece!r}, is not a number")
    if piece.type == Piece.USER_DEFINED and SPACE in piece.piece:
        raise CheckpointError(f"{FILE}: the user-defined piece {piece.piece!r} with a space is not supported")
    return TYPES[piece.type]


def _check_model(model):
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != proto.TrainerSpec.BPE:
        kind = proto.TrainerSpec.ModelType.Name(trainer.model_type).lower()
        raise CheckpointError(f"{FILE}: sentencepiece models of the kind {kind} are not supported, only bpe")
    unsupported = {
        "no byte_fallback": not trainer.byte_fallback,
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        f"the normalizer {normalizer.name or 'of its own'}": bool(normalizer.precompiled_charsmap),
        "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
        "no escape_whitespaces": not normalizer.escape_whitespaces,
        "a denormalizer": bool(model.denormalizer_spec.precompiled_charsmap),
    }
    for what, found in unsupported.items():
        if found:
            raise CheckpointError(f"{FILE}: a sentencepiece model with {what} is not supported: llama.cpp would tokenise otherwise")
    missing = set(BYTES) - {piece.piece for piece in model.pieces if piece.type == Piece.BYTE}
    if missing:
        raise CheckpointError(f"{FILE}: the byte piece {min(missing)} is missing")


def _added_tokens(checkpoint, settings, entries):
    """Tokens added after training, as (content, id, type), from tokenizer_config.json and the older added_tokens.json."""
    decoder = settings.get("added_tokens_decoder") or {}
    older = checkpoint.json("added_tokens.json") or {}
    known, found = {i: text for text, i, _ in entries}, {}
    try:
        listed = [(int(i), token["content"], token) for i, token in decoder.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder is malformed") from error
    for number, content, flags in listed + [(number, content, {}) for content, number in older.items()]:
        for flag in ("lstrip", "rstrip", "single_word"):
            if flags.get(flag):
                raise CheckpointError(f"tokenizer_config.json: added token {content!r} with {flag} is not supported")
        if number in known:
            if known[number] != content:
                raise CheckpointError(f"added token {content!r} has the id {number} of the piece {known[number]!r} in {FILE}")
        elif number not in found:
            found[number] = (content, number, CONTROL if flags.get("special") else USER_DEFINED)
    return list(found.values())


def _space_prefix(model, settings, entries):
    """(whether llama.cpp puts a space before every text between added tokens, the engine's own keys).

    transformers 5 puts one there only where tokenizer_config.json has legacy true; else only before the whole text, as the
    engine does by its own key.
    """
    prefix = model.normalizer_spec.add_dummy_prefix
    stated = settings.get("add_prefix_space")
    if stated is not None and stated != prefix:
        raise CheckpointError(f"{FILE} has add_dummy_prefix {prefix}, tokenizer_config.json add_prefix_space {stated!r}")
    piece = next((text for text, _, kind in entries if kind == USER_DEFINED), None)
    if prefix and piece is not None:
        raise CheckpointError(
            f"{FILE}: add_dummy_prefix with user-defined pieces ({piece!r}) is not supported: llama.cpp would tokenise otherwise"
        )
    always = prefix and settings.get("legacy") is True
    return always, {"tokenizer.space_prefix": "first"} if prefix and not always else {}


def _check_merges(tokens, types):
    """No merge may end in a token that is not a normal one."""
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    for token, kind in zip(tokens, types, strict=True):
        if kind in (NORMAL, USER_DEFINED):
            continue
        text = token.replace(" ", SPACE)
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if (len(left) == 1 or left in normal) and (len(right) == 1 or right in normal):
                parts = f"{reprlib.repr(left)} and {reprlib.repr(right)}"
                raise CheckpointError(f"{FILE}: llama.cpp would merge {parts} to {token!r}, which sentencepiece never does")
