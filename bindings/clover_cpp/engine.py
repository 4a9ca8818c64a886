"""`Clover`: a model file and one conversation with it."""

import contextlib
import ctypes as c
import operator
import os
import threading

import numpy as np

from . import interrupt, native
from .errors import ArgumentError, BusyError, CloverError, ContextFullError, TemplateError
from .events import ModelInfo, Stats, Step, Text, from_struct
from .template import render


def _choice(name, value, table):
    if not isinstance(value, str) or value not in table:
        raise ArgumentError(f"{name} is {value!r}, it must be one of {', '.join(table)}")
    return table[value]


def _integer(name, value, low=-(2**31), high=2**31 - 1):
    """`value` as an int: any whole number (NumPy's too), but no bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name} is {value!r}, it must be a whole number")
    value = operator.index(value)
    if not low <= value <= high:
        raise ArgumentError(f"{name} is {value}, it must be in {low} to {high}")
    return value


def _array(tokens):
    tokens = [_integer("token", token) for token in tokens]
    return (c.c_int32 * len(tokens))(*tokens), len(tokens)


def _stop_strings(stop):
    texts = [stop] if isinstance(stop, str) else stop or ()
    if not all(isinstance(text, str) for text in texts):
        raise ArgumentError("stop is not a text or several")
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError:
        raise ArgumentError("a stop string is not UTF-8") from None
    if any(b"\0" in text for text in encoded):
        raise ArgumentError("a stop string holds a zero character")
    return (c.c_char_p * len(encoded))(*encoded), len(encoded)


class Generation:
    """One answer, as an iterator of text pieces (or of `Text` and `Step` events); see `Clover.generate`.

    Leaving the loop early, or `close()`, cancels it: what was delivered stays in the conversation.
    """

    def __init__(self, clover, params, events):
        self._clover = clover
        self._events = events
        self._queue = []
        self._error = None
        self._done = False
        params.on_step = native.StepCallback(self._on_step) if events else native.StepCallback()
        params.on_text = native.TextCallback(self._on_text)
        with clover._open() as lib:
            native.check(lib.clover_session_begin(clover._session, params))
        self._turn = clover._turn  # only the newest answer may step
        self._params = params  # the library calls into it

    def _on_step(self, step, _):
        return self._keep(self._read_step, step.contents)

    def _on_text(self, text, n, _):
        return self._keep(lambda: Text(c.string_at(text, n).decode()))

    def _keep(self, read, *arguments):
        try:
            self._queue.append(read(*arguments))
            return True
        except Exception as error:  # it would be lost in the native frames
            self._error = error
            return False

    @staticmethod
    def _read_step(step):
        n = step.n_fixed
        lists = (tuple(values[:n]) for values in (step.positions, step.tokens, step.confidences))
        return Step(step.block, step.step, step.start, step.block_size, *lists)

    def __iter__(self):
        return self

    def __next__(self):
        while not self._queue:
            if self._done:
                raise StopIteration
            self._step()
        event = self._queue.pop(0)
        return event if self._events else event.text

    def _step(self):
        if self._clover._turn != self._turn:
            self._done = True
            raise ArgumentError("this answer was dropped: a newer one was begun, or the model was closed")
        done = c.c_bool()
        with interrupt.delayed(), self._clover._open() as lib:
            status = lib.clover_session_step(self._clover._session, done)
            self._done = done.value
        native.check(status)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def stats(self):
        """`Stats` so far."""
        return self._clover.stats

    def close(self):
        """Cancel the answer if it is not finished."""
        if not self._done and self._clover._turn == self._turn:
            with self._clover._open() as lib:
                lib.clover_session_cancel(self._clover._session)
            self._step()
        self._done = True
        self._queue.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if hasattr(self, "_params"):
            with contextlib.suppress(CloverError):  # another thread is inside
                self.close()


class Clover:
    """A loaded GGUF file and one context. Use as a context manager, or `close()` it.

    `path`: a file of architecture `clover` or `qwen35moe`. `n_ctx`: most tokens of the conversation, 0 or more than the
    model's limit: that limit. `n_threads`: 0 for all cores. `n_batch`: most prompt tokens in one pass. `kv_type`: "f16",
    "f32", "q8_0". `flash_attn`: "auto", "on", "off". `n_gpu_layers`: -1 for all. `importance`: an `Importance` that gathers from
    all passes.
    Threads may share it: one at a time is inside, others get BusyError. Raises ModelFileError, ArgumentError, ResourceError.
    """

    def __init__(
        self, path, n_ctx=4096, n_threads=0, kv_type="f16", flash_attn="auto", n_batch=512, n_gpu_layers=-1, importance=None
    ):
        self._model, self._session, self._turn = c.c_void_p(), c.c_void_p(), 0
        self._lock, self._inside = threading.RLock(), 0  # a collected `Generation` may close itself anywhere
        self._lib = native.library()
        path = os.fsencode(path)
        if b"\0" in path:
            raise ArgumentError("the path of the model holds a zero character")
        model = native.defaults(native.ModelParams, "clover_model_default_params")
        model.n_gpu_layers = _integer("n_gpu_layers", n_gpu_layers)
        session = native.defaults(native.SessionParams, "clover_session_default_params")
        session.n_ctx = _integer("n_ctx", n_ctx)
        session.n_batch = _integer("n_batch", n_batch)
        session.n_threads = _integer("n_threads", n_threads)
        session.kv_type = _choice("kv_type", kv_type, native.KV_TYPES)
        session.flash_attn = _choice("flash_attn", flash_attn, native.FLASH_ATTN)
        session.imatrix = importance._handle if importance is not None else None
        native.check(self._lib.clover_model_load(path, model, self._model))
        try:
            native.check(self._lib.clover_session_new(self._model, session, self._session))
        except BaseException:
            self.close()
            raise

    def close(self):
        """Free the model; further use raises ArgumentError. Raises BusyError while it is in use, by another thread say."""
        with self._lock:
            if self._inside:
                raise BusyError("the model cannot be closed while it is in use (by another thread, or by the caller of this)")
            self._turn += 1
            session, self._session = self._session, c.c_void_p()
            model, self._model = self._model, c.c_void_p()
        self._lib.clover_session_free(session)
        self._lib.clover_model_free(model)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if hasattr(self, "_lib"):
            self.close()

    @contextlib.contextmanager
    def _open(self):
        """The library, while this model cannot be closed."""
        with self._lock:
            if not self._session:
                raise ArgumentError("this model is closed")
            self._inside += 1
        try:
            yield self._lib
        finally:
            with self._lock:
                self._inside -= 1

    @property
    def info(self):
        """`ModelInfo` of the file."""
        with self._open() as lib:
            return from_struct(ModelInfo, native.filled(native.ModelInfo, lib.clover_model_get_info, self._model))

    @property
    def n_ctx(self):
        """Most tokens of the conversation."""
        with self._open() as lib:
            return lib.clover_session_n_ctx(self._session)

    @property
    def stats(self):
        """`Stats` of the last answer."""
        with self._open() as lib:
            stats = native.filled(native.Stats, lib.clover_session_get_stats, self._session)
        return from_struct(Stats, stats, finish=native.FINISH[stats.finish])

    @property
    def tokens(self):
        """Token ids of the conversation, answers included."""
        with self._open() as lib:
            capacity = self.n_ctx
            out = (c.c_int32 * capacity)()
            n = lib.clover_session_tokens(self._session, out, capacity)
            if n == native.FAILED:
                raise BusyError(native.last_error())
        return out[:n]

    def metadata(self, key):
        """A metadata value of the file as text, or None."""
        if "\0" in key:
            return None
        with self._open() as lib:
            value = lib.clover_model_metadata(self._model, key.encode())
        return None if value is None else value.decode("utf-8", "replace")

    def tokenize(self, text, special=True):
        """Token ids of a text. special: control tokens written in it, such as <|im_start|>, become that token."""
        data = text.encode("utf-8", "replace")
        with self._open() as lib:

            def call(out, capacity):
                return lib.clover_tokenize(self._model, data, len(data), special, out, capacity)

            return self._counted(call, lambda n: (c.c_int32 * n)())[:]

    def detokenize(self, tokens, special=False):
        """Text of token ids; bytes that are no UTF-8 become U+FFFD. special: control tokens are written too."""
        array, n_tokens = _array(tokens)
        with self._open() as lib:

            def call(out, capacity):
                return lib.clover_detokenize(self._model, array, n_tokens, special, out, capacity)

            return self._counted(call, c.create_string_buffer).raw.decode("utf-8", "replace")

    @staticmethod
    def _counted(call, make):
        """The buffer that `call(out, capacity)` fills: once to learn its size, once to fill it."""
        n = call(None, 0)
        if n == native.FAILED:
            raise ArgumentError(native.last_error())
        out = make(-n)
        if n:
            call(out, -n)
        return out

    def _bos(self):
        """The token that begins a text, -1 where the vocabulary has none: only sentencepiece's do."""
        number = self.metadata("tokenizer.ggml.bos_token_id")
        return int(number) if number and self.metadata("tokenizer.ggml.model") == "llama" else -1

    def _written(self, token):
        return self.detokenize([token], special=True) if token >= 0 else ""

    def render(self, messages, tools=None, enable_thinking=False):
        """The prompt of messages ({"role": ..., "content": ...}) by the file's chat template."""
        source = self.metadata("tokenizer.chat_template")
        if not source:
            raise TemplateError("the model file has no chat template: give the prompt as text")
        eos = self.info.eos_token
        names = {"eos_token": self._written(eos), "bos_token": self._written(self._bos())}
        return render(source, messages, tools, enable_thinking=enable_thinking, **names)

    def clear(self):
        """Forget the conversation."""
        with self._open() as lib:
            native.check(lib.clover_session_clear(self._session))
            self._turn += 1

    def evaluate(self, tokens, kind="causal"):
        """One pass over token ids after the conversation, as `logits` does it, without its result."""
        self._evaluate(tokens, kind, None)

    def logits(self, tokens, kind="causal"):
        """Logits of a pass over n >= 1 token ids after the conversation: float32 [n, n_vocab].

        `kind` "causal": the tokens become part of the conversation; row i is of what follows token i. "block": up to twice the
        model's block size of positions, each a token or the mask token, after at least one token; nothing is kept. Row i is of
        position i or, where `info.shift_logits`, of position i + 1.
        Raises ArgumentError, ContextFullError, UnsupportedError, BusyError; the conversation is then as it was.
        """
        tokens = list(tokens)
        out = np.empty((len(tokens), self.info.n_vocab), np.float32)
        self._evaluate(tokens, kind, out.ctypes.data_as(c.POINTER(c.c_float)))
        return out

    def _evaluate(self, tokens, kind, out):
        kind = _choice("kind", kind, native.PASSES)
        array, n = _array(tokens)
        with interrupt.delayed(), self._open() as lib:
            status = lib.clover_session_evaluate(self._session, array, n, kind, out)
            self._turn += status == 0
        native.check(status)

    def _check(self, params, tokens):
        """Whatever would refuse this answer, before anything is forgotten for it."""
        n_vocab, n_ctx = self.info.n_vocab, self.n_ctx
        if not tokens:
            raise ArgumentError("there is nothing to answer: the prompt is empty")
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise ArgumentError(f"token {token} is not in the vocabulary of {n_vocab}")
        if len(tokens) > n_ctx:
            raise ContextFullError(f"{len(tokens)} tokens do not fit into the context of {n_ctx}")
        with self._open() as lib:
            native.check(lib.clover_session_check(self._session, params))

    def _feed(self, tokens):
        """Make `tokens` the conversation; what is evaluated of it already stays."""
        held = self.tokens
        if held != tokens[: len(held)]:
            self.clear()
            held = []
        array, n = _array(tokens[len(held) :])
        with self._open() as lib:
            native.check(lib.clover_session_feed(self._session, array, n))
            self._turn += 1

    def _prompt_tokens(self, prompt, tools, enable_thinking):
        if isinstance(prompt, str):
            begin = [self._bos()] if self.metadata("tokenizer.ggml.add_bos_token") == "true" else []
            return begin + self.tokenize(prompt)
        if isinstance(prompt, bytes | bytearray | dict):
            raise ArgumentError(f"the prompt is a {type(prompt).__name__}; give a text, a list of messages, or token ids")
        prompt = list(prompt)
        if all(hasattr(item, "__index__") for item in prompt):
            return [_integer("token", item) for item in prompt]
        return self.tokenize(self.render(prompt, tools, enable_thinking))

    def generate(
        self,
        prompt,
        mode="block",
        max_tokens=None,
        window=None,
        threshold=None,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        stop=(),
        tools=None,
        enable_thinking=False,
        special=False,
        events=False,
    ):
        """Begin an answer: a `Generation`, which iterates over pieces of text (events: over `Step` and `Text`).

        `prompt`: text, a list of messages for the chat template (with `tools` and `enable_thinking`), or token ids. If it
        continues the conversation held, only what is new is evaluated; else the conversation starts anew.
        `mode`: "block" (diffusion) or "ar" (autoregressive). `max_tokens`: None for as many as fit. `window`: positions
        denoised together, None for the model's block size. `threshold`: confidence above which a position is fixed, None for
        the model's. `temperature` 0: the most likely token; `top_k` 0, `top_p` 1 and `min_p` 0 keep all. `stop`: one text or
        several that end the answer. `special`: control tokens are written as text.
        Raises ArgumentError, ContextFullError, UnsupportedError, TemplateError, BusyError; the conversation is then as it was.
        """
        params = native.defaults(native.GenerateParams, "clover_generate_default_params")
        params.mode = _choice("mode", mode, native.MODES)
        params.max_tokens = -1 if max_tokens is None else _integer("max_tokens", max_tokens, 0)
        params.window = 0 if window is None else _integer("window", window, 1)
        params.threshold = -1 if threshold is None else threshold
        params.temperature, params.top_p, params.min_p = temperature, top_p, min_p
        params.top_k = _integer("top_k", top_k)
        params.seed = _integer("seed", seed, 0, 2**64 - 1)
        params.special = special
        params.stop, params.n_stop = _stop_strings(stop)
        tokens = self._prompt_tokens(prompt, tools, enable_thinking)
        self._check(params, tokens)
        self._feed(tokens)
        return Generation(self, params, events)
