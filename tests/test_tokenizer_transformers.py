"""Sentencepiece vocabularies as transformers reads them: where its LlamaTokenizer puts spaces around control tokens."""

import re
import shutil

import pytest
from test_tokenizer_parity import CONTROLS, N, differing, train, write_settings
from transformers import LlamaTokenizer

import texts
from checkpoints import TOKENIZER_FILES, add_tokenizer, tiny_qwen
from clover_convert import convert
from clover_cpp import Clover
from clover_cpp.errors import CheckpointError

SPLIT = re.compile("(" + "|".join(map(re.escape, CONTROLS)) + ")")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a sentencepiece model that puts a space before a text."""
    folder = tmp_path_factory.mktemp("transformers") / "checkpoint"
    tiny_qwen(folder, eos_token_id=5, pad_token_id=3)
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
    train(folder, True)
    return folder


@pytest.fixture(scope="module")
def given():
    """transformers puts no space before a text that begins with one, sentencepiece does: such texts are left out."""
    drawn = texts.texts(CONTROLS, N, seed=10)
    return [text for text in drawn if not any(part[:1] in (" ", "\u2581") for part in SPLIT.split(text))]


@pytest.mark.parametrize("settings", [{"legacy": True}, {"legacy": False}, {"legacy": None}], ids=str)
def test_as_transformers(folder, given, settings):
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = {str(i): {"content": text, **flags} for i, text in enumerate(["<unk>", "<s>", "</s>", "<pad>", *CONTROLS[4:]])}
    write_settings(folder, added_tokens_decoder=added, **settings)
    output = folder.with_name(f"{settings['legacy']}.gguf")
    convert(folder, output, type="f32")
    oracle = LlamaTokenizer.from_pretrained(folder)
    with Clover(output, n_ctx=64) as clover:
        found = [clover.tokenize(text) for text in given]
        assert len(given) > 2000
        assert not differing(found, oracle(given, add_special_tokens=False).input_ids, given)
        wholes = [text for text in given if not SPLIT.search(text)]
        ids = [clover.tokenize(text) for text in wholes]
        assert not differing([clover.detokenize(tokens) for tokens in ids], [oracle.decode(tokens) for tokens in ids], wholes)


@pytest.mark.parametrize("settings", [{"add_bos_token": True}, {"add_bos_token": False}, {}], ids=str)
def test_beginning_of_text(folder, settings):
    write_settings(folder, bos_token="<s>", chat_template="{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}", **settings)
    output = folder.with_name(f"begin-{settings.get('add_bos_token')}.gguf")
    convert(folder, output, type="f32")
    oracle = LlamaTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "one two"}]
    with Clover(output, n_ctx=64) as clover:
        list(clover.generate("one two", "ar", max_tokens=1))
        assert clover.tokens[:-1] == oracle("one two").input_ids
        assert clover.render(messages) == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        list(clover.generate(messages, "ar", max_tokens=1))
        text = clover.render(messages)
        assert clover.tokens[:-1] == oracle(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    "settings, options, message",
    [
        ({"add_bos_token": True}, {"bos_id": -1}, "no file names a beginning-of-text token"),
        ({"add_eos_token": True}, {}, "add_eos_token is not supported"),
    ],
)
def test_tokens_around_a_text_refused(folder, tmp_path, settings, options, message):
    copy = shutil.copytree(folder, tmp_path / "checkpoint")
    train(copy, True, **options)
    write_settings(copy, **settings)
    with pytest.raises(CheckpointError, match=message):
        convert(copy, tmp_path / "none.gguf")


def test_prefix_that_the_settings_contradict(folder):
    write_settings(folder, add_prefix_space=False)
    with pytest.raises(CheckpointError, match="add_dummy_prefix True, tokenizer_config.json add_prefix_space False"):
        convert(folder, folder.with_suffix(".gguf"))


def test_tokenizer_json_that_is_not_understood(folder, tmp_path):
    """tokenizer.model serves instead; where that is refused too, the error names both."""
    write_settings(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "Unigram"}, "pre_tokenizer": null}')
    convert(folder, tmp_path / "pieces.gguf", type="f32")
    with Clover(tmp_path / "pieces.gguf", n_ctx=64) as clover:
        assert clover.metadata("tokenizer.ggml.model") == "llama"
    train(folder, True, model_type="unigram")
    with pytest.raises(CheckpointError, match="tokenizer.json: unknown pre-tokenizer.*; tokenizer.model: .* unigram"):
        convert(folder, tmp_path / "none.gguf")
    add_tokenizer(folder)
    convert(folder, tmp_path / "bytes.gguf", type="f32")
    with Clover(tmp_path / "bytes.gguf", n_ctx=64) as clover:
        assert clover.metadata("tokenizer.ggml.model") == "gpt2"
