"""The fork's graph against its oracles: transformers, unmodified llama.cpp, and the PyTorch reference."""

import numpy as np
import pytest
import torch

from checkpoints import tiny_clover, tiny_qwen
from clover_convert import convert
from clover_tiny.model import CloverModel
from conftest import BUNDLED
from llama_run import run

TOLERANCE = 2e-3
BLOCKS = (1, 2, 7, 32)
CONTEXTS = (1, 5, 64, 700)


def draw(seed, n, vocab=1000):
    """n random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def assert_close(found, wanted, what):
    """Within TOLERANCE, and the same argmax wherever the margin exceeds it."""
    worst = np.abs(found - wanted).max()
    print(f"{what}: largest difference {worst:.1e}, logits' standard deviation {wanted.std():.2f}")
    assert worst < TOLERANCE, what
    top = np.sort(wanted, axis=-1)
    clear = top[:, -1] - top[:, -2] > TOLERANCE
    assert (found.argmax(-1) == wanted.argmax(-1))[clear].all(), what


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A random transformers model and its conversion to F32."""
    folder = tmp_path_factory.mktemp("qwen")
    model = tiny_qwen(folder / "checkpoint", seed=3)
    convert(folder / "checkpoint", folder / "qwen.gguf", type="f32")
    return model, folder / "qwen.gguf"


@torch.no_grad()
@pytest.mark.slow
def test_causal_pass_equals_transformers_in_the_fork_and_in_plain_llama_cpp(qwen, library, plain_library):
    model, gguf = qwen
    tokens = draw(1, 300)
    wanted = model(torch.tensor([tokens])).logits[0].numpy()
    generated = model.generate(
        torch.tensor([tokens[:50]]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
    )
    greedy = generated[0, 50:].tolist()
    for name, folder in ("fork", library), ("plain llama.cpp", plain_library):
        (logits,) = run(folder, gguf, [("causal", tokens)])
        assert_close(logits, wanted, f"causal pass, {name} against transformers")
        (tokens_found,) = run(folder, gguf, [("greedy", (tokens[:50], 64))])
        assert tokens_found.tolist() == greedy, name


@pytest.mark.slow
def test_the_fork_leaves_qwen35moe_bit_equal(qwen, library, plain_library):
    passes = [("causal", draw(2, 100)), ("causal", draw(3, 1))]
    for ours, theirs in zip(run(library, qwen[1], passes), run(plain_library, qwen[1], passes), strict=True):
        assert np.array_equal(ours, theirs)


def block_parity(model, gguf, library, what):
    """Block passes of all sizes after all contexts, and the causal pass before them, against the reference."""
    mask = model.config.mask_token_id
    for context in CONTEXTS:
        prompt = draw(context, context)
        state = model.new_state()
        passes, wanted = [("causal", prompt)], [model.causal(torch.tensor(prompt), state).numpy()]
        for n in BLOCKS:
            tokens = [mask if i % 3 else token for i, token in enumerate(draw(n, n), start=n % 2)]
            passes.append(("block", tokens))
            wanted.append(model.block(torch.tensor(tokens), state).numpy())
        for (kind, tokens), found, reference in zip(passes, run(library, gguf, passes), wanted, strict=True):
            assert_close(found, reference, f"{what}: {kind} pass of {len(tokens)} after {context * (kind == 'block')}")


@pytest.mark.parametrize("shift", [True, False])
def test_block_pass_equals_the_reference_on_random_weights(shift, library, tmp_path):
    model = tiny_clover(tmp_path / "checkpoint", seed=5, shift_logits=shift)
    convert(tmp_path / "checkpoint", tmp_path / "model.gguf", type="f32")
    block_parity(model, tmp_path / "model.gguf", library, "random weights")


def test_block_pass_equals_the_reference_on_the_bundled_model(library, bundled_gguf):
    block_parity(CloverModel.from_pretrained(BUNDLED), bundled_gguf("f32"), library, "clover-tiny")


@pytest.mark.parametrize("flash", [False, True])
def test_block_passes_leave_the_state_bit_identical(flash, library, bundled_gguf):
    prompt, block, commit = draw(7, 200), draw(8, 32), draw(9, 32)
    results = []
    for n in (0, 1, 20):
        passes = [("causal", prompt), *[("block", block)] * n, ("causal", commit), ("causal", draw(10, 1))]
        results.append(run(library, bundled_gguf("f32"), passes, flash)[-2:])
    for after in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(after, results[0], strict=True))
