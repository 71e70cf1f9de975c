"""Draws from an LM head that is never in memory as a whole: rows of a safetensors file, a slice at a time.

python examples/out_of_core.py                     # makes a head of 32,000 x 256 in a temporary file, and checks the tokens
python examples/out_of_core.py FILE --key lm_head.weight --slice-rows 4096
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import nologits as nl


def draw(path: Path, key: str, hidden: torch.Tensor, params: nl.SamplingParams, slice_rows: int) -> nl.Samples:
    """One draw a row of ``hidden [B, D]`` from the head ``key`` of a file; at most ``slice_rows`` of its rows are in memory."""
    with safe_open(path, "pt") as file:
        head = file.get_slice(key)
        vocab = head.get_shape()[0]
        sampler = nl.OnlineSampler(len(hidden), vocab, params, logprobs="processed")
        for start in range(0, vocab, slice_rows):
            sampler.update_head(hidden, head[start : start + slice_rows], start)
    return sampler.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a safetensors file")
    parser.add_argument("--key", default="lm_head.weight", help="the head's name in it")
    parser.add_argument("--slice-rows", type=int, default=4096, help="rows of the head in memory at a time")
    parser.add_argument("--batch", type=int, default=4, help="rows to draw, from random hidden states")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "head.safetensors"
        if options.file is None:
            weight = torch.randn(32_000, 256, generator=torch.Generator().manual_seed(0)) / 4
            save_file({options.key: weight.bfloat16()}, path)
        with safe_open(path, "pt") as file:
            depth = file.get_slice(options.key).get_shape()[1]
        hidden = torch.randn(options.batch, depth, generator=torch.Generator().manual_seed(1)).bfloat16()
        params = nl.SamplingParams(temperature=0.8, seed=torch.arange(options.batch))
        drawn = draw(path, options.key, hidden, params, options.slice_rows)
        print("tokens           ", drawn.tokens.tolist())
        print("log-probabilities", [round(value, 3) for value in drawn.logprobs.tolist()])
        if options.file is None:
            whole = nl.LMHead(weight.bfloat16()).sample(hidden, params, impl="torch")
            print("the same tokens as from the whole head:", torch.equal(whole.tokens, drawn.tokens))


if __name__ == "__main__":
    main()
