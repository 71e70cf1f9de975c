"""The kernels of a sharded head on GPUs: one GPU's draws, by shards on one GPU after another, and on two at once."""

import runpy
import socket
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nologits as nl
from nologits.dispatch import hopper_obstacle
from nologits.testing import make_logits

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(hopper_obstacle(DEVICE)), reason=hopper_obstacle(DEVICE) or "-")]

RANKS = runpy.run_path(str(Path(__file__).parent / "emulated" / "ranks.py"))
V, D = 40_003, 512
CUTS = {2: [0, 17_001, V], 3: [0, 128, 20_480, V]}
BATCHES = (1, 7, 64, 130, 700)
REQUESTS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "k": {"top_k": 50},
    "k and p": {"top_k": 20, "top_p": 0.95},
    "p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "wide": {"top_p": 0.99, "temperature": 3.0},
    "mixed": None,
}


def request_of(name, batch, device):
    """A request's parameters, seeded."""
    if name == "mixed":
        generator = torch.Generator().manual_seed(batch)

        def pick(values):
            return torch.tensor(values)[torch.randint(len(values), (batch,), generator=generator)].to(device)

        asked = {"top_k": pick([0, 1, 50, 3000]), "top_p": pick([1.0, 0.9, 0.3]), "min_p": pick([0.0, 0.0, 0.1])}
        asked["temperature"] = pick([0.0, 0.7, 1.0, 2.0])
    else:
        asked = dict(REQUESTS[name])
    return nl.SamplingParams(seed=torch.arange(batch, device=device), **asked)


def operands(batch, device, spread=5.0):
    generator = torch.Generator().manual_seed(batch)
    hidden = torch.randn(batch, D, generator=generator).bfloat16()
    weight = (torch.randn(V, D, generator=generator) * spread / D**0.5).bfloat16()
    return hidden.to(device), weight.to(device)


@pytest.mark.parametrize("world", CUTS)
@pytest.mark.parametrize("name", REQUESTS)
def test_shards_one_after_another_draw_as_one(name, world):
    """On one GPU, by gathering: every rank has the whole head's tokens."""
    from nologits import linked
    from nologits.kernels.categorical_sm90 import Extent
    from nologits.params import make_rows
    from nologits.sources import HiddenSource

    cuts = CUTS[world]
    for batch in BATCHES:
        hidden, weight = operands(batch, DEVICE)
        params = request_of(name, batch, DEVICE)
        rows = make_rows(params, batch, V, DEVICE)
        want = nl.LMHead(weight).sample(hidden, params, logprobs=True, impl="hopper")
        ranks, settled = RANKS["Ranks"](world), []

        def settle(start, stop, hidden=hidden, weight=weight, rows=rows, settled=settled):
            settled.append(stop - start)
            from nologits import hopper

            return hopper.sample(
                HiddenSource(hidden[start:stop], nl.LMHead(weight).spec), rows.block(start, stop), 1, True, True
            )

        def of_rank(rank, hidden=hidden, weight=weight, rows=rows, ranks=ranks, settle=settle):
            torch.cuda.set_device(DEVICE)
            extent = Extent(cuts[rank], cuts[rank + 1] - cuts[rank], V, world)
            source = HiddenSource(hidden, nl.LMHead(weight[cuts[rank] : cuts[rank + 1]]).spec)
            transport = RANKS["Transport"](ranks, rank, [], None)
            return linked.sample(source, extent, transport, rows, True, True, 0, settle)

        for drawn in ranks.run(of_rank):
            assert torch.equal(drawn.tokens[:, 0], want.tokens), (batch, (drawn.tokens[:, 0] != want.tokens).sum())
            for part in ("logprobs", "raw_logprobs"):
                torch.testing.assert_close(
                    getattr(drawn, part)[:, 0], getattr(want, part), rtol=1e-5, atol=1e-5, equal_nan=True
                )
            torch.testing.assert_close(drawn.log_mass, want.log_mass, rtol=1e-5, atol=1e-5, equal_nan=True)
        if name in ("k", "k and p", "plain", "greedy"):
            assert not settled


# ---- two GPUs


def head_of(weight, rank, world, **options):
    start, stop = CUTS[world][rank : rank + 2]
    return nl.LMHead(weight[start:stop], vocab_size=V, group=dist.group.WORLD, vocab_start=start, **options)


def check_tokens(rank, world, device):
    """Every request at every batch size, with log-probabilities and top lists: one GPU's."""
    for batch in BATCHES:
        hidden, weight = operands(batch, device)
        head = head_of(weight, rank, world)
        for name in REQUESTS:
            params = request_of(name, batch, device)
            for options in ({}, {"logprobs": True, "top_logprobs": 20}):
                got = head.sample(hidden, params, impl="hopper", **options)
                want = nl.LMHead(weight).sample(hidden, params, impl="hopper", **options)
                assert torch.equal(got.tokens, want.tokens), (batch, name, options)
                if options:
                    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)
                    torch.testing.assert_close(got.raw_logprobs, want.raw_logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)
                    assert torch.equal(got.top.ids, want.top.ids), (batch, name)
                    torch.testing.assert_close(got.top.logprobs, want.top.logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)


def check_families(rank, world, device):
    """Planted rows, of which many stay open: flat, tied, with outliers; each logit is one element of the weight."""
    families = ["peaked", "gauss", "flat", "zipf", "ties", "outlier", "coldT", "flat"]
    logits = torch.cat([make_logits(family, 1, V, index) for index, family in enumerate(families)]).clamp(-200, 200)
    weight, hidden = logits.T.contiguous().bfloat16().to(device), torch.eye(8, dtype=torch.bfloat16, device=device)
    head = head_of(weight, rank, world)
    for name in REQUESTS:
        params = request_of(name, 8, device)
        got = head.sample(hidden, params, impl="hopper", logprobs=True)
        want = nl.sample_logits(weight.T.float().cpu(), request_of(name, 8, "cpu"), logprobs=True, impl="reference")
        assert torch.equal(got.tokens.cpu(), want.tokens), name
        torch.testing.assert_close(got.logprobs.cpu(), want.logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)


def check_masks(rank, world, device):
    """Masks and biases of global ids."""
    hidden, weight = operands(9, device)
    generator = torch.Generator().manual_seed(3)
    allowed = torch.randint(-(2**31), 2**31, (9, -(-V // 32)), generator=generator).int()
    allowed[4], allowed[5] = 0, 0
    allowed[5, 1200] = 1 << 7  # a token of the last shard alone
    bias = torch.randn(9, V, generator=generator)
    sparse = (torch.tensor([[17_001, 17_000, 16_999]]).expand(9, -1), torch.tensor([[30.0, 29.0, 30.5]]).expand(9, -1))
    for asked in ({"allowed_tokens": allowed, "logit_bias": bias}, {"logit_bias": sparse}):
        asked = {
            key: tuple(part.to(device) for part in value) if isinstance(value, tuple) else value.to(device)
            for key, value in asked.items()
        }
        for filters in ({}, {"top_k": 40}, {"top_p": 0.8}):
            params = nl.SamplingParams(seed=torch.arange(9, device=device), **asked, **filters)
            got = head_of(weight, rank, world).sample(hidden, params, impl="hopper")
            assert torch.equal(got.tokens, nl.LMHead(weight).sample(hidden, params, impl="hopper").tokens), filters


def check_graphs(rank, world, device):
    """Captured draws, replayed on other hidden states, many times in a row."""
    from nologits.transport import transport_for

    peers = transport_for(dist.group.WORLD, device, V).peer_buffers()
    for name in ("plain", "k", "p", "wide") if peers else ("plain",):
        hidden, weight = operands(64, device)
        head, params = head_of(weight, rank, world, validate=False), request_of(name, 64, device)
        head.sample(hidden, params, impl="hopper", logprobs="processed")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = head.sample(hidden, params, impl="hopper", logprobs="processed")
        for turn in range(20):
            hidden.copy_(operands(64, device)[0].roll(turn, 0))
            graph.replay()
            want = nl.LMHead(weight).sample(hidden, params, impl="hopper", logprobs="processed")
            assert torch.equal(captured.tokens, want.tokens), (name, turn)
    if not peers:
        head = head_of(weight, rank, world, validate=False)
        with (
            pytest.raises(RuntimeError, match="must have GPUs that can address each other"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            head.sample(hidden, nl.SamplingParams(top_k=5, seed=1), impl="hopper")


def check_unseeded(rank, world, device):
    """Ranks whose generators differ draw alike, and draw anew each time."""
    torch.manual_seed(rank)
    hidden, weight = operands(64, device, spread=1.0)
    for request in ({}, {"top_k": 30}):
        drawn = [
            head_of(weight, rank, world).sample(hidden, nl.SamplingParams(**request), impl="hopper").tokens for _ in range(2)
        ]
        everyone = [torch.empty_like(drawn[0]) for _ in range(world)]
        dist.all_gather(everyone, drawn[0])
        assert all(torch.equal(other, drawn[0]) for other in everyone)
        assert not torch.equal(*drawn)


def work(rank, world, port, transport, results):
    import os

    os.environ["NOLOGITS_TRANSPORT"] = transport
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=device)
    told = ""
    try:
        for check in (check_tokens, check_families, check_masks, check_unseeded, check_graphs):
            check(rank, world, device)
    except BaseException:
        told = f"{check.__name__}: {traceback.format_exc()}"
    results.put((rank, told))
    results.close()
    results.join_thread()
    os._exit(0)  # a rank that failed leaves the others in an exchange: nobody waits for them


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("transport", ["collective", "peers"])
def test_two_gpus_draw_as_one(transport):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, 2, port, transport, results)) for rank in range(2)]
    for process in processes:
        process.start()
    told = []
    try:
        for _ in processes:
            told.append(results.get(timeout=240))
            if told[-1][1]:
                break
    finally:
        for process in processes:
            process.kill()
    assert [text for _, text in sorted(told) if text] == []
