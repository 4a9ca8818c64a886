"""The C API under wrong use and damaged files: a code and a message each time, never an abort."""

import ctypes as c
import os
import random
import struct
import subprocess
import sys
import threading

import gguf_edit
import model_files
import pytest

from clover_cpp import native
from conftest import ROOT

pytestmark = pytest.mark.usefixtures("library")

OK, ARGUMENT, FILE, UNSUPPORTED, CONTEXT_FULL, MEMORY, BUSY, ENGINE = range(8)
FINISH = {name: number for number, name in enumerate(native.FINISH)}


class Session:
    """A model and a session of it through the raw C API."""

    def __init__(self, path, **params):
        self.lib = native.library()
        self.model, self.session = c.c_void_p(), c.c_void_p()
        assert self.lib.clover_model_load(os.fsencode(path), None, self.model) == OK, native.last_error()
        given = native.defaults(native.SessionParams, "clover_session_default_params")
        for name, value in {"n_ctx": 256, "n_threads": 1, **params}.items():
            setattr(given, name, value)
        self.status = self.lib.clover_session_new(self.model, given, self.session)

    def feed(self, *tokens):
        return self.lib.clover_session_feed(self.session, (c.c_int32 * len(tokens))(*tokens), len(tokens))

    def params(self, **values):
        params = native.defaults(native.GenerateParams, "clover_generate_default_params")
        for name, value in values.items():
            setattr(params, name, value)
        return params

    def generate(self, **values):
        return self.lib.clover_session_generate(self.session, self.params(**values))

    def text(self, stop=(), **values):
        """(status, pieces of text, stats) of an answer."""
        pieces = []
        on_text = native.TextCallback(lambda text, n, _: pieces.append(c.string_at(text, n)) is None)
        array = (c.c_char_p * len(stop))(*stop)
        status = self.generate(on_text=on_text, stop=array, n_stop=len(stop), **values)
        return status, pieces, self.stats()

    def tokens(self):
        out = (c.c_int32 * 4096)()
        return out[: self.lib.clover_session_tokens(self.session, out, 4096)]

    def stats(self):
        return native.filled(native.Stats, self.lib.clover_session_get_stats, self.session)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lib.clover_session_free(self.session)
        self.lib.clover_model_free(self.model)


@pytest.fixture
def session():
    with Session(model_files.clover()[0]) as made:
        yield made


def load(path):
    model = c.c_void_p()
    status = native.library().clover_model_load(os.fsencode(path), None, model)
    message = native.last_error()
    native.library().clover_model_free(model)
    return status, message


def test_null_pointers_give_a_code(session):
    lib, none = session.lib, None
    assert lib.clover_model_load(none, none, c.byref(c.c_void_p())) == ARGUMENT
    assert lib.clover_model_load(b"x", none, none) == ARGUMENT
    assert lib.clover_session_new(none, none, c.byref(c.c_void_p())) == ARGUMENT
    assert lib.clover_session_new(session.model, none, none) == ARGUMENT
    for name in ("feed", "check", "generate", "begin", "step"):
        function = getattr(lib, f"clover_session_{name}")
        assert function(*[none if t is not c.c_int32 else 1 for t in function.argtypes]) == ARGUMENT, name
        assert native.last_error()
    assert lib.clover_session_clear(none) == ARGUMENT
    assert lib.clover_session_feed(session.session, none, 3) == ARGUMENT
    assert lib.clover_session_feed(session.session, none, 0) == OK
    assert lib.clover_session_tokens(none, none, 0) == native.FAILED
    assert lib.clover_session_tokens(session.session, none, 5) == native.FAILED
    assert lib.clover_session_n_ctx(none) == 0
    assert lib.clover_tokenize(none, b"a", 1, True, none, 0) == native.FAILED
    assert lib.clover_tokenize(session.model, none, 1, True, none, 0) == native.FAILED
    assert lib.clover_tokenize(session.model, b"abc", 3, True, none, 5) == native.FAILED
    assert lib.clover_detokenize(session.model, none, 2, True, none, 0) == native.FAILED
    assert lib.clover_model_metadata(none, b"a") is None
    assert lib.clover_model_metadata(session.model, none) is None
    assert not lib.clover_token_is_end(none, 0)
    for name in ("clover_model_free", "clover_session_free", "clover_session_cancel"):
        getattr(lib, name)(none)
    lib.clover_model_default_params(none, 8)
    lib.clover_session_get_stats(none, none, 0)
    lib.clover_model_get_info(none, native.ModelInfo(), c.sizeof(native.ModelInfo))


def test_structs_of_older_and_newer_callers(session):
    class Newer(c.Structure):
        _fields_ = [("known", native.Stats), ("added", c.c_int64)]

    newer = Newer(added=7)
    session.lib.clover_session_get_stats(session.session, c.cast(c.byref(newer), c.POINTER(native.Stats)), c.sizeof(newer))
    assert newer.added == 0
    older = native.Stats(tokens=5, prompt_tokens=6)
    session.lib.clover_session_get_stats(session.session, older, native.Stats.tokens.offset)
    assert (older.tokens, older.prompt_tokens) == (5, 0)
    session.feed(1)
    assert session.generate(size=0) == ARGUMENT
    assert session.generate(size=native.GenerateParams.threshold.offset, max_tokens=2, threshold=9.0) == OK
    assert session.stats().tokens == 2
    assert session.generate(size=2**40 + c.sizeof(native.GenerateParams), max_tokens=1) == OK


@pytest.mark.parametrize(
    "values",
    [
        {"mode": 2},
        {"mode": -1},
        {"max_tokens": -2},
        {"window": -1},
        {"window": 65},
        {"threshold": 1.5},
        {"threshold": float("nan")},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"min_p": 1.1},
        {"n_stop": 1},
    ],
)
def test_parameters_out_of_range(session, values):
    session.feed(1, 2)
    assert session.lib.clover_session_check(session.session, session.params(**values)) == ARGUMENT
    assert session.generate(**values) == ARGUMENT
    assert next(iter(values)).removeprefix("n_") in native.last_error()
    assert session.generate(max_tokens=1) == OK


@pytest.mark.parametrize(
    "values", [{"n_ctx": -1}, {"n_batch": 0}, {"n_threads": -1}, {"kv_type": 9}, {"flash_attn": 2}, {"kv_type": 2, "flash_attn": 0}]
)
def test_session_parameters_out_of_range(values):
    with Session(model_files.clover()[0], **values) as session:
        assert session.status == ARGUMENT
        assert next(iter(values)) in native.last_error()


@pytest.mark.parametrize("kv_type", native.KV_TYPES.values())
@pytest.mark.parametrize("flash_attn", native.FLASH_ATTN.values())
def test_every_cache_type_answers(kv_type, flash_attn):
    if (kv_type, flash_attn) == (native.KV_TYPES["q8_0"], native.FLASH_ATTN["off"]):
        return
    with Session(model_files.clover()[0], kv_type=kv_type, flash_attn=flash_attn) as session:
        session.feed(1, 2, 3)
        assert session.generate(max_tokens=33) == OK
        assert session.stats().tokens == 33


def test_context_is_at_most_the_models():
    with Session(model_files.clover()[0], n_ctx=2**31 - 1) as session:
        assert session.lib.clover_session_n_ctx(session.session) == 4096


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_context_of_a_file_that_claims_a_huge_one(tmp_path):
    """What is asked of the machine stays bounded; that little memory is refused with a message."""
    import resource

    path = tmp_path / "changed.gguf"
    path.write_bytes(gguf_edit.with_key(model_files.clover()[0].read_bytes(), "clover.context_length", "u32", 2**30))
    code = f"import clover_cpp; clover_cpp.Clover({str(path)!r}, n_ctx=0, n_threads=1, kv_type='f32')"
    limit = 3 * 2**29
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "bindings"), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and "ResourceError: a context of 16777216 tokens" in result.stderr


def test_tokens_outside_the_vocabulary(session):
    for token in (-1, 1024, 2**31 - 1, -(2**31)):
        assert session.feed(1, token) == ARGUMENT
        assert str(token) in native.last_error()
        array = (c.c_int32 * 1)(token)
        assert session.lib.clover_detokenize(session.model, array, 1, True, None, 0) == native.FAILED
    assert session.tokens() == []


def test_nothing_to_answer(session):
    assert session.generate() == ARGUMENT
    assert session.lib.clover_session_step(session.session, c.c_bool()) == ARGUMENT


def test_context_full_is_all_or_nothing(session):
    assert session.feed(*range(200)) == OK
    assert session.feed(*range(57)) == CONTEXT_FULL
    assert "256" in native.last_error()
    assert session.tokens() == list(range(200))
    assert session.feed(*range(56)) == OK
    status, pieces, stats = session.text()
    assert (status, pieces, stats.finish, stats.prompt_passes) == (OK, [], FINISH["length"], 0)


@pytest.mark.parametrize("mode", [0, 1])
def test_answer_stops_at_the_context(session, mode):
    session.feed(*range(250))
    status, _, stats = session.text(mode=mode)
    assert status == OK and stats.finish == FINISH["length"] and stats.tokens == 6
    assert len(session.tokens()) == 256


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64, 65])
def test_max_tokens_is_exact(session, mode, n):
    session.feed(5, 6, 7)
    status, _, stats = session.text(mode=mode, max_tokens=n)
    assert status == OK and stats.finish == FINISH["length"] and stats.tokens == n
    assert len(session.tokens()) == 3 + n
    assert stats.commit_passes == (0 if mode else max(0, -(-n // 32) - 1))


def test_block_decoding_of_an_autoregressive_model():
    with Session(model_files.qwen()) as session:
        session.feed(1, 2, 3)
        assert session.generate(mode=0) == UNSUPPORTED
        assert "block" in native.last_error()
        assert session.generate(mode=1, max_tokens=5) == OK
        assert session.stats().tokens == 5


def test_pieces_are_whole_characters_and_a_prefix(session):
    """Random weights give random bytes: broken characters become U+FFFD, and no piece splits one."""
    session.feed(1)
    for seed in range(5):
        _, pieces, _ = session.text(max_tokens=150, temperature=3.0, threshold=0.001, seed=seed)
        assert all(piece.decode() for piece in pieces)


def tokens_of(session, n):
    """How many of the answer's tokens have a part in its first n characters."""
    tokens = session.tokens()[2:]
    out = c.create_string_buffer(4096)
    for count in range(len(tokens) + 1):
        size = session.lib.clover_detokenize(session.model, (c.c_int32 * count)(*tokens[:count]), count, False, out, 4096)
        if len(out.raw[:size].decode("utf-8", "replace")) >= n:
            return count
    raise AssertionError("the tokens have less text")


@pytest.mark.parametrize("mode", [0, 1])
def test_stop_string_is_found_wherever_it_stands(session, mode):
    options = {"mode": mode, "max_tokens": 120, "temperature": 2.0, "seed": 3, "threshold": 0.001}
    session.feed(1, 2)
    whole = b"".join(session.text(**options)[1])
    start = len(session.tokens())
    text = whole.decode()
    for place in (0, 1, 5, len(text) // 2, len(text) - 6):
        stop = text[place : place + 6]
        session.lib.clover_session_clear(session.session)
        session.feed(1, 2)
        status, pieces, stats = session.text(stop=[stop.encode(), b"never there"], **options)
        assert status == OK and stats.finish == FINISH["stop_string"]
        assert b"".join(pieces).decode() == text[: text.index(stop)]
        assert stats.tokens == tokens_of(session, text.index(stop))
        assert mode == 0 or stats.tokens_per_step <= 1
        assert len(session.tokens()) <= start


def test_beginning_of_a_stop_string_is_released_at_the_end(session):
    session.feed(1, 2)
    whole = b"".join(session.text(max_tokens=40)[1])
    session.lib.clover_session_clear(session.session)
    session.feed(1, 2)
    status, pieces, stats = session.text(max_tokens=40, stop=[whole[-4:] + b"never there"])
    assert (b"".join(pieces), stats.finish) == (whole, FINISH["length"])


def test_nothing_after_an_end_token():
    """At a high temperature the end token comes anywhere, in the middle of a step's other tokens too."""
    with Session(model_files.clover()[0]) as session:
        info = native.filled(native.ModelInfo, session.lib.clover_model_get_info, session.model)
        session.feed(1, 2, 3)
        seen = 0
        for seed in range(60):
            _, _, stats = session.text(max_tokens=300, temperature=50.0, threshold=0.0, seed=seed)
            tokens = session.tokens()[3:]
            if stats.finish == FINISH["stop"]:
                seen += 1
                assert tokens[-1] == info.eos_token and info.eos_token not in tokens[:-1]
                assert stats.tokens == len(tokens) - 1
            else:
                assert info.eos_token not in tokens
            session.lib.clover_session_clear(session.session)
            session.feed(1, 2, 3)
        assert seen > 3


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("kind", ["step", "text"])
def test_a_callback_cancels(session, mode, kind):
    session.feed(1, 2, 3)
    calls = []
    stop_at_third = lambda *_: len(calls) < 2 and calls.append(1) is None  # noqa: E731
    callback = native.StepCallback(stop_at_third) if kind == "step" else native.TextCallback(stop_at_third)
    assert session.generate(mode=mode, max_tokens=100, **{f"on_{kind}": callback}) == OK
    assert session.stats().finish == FINISH["cancelled"]
    assert len(session.tokens()) < 40
    assert session.generate(mode=mode, max_tokens=5) == OK


def test_cancel_between_steps_keeps_what_was_delivered(session):
    session.feed(1, 2, 3)
    assert session.lib.clover_session_begin(session.session, session.params(max_tokens=64)) == OK
    done = c.c_bool()
    for _ in range(10):
        assert session.lib.clover_session_step(session.session, done) == OK
    session.lib.clover_session_cancel(session.session)
    passes = session.stats().block_passes
    assert session.lib.clover_session_step(session.session, done) == OK
    stats = session.stats()
    assert done.value and stats.finish == FINISH["cancelled"] and stats.block_passes == passes
    assert len(session.tokens()) == 3 + stats.tokens
    assert session.lib.clover_session_step(session.session, done) == OK and done.value


def test_answer_after_a_cancelled_block_in_the_other_mode():
    """Without shift_logits a block's context has no logits ready: autoregressive decoding must not need them."""
    with Session(model_files.clover(shift_logits=False)[0]) as session:
        session.feed(1, 2, 3)
        refuse = native.StepCallback(lambda *_: False)
        assert session.generate(on_step=refuse) == OK
        assert session.tokens() == [1, 2, 3]
        assert session.generate(mode=1, max_tokens=8) == OK
        tokens = session.tokens()
        session.lib.clover_session_clear(session.session)
        session.feed(1, 2, 3)
        session.generate(mode=1, max_tokens=8)
        assert session.tokens() == tokens


def test_busy_inside_a_callback_and_from_another_thread(session):
    session.feed(1, 2, 3)
    found = []

    def look(*_):
        if not found:
            found.append(session.feed(4))
            found.append(session.lib.clover_session_clear(session.session))
            thread = threading.Thread(target=lambda: found.append(session.generate()))
            thread.start()
            thread.join()
            found.append(session.lib.clover_session_tokens(session.session, None, 0))
            session.stats()
        return True

    assert session.generate(max_tokens=4, on_text=native.TextCallback(look)) == OK
    assert found == [BUSY, BUSY, BUSY, native.FAILED]
    assert session.feed(4) == OK


def test_cancel_from_another_thread(session):
    session.feed(1)
    started = threading.Event()
    on_text = native.TextCallback(lambda *_: started.set() is None)

    def cancel():
        started.wait(60)
        session.lib.clover_session_cancel(session.session)

    thread = threading.Thread(target=cancel)
    thread.start()
    for seed in range(1000):
        assert session.generate(max_tokens=200, on_text=on_text, temperature=1.0, seed=seed) == OK
        if session.stats().finish == FINISH["cancelled"] or not thread.is_alive():
            break
        session.lib.clover_session_clear(session.session)
        session.feed(1)
    thread.join()


def test_sessions_of_one_model_do_not_mix():
    with Session(model_files.clover()[0]) as first:
        other = c.c_void_p()
        assert first.lib.clover_session_new(first.model, None, other) == OK
        first.feed(1, 2, 3)
        first.generate(max_tokens=40)
        expected = first.tokens()
        first.lib.clover_session_clear(first.session)
        first.feed(1, 2, 3)
        done = c.c_bool()
        first.lib.clover_session_begin(first.session, first.params(max_tokens=40))
        array = (c.c_int32 * 2)(9, 8)
        first.lib.clover_session_feed(other, array, 2)
        first.lib.clover_session_begin(other, first.params(max_tokens=60))
        while not done.value:
            first.lib.clover_session_step(other, c.c_bool())
            first.lib.clover_session_step(first.session, done)
        assert first.tokens() == expected
        first.lib.clover_session_free(other)


# ---- files


def test_file_that_is_no_model(tmp_path):
    cases = {
        "missing": None,
        "empty": b"",
        "short": b"GG",
        "text": b"hello world, this is not a model" * 10,
        "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "bare": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        "huge counts": b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63),
        "huge key": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
    }
    for name, data in cases.items():
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        status, message = load(path)
        assert status == FILE and str(path) in message, (name, status, message)
    status, message = load(tmp_path)
    assert status == FILE and "folder" in message


def replaced(path, tmp_path, old, new):
    data = path.read_bytes()
    assert data.count(old) >= 1
    out = tmp_path / "changed.gguf"
    out.write_bytes(data.replace(old, new, 1))
    return out


def test_other_architecture(tmp_path):
    path = replaced(model_files.clover()[0], tmp_path, b"clover", b"flower")
    status, message = load(path)
    assert status == FILE and "flower" in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"blk.0.ssm_mem_gate.weight", b"blk.0.ssm_mem_gate.weighx", "ssm_mem_gate"),
        (b"blk.3.attn_k.weight", b"blk.3.attn_x.weight", "attn_k"),
        (b"clover.block.size\x04", b"clover.block.sizx\x04", "clover.block.size"),
        (b"diffusion.shift_logits", b"diffusion.shift_logitx", "diffusion.shift_logits"),
        (b"tokenizer.ggml.mask_token_id", b"tokenizer.ggml.mask_token_ix", "mask token"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenx", "vocabulary"),
        (b"clover.rope.dimension_count\x04\0\0\0\x10", b"clover.rope.dimension_count\x04\0\0\0\x40", "rotated"),
        (b"clover.ssm.inner_size\x04\0\0\0\xc0", b"clover.ssm.inner_size\x04\0\0\0\xc1", "inner size"),
        (b"normalizer\x08\0\0\0\x03\0\0\0\0\0\0\0nfc", b"normalizer\x08\0\0\0\x03\0\0\0\0\0\0\0nfd", "nfd"),
    ],
)
def test_incomplete_or_contradicting_file(tmp_path, old, new, message):
    path = model_files.clover()[0]
    status, found = load(replaced(path, tmp_path, old, new))
    assert status == FILE and message in found, found


@pytest.mark.parametrize(
    ("key", "kind", "content"),
    [
        ("clover.rope.scaling.type", "str", "spiral"),
        ("clover.rope.freq_base", "f32", 0.0),
        ("clover.rope.freq_base", "f32", float("nan")),
        ("clover.rope.scaling.factor", "f32", float("inf")),
        ("clover.attention.layer_norm_rms_epsilon", "f32", float("nan")),
        ("clover.attention.layer_norm_rms_epsilon", "f32", -1.0),
        ("clover.attention.layer_norm_rms_epsilon", "u32", 1),
        ("clover.expert_used_count", "u32", [2, 9, 2, 2]),
        ("clover.expert_used_count", "u32", []),
        ("clover.attention.head_count", "u32", [4, 5, 4, 7]),
        ("clover.attention.head_count_kv", "u32", [2, 3, 2, 2]),
        ("clover.attention.head_count_kv", "u32", [2, 0, 2, 2]),
        ("clover.block.size", "u32", [32]),
        ("clover.block.threshold", "str", "0.9"),
        ("clover.block.threshold", "f32", float("nan")),
        ("clover.block.threshold", "f32", 1.5),
        ("diffusion.shift_logits", "str", "true"),
        ("diffusion.shift_logits", "u32", 1),
        ("tokenizer.chat_template", "u32", 1),
        ("clover.tokenizer.normalizer", "u32", 1),
    ],
)
def test_metadata_that_llama_cpp_would_abort_on_or_we_misread(tmp_path, key, kind, content):
    path = tmp_path / "changed.gguf"
    path.write_bytes(gguf_edit.with_key(model_files.clover()[0].read_bytes(), key, kind, content))
    status, message = load(path)
    assert status == FILE and key in message, message


def test_mask_token_that_ends_answers(tmp_path, session):
    eos = native.filled(native.ModelInfo, session.lib.clover_model_get_info, session.model).eos_token
    path = tmp_path / "changed.gguf"
    path.write_bytes(gguf_edit.with_key(model_files.clover()[0].read_bytes(), "tokenizer.ggml.mask_token_id", "u32", eos))
    status, message = load(path)
    assert status == FILE and "mask token" in message


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        *[(name, gguf_edit.F16) for name in ("blk.0.attn_norm.weight", "blk.0.ssm_conv1d.weight", "blk.0.ssm_mem_gate.bias")],
        *[(name, gguf_edit.F16) for name in ("blk.0.ssm_block_scale", "blk.0.ssm_a", "output_norm.weight")],
        *[("token_embd.weight", kind) for kind in (gguf_edit.I8, gguf_edit.I32, gguf_edit.Q8_1)],
        *[(name, gguf_edit.I32) for name in ("blk.0.attn_qkv.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ssm_mem_gate.weight")],
    ],
)
def test_tensor_types_without_a_kernel(tmp_path, tensor, kind):
    path = tmp_path / "changed.gguf"
    path.write_bytes(gguf_edit.with_tensor_type(model_files.clover()[0].read_bytes(), tensor, kind))
    status, message = load(path)
    assert status == FILE and f"tensor {tensor}" in message, message


def test_edited_file_still_loads(tmp_path):
    """The editing itself does no harm, and keys that are right are taken: one value for each layer too."""
    data = model_files.clover()[0].read_bytes()
    data = gguf_edit.with_key(data, "clover.expert_used_count", "u32", [2, 2, 2, 2])
    for name in ("none", "linear", "yarn"):
        (tmp_path / name).write_bytes(gguf_edit.with_key(data, "clover.rope.scaling.type", "str", name))
        assert load(tmp_path / name)[0] == OK


def test_truncated_anywhere(tmp_path):
    path, _ = model_files.clover()
    data = path.read_bytes()
    rng = random.Random(1)
    header = 60000  # the vocabulary lies in it
    ends = [1, 4, 8, 24, len(data) - 1, len(data) // 2]
    ends += [rng.randrange(header) for _ in range(40)] + [rng.randrange(len(data)) for _ in range(10)]
    cut = tmp_path / "cut.gguf"
    for end in ends:
        cut.write_bytes(data[:end])
        status, message = load(cut)
        assert status == FILE and str(cut) in message, (end, status, message)


DAMAGE = """
import ctypes, os, random, sys
from clover_cpp import native
lib, path, out, seeds = native.library(), sys.argv[1], sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4]))
data = open(path, "rb").read()
words, merges = data.index(b"tokenizer.ggml.tokens"), data.index(b"tokenizer.ggml.merges")
end = data.rindex(b"blk.") + 64
places = [*range(words + 200), *range(words, end, 20), *range(merges - 100, merges + 100), *range(end - 6000, end)]
for seed in seeds:
    rng = random.Random(seed)
    changed = bytearray(data)
    place = rng.choice(places)
    width = rng.choice((1, 1, 4, 8))
    values = rng.randbytes(width), bytes(width), b"\\xff" * width, rng.randrange(256).to_bytes(width, "little")
    changed[place : place + width] = rng.choice(values)
    open(out, "wb").write(changed)
    print(seed, flush=True)
    model, session = ctypes.c_void_p(), ctypes.c_void_p()
    if lib.clover_model_load(os.fsencode(out), None, model):
        assert not model and native.last_error()
        continue
    params = native.defaults(native.SessionParams, "clover_session_default_params")
    params.n_ctx, params.n_threads = 64, 1
    if lib.clover_session_new(model, params, session) == 0:
        lib.clover_session_feed(session, (ctypes.c_int32 * 2)(1, 2), 2)
        generate = native.defaults(native.GenerateParams, "clover_generate_default_params")
        generate.max_tokens = 3
        lib.clover_session_generate(session, generate)
    lib.clover_session_free(session)
    lib.clover_model_free(model)
"""


def test_damaged_headers_never_abort(tmp_path, library):
    """Random bytes anywhere before the weights: each file loads or is refused, in a process of its own that must live."""
    path, _ = model_files.clover()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings"), "GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, "-c", DAMAGE, str(path), str(tmp_path / "damaged.gguf"), "0", "300"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"seed {result.stdout.split()[-1:]}: {result.stderr[-1500:]}"
    assert result.stderr == ""


def test_c_program_on_the_header_alone(tmp_path, library):
    program = tmp_path / "embed"
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{ROOT / 'cpp/libclover/include'}"]
    command += [str(ROOT / "tests/embed.c"), "-o", str(program), f"-L{library}", "-lclover", f"-Wl,-rpath,{library}"]
    subprocess.run([*command, f"-Wl,-rpath-link,{library}"], check=True)
    result = subprocess.run([program, model_files.clover()[0], "Hello"], capture_output=True)
    assert result.returncode == 0 and result.stderr == b""
    lines = result.stdout.decode("utf-8", "replace").splitlines()
    sizes = dict(line.split() for line in lines[:6])
    for name in ("ModelParams", "ModelInfo", "SessionParams", "Step", "GenerateParams", "Stats"):
        key = "clover_" + "".join("_" + char.lower() if char.isupper() else char for char in name).lstrip("_")
        assert int(sizes[key]) == c.sizeof(getattr(native, name)), name
    assert lines[-1] == "tokens 20"
    result = subprocess.run([program, tmp_path / "none", "x"], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("load: ")


def evaluate(session, tokens, kind="causal", n=None, logits=None):
    array = (c.c_int32 * max(1, len(tokens)))(*tokens)
    n = len(tokens) if n is None else n
    return session.lib.clover_session_evaluate(session.session, array, n, native.PASSES.get(kind, kind), logits)


def test_wrong_arguments_of_a_pass_change_nothing(session):
    lib, none, one = session.lib, None, (c.c_int32 * 1)(5)
    assert session.feed(1, 2, 3) == OK
    assert lib.clover_session_evaluate(none, one, 1, 0, none) == ARGUMENT
    assert lib.clover_session_evaluate(session.session, none, 1, 0, none) == ARGUMENT
    for kind in native.PASSES:
        assert evaluate(session, [], kind) == ARGUMENT
        assert evaluate(session, [5], kind, n=-1) == ARGUMENT
        for token in (-1, 1024, 2**31 - 1, -(2**31)):
            assert evaluate(session, [5, token], kind) == ARGUMENT, token
            assert "vocabulary" in native.last_error()
    for kind in (-1, 2, 2**31 - 1):
        assert evaluate(session, [5], kind) == ARGUMENT
    assert evaluate(session, [5] * 65, "block") == ARGUMENT
    assert "65" in native.last_error() and "64" in native.last_error()
    assert evaluate(session, [5] * 254) == CONTEXT_FULL
    assert session.tokens() == [1, 2, 3]
    assert session.feed(*[5] * 250) == OK
    assert evaluate(session, [5] * 4, "block") == CONTEXT_FULL
    assert evaluate(session, [5] * 3, "block") == OK
    assert evaluate(session, [5] * 3) == OK
    assert len(session.tokens()) == 256
    for kind in native.PASSES:
        assert evaluate(session, [5], kind) == CONTEXT_FULL


def test_a_block_pass_needs_a_context_and_a_model_that_has_it(session):
    assert evaluate(session, [5], "block") == ARGUMENT
    assert "context" in native.last_error()
    with Session(model_files.qwen()) as plain:
        assert plain.feed(1) == OK
        assert evaluate(plain, [5], "block") == UNSUPPORTED
        assert evaluate(plain, [5]) == OK


def test_a_pass_inside_a_callback_is_refused(session):
    found = []
    on_text = native.TextCallback(lambda text, n, _: found.append(evaluate(session, [5])) is None)
    session.feed(1, 2, 3)
    assert session.generate(on_text=on_text, max_tokens=8) == OK
    assert set(found) == {BUSY}


def test_importance_with_null_pointers_and_out_of_range():
    lib, none, handle = native.library(), None, c.c_void_p()
    assert lib.clover_imatrix_new(none) == ARGUMENT
    lib.clover_imatrix_free(none)
    lib.clover_imatrix_pause(none, True)
    assert lib.clover_imatrix_count(none) == 0
    entry = native.ImatrixEntry()
    assert lib.clover_imatrix_get(none, 0, entry, c.sizeof(entry)) == ARGUMENT
    assert lib.clover_imatrix_new(handle) == OK
    assert lib.clover_imatrix_count(handle) == 0
    for i in (-1, 0, 1):
        assert lib.clover_imatrix_get(handle, i, entry, c.sizeof(entry)) == ARGUMENT
    with Session(model_files.clover()[0], imatrix=handle) as session:
        lib.clover_imatrix_free(handle)  # the session keeps it
        assert evaluate(session, [1, 2, 3]) == OK
        assert evaluate(session, [5] * 32, "block") == OK
