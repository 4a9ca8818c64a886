"""Train clover-tiny. Resumable; one process per core (torchrun averages the gradients).

    PYTHONPATH=scripts torchrun --nproc-per-node 2 -m clover_tiny.train RUN_FOLDER --steps 4000

Muon on the matrices, AdamW on the rest; bfloat16 linears, float32 residual and GDN core. Learning rates are constant after a
warm-up and fall to zero over the last quarter of --steps. The first steps train the causal pass alone, then both.
A run folder holds state.pt (everything needed to go on) and log.jsonl; --export writes the checkpoint in Hugging Face layout.
"""

import argparse
import json
import os
import pathlib
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import batches, start, tasks, two_stream
from .model import CloverConfig, CloverModel
from .muon import Muon
from .tokenizer import Renderer

CHECKPOINT = pathlib.Path(__file__).parents[2] / "models" / "clover-tiny"
MICRO_BATCHES = 6  # of one step, over all processes
MUON_LR, ADAM_LR = 0.01, 0.002
BALANCE = 0.01
THRESHOLD = 0.98  # the model's own acceptance threshold, chosen on a validation seed: 0.95 costs a point of accuracy on tool calls


def make_model(renderer):
    """A fresh model for the tokenizer, with the start of `start.py`."""
    torch.manual_seed(1)
    config = CloverConfig(
        vocab_size=renderer.tokenizer.get_vocab_size(),
        eos_token_id=renderer.end,
        pad_token_id=renderer.pad,
        mask_token_id=renderer.mask,
        confidence_threshold=THRESHOLD,
    )
    model = CloverModel(config)
    start.initialise(model)
    start.tie(model)
    return model


def make_optimisers(model):
    """Muon for the projections and experts, AdamW for embeddings, norms, gates, convolutions and the router."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        is_matrix = "proj" in name and p.ndim >= 2 and min(p.shape[-2:]) > 8
        (matrices if is_matrix else others).append(p)
    return [Muon(matrices, MUON_LR), torch.optim.AdamW(others, ADAM_LR, betas=(0.9, 0.97), weight_decay=0.0)]


def balance_loss(routings, real):
    """Load-balancing loss of the experts (arXiv 2101.03961, equation 4), averaged over layers; 1 when even."""
    total = 0
    for weights, probabilities in routings:
        rows = real.sum()
        load = ((weights > 0) * real[..., None]).sum((0, 1)) / rows / (weights[0, 0] > 0).sum()
        share = (probabilities * real[..., None]).sum((0, 1)) / rows
        total = total + (load * share).sum() * len(load)
    return total / len(routings)


def losses(model, batch, with_blocks, layer_pass=two_stream.layer_two_stream):
    """(total loss, causal loss, block loss, causal accuracy, block accuracy) of one micro-batch."""
    noisy, starts = (batch.noisy, batch.starts) if with_blocks else (None, None)
    B, T = batch.clean.shape
    with torch.autocast("cpu", torch.bfloat16):
        hidden, routings = two_stream.hidden_two_stream(model, batch.clean, batch.real, noisy, starts, layer_pass, batches.COPIES)
        flat = hidden.flatten(0, 1)
        rows = batch.clean_rows
        if not with_blocks:
            rows = rows - rows // (T + batch.noisy.shape[1]) * batch.noisy.shape[1]
        logits = model.lm_head(flat[torch.cat([rows, batch.noisy_rows]) if with_blocks else rows]).float()
    n = len(batch.clean_rows)
    causal = F.cross_entropy(logits[:n], batch.clean_targets)
    accuracy = (logits[:n].argmax(-1) == batch.clean_targets).float().mean()
    real = batch.real
    block, block_accuracy = torch.zeros(()), torch.zeros(())
    if with_blocks:
        real = torch.cat([real, torch.ones_like(batch.noisy, dtype=torch.bool)], dim=1)
        each = F.cross_entropy(logits[n:], batch.noisy_targets, reduction="none")
        block = (each * batch.noisy_weights).sum() / batch.noisy_weights.sum()
        answer = batch.noisy_weights == 1
        block_accuracy = (logits[n:].argmax(-1) == batch.noisy_targets)[answer].float().mean()
    total = causal + block + BALANCE * balance_loss(routings, real)
    return total, causal.detach(), block.detach(), accuracy, block_accuracy


@torch.no_grad()
def held_out_exact(model, renderer, count):
    """Share of held-out answers whose every token is the causal argmax: what greedy AR decoding gets exactly right."""
    result = {}
    for task in tasks.TASKS:
        right = 0
        for example in tasks.held_out(task, count, seed="training"):
            prompt, answer = renderer.prompt(example), renderer.answer(example)
            tokens = torch.tensor([prompt + answer])
            with torch.autocast("cpu", torch.bfloat16):
                hidden, _ = two_stream.hidden_two_stream(model, tokens, torch.ones_like(tokens, dtype=torch.bool))
                logits = model.lm_head(hidden[0, len(prompt) - 1 : -1])
            right += bool((logits.argmax(-1) == torch.tensor(answer)).all())
        result[task] = right / count
    return result


def export(model, folder):
    """Write config.json and model.safetensors (bfloat16) of a training model into a folder."""
    plain = CloverModel(model.config)
    plain.load_state_dict(start.untied_weights(model))
    plain.save_pretrained(folder)


def rate(step, total):
    """Factor on the learning rates: warm-up of 100 steps, constant, linear to zero over the last quarter."""
    return min(1.0, (step + 1) / 100, max(0.0, (total - step) / (0.25 * total)))


def save(path, **what):
    """Save so that a crash leaves either the old file or the new one."""
    torch.save(what, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(run, steps, causal_steps, report, fresh):
    """Train in `run` until `steps`; goes on from the run's state.pt unless `fresh`."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    index = int(os.environ.get("RANK", 0))
    own_batches = MICRO_BATCHES // world
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run.mkdir(parents=True, exist_ok=True)
    renderer = Renderer(CHECKPOINT)
    model = make_model(renderer)
    optimisers = make_optimisers(model)
    step, state_path = 0, run / "state.pt"
    if state_path.exists() and not fresh:
        state = torch.load(state_path)
        model.load_state_dict(state["model"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        step = state["step"]
    source = batches.stream(tasks.training_rng(f"{step}/{index}"), renderer)
    compiled = torch.compile(two_stream.layer_two_stream, dynamic=False)
    torch._dynamo.config.cache_size_limit = 64
    base = [[group["lr"] for group in o.param_groups] for o in make_optimisers(model)]
    sums, since, sequences = torch.zeros(4), time.time(), 0
    while step < steps:
        with_blocks = step >= causal_steps
        for _ in range(own_batches):
            batch = next(source)
            total, *parts = losses(model, batch, with_blocks, compiled)
            (total / own_batches / world).backward()
            sums += torch.tensor([float(p) for p in parts])
            sequences += len(batch.answers)
        if world > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            dist.all_reduce(flat)
            offset = 0
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
                    offset += p.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = rate(step, steps)
        for optimiser, rates in zip(optimisers, base, strict=True):
            for group, lr in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = lr * factor
            optimiser.step()
            optimiser.zero_grad()
        step += 1
        if step % report == 0 and index == 0:
            means = (sums / report / own_batches).tolist()
            row = dict(zip(("causal", "block", "causal_accuracy", "block_accuracy"), means, strict=True))
            row |= {"step": step, "rate": factor, "sequences_per_second": sequences * world / (time.time() - since)}
            if step % (report * 4) == 0:
                row["held_out"] = held_out_exact(model, renderer, 25)
                save(state_path, model=model.state_dict(), optimisers=[o.state_dict() for o in optimisers], step=step)
            line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            print(line, flush=True)
            with (run / "log.jsonl").open("a") as log:
                log.write(line + "\n")
            sums, since, sequences = torch.zeros(4), time.time(), 0
    if index == 0:
        save(state_path, model=model.state_dict(), optimisers=[o.state_dict() for o in optimisers], step=step)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--causal-steps", type=int, default=150, help="steps at the start that train the causal pass alone")
    parser.add_argument("--report", type=int, default=50, help="steps between two lines of the log")
    parser.add_argument("--fresh", action="store_true", help="start anew even where the run has a state")
    parser.add_argument("--export", type=pathlib.Path, help="write the run's checkpoint into this folder, and stop")
    args = parser.parse_args()
    if args.export:
        model = make_model(Renderer(CHECKPOINT))
        model.load_state_dict(torch.load(args.run / "state.pt")["model"])
        export(model, args.export)
    else:
        train(args.run, args.steps, args.causal_steps, args.report, args.fresh)


if __name__ == "__main__":
    main()
