"""The engine decodes as the reference decoder does (scripts/clover_tiny/decode.py over the PyTorch model), step by step."""

import random
import unicodedata

import model_files
import pytest
import torch
from tokenizers import Tokenizer

from clover_cpp import Clover, Step
from clover_tiny import tasks
from clover_tiny.decode import block_decode, causal_decode
from clover_tiny.model import CloverModel
from clover_tiny.tokenizer import Renderer
from conftest import BUNDLED

pytestmark = pytest.mark.usefixtures("library")

EXACT = {"n_ctx": 2048, "n_threads": 1, "kv_type": "f32", "flash_attn": "off"}
CLOSE = 1e-3  # confidences are compared to the threshold no closer than this


def engine_steps(clover, prompt, **options):
    """The answer as (token ids, [(block, step, {position: token})], end token seen)."""
    clover.clear()
    answer = clover.generate(prompt, events=True, **options)
    steps = [(e.block, e.step, dict(zip(e.positions, e.tokens, strict=True))) for e in answer if isinstance(e, Step)]
    tokens = clover.tokens[len(prompt) :]
    ended = answer.stats.finish == "stop"
    return tokens[:-1] if ended else tokens, steps, ended


def reference_steps(model, prompt, **options):
    """The same from the reference decoder."""
    decoded = block_decode(model, prompt, **options)
    steps = [(s.block, s.step, {i: token for i, (token, _) in s.fixed.items()}) for s in decoded.steps]
    return decoded.tokens, steps, decoded.ended


def compare(clover, model, prompts, threshold, max_tokens, aside=3, **options):
    """Assert that both decoders take the same steps; at most `aside` prompts may hang on a confidence close to the threshold."""
    close = []
    for number, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = reference_steps(model, prompt, threshold=threshold, max_tokens=max_tokens, **options)
        window = {"window": options["block_size"]} if options else {}
        found = engine_steps(clover, prompt, threshold=threshold, max_tokens=max_tokens, **window)
        if found == expected:
            continue
        with torch.no_grad():
            around = [
                reference_steps(model, prompt, threshold=threshold + d, max_tokens=max_tokens, **options) for d in (-CLOSE, CLOSE)
            ]
        if expected == around[0] == around[1]:
            first = next(pair for pair in zip(found[1], expected[1], strict=False) if pair[0] != pair[1])
            pytest.fail(f"prompt {number}: the engine took step {first[0]}, the reference {first[1]}")
        close.append(number)
    print(f"{len(prompts) - len(close)} of {len(prompts)} prompts take the same steps; close to the threshold: {close}")
    assert len(close) <= aside


def random_prompts(n, seed, longest=80):
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(rng.randint(1, longest))] for _ in range(n)]


@pytest.mark.parametrize("shift_logits", [True, False])
@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_same_steps_as_reference_with_random_weights(shift_logits, block_size):
    path, model = model_files.clover(shift_logits, sharp=True)
    with Clover(path, **EXACT) as clover:
        compare(clover, model, random_prompts(4, seed=3), 0.9, max_tokens=70, aside=1, block_size=block_size)


@pytest.mark.parametrize("shift_logits", [True, False])
def test_same_tokens_as_reference_autoregressively(shift_logits):
    path, model = model_files.clover(shift_logits)
    with Clover(path, **EXACT) as clover, torch.no_grad():
        for prompt in random_prompts(4, seed=4):
            expected = causal_decode(model, prompt, max_tokens=40)
            tokens, steps, ended = engine_steps(clover, prompt, mode="ar", max_tokens=40)
            assert (tokens, ended) == (expected.tokens, expected.ended)
            assert [step[2][0] for step in steps][: len(tokens)] == tokens


@pytest.mark.skipif(not (BUNDLED / "model.safetensors").exists(), reason="the bundled model is not trained yet")
def test_bundled_model_takes_the_reference_steps_on_50_held_out_prompts(bundled_gguf):
    model, renderer = CloverModel.from_pretrained(BUNDLED), Renderer(BUNDLED)
    examples = [e for task in ("notices", "tools", "web", "chat", "copy") for e in tasks.held_out(task, 10, seed=1)]
    prompts = [renderer.prompt(example) for example in examples]
    with Clover(bundled_gguf("f32"), **EXACT) as clover:
        compare(clover, model, prompts, threshold=0.95, max_tokens=160)
        for prompt in prompts[::5]:
            with torch.no_grad():
                expected = causal_decode(model, prompt, max_tokens=160)
            assert engine_steps(clover, prompt, mode="ar", max_tokens=160)[0] == expected.tokens


def test_second_identical_prompt_gives_the_same_answer():
    path, _ = model_files.clover(sharp=True)
    with Clover(path, **EXACT) as clover:
        prompt, other = random_prompts(2, seed=5)
        first = engine_steps(clover, prompt, max_tokens=50)
        engine_steps(clover, other, max_tokens=50)
        engine_steps(clover, other, max_tokens=20, mode="ar")
        assert engine_steps(clover, prompt, max_tokens=50) == first


def test_continuing_evaluates_only_what_is_new_and_changes_nothing():
    path, _ = model_files.clover(sharp=True)
    with Clover(path, **EXACT) as clover:
        (prompt,) = random_prompts(1, seed=6)
        "".join(clover.generate(prompt, max_tokens=40))
        longer = [*clover.tokens, 1, 2, 3]
        continued = clover.generate(longer, max_tokens=40)
        "".join(continued)
        assert continued.stats.prompt_tokens == 3
        tokens = clover.tokens
        clover.clear()
        "".join(clover.generate(longer, max_tokens=40))
        assert clover.tokens == tokens


@pytest.mark.parametrize("n_batch", [1, 7, 512])
def test_prompt_chunks_change_nothing(n_batch):
    path, model = model_files.clover(sharp=True)
    (prompt,) = random_prompts(1, seed=7)
    with Clover(path, **{**EXACT, "n_batch": n_batch}) as clover, torch.no_grad():
        assert engine_steps(clover, prompt, max_tokens=20, threshold=0.9) == reference_steps(
            model, prompt, max_tokens=20, threshold=0.9
        )
        assert clover.stats.prompt_passes == -(-len(prompt) // n_batch)


@pytest.mark.parametrize("mode", ["block", "ar"])
def test_sampling_follows_the_seed(mode):
    path, _ = model_files.clover()
    with Clover(path, **EXACT) as clover:
        (prompt,) = random_prompts(1, seed=8)
        answers = [engine_steps(clover, prompt, mode=mode, max_tokens=40, temperature=1.0, seed=s) for s in (1, 1, 2, 2**64 - 1)]
        assert answers[0] == answers[1]
        assert len({tuple(tokens) for tokens, _, _ in answers}) == 3


def test_first_sampled_token_has_the_distribution_of_the_reference():
    path, model = model_files.clover()
    (prompt,) = random_prompts(1, seed=9)
    with Clover(path, **EXACT) as clover, torch.no_grad():
        n, top_k, temperature = 400, 5, 0.7
        logits = model.causal(torch.tensor(prompt), model.new_state())[-1]
        logits[[model.config.mask_token_id, model.config.pad_token_id]] = -torch.inf
        best = logits.topk(top_k)
        expected = dict(zip(best.indices.tolist(), (best.values / temperature).softmax(-1).tolist(), strict=True))
        counts = dict.fromkeys(expected, 0)
        for seed in range(n):
            for _ in clover.generate(prompt, mode="ar", max_tokens=1, temperature=temperature, top_k=top_k, seed=seed):
                pass
            counts[clover.tokens[-1]] += 1
            clover.clear()
        for token, p in expected.items():
            assert abs(counts[token] / n - p) < 5 * (p * (1 - p) / n) ** 0.5, (token, counts[token] / n, p)


@pytest.mark.parametrize("mode", ["block", "ar"])
def test_forbidden_tokens_never_come(mode):
    path, model = model_files.clover()
    with Clover(path, **EXACT) as clover:
        (prompt,) = random_prompts(1, seed=10)
        tokens, _, _ = engine_steps(clover, prompt, mode=mode, max_tokens=400, temperature=100.0, threshold=0.0)
        assert not {model.config.mask_token_id, model.config.pad_token_id} & set(tokens)


# The tokenizers library normalises by Unicode 9, in which marks added later have no order; these blocks have none of them.
UNICODE_9 = [*range(0xA0, 0x7C0), *range(0x900, 0x9F0), *range(0xE00, 0xE80), *range(0x1E00, 0x2000)]


def random_text(rng):
    pieces = [
        lambda: chr(rng.choice([rng.randrange(0x20, 0x7F), rng.choice(UNICODE_9), rng.randrange(0x3000, 0xA000)])),
        lambda: chr(rng.randrange(0x1F300, 0x1FA00)),
        lambda: unicodedata.normalize("NFD", rng.choice("éüñÅệ각힣ǭẛ̣ﬁ①Ω")),
        lambda: chr(rng.choice([0x300, 0x301, 0x323, 0x327, 0x345, 0x93C, 0x5B0, 0x1100, 0x1161, 0x11A8])),
        lambda: rng.choice(
            ["\n", "\r\n", "  ", "\t", "   x", "'s", "'LL", "12345", "<think>", "</tool_call>", "<|im_end|>", "<|im"]
        ),
        lambda: rng.choice(["hello", "Zone", "NOTAM", " world", '{"a": 1}']),
    ]
    return "".join(rng.choice(pieces)() for _ in range(rng.randint(0, 30)))


def test_tokenizer_equals_the_checkpoints_own():
    path, _ = model_files.clover()
    own = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    rng = random.Random(11)
    with Clover(path, n_ctx=256, n_threads=1) as clover:
        for _ in range(3000):
            text = random_text(rng)
            ids = own.encode(text, add_special_tokens=False).ids
            assert clover.tokenize(text) == ids, text
            assert clover.detokenize(ids, special=True) == own.decode(ids, skip_special_tokens=False)
            assert clover.detokenize(ids) == own.decode(ids)
