"""What a model needs in memory, and the best recipe that fits.

Counts what a session of libclover allocates by default (cpp/libclover/src/context.cpp): two sequences, one of them scratch, that
share keys and values in float16; 512 tokens at most in a pass; flash attention.
"""

import dataclasses
import re

from clover_cpp.errors import ArgumentError, ModelFileError
from clover_quant import recipes

SEQUENCES = 2
BATCH = 512  # most tokens of a pass
PAD = 256  # llama.cpp rounds the context up to a multiple
MOST_CONTEXT = 1 << 24  # libclover's own limit
F32, F16 = 4, 2
TOKEN_BYTES = 160  # of a token or merge in llama.cpp's tables; measured: 157 with the 303,323 of Qwen2's vocabulary
PROCESS_BYTES = 64 << 20  # libraries, graphs, Python; measured: 47 MB beside clover-tiny's own
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text):
    """Bytes of a size such as 16GB (10^9), 16GiB (2^30), 5G, 500M, 4096. Raises ArgumentError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if not 0 < size < 2**63:
        raise ArgumentError(f"{text!r} is no size: give a number with K, M, G or T (or KiB, MiB, ...), such as 16GB")
    return size


def size_text(n):
    """Bytes as text, in GB, or MB for less than one."""
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.2f} MB"


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
        unit, name = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        return " + ".join(f"{n / unit:.2f} {part}" for part, n in parts.items()) + f" = {self.total / unit:.2f} {name}"


def hyperparameter(metadata, key):
    """The value of "ARCHITECTURE.key" in the metadata (GGUF key -> value). Raises ModelFileError where it is missing."""
    name = f"{metadata.get('general.architecture')}.{key}"
    if name not in metadata:
        raise ModelFileError(f"the model's metadata has no {name}")
    return metadata[name]


def memory(metadata, tensor_bytes, context):
    """The `Memory` of running a model.

    metadata: GGUF key -> value; tensor_bytes: of all tensors; context: tokens, at most the model's own limit counts.
    State and cache are exact. Buffers are an upper bound of llama.cpp's on the CPU, checked against its log and the process:

    * activations of the widest layer for a batch: of experts, gate and up (one product) and two results for each one chosen; of
      GDN, four times the convolution's channels and two of the values; and the residual stream, twice;
    * the attention mask, float16 [batch, context];
    * logits of a window of two blocks, in the graph and behind it, and libclover's copies of four rows;
    * the vocabulary's tables, and the process itself.

    Raises ModelFileError where the metadata lacks a key.
    """

    def get(key):
        return hyperparameter(metadata, key)

    arch = metadata.get("general.architecture")
    n_layers, recurrent = get("block_count"), metadata.get(f"{arch}.attention.recurrent_layers")
    if recurrent is None:
        recurrent = [(i + 1) % get("full_attention_interval") != 0 for i in range(n_layers)]
    n_recurrent = sum(map(bool, recurrent))
    n_ctx = -(-min(context, get("context_length"), MOST_CONTEXT) // PAD) * PAD
    heads, inner, size = get("ssm.time_step_rank"), get("ssm.inner_size"), get("ssm.state_size")
    channels = inner + 2 * get("ssm.group_count") * size
    state = n_recurrent * SEQUENCES * (heads * size * size + (get("ssm.conv_kernel") - 1) * channels) * F32
    row = get("attention.head_count_kv") * (get("attention.key_length") + get("attention.value_length"))
    cache = (n_layers - n_recurrent) * n_ctx * row * F16

    tokens, embedding = metadata.get("tokenizer.ggml.tokens", ()), get("embedding_length")
    window = max(2 * metadata.get(f"{arch}.block.size", 0), 2)
    chosen = get("expert_used_count") * (2 * embedding + get("expert_feed_forward_length"))
    widest = max(chosen, 4 * channels + 2 * inner) + 2 * embedding
    activations = max(BATCH, window) * (widest * F32 + n_ctx * F16)
    logits = (2 * window + 4) * len(tokens) * F32
    vocabulary = (len(tokens) + len(metadata.get("tokenizer.ggml.merges", ()))) * TOKEN_BYTES
    return Memory(tensor_bytes, state, cache, activations + logits + vocabulary + PROCESS_BYTES)


def choose(limit, context, plan):
    """(name, `Memory`) of the best recipe, by rank, of the shipped ones that fit into `limit` bytes.

    plan: function of a recipe's name that gives (metadata, bytes of all tensors). Raises ArgumentError where none fits.
    """
    if context < 1:
        raise ArgumentError(f"a context of {context} tokens")
    needed = {}
    for name in recipes.by_rank():
        needed[name] = memory(*plan(name), context)
        if needed[name].total <= limit:
            return name, needed[name]
    name = min(needed, key=lambda name: needed[name].total)
    raise ArgumentError(f"no recipe fits into {size_text(limit)}; the smallest, {name}, needs {needed[name]}")
