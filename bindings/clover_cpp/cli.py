"""The command `clover`."""

import dataclasses
import json
import sys

import click

from .command import Main, printable
from .engine import Clover
from .live import show
from .native import FLASH_ATTN, KV_TYPES, MODES, library


class Commands(Main, click.Group):
    """The group `clover`: every subcommand's work is what it prints."""

    needs_output = True


def _version(context, _, wanted):
    if wanted and not context.resilient_parsing:
        click.echo(library().clover_version().decode())
        context.exit()


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit.")
@click.pass_context
def main(context):
    """Run Clover models: block diffusion, and autoregressive decoding of the same weights.

    \b
    clover generate clover.gguf "Name three rivers."
    clover generate clover.gguf --mode ar --file question.txt
    echo "Say hello." | clover generate clover.gguf -
    clover info clover.gguf
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _prompt(prompt, file, raw):
    """The prompt's text; the line feed that ends a file is no part of it, unless raw."""
    if (prompt is None) == (file is None):
        raise click.UsageError("give the prompt either as PROMPT (- for standard input) or as --file")
    if file is not None:
        data = file.read()
    elif prompt == "-":
        if sys.stdin is None:
            raise click.ClickException("standard input is closed")
        data = sys.stdin.buffer.read()
    else:
        return prompt
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"the prompt is not UTF-8 (byte {error.start})") from None
    if raw or not text.endswith("\n"):
        return text
    return text[:-1].removesuffix("\r")


def _tools(file):
    if file is None:
        return None
    try:
        return json.load(file)
    except ValueError as error:
        raise click.ClickException(f"{file.name}: not JSON: {error}") from None
    except RecursionError:
        raise click.ClickException(f"{file.name}: nested too deeply") from None


def _summary(stats):
    speed = stats.tokens / stats.seconds if stats.seconds else 0
    passes = f"{stats.block_passes} block + {stats.commit_passes} commit" if stats.block_passes else f"{stats.causal_passes} causal"
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({speed:.1f}/s, {stats.tokens_per_step:.2f} a step; {passes} passes; "
        f"prompt {stats.prompt_tokens} tokens, {stats.prompt_seconds:.2f} s; {stats.finish})"
    )


@main.command()
@click.argument("model", type=click.Path())
@click.argument("prompt", required=False)
@click.option("--file", type=click.File("rb"), help="Read the prompt from a file (without its last line feed, unless --raw).")
@click.option("--raw", is_flag=True, help="The prompt is the whole text before the answer: no chat template.")
@click.option("--system", help="System message.")
@click.option("--tools", type=click.File("rb"), help="JSON file with a list of tools (OpenAI form) for the template.")
@click.option("--thinking", is_flag=True, help="Let the model think first, where its template can.")
@click.option("--mode", type=click.Choice(list(MODES)), help="Default: block if the model can, else ar.")
@click.option("--max-tokens", type=click.IntRange(0), help="Most tokens of the answer. Default: as many as fit.")
@click.option("--window", type=click.IntRange(1), help="Positions denoised together. Default: the model's block size.")
@click.option("--threshold", type=click.FloatRange(0, 1), help="Confidence above which a position is fixed. Default: the model's.")
@click.option("--temperature", default=0.0, show_default=True, help="0: always the most likely token.")
@click.option("--top-k", default=0, show_default=True, help="0: all.")
@click.option("--top-p", default=1.0, show_default=True, help="1: all.")
@click.option("--min-p", default=0.0, show_default=True, help="0: all.")
@click.option("--seed", default=0, show_default=True)
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--n-ctx", default=4096, show_default=True, help="Most tokens of prompt and answer. 0: the model's limit.")
@click.option("--threads", default=0, show_default=True, help="0: all cores.")
@click.option("--kv-type", type=click.Choice(list(KV_TYPES)), default="f16", show_default=True)
@click.option("--flash-attn", type=click.Choice(list(FLASH_ATTN)), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line: text, finish, counts.")
@click.option("--plain", is_flag=True, help="Stream text only, without the live view of a terminal.")
@click.option("-q", "--quiet", is_flag=True, help="No statistics on standard error.")
def generate(
    model, prompt, file, raw, system, tools, thinking, mode, n_ctx, threads, kv_type, flash_attn, as_json, plain, quiet, **options
):
    """Answer PROMPT with MODEL, a GGUF file.

    On a terminal the answer's undecided positions are shown as they turn into text; else the text is streamed.
    """
    text = _prompt(prompt, file, raw)
    if raw and (system or tools or thinking):
        raise click.UsageError("--raw takes no --system, --tools or --thinking: it uses no chat template")
    if not raw:
        text = [{"role": "user", "content": text}]
        if system:
            text.insert(0, {"role": "system", "content": system})
    options["tools"], options["enable_thinking"] = _tools(tools), thinking
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    with Clover(model, n_ctx=n_ctx, n_threads=threads, kv_type=kv_type, flash_attn=flash_attn) as clover:
        mode = mode or ("block" if clover.info.can_block else "ar")
        live = sys.stdout.isatty() and not as_json and not plain
        answer = clover.generate(text, mode=mode, events=live, **options)
        try:
            if live:
                show(clover, answer)
            elif as_json:
                whole = "".join(answer)
            else:
                _stream(answer)
        finally:
            answer.close()
            stats = answer.stats
            if not quiet and not as_json:
                print(_summary(stats), file=sys.stderr)
        if as_json:
            print(json.dumps({"text": whole, **dataclasses.asdict(stats)}, ensure_ascii=False))


def _stream(answer):
    for piece in answer:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


@main.command()
@click.argument("model", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def info(model, as_json):
    """Facts of MODEL, a GGUF file."""
    with Clover(model, n_ctx=256) as clover:
        facts = {
            "name": clover.metadata("general.name"),
            "architecture": clover.metadata("general.architecture"),
            **dataclasses.asdict(clover.info),
            "chat_template": bool(clover.metadata("tokenizer.chat_template")),
        }
    facts["threshold"] = round(facts["threshold"], 6)
    if as_json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name:13}  {printable(str(value))}")
