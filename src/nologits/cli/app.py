"""The commands, their options and the one place where errors become a line and an exit code.

Each command imports its own module when it runs, so ``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from .console import EXIT_INTERRUPTED, EXIT_USAGE, UserError, one_line

app = typer.Typer(
    name="nologits",
    help="Draw LLM tokens straight from hidden states: exact, seeded, filtered, and without a [B, V] tensor of logits.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Impl = Annotated[str, typer.Option("--impl", help="auto, reference, torch, triton or hopper; a named one runs or fails.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from .._version import __version__

        typer.echo(f"nologits {__version__}")
        raise typer.Exit


@app.command()
def generate(
    model: Annotated[
        str | None,
        typer.Argument(help="A local folder with a Hugging Face model. Default: the packaged SmolLM2-135M-Instruct."),
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to answer, or with --raw, what to continue.")] = (
        "Three things to see in Paris are"
    ),
    temperature: Annotated[float, typer.Option(help="At least 0; 0 is greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k largest logits. Default: off, as are 0 and -1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass. Default: off.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens at least this likely, relative to the likeliest. Default: off.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text. Default: fresh noise.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 100,
    batch: Annotated[int, typer.Option(help="Answers to generate side by side.")] = 1,
    compare: Annotated[bool, typer.Option("--compare", help="Also run transformers' own sampling and compare.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Show each drawn token's log-probability.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Give the model the prompt as it is, without its chat template.")] = False,
    impl: Impl = "auto",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto (float32 on a CPU, else bfloat16), float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Generate text with a real model, every token drawn straight from its hidden state."""
    from .generate import GenerateOptions, run_generate

    run_generate(
        GenerateOptions(
            *(model, prompt, temperature, top_k, top_p, min_p, seed, max_tokens),
            *(batch, compare, logprobs, raw, impl, device, dtype),
        )
    )


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what is installed, what would run where and why, and test it for a moment."""
    from .doctor import run_doctor

    raise typer.Exit(run_doctor(as_json))


@app.command()
def verify(
    draws: Annotated[
        int | None,
        typer.Option(help="Draws of every check. Default: 100,000, and for the tail as many as 20 s allow, at most 1,000,000."),
    ] = None,
    impl: Impl = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Another seed is another experiment.")] = 0,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw observed against expected counts (.png, .pdf, .svg).")
    ] = None,
) -> None:
    """Draw on this machine and test the draws against the distributions they should have."""
    from .verify import run_verify

    raise typer.Exit(run_verify(draws, impl, device, seed, plot))


@app.command()
def tune(
    vocab: Annotated[int, typer.Option(help="V of the LM head.")] = 151_936,
    depth: Annotated[int, typer.Option(help="D of the LM head, the hidden size.")] = 4_096,
    batch: Annotated[
        list[str] | None, typer.Option(help="Rows; repeat it, or put commas between. Default: 1,16,32,64,128,256.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    impl: Annotated[str, typer.Option(help="auto (what would draw there), triton or hopper.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Repetitions of each candidate.")] = 40,
    show: Annotated[bool, typer.Option("--show", help="Only print the table in force; needs no GPU.")] = False,
    arch: Annotated[str | None, typer.Option(help="With --show: of this architecture, like sm90. Default: this GPU's.")] = None,
) -> None:
    """Time launch configurations on this GPU and print a table for kernels/config.py.

    A configuration changes the time of a draw, never its result: each candidate's tokens are compared before it is timed, and
    the exit code is 1 if any differ. The table goes to standard output, everything else to standard error.
    """
    from .tune import TuneOptions, run_tune

    raise typer.Exit(run_tune(TuneOptions(vocab, depth, batch or (), dtype, impl, repeats, show, arch)))


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Run the benchmarks (nologits bench --help)."""
    try:
        from ..bench.cli import bench as command
    except ModuleNotFoundError as error:
        raise UserError(f"the benchmarks need {error.name}: pip install 'nologits[bench]'") from None
    # A command of its own, built only now: its options and imports stay out of every other command's way.
    inner = command if isinstance(command, typer.Typer) else typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if inner is not command:
        inner.command()(command)
    code = inner(list(context.args), prog_name="nologits bench", standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)


def run(arguments: list[str]) -> int:
    """Runs a command; every foreseeable error is one line on standard error and exit code 2, never a traceback."""
    try:
        result = app(arguments, prog_name="nologits", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`). Point the descriptor elsewhere, or the flush at exit complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, ValueError, ImportError, OSError) as error:
        return _fail(one_line(error))
    except Exception as error:
        message = _usage(error)
        if message is None:
            raise
        return _fail(message) if message else EXIT_USAGE  # nothing to say where the help has been shown
    return result if isinstance(result, int) else 0


def _usage(error: Any) -> str | None:
    """The message of a parsing error of typer's, which has had click inside and click beside it over its versions."""
    if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
        return None
    message = str(error.format_message()).strip()
    return message[:1].lower() + message[1:].removesuffix(".")


def _fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return EXIT_USAGE
