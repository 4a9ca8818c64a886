"""Muon (Jordan et al. 2024): momentum whose update is made near-orthogonal by five Newton-Schulz iterations."""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(update):
    """Near-orthogonal factor of matrices [..., rows, columns], computed in bfloat16."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Muon for matrices; tensors with more than two dims are stacks of matrices."""

    def __init__(self, params, lr=0.01, momentum=0.95, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        """One update from the gradients in place."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(state["momentum"], group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
