"""What all kinds of tokenizer share: token types, and the table of tokens that fills the rows of the embedding."""

from clover_cpp.errors import CheckpointError

# llama.cpp's token types (enum llama_token_type)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def check_text(text, what):
    """JSON can hold what UTF-8 cannot, half of a surrogate pair: raises CheckpointError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{what} is not valid Unicode") from error


def place(file, entries, size):
    """([size] texts, [size] types) of the tokens (text, id, type) that `file` lists; ids without one are named [PAD<id>].

    Raises CheckpointError, naming `file`, for ids out of range, two tokens of one id, one token of two ids, or bad text.
    """
    tokens, types, ids = [None] * size, [UNUSED] * size, {}
    for content, number, kind in entries:
        if type(number) is not int or not 0 <= number < size:
            raise CheckpointError(f"{file}: token {content!r} has id {number}, the embedding has {size} rows")
        if tokens[number] not in (None, content):
            raise CheckpointError(f"{file}: tokens {tokens[number]!r} and {content!r} have the same id {number}")
        if ids.setdefault(content, number) != number:
            raise CheckpointError(f"{file}: token {content!r} has two ids, {ids[content]} and {number}")
        check_text(content, f"{file}: token {content!r}")
        if not content or "\0" in content:
            raise CheckpointError(f"{file}: token {number} {'holds a zero byte' if content else 'is empty'}")
        tokens[number], types[number] = content, kind
    for i, token in enumerate(tokens):
        if token is None:
            tokens[i] = f"[PAD{i}]"
            if tokens[i] in ids:
                raise CheckpointError(f"{file}: token {tokens[i]!r} has the name of the unused id {i}")
    return tokens, types
