"""What llama.cpp says it allocates for a context as libclover makes it (cpp/libclover/src/context.cpp), in a process of its own.

    from llama_memory import buffers
    buffers(library_folder, model, n_ctx=4096, n_window=64)     # {"KV": bytes, "RS": ..., "compute": ..., "output": ...}

A causal pass of n_batch tokens and, where n_window is not 0, a block pass of n_window positions run first: buffers grow with them.
"""

import json
import os
import re
import subprocess
import sys

LINE = re.compile(r"(KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")


def buffers(library, model, n_ctx, n_window, n_batch=512):
    """Bytes, each to within the 0.01 MiB of the log."""
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library), "OMP_WAIT_POLICY": "passive"}
    arguments = [str(model), str(n_ctx), str(n_window), str(n_batch)]
    result = subprocess.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    return json.loads(result.stdout)


def main(path, n_ctx, n_window, n_batch):
    """Child process."""
    import llama_cpp as api

    found = {}

    @api.llama_log_callback
    def log(_, text, __):
        match = LINE.search(text.decode(errors="replace"))
        if match:
            found[match[1]] = max(found.get(match[1], 0), float(match[2]) * 2**20)

    api.llama_log_set(log, None)
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(path.encode(), params)
    params = api.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = params.n_ubatch = max(n_batch, n_window)
    params.n_seq_max, params.kv_unified, params.n_rs_seq = 2, True, 0
    params.n_outputs_max = max(n_window, 2)
    params.n_threads = params.n_threads_batch = 2
    params.flash_attn_type = -1
    context = api.llama_init_from_model(model, params)
    memory = api.llama_get_memory(context)
    batch = api.llama_batch_init(params.n_batch, 0, 1)

    def decode(start, n, sequence, wanted):
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 5, start + i, 1, int(i >= n - wanted)
            batch.seq_id[i][0] = sequence
        if api.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")

    room = min(n_ctx - n_window, n_batch)
    decode(0, room, 0, 1)
    if n_window:
        api.llama_memory_seq_cp(memory, 0, 1, -1, -1)
        api.llama_set_causal_attn(context, False)
        decode(room, n_window, 1, n_window)
        api.llama_memory_seq_rm(memory, 1, -1, -1)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
