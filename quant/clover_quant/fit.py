"""What a model needs in memory, and the best recipe that fits.

Counts what libclover's session allocates (cpp/libclover/src/context.cpp): two sequences, one of them scratch, that share keys and
values in float16.
"""

import dataclasses
import re

from clover_cpp.errors import ArgumentError
from clover_quant import recipes

SEQUENCES = 2
BATCH = 512  # most tokens of a pass
PAD = 256  # llama.cpp rounds the context up to a multiple
F32, F16 = 4, 2
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text):
    """Bytes of a size such as 16GB (10^9), 16GiB (2^30), 5G, 500M, 4096. Raises ArgumentError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if not 0 < size < 2**63:
        raise ArgumentError(f"{text!r} is no size: give a number with K, M, G or T (or KiB, MiB, ...), such as 16GB")
    return size


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes: weights, recurrent state of the GDN layers, keys and values, working buffers."""

    weights: int
    state: int
    cache: int
    buffers: int

    @property
    def total(self):
        """All of it."""
        return self.weights + self.state + self.cache + self.buffers

    def __str__(self):
        parts = {"weights": self.weights, "state": self.state, "keys and values": self.cache, "buffers": self.buffers}
        return " + ".join(f"{n / 1e9:.2f} ({name})" for name, n in parts.items()) + f" = {self.total / 1e9:.2f} GB"


def memory(metadata, tensor_bytes, context):
    """The `Memory` of running a model. metadata: GGUF key -> value; tensor_bytes: of all tensors; context: tokens.

    State and cache are exact. Buffers are an estimate from above: the widest layer's activations for a batch (inputs, the
    queries, keys and values, the chosen experts' three products, attention scores without flash attention), the logits of one
    block and libclover's copy of them.
    """
    arch = metadata["general.architecture"]

    def get(key):
        return metadata[f"{arch}.{key}"]

    recurrent = get("attention.recurrent_layers")
    n_ctx = -(-min(context, get("context_length")) // PAD) * PAD
    heads, inner, size = get("ssm.time_step_rank"), get("ssm.inner_size"), get("ssm.state_size")
    channels = inner + 2 * get("ssm.group_count") * size
    state = sum(recurrent) * SEQUENCES * (heads * size * size + (get("ssm.conv_kernel") - 1) * channels) * F32
    kv = get("attention.head_count_kv") * (get("attention.key_length") + get("attention.value_length"))
    cache = (len(recurrent) - sum(recurrent)) * n_ctx * kv * F16
    n_vocab = len(metadata["tokenizer.ggml.tokens"])
    attention = get("attention.head_count") * (3 * get("attention.key_length") + n_ctx)
    experts = 3 * get("expert_used_count") * max(get("expert_feed_forward_length"), get("embedding_length"))
    block = metadata.get(f"{arch}.block.size", 1)
    buffers = (BATCH * (4 * get("embedding_length") + 3 * channels + attention + experts) + 6 * block * n_vocab) * F32
    return Memory(tensor_bytes, state, cache, buffers)


def choose(limit, context, plan):
    """(name, `Memory`) of the shipped recipe that needs most, and so keeps most, of those that fit into `limit` bytes.

    plan: function of a recipe's name that gives (metadata, bytes of all tensors). Raises ArgumentError where none fits.
    """
    if context < 1:
        raise ArgumentError(f"a context of {context} tokens")
    needed = {}
    for name in recipes.names():
        needed[name] = memory(*plan(name), context)
    fitting = [name for name, sizes in needed.items() if sizes.total <= limit]
    if not fitting:
        name = min(needed, key=lambda name: needed[name].total)
        raise ArgumentError(f"no recipe fits into {limit / 1e9:.2f} GB; the smallest, {name}, needs {needed[name]}")
    # of two that need the same, the mix that was made for small machines
    name = max(fitting, key=lambda name: (needed[name].total, name.startswith("edge")))
    return name, needed[name]
