"""Tokenise texts with a llama.cpp library's own `llama_tokenize`, in a process of its own.

from llama_tokenize import tokenize
ids = tokenize(library_folder, model, texts)     # a list of token ids for each text
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile


def tokenize(library, model, texts):
    """Token ids of each text; control tokens written in a text are taken as such, none is added."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = pathlib.Path(folder, "request.json"), pathlib.Path(folder, "answer.json")
        request.write_text(json.dumps({"model": str(model), "texts": texts}))
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library)}
        result = subprocess.run([sys.executable, __file__, request, answer], env=environment, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{library}: {result.stderr[-2000:]}")
        return json.loads(answer.read_text())


def main(request, answer):
    """Child process."""
    import llama_cpp as api

    request = json.loads(pathlib.Path(request).read_text())
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(request["model"].encode(), params)
    if not model:
        raise SystemExit(f"cannot load {request['model']}")
    vocab, found = api.llama_model_get_vocab(model), []
    for text in request["texts"]:
        data = text.encode()
        out = (api.llama_token * (len(data) + 16))()
        n = api.llama_tokenize(vocab, data, len(data), out, len(out), False, True)
        found.append(out[:n])
    pathlib.Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
