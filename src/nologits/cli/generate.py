"""``nologits generate``: text from a real model, each token drawn straight from its hidden state."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .. import filtered
from ..dispatch import hopper_obstacle, triton_obstacle
from ..params import SamplingParams
from .console import UserError, megabytes, notes, one_line, output, resolve_device, resolve_impl

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_SEED = 2**63 - 1


class GenerateOptions(NamedTuple):
    """The options of the command, as they were given."""

    model: str | None
    prompt: str
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int
    batch: int
    compare: bool
    logprobs: bool
    raw: bool
    impl: str
    device: str
    dtype: str


class Generation(NamedTuple):
    """What one run of ``generate`` gave."""

    tokens: Tensor  # [B, L], without the prompt
    seconds: float
    logprobs: Tensor | None = None  # [B, L]
    raw_logprobs: Tensor | None = None
    reason: str = ""  # why transformers' own loop ran instead of nologits' draw
    whole_rows: int = 0  # draws for which a row's logits were made
    open_rows: int = 0  # draws that took further sweeps over the head instead


def run_generate(options: GenerateOptions) -> None:
    """Generates and prints. The text goes to standard output, everything about it to standard error."""
    _check(options)
    device = resolve_device(options.device)
    choice = resolve_impl(options.impl, device)
    model, tokenizer = _load(options, device)
    inputs = _encode(tokenizer, options, device)
    _check_length(model, inputs, options)

    if options.compare:
        # First calls pay for allocations and lazy initialisation; the comparison should not depend on who goes first.
        _generate(model, tokenizer, inputs, options, max_tokens=2)
        _stock(model, tokenizer, inputs, options, max_tokens=2)
    stream = options.batch == 1 and not options.compare and not options.logprobs
    streamer = _streamer(tokenizer) if stream else None
    ours = _generate(model, tokenizer, inputs, options, max_tokens=options.max_tokens, streamer=streamer)
    scratch = _measure_draw(model, options, device) if not ours.reason else None

    if options.compare:
        stock = _stock(model, tokenizer, inputs, options, max_tokens=options.max_tokens)
        _show_comparison(model, tokenizer, options, device, ours, stock, scratch)
    elif options.logprobs:
        _show_logprobs(model, tokenizer, ours)
    elif not stream:
        _show_rows(tokenizer, ours)
    _show_summary(model, options, ours, scratch, f"impl {choice.impl} on {device}")


def _check(options: GenerateOptions) -> None:
    """Everything that can be refused before a model is loaded."""
    SamplingParams(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
    if not options.prompt:
        raise UserError("--prompt must not be empty, got ''")
    if options.max_tokens < 1:
        raise UserError(f"--max-tokens must be at least 1, got {options.max_tokens}")
    if options.batch < 1:
        raise UserError(f"--batch must be at least 1, got {options.batch}")
    if options.seed is not None and not 0 <= options.seed <= _MAX_SEED - options.batch:
        raise UserError(f"--seed must be in [0, 2**63), got {options.seed}")
    if options.dtype != "auto" and options.dtype not in _DTYPES:
        raise UserError(f"--dtype must be auto, {', '.join(_DTYPES)}, got {options.dtype!r}")
    if options.model is not None and not Path(options.model).is_dir():
        raise UserError(f"MODEL must be a local folder with a Hugging Face model, got {options.model!r}")


def _load(options: GenerateOptions, device: torch.device) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError:
        raise UserError("nologits generate needs transformers: pip install 'nologits[demo]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = _DTYPES.get(options.dtype, default)
    with notes().status("loading the model"):
        if options.model is None:
            from ..demo import smollm2

            return smollm2.load(device, dtype)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, local_files_only=True)
        except Exception as error:  # transformers raises whatever the first broken file leads to
            raise UserError(
                f"MODEL must be a folder that transformers can load, got {options.model!r}: {one_line(error)}"
            ) from None
        return model.to(device).eval(), tokenizer


def _encode(tokenizer: Any, options: GenerateOptions, device: torch.device) -> dict[str, Tensor]:
    if options.raw or not getattr(tokenizer, "chat_template", None):
        encoded = tokenizer(options.prompt, return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": options.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    # The same prompt in every row: no padding.
    return {name: encoded[name].repeat(options.batch, 1).to(device) for name in ("input_ids", "attention_mask")}


def _check_length(model: Any, inputs: dict[str, Tensor], options: GenerateOptions) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    used = inputs["input_ids"].shape[1]
    if limit is not None and used + options.max_tokens > limit:
        raise UserError(
            f"--max-tokens must be at most {max(limit - used, 0)} (the model's {limit} positions less the prompt), "
            f"got {options.max_tokens}"
        )


def _settings(model: Any, tokenizer: Any, options: GenerateOptions, max_tokens: int) -> dict[str, Any]:
    """Arguments of ``generate``, each given, so that none comes from the model's own defaults (top-k is 50 there)."""
    end = model.generation_config.eos_token_id
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = end[0] if isinstance(end, list) else end
    settings: dict[str, Any] = {"max_new_tokens": max_tokens, "pad_token_id": pad, "do_sample": options.temperature > 0}
    if options.temperature > 0:
        settings |= {
            "temperature": options.temperature,
            "top_k": max(options.top_k or 0, 0),
            "top_p": 1.0 if options.top_p is None else options.top_p,
            "min_p": options.min_p or None,
        }
    return settings


def _generate(
    model: Any, tokenizer: Any, inputs: dict[str, Tensor], options: GenerateOptions, max_tokens: int, streamer: Any = None
) -> Generation:
    from ..integrations import transformers as integration

    settings = _settings(model, tokenizer, options, max_tokens)
    seed: int | Tensor | None = options.seed
    if seed is not None and options.batch > 1:
        # One seed for all rows would draw one text several times: each row has its own.
        seed = seed + torch.arange(options.batch, device=model.device)
    if options.logprobs:
        settings |= {"return_dict_in_generate": True, "logprobs": True}
    before, open_before = _whole_rows(model.device), _open_rows(model.device)
    with _errors_only():
        generation = _timed(
            lambda: model.generate(
                **inputs, **settings, custom_generate=integration.generate, seed=seed, impl=options.impl, streamer=streamer
            ),
            inputs,
        )
    report = integration.last_report(model)
    return generation._replace(
        reason=report.reason if report is not None else "",
        whole_rows=_whole_rows(model.device) - before,
        open_rows=_open_rows(model.device) - open_before,
    )


@contextmanager
def _errors_only() -> Iterator[None]:
    """The loop says why it falls back on the library's logger; here the summary says it."""
    logger = logging.getLogger("nologits")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _whole_rows(device: torch.device) -> int:
    """Rows of logits so far that were made for filtered draws, as the host knows or the Triton kernels counted."""
    if triton_obstacle(device):
        return filtered.Count.rows
    from ..fused import made_rows  # needs Triton

    return filtered.Count.rows + int(made_rows(device))


def _open_rows(device: torch.device) -> int:
    """Rows so far that the Hopper kernels left open; 0 where they cannot run."""
    if hopper_obstacle(device):
        return 0
    from ..kernels.categorical_sm90 import open_rows  # needs cuda.bindings

    return int(open_rows(device))


def _stock(model: Any, tokenizer: Any, inputs: dict[str, Tensor], options: GenerateOptions, max_tokens: int) -> Generation:
    if options.seed is not None:
        torch.manual_seed(options.seed)
    settings = _settings(model, tokenizer, options, max_tokens)
    return _timed(lambda: model.generate(**inputs, **settings), inputs)


def _timed(call: Callable[[], Any], inputs: dict[str, Tensor]) -> Generation:
    ids = inputs["input_ids"]
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    started = time.perf_counter()
    result = call()
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    seconds = time.perf_counter() - started
    sequences = result if isinstance(result, Tensor) else result.sequences
    processed, raw = (getattr(result, name, None) for name in ("logprobs", "raw_logprobs"))
    return Generation(sequences[:, ids.shape[1] :].cpu(), seconds, processed, raw)


def _measure_draw(model: Any, options: GenerateOptions, device: torch.device) -> int | None:
    """Peak temporary memory of one draw of the batch, beyond the head and the hidden states; bytes."""
    from ..integrations.transformers import find_head

    head = find_head(model)
    weight = head.spec.weight
    # Memory depends on the shape of the hidden states, not on what is in them.
    hidden = torch.zeros(options.batch, weight.shape[1], device=device, dtype=weight.dtype)
    params = SamplingParams(options.temperature, options.top_k, options.top_p, options.min_p, seed=0)
    return peak_memory(lambda: head.sample(hidden, params, impl=options.impl), device)  # type: ignore[arg-type]


def _measure_stock(model: Any, options: GenerateOptions, device: torch.device) -> int | None:
    """The same of transformers' own step: the head, its fp32 copy, the filters as set, softmax and multinomial."""
    import transformers

    projection = model.get_output_embeddings()
    depth = projection.weight.shape[1]
    hidden = torch.zeros(options.batch, depth, device=device, dtype=projection.weight.dtype)
    processors = transformers.LogitsProcessorList()
    if options.temperature > 0:
        if options.temperature != 1:
            processors.append(transformers.TemperatureLogitsWarper(options.temperature))
        if options.top_k is not None and options.top_k > 0:
            processors.append(transformers.TopKLogitsWarper(options.top_k))
        if options.top_p is not None and options.top_p < 1:
            processors.append(transformers.TopPLogitsWarper(options.top_p))
        if options.min_p:
            processors.append(transformers.MinPLogitsWarper(options.min_p))
    ids = torch.zeros(options.batch, 1, dtype=torch.int64, device=device)

    def step() -> object:
        logits = projection(hidden)
        scores = processors(ids, logits.to(torch.float32, copy=True))
        if options.temperature == 0:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1)

    return peak_memory(step, device)


def peak_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that was live at once during ``call``, over what was before; bytes.

    CUDA: the allocator's peak. CPU: torch.profiler's record of every allocation, added up. ``None`` where it has none.
    """
    call()  # caches and lazily made buffers are not part of a step
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    try:
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    except AttributeError:
        return None
    live = peak = 0
    for _, size in changes:
        live += size
        peak = max(peak, live)
    return peak or None


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """CPU builds of torch log the profiler's start and stop from C++, past Python's ``sys.stderr`` and every log level."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _streamer(tokenizer: Any) -> Any:
    """Prints words as soon as they are complete, wrapped at the terminal's width."""
    import transformers

    class Printer(transformers.TextStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.wrap = _Wrapper(output().width if sys.stdout.isatty() else 0)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            sys.stdout.write(self.wrap(text) + ("\n" if stream_end else ""))
            sys.stdout.flush()

    return Printer()


class _Wrapper:
    """Breaks lines between words; with width 0 the text passes as it is."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.column = 0

    def __call__(self, text: str) -> str:
        if not self.width:
            return text
        out = []
        for line_number, line in enumerate(text.split("\n")):
            if line_number:
                out.append("\n")
                self.column = 0
            for word in re.findall(r"\s*\S+|\s+", line):
                if self.column and self.column + len(word.rstrip()) > self.width and not word.isspace():
                    out.append("\n")
                    self.column = 0
                    word = word.lstrip()
                out.append(word)
                self.column += len(word)
        return "".join(out)


def _lengths(model: Any, tokens: Tensor) -> list[int]:
    """Tokens of each row up to its end token, which counts; what follows is padding."""
    end = model.generation_config.eos_token_id
    ends = torch.tensor(end if isinstance(end, list) else [-1 if end is None else end])
    is_end = torch.isin(tokens, ends)
    first = torch.where(is_end.any(-1), is_end.int().argmax(-1) + 1, tokens.shape[1])
    return [int(length) for length in first]


def _texts(tokenizer: Any, tokens: Tensor) -> list[str]:
    return [str(text).strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def _show_rows(tokenizer: Any, ours: Generation) -> None:
    console = output()
    for number, text in enumerate(_texts(tokenizer, ours.tokens), 1):
        if console.is_terminal:
            console.print(Panel(Text(text), title=str(number), title_align="left", border_style="dim"))
        else:
            console.out(f"{number}: {text}")


def _show_logprobs(model: Any, tokenizer: Any, ours: Generation) -> None:
    if ours.logprobs is None or ours.raw_logprobs is None:
        raise UserError(f"--logprobs needs draws by nologits, got transformers' own loop: {ours.reason}")
    console = output()
    for number, length in enumerate(_lengths(model, ours.tokens)):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("token", header_style="dim")
        for heading in ("log-probability", "before filters, at T = 1"):
            table.add_column(heading, justify="right", header_style="dim")
        processed, raw = ours.logprobs[number], ours.raw_logprobs[number]
        for step, token in enumerate(ours.tokens[number, :length].tolist()):
            # repr shows the spaces and line ends that tell tokens apart.
            table.add_row(Text(repr(tokenizer.decode([token]))), f"{float(processed[step]):.4f}", f"{float(raw[step]):.4f}")
        table.add_section()
        table.add_row("sum", f"{float(processed[:length].sum()):.4f}", f"{float(raw[:length].sum()):.4f}")
        console.print(table)


def _show_comparison(
    model: Any,
    tokenizer: Any,
    options: GenerateOptions,
    device: torch.device,
    ours: Generation,
    stock: Generation,
    scratch: int | None,
) -> None:
    console = output()
    names = ("nologits", "transformers")
    for left, right in zip(_texts(tokenizer, ours.tokens), _texts(tokenizer, stock.tokens), strict=True):
        grid = Table.grid(expand=True, padding=0)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(
            *(Panel(Text(text), title=name, title_align="left") for name, text in zip(names, (left, right), strict=True))
        )
        console.print(grid)
    if options.temperature > 0:
        console.print("[dim]The same distribution, other random numbers: the texts differ.[/dim]")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("tokens", "tokens/s", "memory of one draw"):
        table.add_column(heading, justify="right", header_style="dim")
    for name, run, memory in zip(names, (ours, stock), (scratch, _measure_stock(model, options, device)), strict=True):
        count = sum(_lengths(model, run.tokens))
        table.add_row(name, f"{count}", f"{count / run.seconds:.1f}", "not measured" if memory is None else megabytes(memory))
    console.print(table)


def _show_summary(model: Any, options: GenerateOptions, ours: Generation, scratch: int | None, note: str) -> None:
    console = notes()
    count = sum(_lengths(model, ours.tokens))
    if ours.reason:
        console.print(f"[dim]{count} tokens, {count / ours.seconds:.1f} tokens/s[/dim]")
        console.print(Text(f"transformers' own loop ran, which makes logits: {ours.reason}", style="yellow"))
        return
    vocab = model.get_output_embeddings().weight.shape[0]
    memory = "not measured" if scratch is None else megabytes(scratch)
    console.print(f"[dim]{count} tokens, {count / ours.seconds:.1f} tokens/s, {note}[/dim]")
    console.print(
        f"[dim]{_how(ours)}; one draw, temporary memory at its peak: {memory}; "
        f"the logits \\[{options.batch}, {vocab}] in fp32 would be {megabytes(4 * options.batch * vocab)}[/dim]"
    )


def _how(ours: Generation) -> str:
    """Of how many draws the logits were made, or made again. Rows that have ended are drawn on until the last has."""
    if ours.whole_rows:
        return f"{ours.whole_rows} draws needed a whole row of logits, for their filters"
    if ours.open_rows:
        return f"no row of logits was made; {ours.open_rows} draws took further sweeps over the head, for their filters"
    return "no row of logits was made"
