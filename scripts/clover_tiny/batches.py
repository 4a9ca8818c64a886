"""Batches for training: examples sorted into a few fixed shapes, noise for the block stream, and what is to be predicted."""

import dataclasses

import torch

from . import tasks

# (longest prompt, longest answer): few shapes, since every shape is compiled once
SHAPES = ((56, 56), (96, 64), (160, 136), (320, 40), (480, 40))
POSITIONS = 2000  # of both streams together, in one micro-batch
PAD_WEIGHT = 0.25
COPIES = 2  # noisy copies of each answer


@dataclasses.dataclass
class Batch:
    """One micro-batch; `clean_rows` and `noisy_rows` are flat indices of hidden rows, with targets and weights."""

    clean: torch.Tensor  # int64 [B, T]
    real: torch.Tensor  # bool [B, T]
    noisy: torch.Tensor  # int64 [B, COPIES * M]
    starts: torch.Tensor  # int64 [B, COPIES * M]
    clean_rows: torch.Tensor
    clean_targets: torch.Tensor
    noisy_rows: torch.Tensor
    noisy_targets: torch.Tensor
    noisy_weights: torch.Tensor
    answers: list  # answer length of each sequence


def block_starts(rng, length, P):
    """Where the block of each of `length` answer positions begins: the model's own blocks of 32, or a random cut."""
    starts, begin = [], 0
    fixed = rng.random() < 0.8
    size = rng.choice((4, 8, 16, 32))
    while begin < length:
        step = 32 if fixed else size if begin else rng.randint(1, 32)
        starts += [P + begin] * min(step, length - begin)
        begin += step
    return starts


def masked_positions(rng, starts):
    """Which positions are masked: per block everything, all but a prefix, or a random share; never a block's first."""
    masked, begin = [], 0
    while begin < len(starts):
        end = begin
        while end < len(starts) and starts[end] == starts[begin]:
            end += 1
        n = end - begin
        kind = rng.random()
        if kind < 0.35:
            block = [True] * n
        elif kind < 0.65:
            kept = rng.randint(1, n)
            block = [i >= kept for i in range(n)]
        else:
            ratio = rng.random()
            block = [rng.random() < ratio for _ in range(n)]
        block[0] = False
        masked += block
        begin = end
    return masked


def assistant_positions(ids, renderer):
    """Indices in a prompt that an earlier answer of the conversation produced (from `</think>` to the end token)."""
    close = renderer.tokenizer.token_to_id("</think>")
    positions, inside = [], False
    for i, token in enumerate(ids):
        if inside:
            positions.append(i)
        if token == close:
            inside = True
        elif token == renderer.end:
            inside = False
    return positions if not inside else [p for p in positions if p < _last(ids, close)]


def _last(ids, token):
    return len(ids) - 1 - ids[::-1].index(token)


def collate(rng, pairs, renderer, P, M):
    """Make a batch of (prompt ids, answer ids) pairs of one shape."""
    B, T = len(pairs), P + M
    clean = torch.full((B, T), renderer.pad)
    real = torch.zeros(B, T, dtype=torch.bool)
    noisy = torch.full((B, COPIES * M), renderer.mask)
    starts = torch.zeros(B, COPIES * M, dtype=torch.int64)
    clean_rows, clean_targets, noisy_rows, noisy_targets, noisy_weights = [], [], [], [], []
    width = T + COPIES * M
    for b, (prompt, answer) in enumerate(pairs):
        first, n = P - len(prompt), len(answer)
        clean[b, first:P] = torch.tensor(prompt)
        clean[b, P : P + n] = torch.tensor(answer)
        real[b, first : P + n] = True
        for position in assistant_positions(prompt, renderer):
            clean_rows.append(b * width + first + position - 1)
            clean_targets.append(prompt[position])
        for i in range(n):
            clean_rows.append(b * width + P + i - 1)
            clean_targets.append(answer[i])
        for copy in range(COPIES):
            begins = block_starts(rng, M, P)
            masked = masked_positions(rng, begins)
            last_block, offset = begins[n - 1], copy * M
            starts[b, offset : offset + M] = torch.tensor(begins)
            for i in range(n):
                if not masked[i]:
                    noisy[b, offset + i] = answer[i]
            for i in range(1, M):
                # shift_logits: the row at i - 1 predicts position i; after the end only padding follows, and is never fixed
                if begins[i] == begins[i - 1] and (masked[i] or i >= n) and begins[i] <= last_block:
                    noisy_rows.append(b * width + T + offset + i - 1)
                    noisy_targets.append(answer[i] if i < n else renderer.pad)
                    noisy_weights.append(1.0 if i < n else PAD_WEIGHT)
    tensors = [torch.tensor(x) for x in (clean_rows, clean_targets, noisy_rows, noisy_targets, noisy_weights)]
    return Batch(clean, real, noisy, starts, *tensors, [len(a) for _, a in pairs])


def stream(rng, renderer, shapes=SHAPES):
    """Endless training batches; examples longer than the last shape are left out."""
    waiting = {shape: [] for shape in shapes}
    while True:
        example = tasks.draw(rng)
        pair = renderer.prompt(example), renderer.answer(example)
        shape = next((s for s in shapes if len(pair[0]) <= s[0] and len(pair[1]) <= s[1]), None)
        if shape is None:
            continue
        waiting[shape].append(pair)
        P, M = shape
        if len(waiting[shape]) == max(1, POSITIONS // (P + (1 + COPIES) * M)):
            yield collate(rng, waiting[shape], renderer, P, M)
            waiting[shape] = []
