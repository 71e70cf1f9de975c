"""Who is measured in the head suite. A provider turns inputs into a call to time, or says in one line why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

import nologits as nl

from ..dispatch import hopper_obstacle
from ..testing import screened_draw
from .cases import Inputs
from .modes import FALLBACKS, FILTERED, MODES, SCREENED, UNFILTERED
from .peer_draws import draw_as_vllm, flashinfer_draw, vllm_mask
from .peers import SkipError, flashinfer_sampling, flashsampling_kernel
from .suite import Call

Provider = Callable[[Inputs, str], Call]

TOP_K, TOP_P = 50, 0.95
"""The truncation of ``flashinfer-topk-topp``."""

CANDIDATE_DRAWS = 16
"""Of each row, whose candidates are counted."""


def nologits(impl: str) -> Provider:
    """One implementation of this library, every row seeded."""

    def provider(inputs: Inputs, mode: str) -> Call:
        if impl == "triton" and mode in FALLBACKS:
            raise SkipError("it makes the logits of all rows with filters: none falls back")
        if impl == "triton" and mode in SCREENED:
            raise SkipError("it has no screen")
        options = {"impl": impl, **MODES[mode].results}

        def call() -> object:
            return inputs.head.sample(inputs.hidden, inputs.params, **options)

        try:
            call()
        except ValueError as error:  # how a named implementation says that it does not exist, or cannot run there
            raise SkipError(str(error)) from error
        return call

    return provider


def matmul(inputs: Inputs, mode: str) -> Callable[[], Tensor]:
    """The LM head's matmul alone, bf16 logits written: what every fused sampler is measured against."""
    return lambda: inputs.hidden @ inputs.weight.T


def multinomial(inputs: Inputs, mode: str) -> Call:
    """The textbook in eager torch: matmul, softmax, ``torch.multinomial`` (greedy: argmax)."""
    _only(mode, UNFILTERED)
    return lambda: _textbook(inputs.hidden, inputs.weight, mode)


def multinomial_compiled(inputs: Inputs, mode: str) -> Call:
    """The textbook through ``torch.compile``; its default mode keeps cuBLAS's matmul and fuses what follows."""
    _only(mode, UNFILTERED)
    torch.compiler.reset()  # one shape a cell: they would add up to the limit of recompilations
    compiled = torch.compile(_textbook, dynamic=False)
    return lambda: compiled(inputs.hidden, inputs.weight, mode)


def flashinfer_gumbel(inputs: Inputs, mode: str) -> Call:
    """Matmul, then FlashInfer's ``sampling_from_logits``: Gumbel-max on the logits, each row with its seed."""
    _only(mode, ["plain"])
    sample = flashinfer_sampling().sampling_from_logits
    seeds = torch.arange(len(inputs.hidden), device=inputs.hidden.device)
    return lambda: sample(inputs.hidden @ inputs.weight.T, seed=seeds, offset=seeds)


def flashinfer_topk_topp(inputs: Inputs, mode: str) -> Call:
    """Matmul, then FlashInfer's ``top_k_top_p_sampling_from_logits`` with a k of 50 and a p of 0.95 for each row.

    It does more than the others, which draw from all tokens: it is what an engine runs when its requests truncate, and an upper
    bracket here. Per-row tensors, as engines pass them, keep it off its path for one k for all rows.
    """
    _only(mode, ["plain"])
    sample = flashinfer_sampling().top_k_top_p_sampling_from_logits
    batch, device = len(inputs.hidden), inputs.hidden.device
    top_k = torch.full((batch,), TOP_K, dtype=torch.int32, device=device)
    top_p = torch.full((batch,), TOP_P, device=device)
    seeds = torch.arange(batch, device=device)
    return lambda: sample((inputs.hidden @ inputs.weight.T).float(), top_k, top_p, seed=seeds, offset=seeds)


def flashsampling(inputs: Inputs, mode: str) -> Call:
    """The paper's reference kernel, with one seed and one temperature for the batch (it has no others)."""
    if MODES[mode].logprobs:
        raise SkipError("its kernel has no log-probabilities")
    _only(mode, ["plain", "greedy"])
    kernel = flashsampling_kernel()
    temperature = torch.tensor(1.0, device=inputs.hidden.device)
    return lambda: kernel(inputs.weight, inputs.hidden, 1, temperature, 7, greedy_sampling=mode == "greedy")


def matmul_nologits(inputs: Inputs, mode: str) -> Call:
    """Matmul, then our draw from the bf16 logits that it wrote, which fusing the two has to beat."""
    _only(mode, [name for name in MODES if name not in UNFILTERED])
    logits, results = matmul(inputs, mode), MODES[mode].results
    return lambda: nl.sample_logits(logits(), inputs.params, **results)


def matmul_vllm_qrita(inputs: Inputs, mode: str) -> Call:
    """Matmul, then what vLLM runs without FlashInfer: its Triton mask, softmax, and of the shares over exponential noise the
    largest. Its division by the temperature, here 1, is left out."""
    _only(mode, FILTERED)
    logits, mask = matmul(inputs, mode), vllm_mask(inputs.params)
    return lambda: draw_as_vllm(mask(logits().float()))


def matmul_flashinfer(inputs: Inputs, mode: str) -> Call:
    """Matmul, then the fastest of FlashInfer's draws that apply; a k and a p for each row."""
    _only(mode, FILTERED)
    logits = matmul(inputs, mode)
    return flashinfer_draw(lambda: logits().float(), inputs.params)


def count_open_rows(make: Callable[[], Inputs]) -> int | None:
    """How many rows of a draw the Hopper kernels' candidates do not settle; ``None`` where those do not run."""
    inputs = make()
    device = inputs.hidden.device
    if hopper_obstacle(device):
        return None
    from ..kernels.categorical_sm90 import open_rows  # needs cuda.bindings

    before = int(open_rows(device))
    inputs.head.sample(inputs.hidden, inputs.params, impl="hopper")
    return int(open_rows(device)) - before


def count_left_rows(make: Callable[[], Inputs]) -> int | None:
    """How many rows of a screened draw take the full path; ``None`` where the Hopper kernels do not run."""
    inputs = make()
    device = inputs.hidden.device
    if hopper_obstacle(device):
        return None
    from ..screened import counting_left

    with counting_left(device) as left:
        inputs.head.sample(inputs.hidden, inputs.params, impl="hopper")
    return int(left)


def count_candidates(make: Callable[[], Inputs]) -> tuple[int, int, int]:
    """How many tokens a row's bounds leave: the median, the 99th percentile and the largest of some draws of each row."""
    inputs = make()
    rows = torch.arange(len(inputs.hidden), device=inputs.hidden.device)
    counts = torch.cat(
        [
            screened_draw(inputs.hidden, inputs.head, replace(inputs.params, position=rows + (draw << 32))).candidates
            for draw in range(CANDIDATE_DRAWS)
        ]
    )
    ordered = counts.sort().values.tolist()
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]


MATMUL, HOPPER = "matmul", "nologits-hopper"
OURS = {HOPPER: "hopper", "nologits-triton": "triton"}
"""Providers that are implementations of this library: they pass the gate before anything of their cell is timed."""

PROVIDERS: dict[str, Provider] = {
    MATMUL: matmul,
    **{name: nologits(impl) for name, impl in OURS.items()},
    "multinomial": multinomial,
    "multinomial-compiled": multinomial_compiled,
    "flashinfer-gumbel": flashinfer_gumbel,
    "flashinfer-topk-topp": flashinfer_topk_topp,
    "flashsampling": flashsampling,
    "matmul-nologits": matmul_nologits,
    "matmul-vllm-qrita": matmul_vllm_qrita,
    "matmul-flashinfer": matmul_flashinfer,
}


def _textbook(hidden: Tensor, weight: Tensor, mode: str) -> Tensor | tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T).float()
    if mode == "greedy":
        return logits.argmax(-1)
    probabilities = torch.softmax(logits, -1)
    token = torch.multinomial(probabilities, 1)
    return (token, probabilities.gather(1, token).log()) if mode == "logprobs" else token


def _only(mode: str, modes: Collection[str]) -> None:
    if mode not in modes:
        raise SkipError(f"measured in {'mode' if len(modes) == 1 else 'modes'} {', '.join(modes)} only")
