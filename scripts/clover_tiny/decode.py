"""Block-diffusion decoding as a plain loop over the PyTorch reference: the oracle of the C++ engine. Greedy."""

import dataclasses

import torch


@dataclasses.dataclass
class Step:
    """What one step fixed: the block's index, the step's (0: the token the causal pass gives), {position: (token, confidence)}."""

    block: int
    step: int
    fixed: dict


@dataclasses.dataclass
class Decoded:
    """Token ids of the answer, without the end token; all steps; block passes; whether an end token closed it."""

    tokens: list
    steps: list
    passes: int
    ended: bool


def candidate(logits, forbidden):
    """The most probable allowed token of one position and its probability under the whole softmax."""
    probabilities = logits.softmax(-1)
    allowed = probabilities.clone()
    allowed[forbidden] = -1
    token = int(allowed.argmax())
    return token, float(probabilities[token])


def block_decode(model, prompt, max_tokens=256, threshold=None, block_size=None):
    """Decode an answer to prompt ids by the model's own schedule: blocks of block_size, committed whole."""
    c = model.config
    threshold = c.confidence_threshold if threshold is None else threshold
    size = c.block_size if block_size is None else block_size
    forbidden = [c.mask_token_id, c.pad_token_id]
    state = model.new_state()
    last = model.causal(torch.tensor(prompt), state)[-1]
    tokens, steps, passes = [], [], 0
    while len(tokens) < max_tokens:
        n = min(size, max_tokens - len(tokens))
        window, index = [None] * n, len(tokens) // size
        if c.shift_logits:
            window[0], confidence = candidate(last, forbidden)
            steps.append(Step(index, 0, {0: (window[0], confidence)}))
        count = 0
        while None in window[: end_of(window, c)]:
            count += 1
            passes += 1
            logits = model.block(torch.tensor([c.mask_token_id if t is None else t for t in window]), state)
            open_positions = [i for i in range(end_of(window, c)) if window[i] is None]
            found = {i: candidate(logits[i - 1 if c.shift_logits else i], forbidden) for i in open_positions}
            fixed = {i: f for i, f in found.items() if f[1] > threshold}
            if not fixed:
                best = max(found, key=lambda i: found[i][1])
                fixed = {best: found[best]}
            for i, (token, _) in fixed.items():
                window[i] = token
            steps.append(Step(index, count, fixed))
        end = end_of(window, c)
        tokens += window[:end]
        if end < n:
            return Decoded(tokens, steps, passes, True)
        if len(tokens) < max_tokens:
            last = model.causal(torch.tensor(window), state)[-1]
    return Decoded(tokens, steps, passes, False)


def end_of(window, config):
    """Index of the first end token in a window, or its length; what stands after it does not matter any more."""
    return window.index(config.eos_token_id) if config.eos_token_id in window else len(window)


def causal_decode(model, prompt, max_tokens=256):
    """Decode an answer autoregressively."""
    c = model.config
    state = model.new_state()
    last = model.causal(torch.tensor(prompt), state)[-1]
    tokens = []
    while len(tokens) < max_tokens:
        token, _ = candidate(last, [c.mask_token_id, c.pad_token_id])
        if token == c.eos_token_id:
            return Decoded(tokens, [], 0, True)
        tokens.append(token)
        if len(tokens) < max_tokens:
            last = model.causal(torch.tensor([token]), state)[-1]
    return Decoded(tokens, [], 0, False)
