"""The Hopper kernel of the filters: the sort's sets, the reference's draws, the same bits in every launch, slot and run.

Rows are made on the CPU and requests by ``random``, so that both have the same bits everywhere.
"""

import ctypes
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch

import nologits as nl
from nologits import filtered
from nologits.dispatch import hopper_obstacle
from nologits.kernels.config import FILTER_CHUNK_BYTES, FilterConfig, SearchConfig
from nologits.params import make_rows
from nologits.reference import scores
from nologits.sources import transform
from nologits.testing import FAMILIES, UnavailableError, kept_sets, make_logits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(hopper_obstacle(DEVICE)), reason=hopper_obstacle(DEVICE) or "-")]

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = (("top_k",), ("top_p",), ("top_k", "top_p"), ("min_p",), ("min_p", "top_k", "top_p"))
MADE = [name for name in FAMILIES if name != "smollm2"]
LAUNCHES = [FilterConfig(cluster, resident) for cluster in (1, 8, 16) for resident in (True, False)]


@pytest.fixture
def only_hopper(monkeypatch):
    """Leaves the Hopper implementation nothing of the portable paths to run instead of its kernel."""
    from nologits import fused, hopper

    monkeypatch.setattr(hopper, "filtered", SimpleNamespace(row_blocks=filtered.row_blocks))
    monkeypatch.setattr(hopper, "fused", SimpleNamespace(KernelSource=fused.KernelSource))


@pytest.fixture
def force(monkeypatch):
    """``force(config)``: every launch is made that way; ``force(None)``: as it ships."""
    from nologits.kernels import filters_sm90

    shipped = filters_sm90.filter_config
    return lambda config: monkeypatch.setattr(filters_sm90, "filter_config", (lambda *shape: config) if config else shipped)


def launches(vocab, dtype):
    """All launches that can hold such rows."""
    return [config for config in LAUNCHES if config.shared_bytes(vocab, dtype.itemsize) <= FILTER_CHUNK_BYTES]


def finite(logits, dtype):
    """In ``dtype``; what would become +inf becomes its largest number."""
    return logits.to(dtype).nan_to_num(posinf=torch.finfo(dtype).max, neginf=-INF)


def mixed(count, vocab, dtype, seed=0):
    """Rows of all families in turn."""
    each = -(-count // len(MADE))
    rows = torch.stack([make_logits(name, each, vocab, seed, DEVICE) for name in MADE], dim=1)
    return finite(rows.flatten(0, 1)[:count], dtype)


def request_of(names, draw, vocab, rows=0):
    """Random filters and a temperature for all rows, or tensors with ``rows`` of each."""
    makers = {
        "top_k": lambda: draw.choice([0, -1, 1, 2, 50, 400, draw.randrange(vocab) + 1, vocab - 1, vocab, vocab + 7]),
        "top_p": lambda: draw.choice([0.0, 1.0, 1e-8, 0.9999999, 0.9, draw.random(), 1 - draw.random() ** 4]),
        "min_p": lambda: draw.choice([0.0, 1.0, 0.05, draw.random(), draw.random() ** 4]),
        "temperature": lambda: draw.choice([1.0, 10 ** draw.uniform(-2, 0), draw.uniform(0.5, 5)]),
    }
    wide, narrow = (torch.int64, torch.float64, torch.float64), (torch.int32, torch.float32, torch.float32)
    request = {}
    for name in (*names, "temperature"):
        if not rows:
            request[name] = makers[name]()
            continue
        dtypes = dict(zip(("top_k", "top_p", "min_p"), draw.choice((wide, narrow)), strict=True))
        values = [makers[name]() for _ in range(rows)]
        request[name] = torch.tensor(values, dtype=dtypes.get(name, torch.float32), device=DEVICE)
    return request


def part_of(request, rows):
    return {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in request.items()}


def sorted_set(row, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0):
    """``kept_sets`` of one row ``[1, V]``, for every value that a filter may have."""
    top_k = top_k if top_k > 0 else row.shape[1]
    if min_p == 1:  # only the peak's copies are as likely as the peak; the oracle would call that undecided
        top_k, min_p = min(top_k, int((row == row.amax()).sum())), 0.0
    temperature = float(torch.tensor(temperature, dtype=torch.float32))
    return kept_sets(row, top_k=top_k, top_p=top_p, min_p=min_p or None, temperature=temperature)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def filter_rows(logits, **request):
    return nl.filter_logits(logits, impl="hopper", **request)


def check_sets(logits, request, about):
    """Kept sets against the sort's and the portable path's; returns how many rows are clear, and so were compared."""
    out = filter_rows(logits, **request)
    keep = out > -INF
    assert torch.equal(bits(out), bits(logits.masked_fill(~keep, -INF))), about
    # Whatever a boundary's rounding, what is kept is a prefix of the contract's order.
    ranked = keep.gather(1, logits.double().sort(dim=-1, descending=True, stable=True).indices)
    assert ranked[:, 0].all(), about
    assert not (ranked[:, 1:] & ~ranked[:, :-1]).any(), about
    listed = {
        name: value.tolist() if isinstance(value, torch.Tensor) else [value] * len(logits) for name, value in request.items()
    }
    sets = [sorted_set(logits[i : i + 1], **{name: values[i] for name, values in listed.items()}) for i in range(len(logits))]
    want, clear = (torch.cat(part) for part in zip(*sets, strict=True))
    portable = nl.filter_logits(logits, impl="torch", **request) > -INF
    for oracle, other in (("the sort", want), ("the portable path", portable)):
        wrong = (clear & (keep != other).any(-1)).nonzero().flatten().tolist()
        assert not wrong, f"{about}: {oracle} has other sets for {[(i, part_of(listed, i)) for i in wrong]}"
    return int(clear.sum())


def check_family(family, batch, vocab, dtype, turns):
    """Every mode, ``turns`` times with one request for all rows and with one a row."""
    logits = finite(make_logits(family, batch, vocab, seed=batch, device=DEVICE), dtype)
    draw = random.Random(f"{family} {batch} {vocab} {dtype}")
    requests = [request_of(names, draw, vocab, rows) for names in MODES for rows in (0, batch) for _ in range(turns)]
    return sum(check_sets(logits, request, f"{family} {list(logits.shape)} {dtype}") for request in requests)


# Of 1,000 rows or more a case: over 10,000 in all are compared, or one of the cases fails.
@pytest.mark.parametrize(("batch", "vocab"), [(12, 33), (12, 1_000), (12, 5_000), (12, 20_000), (8, 151_936), (9, 151_936)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sets_equal_the_sort(batch, vocab, dtype, only_hopper):
    assert sum(check_family(family, batch, vocab, dtype, turns=2) for family in MADE) > 800


def test_sets_of_a_trained_model_equal_the_sort(only_hopper):
    try:
        assert sum(check_family("smollm2", 32, 49_152, dtype, turns=1) for dtype in DTYPES) > 500
    except UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("config", LAUNCHES, ids=str)
def test_sets_equal_the_sort_in_every_launch(config, force, only_hopper):
    """Also where most blocks of a cluster have no logits at all."""
    force(config)
    for vocab in (1, 33, 1_000, 20_001):
        assert sum(check_family(family, 3, vocab, torch.float32, turns=1) for family in MADE) > 100


VARIANTS = [SearchConfig(TRUNCATE=0), SearchConfig(TIERED=0), *(SearchConfig(ARITY=parts) for parts in (2, 3, 4))]


@pytest.mark.parametrize("search", VARIANTS, ids=str)
def test_parts_of_the_search_change_no_set(search, force, only_hopper):
    force(FilterConfig(8, True, search))
    assert sum(check_family(family, 8, 20_000, torch.float32, turns=1) for family in MADE) > 400


def test_copies_that_are_all_kept_are_seen(force, only_hopper):
    """The control of the tests above: without the rule for copies of the boundary value the comparison fails."""
    force(FilterConfig(8, True, SearchConfig(DUPLICATES=0)))
    with pytest.raises(AssertionError, match=r"ties.*the sort has other sets"):
        check_family("ties", 12, 20_000, torch.float32, turns=2)
    force(FilterConfig(8, True))
    assert check_family("ties", 12, 20_000, torch.float32, turns=2) > 100


@pytest.mark.parametrize("what", ["set", "token", "logprobs"])
@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 20_000), (torch.bfloat16, 20_001)], ids=str)
def test_a_row_has_the_same_bits_in_every_batch_slot_launch_and_run(what, dtype, vocab, force, only_hopper):
    """Rows of an odd V change their alignment with the slot."""
    logits = mixed(65, vocab, dtype)
    request = request_of(MODES[-1], random.Random(vocab), vocab, 65)
    keys = {"seed": torch.arange(65, device=DEVICE), "position": torch.arange(65, device=DEVICE) * 2**31}

    def run(rows):
        if what == "set":
            return [bits(filter_rows(logits[rows], **part_of(request, rows)))]
        mode = "processed" if what == "logprobs" else False
        drawn = nl.sample_logits(logits[rows], **part_of(request | keys, rows), logprobs=mode, impl="hopper")
        return [bits(part) for part in drawn if part is not None]

    want = [torch.cat(parts) for parts in zip(*(run(slice(row, row + 1)) for row in range(65)), strict=True)]
    for config in launches(vocab, dtype):
        force(config)
        for batch in (1, 3, 8, 9, 64, 65):
            slots = torch.arange(batch, device=DEVICE)
            for rows in ((7 * slots + batch) % 65, 0 * slots + batch % 9):  # all different; one in all slots
                for got, again, exact in zip(run(rows), run(rows), want, strict=True):
                    assert torch.equal(got, exact[rows]), (config, batch)
                    assert torch.equal(again, got), (config, batch)


@pytest.mark.parametrize("vocab", [4_999, 20_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_read_and_written_where_they_lie(vocab, dtype, only_hopper):
    """Any pitch and offset, the output a part of something larger or the input itself; nothing else changes."""
    rows = mixed(9, vocab, dtype)
    request = {"top_k": 700, "top_p": 0.9, "temperature": 2.0}
    keep = nl.filter_logits(rows, impl="torch", **request) > -INF
    aligned = -(-vocab // 64) * 64 + 64
    layouts = ((0, aligned), (8, aligned), (1, aligned), (0, vocab), (3, aligned + 1))

    def place(layout, fill):
        offset, pitch = layout
        whole = torch.full((18 * pitch,), fill, dtype=dtype, device=DEVICE).view(18, pitch)
        return whole, whole[::2, offset : offset + vocab]

    for source in layouts:
        given, logits = place(source, 100.0)
        logits.copy_(rows)
        before = given.clone()
        for target in layouts:
            for mask_value in (-INF, -1e4):
                want = rows.masked_fill(~keep, mask_value)
                (whole, out), (expected, inside) = place(target, 5.0), place(target, 5.0)
                inside.copy_(want)
                assert filter_rows(logits, out=out, mask_value=mask_value, **request) is out
                assert torch.equal(whole, expected), (source, target, mask_value)
                assert torch.equal(given, before), (source, target, mask_value)
        assert torch.equal(filter_rows(logits, **request), rows.masked_fill(~keep, -INF))
        filter_rows(logits, out=logits, mask_value=-1e4, **request)
        before[::2, source[0] : source[0] + vocab] = rows.masked_fill(~keep, -1e4)
        assert torch.equal(given, before), source


def test_what_the_kernel_cannot_take_is_filtered_all_the_same():
    """Columns apart, several draws: the portable path, the reference's results."""
    logits = mixed(9, 1_001, torch.float32)
    apart, seed = logits.T.contiguous().T, torch.arange(9, device=DEVICE)
    want = nl.filter_logits(logits, top_k=50, top_p=0.9, impl="torch")
    assert torch.equal(filter_rows(apart, top_k=50, top_p=0.9), want)
    assert torch.equal(filter_rows(logits, top_k=50, top_p=0.9, out=torch.empty_like(apart)), want)
    for given, draws in ((apart, 1), (logits, 3)):
        got = nl.sample_logits(given, top_k=50, seed=seed, num_samples=draws, impl="hopper").tokens
        assert torch.equal(got, nl.sample_logits(logits, top_k=50, seed=seed, num_samples=draws, impl="reference").tokens)


IMPOSSIBLE = [("temperature", NAN), ("temperature", -1.0), ("temperature", INF), ("top_k", -2), ("top_p", NAN)]
IMPOSSIBLE += [("top_p", 1.5), ("top_p", -0.5), ("min_p", NAN), ("min_p", 1.5)]


@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 5_000), (torch.bfloat16, 20_001)], ids=str)
def test_invalid_rows_leave_their_neighbours_alone(dtype, vocab, only_hopper):
    logits = mixed(28, vocab, dtype)
    request = request_of(MODES[-1], random.Random(vocab), vocab, 28)
    request |= {"seed": torch.arange(28, device=DEVICE)}
    for row, (name, value) in zip(range(1, 19, 2), IMPOSSIBLE, strict=True):
        request[name][row] = value
    logits[19, 0] = logits[21, vocab // 2] = logits[23, -1] = NAN
    logits[25], logits[27] = -INF, NAN
    filters = {name: value for name, value in request.items() if name != "seed"}
    out = filter_rows(logits, mask_value=-1e4, **filters)
    plain = nl.sample_logits(logits, impl="hopper", **request).tokens
    drawn = nl.sample_logits(logits, logprobs=True, impl="hopper", **request)
    assert torch.equal(out[1::2], torch.full_like(out[1::2], -1e4))
    assert plain[1::2].tolist() == [-1] * 14
    assert torch.equal(plain, drawn.tokens)
    assert all(part[1::2].isnan().all() for part in drawn[1:])
    for row in range(0, 28, 2):
        alone = slice(row, row + 1)
        assert torch.equal(bits(out[alone]), bits(filter_rows(logits[alone], mask_value=-1e4, **part_of(filters, alone))))
        solo = nl.sample_logits(logits[alone], logprobs="processed", impl="hopper", **part_of(request, alone))
        assert all(torch.equal(bits(solo[i]), bits(drawn[i][alone])) for i in (0, 1, 3))


@pytest.mark.parametrize("vocab", [5_000, 20_001])
def test_infinite_logits_win(vocab, only_hopper):
    logits = mixed(9, vocab, torch.float32)
    logits[:, [vocab - 2, 77]] = INF
    kept = {1: ({"top_k": 1}, {"top_p": 0.4}), 2: ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, {"top_k": 40, "top_p": 0.9})}
    for count, requests in kept.items():
        for request in requests:
            ids = (filter_rows(logits, **request) > -INF).nonzero()[:, 1].view(9, -1)
            assert ids.tolist() == [[77, vocab - 2][:count]] * 9
            drawn = nl.sample_logits(logits, seed=1, logprobs="processed", impl="hopper", **request)
            assert (drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.log_mass.tolist()) == ([77] * 9, [0.0] * 9, [INF] * 9)


def check_draws(draw, logits, params, mode):
    """``draw(impl)`` against the reference's of ``logits``: tokens, except where the best scores are too close, and numbers."""
    torch.manual_seed(5)
    got = draw("hopper")
    torch.manual_seed(5)
    want = nl.sample_logits(logits, params, logprobs=mode, impl="reference")
    differ = got.tokens != want.tokens
    if differ.any():  # the kernel's logarithms are approximate
        torch.manual_seed(5)
        rows = make_rows(params, *logits.shape, DEVICE)
        score = scores(transform(logits.float(), rows, 0, logits.shape[1]), rows, 0, 0)
        best, other = (score.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1) for tokens in (want.tokens, got.tokens))
        close = (best - other).abs() <= 1e-5 * torch.maximum(best.abs(), torch.as_tensor(rows.temperature32, device=DEVICE))
        assert (close | ~differ).all(), (best[differ], other[differ])
    assert differ.sum() <= 1
    for a, b in zip(got[1:], want[1:], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = (part[~differ] if part.dim() == 1 else part for part in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-5)


def request_with_keys(names, draw, vocab, rows, seeds):
    """Per-row filters; every fourth row greedy; ``seeds``: one a row, some or all rows without, or unsigned."""
    request = request_of(names, draw, vocab, rows)
    request["temperature"][::4] = 0
    slots = torch.arange(rows, device=DEVICE)
    seed = {"given": slots * 2**40, "some": slots % 3 - 1, "none": None, "unsigned": (slots - 1).view(torch.uint64)}[seeds]
    return nl.SamplingParams(**request, seed=seed, position=None if seed is None else slots + 2**33)


@pytest.mark.parametrize("vocab", [33, 5_000, 20_001, 151_936])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [False, "processed", True, "raw"])
def test_draws_are_the_references(vocab, dtype, mode, only_hopper):
    logits, draw = mixed(27, vocab, dtype), random.Random(vocab)
    requests = [
        *(request_with_keys(names, draw, vocab, 27, "given") for names in MODES),
        *(request_with_keys(MODES[-1], draw, vocab, 27, seeds) for seeds in ("some", "none", "unsigned")),
        *(
            nl.SamplingParams(**request_of(names, draw, vocab), top_k=40, seed=7, position=9)
            for names in (("top_p",), ("min_p",))
        ),
        nl.SamplingParams(top_k=50, top_p=0.95, seed=torch.arange(27, device=DEVICE)),
    ]
    for params in requests:
        check_draws(lambda impl, p=params: nl.sample_logits(logits, p, logprobs=mode, impl=impl), logits, params, mode)


@pytest.mark.parametrize("seeds", ["given", "some", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_under_a_bias_and_a_mask_are_the_references(seeds, dtype, only_hopper, monkeypatch):
    """They are made for a few rows at a time."""
    vocab = 20_001
    monkeypatch.setattr(filtered, "SCRATCH_BYTES", vocab * 8 * 5)
    logits, draw, generator = mixed(27, vocab, dtype), random.Random(3), torch.Generator().manual_seed(3)
    ids = torch.randint(-1, vocab, (27, 40), generator=generator).to(DEVICE)
    dense = torch.randn(27, vocab, generator=generator).to(DEVICE)
    allowed = torch.randint(-(2**31), 2**31, (27, 626), generator=generator).to(torch.int32).to(DEVICE)
    allowed[:, 0] |= 1
    logits[:, 0] = 1.0  # something is left
    extras = (
        {"logit_bias": dense},
        {"logit_bias": dense[0].bfloat16()},
        {"logit_bias": (ids, ids.cos())},
        {"allowed_tokens": allowed},
        {"logit_bias": dense, "allowed_tokens": allowed[0]},
    )
    for extra in extras:
        params = request_with_keys(MODES[-1], draw, vocab, 27, seeds)
        params = nl.SamplingParams(**{**vars(params), **extra})
        check_draws(lambda impl, p=params: nl.sample_logits(logits, p, logprobs=True, impl=impl), logits, params, True)


@pytest.mark.parametrize("seeds", ["given", "some", "none"])
def test_filtered_draws_from_hidden_states_are_the_references(seeds, only_hopper):
    """Through an identity: row b's logits are column b % 16 of the weight, exactly."""
    weight = mixed(16, 20_001, torch.bfloat16).clamp(min=-3e4).T.contiguous()
    rows = torch.arange(40, device=DEVICE) % 16
    hidden, logits = torch.eye(16, dtype=torch.bfloat16, device=DEVICE)[rows], weight.T.float()[rows]
    for names in MODES:
        params = request_with_keys(names, random.Random(names[0]), 20_001, 40, seeds)
        check_draws(lambda impl, p=params: nl.sample(hidden, weight, **vars(p), logprobs=True, impl=impl), logits, params, True)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
def test_nothing_synchronises_and_a_replay_follows_its_inputs(only_hopper):
    logits, rows = mixed(9, 20_000, torch.bfloat16), torch.arange(9, device=DEVICE)
    request = request_of(MODES[-1], random.Random(0), 20_000, 9) | {"seed": rows.clone()}

    def call():
        filters = {name: value for name, value in request.items() if name != "seed"}
        plain = nl.sample_logits(logits, impl="hopper", **request)
        drawn = nl.sample_logits(logits, logprobs="processed", impl="hopper", **request)
        scalars = nl.sample_logits(logits, top_k=50, top_p=0.9, seed=3, impl="hopper")
        return [filter_rows(logits, **filters), plain.tokens, drawn.tokens, drawn.logprobs, drawn.log_mass, scalars.tokens]

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for turn in range(1, 4):
        logits.copy_(mixed(9, 20_000, torch.bfloat16, seed=turn).flip(0))
        for name, value in (request_of(MODES[-1], random.Random(turn), 20_000, 9) | {"seed": rows + 9 * turn}).items():
            request[name].copy_(value)
        graph.replay()
        assert all(torch.equal(bits(got), bits(want)) for got, want in zip(out, call(), strict=True))


def test_compiled_filters_and_draws_are_the_eager_ones(only_hopper):
    def step(x, keys, p):
        drawn = nl.sample_logits(x * 2, seed=keys, top_k=50, top_p=p, logprobs=True, impl="hopper")
        return nl.filter_logits(x * 2, top_k=900, top_p=p, impl="hopper"), drawn.tokens, drawn.logprobs, drawn.log_mass

    inputs = (mixed(9, 20_000, torch.bfloat16) / 2, torch.arange(9, device=DEVICE), torch.arange(1, 10, device=DEVICE) / 10)
    for got, want in zip(torch.compile(step, fullgraph=True)(*inputs), step(*inputs), strict=True):
        assert torch.equal(bits(got), bits(want))


FLAT = [(4_096, {"top_p": 0.5}, 2_048), (4_096, {"top_k": 5}, 5), (151_936, {"top_p": 0.5}, 75_968)]
FLAT += [(20_000, {"top_k": 1_024, "top_p": 0.5}, 512), (20_000, {"top_k": 256, "top_p": 0.25, "min_p": 1.0}, 64)]
FLAT += [(1 << 22, {"top_p": 0.5}, 1 << 21), (1 << 22, {"top_k": 3_000_001}, 3_000_001)]


@pytest.mark.parametrize(("vocab", "request_", "count"), FLAT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_equal_logits_the_first_are_kept(vocab, request_, count, dtype, only_hopper):
    """Up to the largest V, whose masses sum to 2^62 units; a zero's sign counts for nothing, and stays."""
    zeros = torch.zeros(3, vocab, dtype=dtype, device=DEVICE)
    zeros[1, ::3] = -0.0
    zeros[2] = 1.5
    out = filter_rows(zeros, **request_)
    assert torch.equal(bits(out[:, :count]), bits(zeros[:, :count]))
    assert (out[:, count:] == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [None, *LAUNCHES], ids=str)
def test_copies_of_the_boundary_stay_by_id(config, dtype, force, only_hopper):
    """Copies spread over all blocks, fewer and more than a list holds; what is below them has no mass."""
    vocab, cases = 20_000, []
    for copies in (2, 300, 512, 513, 600, 5_000):
        half = copies // 2
        for above in (0, 10):
            cases += [(copies, above, k, 1.0, 0.0, k) for k in (above + 1, above + half, above + copies)]
        cases += [(copies, 0, 0, 0.5, 0.0, -(-copies // 2)), (copies, 0, half, 0.5, 0.0, -(-half // 2))]
        cases += [(copies, 0, vocab - 1, 0.5, 0.0, -(-copies // 2)), (copies, 0, 0, 1.0, 0.5, copies)]
        cases += [(copies, 0, half, 1.0, 0.5, half), (copies, 0, half, 0.5, 1.0, -(-half // 2))]
    logits = torch.randn(len(cases), vocab, generator=torch.Generator().manual_seed(2)).round() - 60
    want = torch.zeros(len(cases), vocab, dtype=torch.bool)
    for row, (copies, above, *_, count) in enumerate(cases):
        ids = torch.arange(copies) * (vocab // copies) + row % 2
        logits[row, ids], logits[row, 17 + 1_601 * torch.arange(above)] = 1.0, 2.0
        # An id that was to be a copy may be one above: copies are what is left.
        first = logits[row].sort(descending=True, stable=True).indices[:count]
        want[row, first] = True
    numbers = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float64}
    columns = zip(*(case[2:5] for case in cases), strict=True)
    request = {
        name: torch.tensor(column, dtype=numbers[name], device=DEVICE) for name, column in zip(numbers, columns, strict=True)
    }
    force(config)
    logits, want = finite(logits.to(DEVICE), dtype), want.to(DEVICE)
    wrong = ((filter_rows(logits, **request) > -INF) != want).any(-1).nonzero().flatten().tolist()
    assert not wrong, [cases[row] for row in wrong]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sets_of_a_million_ids_equal_the_sort(dtype, only_hopper):
    """In fp32 more than a cluster holds: every sweep reads the row again."""
    assert sum(check_family(family, 2, 1 << 20, dtype, turns=1) for family in MADE) > 100


def test_the_last_rows_of_a_tensor_past_2_31_elements(only_hopper):
    batch, vocab = 15_000, 151_936
    logits = torch.empty(batch, vocab, dtype=torch.bfloat16, device=DEVICE).normal_()
    seed, rows = torch.arange(batch, device=DEVICE), torch.tensor([0, 14_133, 14_134, 14_135, 14_998, 14_999], device=DEVICE)
    few, request = logits[rows], {"top_k": 5_000, "top_p": 0.5}
    want = nl.filter_logits(few, impl="torch", **request)
    tokens = nl.sample_logits(logits, seed=seed, impl="hopper", **request).tokens[rows]
    assert torch.equal(tokens, nl.sample_logits(few, seed=rows, impl="hopper", **request).tokens)
    assert (want.gather(1, tokens[:, None]) > -INF).all()
    assert torch.equal(filter_rows(logits, out=logits, **request)[rows], want)


def test_the_c_and_python_parameters_agree():
    """Field by field: the ctypes structure against the declaration in the CUDA source."""
    from nologits.kernels.filters_sm90 import Params
    from nologits.kernels.nvrtc import SOURCES

    body = re.search(r"struct Params \{(.*?)\n\};", (SOURCES / "filters.cu").read_text(), re.S).group(1)
    kinds = {"i64": ctypes.c_int64, "int": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double}
    fields = []
    for declaration in re.sub(r"//[^\n]*", "", body).split(";"):
        kind, _, names = declaration.strip().removeprefix("const ").partition(" ")
        for name in filter(None, (n.strip() for n in names.split(","))):
            fields.append((name, ctypes.c_void_p if kind.endswith("*") else kinds[kind]))
    assert fields == list(Params._fields_)
