"""The Hopper implementation: CUDA C++ kernels around wgmma and the bulk copy engine, where those can describe the operands.

A draw goes to the Hopper kernels if :func:`obstacle` names nothing. The rest of the contract (filters, several draws a row,
given logits, fp32 heads, operands that bulk copies cannot address) is computed by the portable kernels of
:mod:`nologits.fused`, which draw the same tokens from the same noise.
"""

from __future__ import annotations

import torch

from . import fused
from .kernels.arguments import tma_fits
from .kernels.categorical_sm90 import launch_draw
from .kernels.config import HopperConfig, hopper_config
from .params import RowParams
from .sources import HiddenSource, LogitsSource
from .types import Samples


def sample(source: HiddenSource | LogitsSource, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    """Draws ``[B, S]`` tokens; arguments and results as :func:`nologits.reference.sample`."""
    if obstacle(source, rows, num_samples, raw):
        return fused.sample(source, rows, num_samples, processed, raw)
    assert isinstance(source, HiddenSource)
    if not tma_fits(source.hidden):
        source = HiddenSource(source.hidden.contiguous(), source.head, source.dtype)
    return fused.refuse_impossible(launch_draw(source, rows, processed, raw, config_for(source)), rows)


def config_for(source: HiddenSource) -> HopperConfig:
    """The launch used for ``source``, a pure function of what it is."""
    return hopper_config(source.batch)


def obstacle(source: HiddenSource | LogitsSource, rows: RowParams, num_samples: int, raw: bool) -> str:
    """Why the portable kernels compute this draw; empty if the Hopper kernels do."""
    if isinstance(source, LogitsSource):
        return "the logits are given: there is no matmul"
    if source.hidden.dtype not in (torch.bfloat16, torch.float16):
        return f"wgmma multiplies bf16 and fp16, not {source.hidden.dtype}"
    if not tma_fits(source.head.weight) or source.hidden.shape[1] % 8:
        return "bulk copies need a weight with dense rows whose pitch is a multiple of 16 bytes"
    if any(bias is not None and bias.dtype == torch.float64 for bias in (source.head.bias, rows.logit_bias)):
        return "the kernels read biases in fp32, bf16 and fp16"
    parts = (source.head.bias, rows.logit_bias, rows.bias_ids, rows.bias_values, rows.allowed)
    if any(part is not None and part.shape[-1] > 1 and part.stride(-1) != 1 for part in parts):
        return "the kernels read biases and masks whose rows are dense"
    if rows.filtered:
        return "filters need whole rows"
    if num_samples != 1:
        return "it makes one draw a row"
    if raw and (rows.logit_bias is not None or rows.bias_ids is not None):
        return "raw log-probabilities under a logit bias need the logit before the bias"
    return ""
