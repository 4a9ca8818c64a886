"""Run passes on a GGUF file through a llama.cpp library's public API (llama.h, as llama_cpp binds it), in a process of its own.

    from llama_run import run
    logits = run(library_folder, model, [("causal", [1, 2, 3]), ("block", [4, 5]), ("causal", [4, 6])])

Each pass is `causal` (on sequence 0, which it extends) or `block` (non-causal, on a scratch copy of sequence 0, which stays as it
is). Returns one float32 array [n, vocab] a pass. `greedy` continues with the argmax instead: [n] tokens.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np


def run(library, model, passes, flash=False):
    """Logits of each pass, evaluated one after the other in one fresh context (F32 KV cache)."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = pathlib.Path(folder, "request.json"), pathlib.Path(folder, "answer.npz")
        request.write_text(json.dumps({"model": str(model), "passes": passes, "flash": flash}))
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, __file__, str(request), str(answer)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{library}: {result.stderr[-2000:]}")
        with np.load(answer) as arrays:
            return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]


class Context:
    """One context of two sequences: 0 and the scratch one."""

    def __init__(self, path, size, flash):
        import llama_cpp as api

        self.api = api
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"cannot load {path}")
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = size
        params.n_seq_max, params.kv_unified = 2, True
        params.n_threads = params.n_threads_batch = 2
        params.type_k = params.type_v = api.GGML_TYPE_F32
        params.flash_attn_type = 1 if flash else 0
        self.context = api.llama_init_from_model(self.model, params)
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(size, 0, 1)
        self.length = 0

    def evaluate(self, tokens, sequence):
        """Logits [n, vocab] of tokens after the context, on a sequence."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, self.length + i, 1, 1
            batch.seq_id[i][0] = sequence
        if self.api.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        rows = self.api.llama_get_logits(self.context)
        return np.ctypeslib.as_array(rows, (len(tokens), self.n_vocab)).copy()

    def causal(self, tokens):
        self.api.llama_set_causal_attn(self.context, True)
        logits = self.evaluate(tokens, 0)
        self.length += len(tokens)
        return logits

    def block(self, tokens):
        self.api.llama_memory_seq_cp(self.memory, 0, 1, -1, -1)
        self.api.llama_set_causal_attn(self.context, False)
        logits = self.evaluate(tokens, 1)
        self.api.llama_memory_seq_rm(self.memory, 1, -1, -1)
        return logits

    def greedy(self, request):
        """[prompt tokens, n] to the n tokens that follow greedily."""
        prompt, n = request
        tokens, row = [], self.causal(prompt)[-1]
        while len(tokens) < n:
            tokens.append(int(row.argmax()))
            row = self.causal(tokens[-1:])[-1]
        return np.array(tokens)


def main(request, answer):
    """Child process."""
    request = json.loads(pathlib.Path(request).read_text())
    context = Context(request["model"], 1024, request["flash"])
    np.savez(answer, *[getattr(context, kind)(argument) for kind, argument in request["passes"]])


if __name__ == "__main__":
    main(*sys.argv[1:])
