"""The Python API and the command `clover`, on a random tiny model."""

import gc
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time

import gguf_edit
import jinja2
import model_files
import pytest

import clover_cpp
from clover_cpp import Clover, Step, Text, native
from clover_cpp.template import render
from clover_tiny import tasks
from clover_tiny.tokenizer import Renderer
from conftest import BUNDLED, ROOT

pytestmark = pytest.mark.usefixtures("library")

HEADER = ROOT / "cpp" / "libclover" / "include" / "clover.h"


@pytest.fixture(scope="module")
def clover():
    with Clover(model_files.clover(sharp=True)[0], n_ctx=512, n_threads=1) as made:
        yield made


def test_pieces_make_the_answer(clover):
    clover.clear()
    answer = clover.generate("Hello", max_tokens=50)
    text = "".join(answer)
    assert text and answer.stats.finish == "length" and answer.stats.tokens == 50
    assert clover.detokenize(clover.tokens[len(clover.tokenize("Hello")) :]).startswith(text[:-1])
    assert answer.stats.tokens_per_step == pytest.approx(50 / answer.stats.block_passes)
    assert clover.stats == answer.stats


def test_events_tell_every_position_once(clover):
    clover.clear()
    events = list(clover.generate("Hello", max_tokens=70, events=True))
    fixed = {}
    for event in events:
        if isinstance(event, Step):
            assert event.block_size == min(32, 70 - event.start) and all(0 <= c <= 1 for c in event.confidences)
            for position, token in zip(event.positions, event.tokens, strict=True):
                assert fixed.setdefault(event.start + position, token) == token
    assert sorted(fixed) == list(range(70))
    assert [fixed[i] for i in range(70)] == clover.tokens[-70:]
    clover.clear()
    assert "".join(e.text for e in events if isinstance(e, Text)) == "".join(clover.generate("Hello", max_tokens=70))


def test_leaving_the_loop_cancels(clover):
    clover.clear()
    for _ in clover.generate("Hello", max_tokens=300):
        break
    gc.collect()
    assert clover.stats.finish == "cancelled" and clover.stats.tokens < 300
    with clover.generate("Hello", max_tokens=300) as answer:
        next(answer)
    assert answer.stats.finish == "cancelled"
    assert list(answer) == []


def test_a_newer_answer_drops_the_older(clover):
    older = clover.generate("Hello", max_tokens=100)
    next(older)
    newer = clover.generate("World", max_tokens=10)
    with pytest.raises(clover_cpp.ArgumentError, match="newer"):
        list(older)
    older.close()
    "".join(newer)
    assert newer.stats.finish == "length"


def test_error_in_a_callback_comes_out(clover, monkeypatch):
    answer = clover.generate("Hello", max_tokens=100, events=True)
    monkeypatch.setattr(answer, "_read_step", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(answer)
    assert clover.stats.finish == "cancelled"


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "fast"},
        {"mode": ["block"]},
        {"max_tokens": -1},
        {"max_tokens": 2**32},
        {"window": 0},
        {"window": 1000},
        {"threshold": 2},
        {"temperature": -1},
        {"seed": -1},
        {"stop": ["a\0b"]},
        {"stop": [""]},
    ],
)
def test_arguments_out_of_range(clover, values):
    with pytest.raises(clover_cpp.ArgumentError, match=next(iter(values))):
        clover.generate("Hello", **values)
    with pytest.raises(ValueError):
        clover.generate("Hello", **values)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((b"Hello",), clover_cpp.ArgumentError),
        (({"role": "user", "content": "x"},), clover_cpp.ArgumentError),
        (([True, False],), clover_cpp.ArgumentError),
        (([1, 1.5],), clover_cpp.TemplateError),
        (([2**40],), clover_cpp.ArgumentError),
        (([],), clover_cpp.ArgumentError),
        (("Hello " * 600,), clover_cpp.ContextFullError),
        (("Hello", "block", 1.5), clover_cpp.ArgumentError),
        (("Hello", "block", None, None, None, -1.0), clover_cpp.ArgumentError),
        (("Hello", "block", None, 1000), clover_cpp.ArgumentError),
    ],
)
def test_a_refused_prompt_leaves_the_conversation(clover, arguments, error):
    clover.clear()
    "".join(clover.generate("Something else", max_tokens=3))
    held = clover.tokens
    with pytest.raises(error):
        clover.generate(*arguments)
    assert clover.tokens == held


def test_prompts_and_stops_of_other_types(clover):
    import numpy

    clover.clear()
    expected = "".join(clover.generate([1, 2, 3], max_tokens=9))
    clover.clear()
    assert "".join(clover.generate(numpy.array([1, 2, 3]), max_tokens=numpy.int32(9), stop=None)) == expected
    assert clover.detokenize(numpy.array([1, 2])) == clover.detokenize([1, 2])
    for stop in (b"x", [1], "\udcff"):
        with pytest.raises(clover_cpp.ArgumentError, match="stop"):
            clover.generate("Hello", stop=stop)
    assert clover.metadata("general.architecture") == "clover" and clover.metadata("general.architecture\0x") is None
    with pytest.raises(clover_cpp.ArgumentError, match="zero"):
        Clover(f"{model_files.clover()[0]}\0x")


def test_closing_a_model_in_use(clover):
    """From another thread, or from inside a callback: refused, and the answer goes on."""
    with Clover(model_files.clover(sharp=True)[0], n_ctx=512, n_threads=1) as made:
        expected = "".join(made.generate("Hello", max_tokens=200))
        made.clear()
        answer, errors = made.generate("Hello", max_tokens=200, events=True), []
        read = answer._read_step

        def close_inside(step):
            for call in (made.close, made.clear, lambda: made.generate("World")):
                with pytest.raises(clover_cpp.BusyError):
                    call()
            thread = threading.Thread(target=lambda: errors.append(pytest.raises(clover_cpp.BusyError, made.close)))
            thread.start()
            thread.join()
            return read(step)

        answer._read_step = close_inside
        assert "".join(event.text for event in answer if isinstance(event, Text)) == expected
        assert errors and answer.stats.finish == "length"
        answer = made.generate("Hello again")
    assert pytest.raises(clover_cpp.ArgumentError, list, answer).match("closed")


def test_closing_while_another_thread_iterates():
    made, found = Clover(model_files.clover()[0], n_ctx=512, n_threads=1), []

    def work():
        try:
            found.append("".join(made.generate("Hello", max_tokens=400, mode="ar")))
        except clover_cpp.ArgumentError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while True:
        try:
            made.close()
            break
        except clover_cpp.BusyError:
            time.sleep(0.0001)
    thread.join()
    assert len(found) == 1


def test_errors_have_their_classes(clover, tmp_path):
    with pytest.raises(clover_cpp.ContextFullError, match="512"):
        clover.generate([1] * 513)
    with pytest.raises(clover_cpp.ArgumentError, match="empty"):
        clover.generate("")
    with pytest.raises(clover_cpp.ArgumentError, match="5000"):
        clover.generate([5000])
    with pytest.raises(clover_cpp.ModelFileError, match="none.gguf"):
        Clover(tmp_path / "none.gguf")
    with pytest.raises(clover_cpp.ArgumentError, match="f16, f32, q8_0"):
        Clover(model_files.clover()[0], kv_type="f8")
    with pytest.raises(clover_cpp.ArgumentError, match="n_gpu_layers"):
        Clover(model_files.clover()[0], n_gpu_layers=-2)
    with Clover(model_files.qwen(), n_ctx=64, n_threads=1) as qwen:
        with pytest.raises(clover_cpp.UnsupportedError, match="autoregressive"):
            qwen.generate("Hello")
        assert "".join(qwen.generate("Hello", mode="ar", max_tokens=9)) and qwen.stats.tokens == 9
    with pytest.raises(clover_cpp.ArgumentError, match="closed"):
        qwen.generate("Hello")
    for error in vars(clover_cpp).values():
        if isinstance(error, type) and issubclass(error, Exception):
            assert issubclass(error, clover_cpp.CloverError)


def test_a_library_of_another_version_is_refused(tmp_path):
    source, number = tmp_path / "other.c", int(re.search(r"#define CLOVER_API_NUMBER (\d+)", HEADER.read_text())[1])
    assert number == native.API_NUMBER
    for code, found in ((f"int clover_api_number(void) {{ return {number + 1}; }}", number + 1), ("int clover_version;", 0)):
        source.write_text(code)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / native.library_path().name, source], check=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings"), "CLOVER_LIB_PATH": str(tmp_path)}
        run = [sys.executable, "-m", "clover_cpp", "info", "model.gguf"]
        done = subprocess.run(run, env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and f"another version of clover.cpp (interface {found}, needed: {number})" in done.stderr
        assert done.stderr.count("\n") == 1


def test_missing_library_is_named(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings"), "CLOVER_LIB_PATH": str(tmp_path)}
    code = "import clover_cpp; clover_cpp.Clover('x')"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert f"ResourceError: libclover.so is not in {tmp_path}" in result.stderr


# ---- chat templates


def test_prompts_equal_the_checkpoints_own(clover):
    renderer = Renderer(BUNDLED)
    for task in ("notices", "tools", "web", "chat"):
        for example in tasks.held_out(task, 5):
            text = clover.render(example.messages, example.tools, example.thinking)
            assert text == renderer.prompt_text(example)
            assert clover.tokenize(text) == renderer.prompt(example)


def test_template_matches_transformers():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    source = (BUNDLED / "chat_template.jinja").read_text()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße <b>&\n"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"ä": {"type": "string"}}}}}]
    for thinking in (False, True):
        expected = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert render(source, messages, tools, enable_thinking=thinking) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ('%s'|attr('format'))|attr('__globals__') }}{{ x.y }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9)|list }}",
        "{% if %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ none.strip() }}",
        "{% break %}",
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    ],
)
def test_hostile_or_broken_templates(source):
    with pytest.raises(clover_cpp.TemplateError):
        render(source, [{"role": "user", "content": "x"}])


def test_jinja_has_the_sandbox_fixes():
    assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= (3, 1, 6)


# ---- the command


def command(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings")}
    line = [sys.executable, "-m", "clover_cpp", *[word if isinstance(word, bytes) else str(word) for word in arguments]]
    return subprocess.run(line, env=environment, capture_output=True, **options)


def test_generate_streams_the_answer_and_counts_on_stderr(clover):
    path = model_files.clover(sharp=True)[0]
    clover.clear()
    expected = "".join(clover.generate("Hello", max_tokens=40))
    options = ("--max-tokens", 40, "--threads", 1, "--raw")
    result = command("generate", path, "Hello", *options)
    assert result.returncode == 0 and result.stdout.decode() == expected + "\n"
    assert re.match(rb"40 tokens in .* block \+ 1 commit passes.*length\)\n$", result.stderr)
    result = command("generate", path, "-", *options, "--json", input=b"Hello")
    assert result.stderr == b""
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["finish"], answer["tokens"]) == (expected, "length", 40)


def test_generate_uses_the_chat_template(clover, tmp_path):
    clover.clear()
    expected = "".join(clover.generate([{"role": "user", "content": "Grüße"}], max_tokens=20, mode="ar"))
    (tmp_path / "prompt").write_text("Grüße")
    path = model_files.clover(sharp=True)[0]
    result = command("generate", path, "--file", tmp_path / "prompt", "--max-tokens", 20, "--mode", "ar", "--threads", 1, "-q")
    assert (result.returncode, result.stdout.decode(), result.stderr) == (0, expected + "\n", b"")


def test_an_autoregressive_model_needs_no_option():
    result = command("generate", model_files.qwen(), "Hello", "--max-tokens", 3, "--threads", 1, "--json")
    assert json.loads(result.stdout)["causal_passes"] == 2
    assert json.loads(result.stdout)["tokens_per_step"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "none.gguf", "x"], 1, "none.gguf"),
        (["info", "none.gguf"], 1, "none.gguf"),
        (["generate", "MODEL"], 2, "prompt"),
        (["generate", "MODEL", "x", "--file", "none"], 2, "none"),
        (["generate", "MODEL", "x", "--top-p", "0"], 1, "top_p"),
        (["generate", "MODEL", "x", "--raw", "--thinking"], 2, "--raw"),
        (["generate", "MODEL", "x" * 9000], 1, "4096"),
        (["generate", "MODEL", "--file", "MODEL"], 1, "UTF-8"),
        (["generate", "MODEL", "x", "--tools", "MODEL"], 1, "JSON"),
        (["nonsense"], 2, "nonsense"),
        (["generate", "MODEL", "x", "--stop", b"\xff"], 1, "stop string"),
        (["generate", "MODEL", "x", "--tools", "DEEP"], 1, "deep"),
        (["info", "."], 1, "folder"),
    ],
)
def test_errors_are_one_line(arguments, code, message, tmp_path):
    files = {"MODEL": model_files.clover()[0], "DEEP": tmp_path / "tools.json"}
    files["DEEP"].write_text("[" * 200_000)
    result = command(*[files.get(word, word) for word in arguments])
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, result.stdout, len(lines)) == (code, b"", 1), result.stderr
    assert lines[0].startswith("clover: error: ") and message in lines[0]


def test_bare_command_is_the_help():
    result = command()
    assert result.returncode == 0 and result.stdout.startswith(b"Usage: ") and result.stderr == b""


@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [("<&-", 1, b"standard input is closed"), (">&-", 1, b"standard output is closed"), ("2>&-", 0, b"")],
)
def test_closed_standard_streams(closed, code, message):
    line = f'"$@" {closed}'
    model = (str(model_files.clover()[0]), "-", "--max-tokens", "1", "--threads", "1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings")}
    shell = ["sh", "-c", line, "sh", sys.executable, "-m", "clover_cpp", "generate", *model]
    result = subprocess.run(shell, env=environment, capture_output=True, input=b"Hello")
    assert result.returncode == code and result.stderr == (b"clover: error: " + message + b"\n" if message else b"")


def test_line_feed_at_the_end_of_a_prompt():
    model = ("generate", model_files.clover(sharp=True)[0], "-", "--max-tokens", 1, "--threads", 1, "--json")
    counts = [
        json.loads(command(*model, *options, input=prompt).stdout)["prompt_tokens"]
        for options in ((), ("--raw",))
        for prompt in (b"Hello", b"Hello\n", b"Hello\r\n")
    ]
    assert counts[0] == counts[1] == counts[2] and counts[3] < counts[4] <= counts[5]


def start(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings"), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    return subprocess.Popen([sys.executable, "-m", "clover_cpp", *map(str, arguments)], env=environment, **options)


LONG = ("--raw", "--n-ctx", 4096, "--threads", 1, "--temperature", 3)


def test_closed_pipe_is_no_traceback():
    process = start("generate", model_files.clover()[0], "x", *LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    message = process.stderr.read()
    assert process.wait() == 1 and b"Traceback" not in message and b"cancelled" in message


def test_interrupt_ends_the_answer():
    process = start("generate", model_files.clover()[0], "x", *LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate()
    assert process.returncode == 130 and b"Traceback" not in message and b"cancelled" in message


def test_interrupt_at_any_moment_is_one_exception(clover):
    """The signal comes while native code runs or just as it enters a callback: never lost, never printed."""
    found = 0
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    for delay in range(40):
        clover.clear()
        answer = clover.generate("Hello", max_tokens=400, events=True)
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.001 + delay * 0.0007)
            for _ in answer:
                pass
            time.sleep(10)
        answer.close()
        found += answer.stats.finish == "cancelled"
    signal.signal(signal.SIGALRM, previous)
    assert found


def test_live_view_on_a_terminal(clover):
    """Masked positions show as blocks first; the text that stays is the answer; no control character gets through."""
    clover.clear()
    expected = "".join(clover.generate("Hello", max_tokens=40))
    main, side = pty.openpty()
    arguments = ("generate", model_files.clover(sharp=True)[0], "Hello", "--max-tokens", 40, "--threads", 1, "--raw", "-q")
    process = start(*arguments, stdout=side, stderr=side)
    os.close(side)
    output = b""
    while select.select([main], [], [], 60)[0]:
        try:
            output += os.read(main, 65536)
        except OSError:  # the other side is closed
            break
    assert process.wait() == 0
    assert "░" in output.decode("utf-8", "replace")
    final = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", output.rsplit(b"\x1b[2K", 1)[-1]).decode()

    def visible(text):
        return "".join(char for char in text if char.isalnum())

    assert visible(expected).endswith(visible(final)) and visible(final)


def test_info():
    result = command("info", model_files.clover()[0], "--json")
    facts = json.loads(result.stdout)
    assert facts["architecture"] == "clover" and facts["block_size"] == 32 and facts["threshold"] == 0.95
    assert b"block_size     32" in command("info", model_files.clover()[0]).stdout
    assert command("--version").stdout == b"0.1.0\n"


def test_info_obeys_no_escape_sequence_of_a_file(tmp_path):
    path = tmp_path / "named.gguf"
    path.write_bytes(gguf_edit.with_key(model_files.clover()[0].read_bytes(), "general.name", "str", "\x1b[31mred\x07"))
    result = command("info", path)
    assert result.returncode == 0 and "\ufffd[31mred\ufffd" in result.stdout.decode() and b"\x1b" not in result.stdout


def test_two_threads_have_two_sessions_or_an_error(clover):
    """One `Clover` at a time is used by one thread; a second thread gets BusyError, and the answer is not disturbed."""
    clover.clear()
    expected = "".join(clover.generate("Hello", max_tokens=200))
    clover.clear()
    answer, errors, done = clover.generate("Hello", max_tokens=200), [], threading.Event()

    def disturb():
        while not done.is_set():
            try:
                _ = clover.tokens
            except clover_cpp.BusyError as error:
                errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    pieces = []
    while True:
        try:
            pieces.append(next(answer))
        except StopIteration:
            break
        except clover_cpp.BusyError:
            continue
    done.set()
    thread.join()
    assert "".join(pieces) == expected
