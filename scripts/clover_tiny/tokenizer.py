"""The tokenizer of clover-tiny: a byte-level BPE trained on task text, in the form of Qwen3.5's.

Run as `python -m clover_tiny.tokenizer DIR`: writes tokenizer.json and tokenizer_config.json.
"""

import json
import pathlib
import sys

import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from . import tasks

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
PAD, END, MASK = "<|endoftext|>", "<|im_end|>", "<|mask|>"
VOCAB_SIZE = 1024
# The split of Qwen3.5's tokenizer.json: every digit is a token of its own.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(lines):
    """Train the BPE on an iterable of texts; returns a `tokenizers.Tokenizer`."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=False, ignore_merges=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(list(SPECIAL[:4]))
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIAL[4:]])
    return tokenizer


class Renderer:
    """Turns examples into token ids with a checkpoint folder's tokenizer.json and chat_template.jinja."""

    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = chat_template(folder)
        self.pad, self.end, self.mask = (self.tokenizer.token_to_id(text) for text in (PAD, END, MASK))

    def prompt_text(self, example):
        """The prompt as text, up to where the answer begins."""
        return self.template.render(
            messages=example.messages, tools=example.tools, add_generation_prompt=True, enable_thinking=example.thinking
        )

    def prompt(self, example):
        """Token ids of the prompt: list of int."""
        return self.tokenizer.encode(self.prompt_text(example), add_special_tokens=False).ids

    def answer(self, example):
        """Token ids of the right answer, end token included."""
        return [*self.tokenizer.encode(example.answer, add_special_tokens=False).ids, self.end]

    def text(self, ids):
        """Text of generated ids; special tokens other than the model's own markup are left out."""
        return self.tokenizer.decode([i for i in ids if i not in (self.pad, self.end, self.mask)], skip_special_tokens=False)


def chat_template(folder):
    """The folder's chat_template.jinja, compiled as Hugging Face compiles it (sandboxed, blocks trimmed)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string((pathlib.Path(folder) / "chat_template.jinja").read_text())


def main(folder):
    """Train on 12,000 examples and write the tokenizer's files into `folder`, which holds chat_template.jinja."""
    folder = pathlib.Path(folder)
    template = chat_template(folder)
    rng = tasks.training_rng("tokenizer")

    def lines():
        for _ in range(12000):
            example = tasks.draw(rng)
            text = template.render(messages=example.messages, tools=example.tools, add_generation_prompt=True)
            for marker in SPECIAL:
                text = text.replace(marker, "\n")
            yield text + example.answer

    tokenizer = train(lines())
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "mask_token": MASK,
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens written to {folder}")


if __name__ == "__main__":
    main(sys.argv[1])
