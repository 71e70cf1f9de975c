"""An LM head sharded over processes: every rank draws the tokens that one process would have drawn.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

CPU processes over gloo, or a GPU each over NCCL where there are as many. A rank sends a few numbers for each of its rows; with
filters its best few hundred tokens; never its logits, but for rows whose kept set those do not settle.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import nologits as nl

VOCAB, DEPTH, BATCH = 32_001, 256, 8  # an odd V: the last shard is padded


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.device_count() >= world
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    # The whole head, only to make this rank's part of it and to compare
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(VOCAB, DEPTH, generator=generator) / 8).bfloat16().to(device)
    hidden = torch.randn(BATCH, DEPTH, generator=generator).bfloat16().to(device)
    width = -(-VOCAB // world)
    shard = torch.nn.functional.pad(whole[rank * width : (rank + 1) * width], (0, 0, 0, max(0, (rank + 1) * width - VOCAB)))

    head = nl.LMHead(shard, vocab_size=VOCAB, group=dist.group.WORLD, vocab_start=rank * width)
    for filters in ({}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}):
        params = nl.SamplingParams(temperature=0.8, seed=torch.arange(BATCH, device=device), **filters)
        drawn = head.sample(hidden, params, logprobs="processed")
        alone = nl.LMHead(whole).sample(hidden, params, impl="torch")
        same = torch.equal(drawn.tokens, alone.tokens)
        print(f"rank {rank}: {drawn.tokens.tolist()} {filters or 'no filters'}; as from the whole head: {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
