"""The tokenizer in the GGUF against the `tokenizers` library reading the same tokenizer.json."""

import json
import shutil

import gguf
import pytest
import tokenizers

from checkpoints import tiny_clover
from clover_convert import convert
from clover_cpp.errors import CheckpointError
from conftest import BUNDLED

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "checkpoint"
    tiny_clover(folder, vocab_size=1100)
    return folder


@pytest.fixture
def copy(tmp_path, checkpoint):
    return shutil.copytree(checkpoint, tmp_path / "checkpoint")


def metadata(folder):
    output = folder.with_suffix(".gguf")
    convert(folder, output)
    return {key: field.contents() for key, field in gguf.GGUFReader(output).fields.items()}


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_vocabulary(checkpoint):
    found = metadata(checkpoint)
    oracle = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 1100
    n = oracle.get_vocab_size(with_added_tokens=True)
    assert tokens[:n] == [oracle.id_to_token(i) for i in range(n)]
    assert tokens[n:] == [f"[PAD{i}]" for i in range(n, 1100)]
    assert set(types[n:]) == {UNUSED}
    added = oracle.get_added_tokens_decoder()
    for i in range(n):
        wanted = (CONTROL if added[i].special else USER_DEFINED) if i in added else NORMAL
        assert types[i] == wanted, tokens[i]
    assert {CONTROL, USER_DEFINED, NORMAL} <= set(types)


def test_merges(checkpoint):
    merges = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["merges"]
    assert metadata(checkpoint)["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]


def test_merges_as_text(copy):
    before = metadata(copy)["tokenizer.ggml.merges"]
    edit(copy / "tokenizer.json", lambda t: t["model"].update(merges=[" ".join(pair) for pair in t["model"]["merges"]]))
    assert metadata(copy)["tokenizer.ggml.merges"] == before


def test_identity_and_special_tokens(checkpoint):
    found = metadata(checkpoint)
    tokens = found["tokenizer.ggml.tokens"]
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "qwen35"
    assert found["clover.tokenizer.normalizer"] == "nfc"
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert tokens[found["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert tokens[found["tokenizer.ggml.padding_token_id"]] == "<|endoftext|>"
    assert tokens[found["tokenizer.ggml.mask_token_id"]] == "<|mask|>"
    assert "tokenizer.ggml.bos_token_id" not in found
    assert found["tokenizer.chat_template"] == (BUNDLED / "chat_template.jinja").read_text()


def test_mask_token_is_control_whatever_the_tokenizer_says(copy):
    def demote(tokenizer):
        next(token for token in tokenizer["added_tokens"] if token["content"] == "<|mask|>")["special"] = False

    edit(copy / "tokenizer.json", demote)
    found = metadata(copy)
    assert found["tokenizer.ggml.token_type"][found["tokenizer.ggml.mask_token_id"]] == CONTROL


def test_mask_token_from_either_file(copy):
    edit(copy / "config.json", lambda config: config.pop("mask_token_id"))
    assert metadata(copy)["tokenizer.ggml.mask_token_id"] == 1017
    edit(copy / "tokenizer_config.json", lambda config: config.pop("mask_token"))
    with pytest.raises(CheckpointError, match="no mask token"):
        metadata(copy)


def test_several_end_tokens(copy):
    (copy / "generation_config.json").write_text('{"eos_token_id": [1016, 1014, 1015]}')
    found = metadata(copy)
    assert found["tokenizer.ggml.eos_token_id"] == 1016
    assert found["tokenizer.ggml.eot_token_id"] == 1014
    assert found["tokenizer.ggml.eom_token_id"] == 1015
    (copy / "generation_config.json").write_text('{"eos_token_id": [1016, 1014, 1015, 1020]}')
    with pytest.raises(CheckpointError, match="4 end tokens"):
        metadata(copy)


def test_chat_template_of_tokenizer_config(copy):
    (copy / "chat_template.jinja").unlink()
    assert "tokenizer.chat_template" not in metadata(copy)
    edit(copy / "tokenizer_config.json", lambda c: c.update(chat_template=[{"name": "default", "template": "{{ messages }}"}]))
    assert metadata(copy)["tokenizer.chat_template"] == "{{ messages }}"


def test_pre_tokenizer_and_normalizer_of_qwen2(copy):
    regex = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

    def change(tokenizer):
        tokenizer["normalizer"] = None
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex

    edit(copy / "tokenizer.json", change)
    found = metadata(copy)
    assert found["tokenizer.ggml.pre"] == "qwen2"
    assert "clover.tokenizer.normalizer" not in found


def split(tokenizer):
    return tokenizer["pre_tokenizer"]["pretokenizers"][0]


# what a tokenizer.json has, changed -> what the error names
REFUSED = [
    (lambda t: split(t)["pattern"].update(Regex=r"\w+|\s+"), r"unknown pre-tokenizer.*\w\+\|\\+s\+"),
    (lambda t: split(t).update(behavior="Removed"), "Split with behavior 'Removed'"),
    (lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), r"unknown pre-tokenizer \(Whitespace\)"),
    (lambda t: t.update(pre_tokenizer=None), r"unknown pre-tokenizer \(none\)"),
    (lambda t: t.update(normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
    (lambda t: t["model"].update(type="Unigram"), "Unigram"),
    (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
    (lambda t: t["model"]["merges"].append(["a", "b", "c"]), "merge"),
    (lambda t: t["model"]["merges"].append(["\ud800", "a"]), r"merge \['\\ud800', 'a'\] is not valid Unicode"),
    (lambda t: t["model"]["vocab"].update({"\ud800": 1050}), r"token '\\ud800' is not valid Unicode"),
    (lambda t: t["model"]["vocab"].update({"": 1050}), "token 1050 is empty"),
    (lambda t: t["model"]["vocab"].update({"a\0": 1050}), "token 1050 holds a zero byte"),
    (lambda t: t["model"]["vocab"].update({"[PAD1051]": 1050}), r"'\[PAD1051\]' has the name of the unused id 1051"),
    (lambda t: t["added_tokens"].append(None), "malformed"),
    (lambda t: t["added_tokens"].append({"content": ["a"], "id": 1050, "special": True}), "malformed"),
    (lambda t: t["added_tokens"][4].update(lstrip=True), "'<think>' with lstrip"),
    (lambda t: t["added_tokens"][4].update(rstrip=True), "'<think>' with rstrip"),
    (lambda t: t["added_tokens"][4].update(single_word=True), "'<think>' with single_word"),
    (lambda t: t["added_tokens"][4].update(normalized=True), "'<think>' with normalized"),
    (lambda t: t["model"].pop("vocab"), "malformed.*vocab"),
    (lambda t: t["model"]["vocab"].update(extra=5000), "'extra' has id 5000"),
    (lambda t: t["model"]["vocab"].update(extra=3), "same id 3"),
    (lambda t: t["added_tokens"][0].update(id=1050, content=t["added_tokens"][1]["content"]), "two ids"),
    (lambda t: t.update(post_processor={"type": "TemplateProcessing"}), "TemplateProcessing"),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_reproduced_is_refused(copy, change, message):
    edit(copy / "tokenizer.json", change)
    with pytest.raises(CheckpointError, match=message):
        metadata(copy)
    assert not copy.with_suffix(".gguf").exists()


SETTINGS = [
    (lambda c: c.update(eos_token=["x"]), r"eos_token \['x'\] is not in the vocabulary"),
    (lambda c: c.update(eos_token=5), "eos_token 5 is not in the vocabulary"),
    (lambda c: c.update(eos_token={"content": {}}), "eos_token {} is not in the vocabulary"),
    (lambda c: c.update(eos_token="<|mask|>"), "the mask token, 1017, is also an end-of-text token"),
    (lambda c: c.update(chat_template="\ud800"), "the chat template is not valid Unicode"),
]


@pytest.mark.parametrize("change, message", SETTINGS, ids=[message for _, message in SETTINGS])
def test_tokenizer_settings_at_fault(copy, change, message):
    (copy / "chat_template.jinja").unlink()
    edit(copy / "tokenizer_config.json", change)
    with pytest.raises(CheckpointError, match=message):
        metadata(copy)


def test_second_end_token_is_not_the_mask(copy):
    (copy / "generation_config.json").write_text('{"eos_token_id": [1016, 1017]}')
    with pytest.raises(CheckpointError, match="the mask token, 1017, is also an end-of-text token"):
        metadata(copy)
