"""Texts tokenise in the engine exactly as with the checkpoint's own tokenizer, by the library that made it."""

import contextlib
import ctypes as c
import io
import json
import os
import re
import shutil
import unicodedata

import model_files
import pytest
import sentencepiece
import tokenizers

import texts
from checkpoints import tiny_qwen
from clover_convert import convert
from clover_cpp import Clover, native
from clover_cpp.errors import CheckpointError, ModelFileError
from conftest import BUNDLED
from llama_tokenize import tokenize

N = 2500


def differing(found, wanted, given):
    """The first texts whose tokens differ: empty, where the tokenizers agree."""
    assert len(found) == len(wanted) == len(given)
    return [(text, ours, theirs) for text, ours, theirs in zip(given, found, wanted, strict=True) if ours != theirs][:5]


class Raw:
    """The tokenizer of a model file, through the C API: bytes to token ids and back."""

    def __init__(self, path):
        self.lib, self.model = native.library(), c.c_void_p()
        native.check(self.lib.clover_model_load(os.fsencode(path), None, self.model))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lib.clover_model_free(self.model)

    def tokenize(self, data, special=True):
        out = (c.c_int32 * (2 * len(data) + 8))()
        return out[: self.lib.clover_tokenize(self.model, data, len(data), special, out, len(out))]


def check_bpe(model, oracle, given):
    with Clover(model, n_ctx=64) as clover:
        found = [clover.tokenize(text) for text in given]
        wanted = [encoding.ids for encoding in oracle.encode_batch(given, add_special_tokens=False)]
        assert not differing(found, wanted, given)
        written = [clover.detokenize(tokens, special=True) for tokens in wanted]
        assert not differing(written, oracle.decode_batch(wanted, skip_special_tokens=False), given)


def check_bytes(model, oracle):
    given = texts.byte_strings(1000, seed=3)
    with Raw(model) as raw:
        found = [raw.tokenize(data) for data in given]
    wanted = [oracle(data.decode("utf-8", "replace")) for data in given]
    assert not differing(found, wanted, given)


def check_unmodified(plain_library, model, oracle, given):
    """The same file in an unmodified llama.cpp, which does not normalise."""
    given = [text for text in given if unicodedata.is_normalized("NFC", text)]
    assert len(given) > 1500
    found = tokenize(plain_library, model, given)
    wanted = [encoding.ids for encoding in oracle.encode_batch(given, add_special_tokens=False)]
    assert not differing(found, wanted, given)


@pytest.fixture(scope="module")
def bundled():
    oracle = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    added = [token.content for token in oracle.get_added_tokens_decoder().values()]
    return model_files.qwen(), oracle, texts.texts(added, N, seed=1)


def test_bundled(bundled):
    check_bpe(*bundled)


def test_bundled_bytes(bundled):
    model, oracle, _ = bundled
    check_bytes(model, lambda text: oracle.encode(text, add_special_tokens=False).ids)


def test_bundled_in_unmodified_llama(bundled, plain_library):
    check_unmodified(plain_library, *bundled)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    import qwen_vocabulary

    folder = tmp_path_factory.mktemp("qwen") / "checkpoint"
    tiny_qwen(folder, vocab_size=qwen_vocabulary.SIZE, eos_token_id=248046, pad_token_id=248044)
    added = qwen_vocabulary.save(folder)
    convert(folder, folder.with_suffix(".gguf"), type="f16")
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return folder.with_suffix(".gguf"), oracle, texts.texts(added, 2 * N, seed=2)


@pytest.mark.slow
def test_qwen_vocabulary(qwen):
    check_bpe(*qwen)


@pytest.mark.slow
def test_qwen_vocabulary_bytes(qwen):
    model, oracle, _ = qwen
    check_bytes(model, lambda text: oracle.encode(text, add_special_tokens=False).ids)


@pytest.mark.slow
def test_qwen_vocabulary_in_unmodified_llama(qwen, plain_library):
    check_unmodified(plain_library, *qwen)


@pytest.mark.slow
def test_qwen_vocabulary_against_its_own_ranks(qwen):
    """Ids as by tiktoken. Not claimed for words that no merges reach, which tiktoken takes as they are: these texts have none."""
    import qwen_vocabulary

    model, _, given = qwen
    ranks = qwen_vocabulary.own_tokenizer()
    given = [text for text in given if unicodedata.is_normalized("NFC", text)]
    with Clover(model, n_ctx=64) as clover:
        differ = [text for text in given if clover.tokenize(text) != ranks.encode(text)]
    assert not differ


# ---- sentencepiece


def train(folder, prefix, **options):
    """A sentencepiece model trained on the texts, in folder/tokenizer.model."""
    settings = {
        "vocab_size": 900,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.98,
        "add_dummy_prefix": prefix,
        "pad_id": 3,
        "control_symbols": ["<|im_start|>", "<|im_end|>"],
        "minloglevel": 2,
        "num_threads": 1,
        **options,
    }
    lines = [line for text in texts.texts([], 2000, seed=5) for line in re.split("[\n\r\0]", text) if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **settings)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_settings(folder, **settings):
    settings = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "legacy": True, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint folder without any tokenizer."""
    folder = tmp_path_factory.mktemp("sentencepiece") / "checkpoint"
    tiny_qwen(folder, eos_token_id=5, pad_token_id=3)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "checkpoint")


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def pieces(request, checkpoint, tmp_path_factory):
    """(GGUF file, sentencepiece's processor): with and without the space before a text."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("pieces") / "checkpoint")
    options = {} if request.param else {"user_defined_symbols": ["def", "世界", "<think>"]}
    oracle = train(folder, request.param, **options)
    write_settings(folder)
    convert(folder, folder.with_suffix(".gguf"), type="f32")
    return folder.with_suffix(".gguf"), oracle


CONTROLS = ["<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>"]


def test_sentencepiece(pieces):
    model, oracle = pieces
    given = texts.texts(["<think>", *CONTROLS], N, seed=6)
    with Clover(model, n_ctx=64) as clover:
        found = [clover.tokenize(text, special=False) for text in given]
        wanted = oracle.encode(given)
        assert not differing(found, wanted, given)
        assert not differing([clover.detokenize(tokens) for tokens in wanted], oracle.decode(wanted), given)


def test_sentencepiece_bytes(pieces):
    model, oracle = pieces
    given = texts.byte_strings(1000, seed=7)
    with Raw(model) as raw:
        found = [raw.tokenize(data, special=False) for data in given]
    assert not differing(found, [oracle.encode(data.decode("utf-8", "replace")) for data in given], given)


def test_sentencepiece_control_tokens(pieces):
    """Control tokens written in a text become that token; what is between them is a text of its own."""
    model, oracle = pieces
    given = texts.texts(CONTROLS, N, seed=8)
    split = re.compile("(" + "|".join(map(re.escape, CONTROLS)) + ")")

    def wanted(text):
        parts = split.split(text)
        return sum(([oracle.piece_to_id(part)] if part in CONTROLS else oracle.encode(part) for part in parts), [])

    with Clover(model, n_ctx=64) as clover:
        assert not differing([clover.tokenize(text) for text in given], [wanted(text) for text in given], given)


def test_sentencepiece_in_unmodified_llama(pieces, plain_library):
    model, oracle = pieces
    given = texts.texts([], N, seed=9)
    assert not differing(tokenize(plain_library, model, given), oracle.encode(given), given)


def test_sentencepiece_streams_the_text_of_its_tokens(pieces):
    model, oracle = pieces
    with Clover(model, n_ctx=64) as clover:
        prompt = clover.tokenize("<|im_start|>")
        text = "".join(clover.generate(prompt, "ar", max_tokens=40, temperature=2.0, seed=1))
        assert text == oracle.decode([token for token in clover.tokens[1:] if not oracle.is_control(token)])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model_type": "unigram"}, "of the kind unigram"),
        ({"model_type": "char"}, "of the kind char"),
        ({"byte_fallback": False}, "no byte_fallback"),
        ({"normalization_rule_name": "nfkc"}, "the normalizer nfkc"),
        ({"normalization_rule_name": "nmt_nfkc_cf"}, "the normalizer nmt_nfkc_cf"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"user_defined_symbols": ["def"]}, "add_dummy_prefix together with|add_dummy_prefix with user-defined"),
        ({"control_symbols": ["the", "<|im_end|>"]}, "llama.cpp would merge"),
    ],
)
def test_refused(copy, options, message):
    train(copy, True, **options)
    write_settings(copy)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(copy, copy.with_suffix(".gguf"))
    assert "tokenizer.model" in str(caught.value) and "\n" not in str(caught.value)
    assert not copy.with_suffix(".gguf").exists()


@pytest.mark.parametrize(
    "added, message",
    [
        ({"6": {"content": "<new>"}}, "has the id 6 of the piece"),
        ({"5000": {"content": "<new>"}}, "has id 5000"),
        ({"950": {"content": "<new>", "lstrip": True}}, "with lstrip"),
        ({"950": {}}, "malformed"),
        ({"x": {"content": "<new>"}}, "malformed"),
    ],
)
def test_added_tokens_refused(copy, added, message):
    train(copy, True)
    write_settings(copy, added_tokens_decoder=added)
    with pytest.raises(CheckpointError, match=message):
        convert(copy, copy.with_suffix(".gguf"))


def test_added_tokens(copy):
    oracle = train(copy, True)
    write_settings(copy, added_tokens_decoder={"950": {"content": "<new>", "special": True}, "951": {"content": "nice"}})
    convert(copy, copy.with_suffix(".gguf"), type="f32")
    with Clover(copy.with_suffix(".gguf"), n_ctx=64) as clover:
        assert clover.tokenize("a<new>nice b") == [*oracle.encode("a"), 950, 951, *oracle.encode(" b")]
        assert clover.tokenize("<new>", special=False) == oracle.encode("<new>")


@pytest.mark.parametrize("damage", ["empty", "random", "half", "one byte less", "text", "folder"])
def test_damaged(copy, damage):
    train(copy, True)
    write_settings(copy)
    path = copy / "tokenizer.model"
    raw = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "random": b"".join(bytes([i * 37 % 256]) for i in range(5000)),
                "half": raw[: len(raw) // 2],
                "one byte less": raw[:-1],
                "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4241003\n",
            }[damage]
        )
    with pytest.raises(CheckpointError, match="tokenizer.model"):
        convert(copy, copy.with_suffix(".gguf"))


def test_missing(copy):
    with contextlib.suppress(FileNotFoundError):
        (copy / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer.json and no tokenizer.model"):
        convert(copy, copy.with_suffix(".gguf"))


@pytest.mark.parametrize(
    "before, after, message",
    [
        (b"tokenizer.ggml.scores", b"tokenizer.ggml.scorex", "scores"),
        (b"<0x41>", b"<0x4g>", "byte tokens"),
        (
            b"tokenizer.ggml.model\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"tokenizer.ggml.model\x08\0\0\0\x05\0\0\0\0\0\0\0llamb",
            "'llamb'",
        ),
    ],
)
def test_damaged_model_file(pieces, tmp_path, before, after, message):
    data = pieces[0].read_bytes()
    assert before in data
    (tmp_path / "damaged.gguf").write_bytes(data.replace(before, after, 1))
    with pytest.raises(ModelFileError, match=message):
        Clover(tmp_path / "damaged.gguf", n_ctx=64)
