"""Single passes through the Python API, against the PyTorch reference and against generation."""

import model_files
import numpy as np
import pytest
import torch

from clover_cpp import ArgumentError, Clover, ContextFullError, UnsupportedError

pytestmark = pytest.mark.usefixtures("library")

EXACT = {"n_ctx": 512, "n_threads": 1, "kv_type": "f32", "flash_attn": "off"}
TOLERANCE = 2e-3


def draw(seed, n):
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


@pytest.mark.parametrize("shift", [True, False])
def test_logits_equal_the_references(shift):
    path, model = model_files.clover(shift_logits=shift)
    state, mask = model.new_state(), model.config.mask_token_id
    with Clover(path, n_batch=50, **EXACT) as clover:
        for kind, tokens in [
            ("causal", draw(1, 150)),  # more than a pass gives the logits of
            ("block", [mask] * 64),
            ("causal", draw(2, 1)),
            ("block", [5, mask, mask, 7]),
            ("block", [5]),
            ("causal", draw(3, 33)),
        ]:
            found = clover.logits(tokens, kind)
            wanted = getattr(model, kind)(torch.tensor(tokens), state).numpy()
            assert found.dtype == np.float32 and found.shape == wanted.shape
            assert np.abs(found - wanted).max() < TOLERANCE, (kind, len(tokens))
        assert clover.tokens == draw(1, 150) + draw(2, 1) + draw(3, 33)


def test_pending_tokens_are_evaluated_first():
    path, model = model_files.clover()
    tokens, more = draw(1, 40), draw(2, 20)
    with Clover(path, **EXACT) as clover:
        answer = list(clover.generate(tokens, "block", max_tokens=7, events=True))
        assert answer
        given = clover.tokens
        found = clover.logits(more)
    state = model.new_state()
    model.causal(torch.tensor(given), state)
    assert np.abs(found - model.causal(torch.tensor(more), state).numpy()).max() < TOLERANCE


def test_generation_goes_on_after_passes_as_without_them():
    path, _ = model_files.clover()
    tokens = draw(1, 60)
    for mode in ("block", "ar"):
        with Clover(path, **EXACT) as clover:
            list(clover.generate(tokens, mode, max_tokens=40))
            wanted = clover.tokens
            clover.clear()
            clover.evaluate(tokens[:30])
            clover.logits(tokens[30:])
            clover.logits([7] * 20, "block")
            list(clover.generate(tokens, mode, max_tokens=40))
            assert clover.tokens == wanted
            assert clover.stats.prompt_passes == 0


def test_a_pass_drops_an_unfinished_answer():
    with Clover(model_files.clover()[0], **EXACT) as clover:
        answer = clover.generate(draw(1, 10), "ar", max_tokens=20)
        next(answer)
        clover.evaluate([5])
        with pytest.raises(ArgumentError, match="dropped"):
            list(answer)


def test_wrong_arguments():
    with Clover(model_files.clover()[0], **EXACT) as clover:
        for tokens, kind, error in (
            ([1], "ar", ArgumentError),
            ([1], None, ArgumentError),
            ([], "causal", ArgumentError),
            ([1.5], "causal", ArgumentError),
            ([2**40], "causal", ArgumentError),
            ([1], "block", ArgumentError),  # no context
            ([1] * 513, "causal", ContextFullError),
        ):
            with pytest.raises(error):
                clover.logits(tokens, kind)
            with pytest.raises(error):
                clover.evaluate(tokens, kind)
        assert clover.tokens == []
    with pytest.raises(ArgumentError, match="closed"):
        clover.logits([1])
    with Clover(model_files.qwen(), **EXACT) as plain:
        plain.evaluate([1])
        with pytest.raises(UnsupportedError):
            plain.logits([1], "block")
