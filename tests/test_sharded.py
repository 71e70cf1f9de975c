"""A head in shards on 2, 4 and 8 processes (gloo): the tokens of one process, on every rank; and ranks that disagree."""

import datetime
import re
import socket
import sys
import traceback
import unittest.mock
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nologits as nl
from nologits import likelihood, sharded
from nologits.integrations.drawing import draw
from nologits.integrations.eligibility import Request
from nologits.integrations.rows import Batch, Keys, make_row
from nologits.integrations.vllm import ranks
from nologits.params import make_rows
from nologits.sources import HiddenSource
from nologits.streaming import RunningMass
from nologits.testing import chi_squared, count_tokens

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

V, D = 1_001, 32
CUTS = {2: [0, 700, V], 4: [0, 100, 101, 800, V], 8: [0, 1, 130, 260, 500, 510, 777, 990, V]}


def operands(batch=7):
    """Exact in any order of summation, with ties."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-40, 41, (V, D), generator=generator) / 32
    hidden = torch.randint(-15, 16, (batch, D), generator=generator) / 16
    return hidden, weight, torch.randint(-8, 9, (V,), generator=generator) / 8


REQUESTS = {
    "plain": {},
    "positions": {"temperature": 0.7, "position": torch.arange(7) * 3},
    "temperatures": {"temperature": torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0])},
    "k": {"top_k": 50},
    "p": {"top_p": 0.9, "temperature": torch.tensor([0.0, 0.3, 0.5, 1.0, 2.0, 5.0, 20.0])},
    "k and p": {"top_k": 20, "top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "all": {"min_p": 0.001, "top_k": 400, "top_p": 0.95, "temperature": 2.0},
    "mixed": {
        "top_k": torch.tensor([0, 1, 5, 900, 0, 50, -2]), "top_p": torch.tensor([1.0, 0.5, 1.0, 0.9, 0.3, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.02, 0.0]),
    },
}  # fmt: skip


def transforms():
    generator = torch.Generator().manual_seed(1)
    allowed = torch.randint(-(2**31), 2**31, (7, -(-V // 32)), generator=generator).int()
    allowed[3] = 0
    return {
        "nothing": {},
        "dense": {"logit_bias": torch.randn(7, V, generator=generator)},
        "sparse and mask": {
            "logit_bias": (torch.tensor([[3, 999, -1]]), torch.tensor([[2.0, 30.0, 1.0]])),
            "allowed_tokens": allowed,
        },
    }


def check_tokens(rank, world):
    """Every request under every transform: what this rank gets is what one process gets from the whole head."""
    hidden, weight, bias = operands()
    start, stop = CUTS[world][rank : rank + 2]
    padding = 3 if rank == world - 1 else 0  # rows beyond the vocabulary
    mine = torch.cat((weight[start:stop], torch.full((padding, D), 100.0)))
    for name, request in REQUESTS.items():
        for transform, extra in transforms().items():
            for options in ({"logprobs": True, "top_logprobs": 9}, {"num_samples": 3, "logprobs": "processed"}, {}):
                params = nl.SamplingParams(seed=torch.arange(7), **request, **extra)
                own_bias = torch.nn.functional.pad(bias[start:stop], (0, padding))
                arguments = {"scale": 0.5, "softcap": 30.0}
                head = nl.LMHead(mine, own_bias, **arguments, vocab_size=V, group=dist.group.WORLD, vocab_start=start)
                got = head.sample(hidden, params, **options)
                want = nl.LMHead(weight, bias, **arguments).sample(hidden, params, impl="torch", **options)
                assert torch.equal(got.tokens, want.tokens), (name, transform, options, got.tokens, want.tokens)
                for part in ("logprobs", "raw_logprobs", "log_mass"):
                    if getattr(want, part) is not None:
                        torch.testing.assert_close(
                            getattr(got, part), getattr(want, part), rtol=1e-5, atol=1e-5, equal_nan=True
                        )
                for ours, theirs in ((got.top, want.top), (got.raw_top, want.raw_top)):
                    assert (ours is None) == (theirs is None)
                    if ours is not None:
                        assert torch.equal(ours.ids, theirs.ids), (name, transform)
                        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)


def check_sets(rank, world):
    """The kept set of every request, also of rows that candidates do not settle."""
    hidden, weight, _ = operands()
    start, stop = CUTS[world][rank : rank + 2]
    head = nl.LMHead(weight[start:stop], vocab_size=V, group=dist.group.WORLD, vocab_start=start)
    for name, request in REQUESTS.items():
        asked = {key: value for key, value in request.items() if key != "position"}
        for extra in transforms().values():
            got = head.select(hidden, **asked, **extra)
            want = nl.LMHead(weight).select(hidden, **asked, **extra, impl="reference")
            assert torch.equal(got.counts, want.counts), (name, got.counts, want.counts)
            assert torch.equal(got.ids, want.ids), name
            assert torch.equal(got.logits, want.logits), name
            torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)


def check_scores(rank, world):
    """Log-probabilities and ranks of given tokens, which lie in every shard, at its first and last id too."""
    hidden, weight, bias = operands()
    start, stop = CUTS[world][rank : rank + 2]
    arguments = {"scale": 0.5, "softcap": 30.0}
    head = nl.LMHead(weight[start:stop], bias[start:stop], **arguments, vocab_size=V, group=dist.group.WORLD, vocab_start=start)
    whole = HiddenSource(hidden, nl.LMHead(weight, bias, **arguments).spec)
    edges = torch.tensor([0, *(id for cut in CUTS[world][1:-1] for id in (cut - 1, cut)), V - 1, 3, 999])
    told = []
    for name in ("nothing", "sparse and mask"):
        for temperature in (1.0, 0.0, torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0])):
            rows = make_rows(nl.SamplingParams(temperature, **transforms()[name]), 7, V, hidden.device, noise=False)
            for first in range(0, len(edges), 3):
                tokens = edges.roll(first).repeat(7)[:7]
                got, want = sharded.score(head.shard, hidden, rows, tokens), likelihood.score(whole, rows, tokens)
                torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5, equal_nan=True)
                assert torch.equal(got[1], want[1]), (name, got[1], want[1])
                told += got[1].tolist()
    assert len(set(told)) > 20


ASKED = [
    Request(temperature=0.0, logprobs=2, top_k=3, top_p=0.5),
    Request(temperature=0.7, top_k=20, seed=3),
    Request(temperature=1.2, top_p=0.8, seed=-4, logprobs=9),
    Request(temperature=1.0, min_p=0.1, seed=2**64 - 2, logit_bias={5: 2.0, 900: -1.5}),
    Request(temperature=1.0, seed=2**63, allowed_tokens=[1, 31, 32, 63, 996]),
    Request(temperature=0.9, logit_bias={7: 50.0}),
    Request(temperature=20.0, top_p=0.99),
]


def check_engine_draws(rank, world):
    """A step of an engine's plugin: tokens, lists, log-probabilities and ranks are those of one process."""
    hidden, weight, bias = operands()
    start, stop = CUTS[world][rank : rank + 2]
    shard = {"vocab_size": V, "group": dist.group.WORLD, "vocab_start": start, "validate": False}
    head, whole = nl.LMHead(weight[start:stop], bias[start:stop], **shard), nl.LMHead(weight, bias)
    assert head.vocab_size == whole.vocab_size == V
    assert f"V={V}" in repr(head)
    assert f"ids {start} to {stop - 1}" in repr(head)
    grammar = {1: np.full(-(-V // 32), 0x55555555, dtype=np.int32), 6: np.array([0b1011], dtype=np.int32)}
    for mode in ("raw_logprobs", "processed_logprobs"):
        for masks in (None, grammar):
            for asked in (ASKED, [Request(seed=9, logprobs=0)], [Request(top_k=5)]):
                keys = Keys(0)  # every rank gives out the same
                batch = Batch([make_row(request, V, keys) for request in asked], V, hidden.device)
                some = {row: mask for row, mask in (masks or {}).items() if row < len(asked)}
                step = (hidden[: len(asked)], batch, np.arange(len(asked)), some, mode)
                got, want = draw(head, *step), draw(whole, *step)
                assert torch.equal(got.tokens, want.tokens), (mode, got.tokens, want.tokens)
                for part in ("ids", "ranks"):
                    ours, theirs = getattr(got, part), getattr(want, part)
                    assert theirs is None if ours is None else torch.equal(ours, theirs), (mode, part)
                if want.logprobs is not None:
                    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)


def check_engine_ranks(rank, world):
    """The vLLM plugin's parts of a head, cut as vLLM cuts it, and the one decision that its ranks come to."""
    group = SimpleNamespace(world_size=world, rank_in_group=rank, cpu_group=dist.group.WORLD, device_group=dist.group.WORLD)
    stand_in = {"vllm": ModuleType("vllm"), "vllm.distributed": SimpleNamespace(get_tp_group=lambda: group)}
    with unittest.mock.patch.dict(sys.modules, stand_in):
        assert ranks.agree("") == ""
        assert ranks.agree("mine" if rank == world - 1 else "") == "mine"
        assert ranks.agree(f"that of rank {rank}" if rank else "") == "that of rank 1"
        hidden, weight, bias = operands()
        rows = -(-V // 64) * 64 // world
        padding = (0, rows * world - V)
        weight, bias = torch.nn.functional.pad(weight, (0, 0, *padding)), torch.nn.functional.pad(bias, padding)
        mine = slice(rank * rows, (rank + 1) * rows)
        head = ranks.make_part(weight[mine], bias[mine], 0.5, 30.0, V)
        params = nl.SamplingParams(seed=5, top_k=40)
        want = nl.LMHead(weight, bias, 0.5, 30.0, V).sample(hidden, params, logprobs=True)
        got = head.sample(hidden, params, logprobs=True)
        assert torch.equal(got.tokens, want.tokens)
        torch.testing.assert_close(got.raw_logprobs, want.raw_logprobs)
        part = SimpleNamespace(weight=weight[mine], tp_size=world)
        assert ranks.is_split(part)
        assert not ranks.is_split(SimpleNamespace(tp_size=1))
        assert ranks.layout_obstacle(part, V) == ranks.layout_obstacle(part, rows * (world - 1) + 1) == ""
        none_left = f"tokens in parts of {rows}, so that the last of {world} tensor parallel ranks has none"
        assert none_left in ranks.layout_obstacle(part, rows * (world - 1))
        other = SimpleNamespace(weight=weight[mine], tp_size=world + 1)
        assert ranks.layout_obstacle(other, V) == f"the head is split over {world + 1} ranks, and the model over {world}"


def check_group_merge(rank, world):
    """The group merge is exact in distribution, and is not if log-masses are missing or all shards share one noise."""
    rows, generator = 30_000, torch.Generator().manual_seed(5)
    weight = torch.randn(64, 1, generator=generator) * 2
    weight[1] += 3  # shards of unequal mass
    cut = {2: [0, 5, 64], 4: [0, 1, 5, 60, 64], 8: [0, 1, 2, 5, 30, 31, 50, 60, 64]}[world]
    whole = {"vocab_size": 64, "group": dist.group.WORLD, "vocab_start": cut[rank], "validate": False}
    head = nl.LMHead(weight[cut[rank] : cut[rank + 1]], **whole, merge="group")
    hidden = torch.ones(rows, 1)
    shares = (weight[:, 0] / 1.5).softmax(0)
    params = nl.SamplingParams(temperature=1.5, seed=torch.arange(rows))

    def fits(head):
        return chi_squared(count_tokens(head.sample(hidden, params).tokens, 64), shares).p_value

    drawn = head.sample(hidden, params, logprobs=True)
    want = nl.sample(hidden, weight, temperature=1.5, seed=torch.arange(rows), logprobs=True)
    assert chi_squared(count_tokens(drawn.tokens, 64), shares).p_value > 1e-4
    assert not torch.equal(drawn.tokens, want.tokens)  # another draw than the pathwise one
    torch.testing.assert_close(drawn.logprobs, shares.log()[drawn.tokens], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(drawn.raw_logprobs, weight[:, 0].log_softmax(0)[drawn.tokens], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(drawn.log_mass, want.log_mass, rtol=1e-5, atol=1e-5)
    everyone = [torch.empty_like(drawn.tokens) for _ in range(world)]
    dist.all_gather(everyone, drawn.tokens)
    assert all(torch.equal(other, drawn.tokens) for other in everyone)
    several = head.sample(hidden[:5], nl.SamplingParams(temperature=1.5, seed=torch.arange(5)), num_samples=6)
    assert several.tokens.shape == (5, 6)
    assert len(several.tokens.unique(dim=1)[0]) > 1  # and each of them has noise of its own

    # Controls
    with unittest.mock.patch.object(sharded, "group_noise", return_value=torch.zeros(rows, world)):
        assert fits(head) < 1e-9
    with unittest.mock.patch.object(RunningMass, "log_total", return_value=torch.zeros(rows)):
        assert fits(head) < 1e-9

    # Rows without a token, and greedy ones
    weight[3] = weight[63] = 40.0  # the largest, in different shards
    head = nl.LMHead(weight[cut[rank] : cut[rank + 1]], **whole, merge="group")
    allowed = torch.full((4, 2), -1, dtype=torch.int32)
    allowed[1] = 0
    temperature = torch.tensor([0.0, 1.0, float("nan"), 0.0])
    greedy = head.sample(torch.ones(4, 1), nl.SamplingParams(temperature=temperature, seed=1, allowed_tokens=allowed))
    assert greedy.tokens.tolist() == [3, -1, -1, 3]
    raises('merge must be "pathwise" for a head', lambda: head.sample(hidden[:2], nl.SamplingParams(top_k=5, seed=1)))


def check_two_logits(rank, world):
    """CASES N9: equal logits in each half, one seed on all ranks; noise of local ids would never draw from the second half."""
    weight = torch.tensor([[0.0]] * 128 + [[-1.0]] * 128)
    width = 256 // world
    shard = {"vocab_size": 256, "group": dist.group.WORLD, "vocab_start": rank * width, "validate": False}
    head = nl.LMHead(weight[rank * width : (rank + 1) * width], **shard)
    tokens = head.sample(torch.ones(20_000, 1), nl.SamplingParams(seed=torch.arange(20_000))).tokens
    assert abs((tokens >= 128).float().mean() - 0.2689) < 0.012
    assert torch.equal(tokens, nl.sample(torch.ones(20_000, 1), weight, seed=torch.arange(20_000)).tokens)
    # The control: shards that all number their tokens from 0 have the same noise, and the better logit wins every draw
    local = nl.LMHead(head.spec.weight, **shard | {"vocab_start": 0})
    won = local.sample(torch.ones(20_000, 1), nl.SamplingParams(seed=torch.arange(20_000)), logprobs="raw").raw_logprobs
    assert (won == won.max()).all()


def check_unseeded(rank, world):
    """Ranks whose generators differ draw alike, and draw anew each time."""
    hidden, weight, _ = operands()
    start, stop = CUTS[world][rank : rank + 2]
    head = nl.LMHead(weight[start:stop], vocab_size=V, group=dist.group.WORLD, vocab_start=start)
    torch.manual_seed(rank)
    rows = hidden[:1].expand(200, D).contiguous()
    for request in ({"temperature": 5.0}, {"temperature": 5.0, "top_k": 30}):
        drawn = [head.sample(rows, nl.SamplingParams(**request)).tokens for _ in range(2)]
        everyone = [torch.empty_like(drawn[0]) for _ in range(world)]
        dist.all_gather(everyone, drawn[0])
        assert all(torch.equal(other, drawn[0]) for other in everyone)
        assert not torch.equal(*drawn)


def raises(match, call):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(match)):
        call()


def check_disagreement(rank, world):
    """What differs on one rank is an error on all."""
    hidden, weight, _ = operands()
    start, stop = CUTS[world][rank : rank + 2]
    odd = rank == world - 1
    whole = {"vocab_size": V, "group": dist.group.WORLD, "vocab_start": start}
    head = nl.LMHead(weight[start:stop], **whole)
    params = nl.SamplingParams(seed=1)
    raises("the same rows, got 7 on rank 0 and 5", lambda: head.sample(hidden[:5] if odd else hidden, params))
    raises("the same request", lambda: head.sample(hidden, nl.SamplingParams(seed=1, top_k=5 + odd)))
    raises("the same request", lambda: head.sample(hidden, params, logprobs=odd))
    half = nl.LMHead(weight[start:stop].bfloat16(), **whole)
    raises("the same dtype", lambda: (half if odd else head).sample(hidden.bfloat16() if odd else hidden, params))
    short = nl.LMHead(weight[start : stop - odd], **whole)
    raises("must make up the ids 0 to 1000, got ids up to 999", lambda: short.sample(hidden, params))
    assert head.sample(hidden, params).tokens.shape == (7,)  # and nobody hangs
    raises('impl must be "auto", "torch" or "hopper"', lambda: head.sample(hidden, params, impl="reference"))
    raises("the same request", lambda: head.sample(hidden, params, logprobs=True, top_logprobs=2 + odd))
    raises("the same request", lambda: head.select(hidden, top_k=2 + odd))
    other = nl.LMHead(weight[start:stop], **whole, merge="group" if odd else "pathwise")
    raises("the same merge, got pathwise on rank 0 and group", lambda: other.sample(hidden, params))
    raises('merge must be "pathwise" or "group", got \'sum\'', lambda: nl.LMHead(weight, **whole, merge="sum"))
    raises("merge must come with a group", lambda: nl.LMHead(weight, merge="group"))
    raises(
        "vocab_start must be below vocab_size", lambda: nl.LMHead(weight, vocab_size=5, group=dist.group.WORLD, vocab_start=5)
    )
    raises("vocab_start must come with a group", lambda: nl.LMHead(weight, vocab_start=5))
    raises("vocab_start must be an integer", lambda: nl.LMHead(weight, vocab_size=5, group=dist.group.WORLD))


def check_absent_rank(rank, world):
    """A rank that does not come: the others say over which group they waited. Last, for the group is no good afterwards."""
    hidden, weight, _ = operands()
    start, stop = CUTS[world][rank : rank + 2]
    group = dist.new_group(list(range(world)), timeout=datetime.timedelta(seconds=2))
    head = nl.LMHead(weight[start:stop], vocab_size=V, group=group, vocab_start=start, validate=False)
    if rank:
        name = f"the exchange of a sharded draw over the process group {group.group_name!r} failed"
        raises(name, lambda: head.sample(hidden, nl.SamplingParams(seed=1)))


CHECKS = (
    check_tokens,
    check_sets,
    check_scores,
    check_engine_draws,
    check_engine_ranks,
    check_two_logits,
    check_group_merge,
    check_unseeded,
    check_disagreement,
    check_absent_rank,
)


def work(rank, world, port, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        for check in CHECKS if world < 8 else CHECKS[:5]:
            check(rank, world)
        results.put((rank, ""))
    except BaseException:
        results.put((rank, f"{check.__name__}: {traceback.format_exc()}"))
    results.close()
    results.join_thread()


@pytest.mark.parametrize("world", CUTS)
def test_shards(world):
    """All checks in the same processes: starting them takes longer than most of the checks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, world, port, results)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        told = [results.get(timeout=400) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    assert [text for _, text in sorted(told) if text] == []
