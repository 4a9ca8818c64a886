"""How far the distributions of a model are from those of another, over the same inputs."""

import dataclasses

import numpy as np

from clover_cpp.errors import EngineError

SLAB = 16  # rows worked on at once: bounds the memory of a vocabulary of 250,000


@dataclasses.dataclass(frozen=True)
class Rows:
    """Of n positions: `divergence` KL(base || other) in nats, float64; `same`: equal first choice; `fixed`: the other's first
    choice has a probability above the threshold; all [n]."""

    divergence: np.ndarray
    same: np.ndarray
    fixed: np.ndarray

    @classmethod
    def joined(cls, parts):
        """Several, one after the other."""
        empty = cls(np.zeros(0), np.zeros(0, bool), np.zeros(0, bool))
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in (empty, *parts)]) for name in names))

    def summary(self):
        """Figures over all positions; None where there are none."""
        if not len(self.divergence):
            return None
        return {
            "positions": len(self.divergence),
            "kld_mean": float(self.divergence.mean()),
            "kld_99.9": float(np.quantile(self.divergence, 0.999)),
            "top1": float(self.same.mean()),
        }

    def flips(self):
        """Commit flips: of the positions that the other fixes, how many it fixes to another token than the base's first choice."""
        fixed, flipped = int(self.fixed.sum()), int((self.fixed & ~self.same).sum())
        return {"fixed": fixed, "flipped": flipped, "rate": flipped / fixed if fixed else None}


def log_softmax(logits):
    """Logarithms of probabilities, float64 [n, vocabulary], of logits [n, vocabulary]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare(base, other, threshold, never=None):
    """`Rows` of two models' logits, float32 [n, vocabulary]. never: a token that neither chooses (the mask token).

    Raises EngineError for logits that are not finite.
    """
    parts = []
    for start in range(0, len(base), SLAB):
        logits = [each[start : start + SLAB] for each in (base, other)]
        if not all(np.isfinite(each).all() for each in logits):
            raise EngineError("a model produced logits that are not finite")
        p, q = map(log_softmax, logits)
        divergence = np.maximum((np.exp(p) * (p - q)).sum(-1), 0)  # rounding can make it a little negative
        if never is not None and never >= 0:
            p[:, never] = q[:, never] = -np.inf
        parts.append(Rows(divergence, p.argmax(-1) == q.argmax(-1), np.exp(q.max(-1)) > threshold))
    return Rows.joined(parts)
