"""The Hopper kernel of the filters: the sort's sets, the reference's draws, the same bits in every launch, slot and run."""

import random
from types import SimpleNamespace

import pytest
import torch

import nologits as nl
from nologits import filtered
from nologits.dispatch import hopper_obstacle
from nologits.kernels.config import FilterConfig, SearchConfig
from nologits.params import make_rows
from nologits.reference import scores
from nologits.selection import count_sorted
from nologits.sources import transform
from nologits.testing import FAMILIES, UnavailableError, kept_sets, make_logits

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(hopper_obstacle(DEVICE)), reason=hopper_obstacle(DEVICE) or "-")]

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = (("top_k",), ("top_p",), ("top_k", "top_p"), ("min_p",), ("min_p", "top_k", "top_p"))
MADE = [name for name in FAMILIES if name != "smollm2"]
LAUNCHES = [
    FilterConfig(1),
    FilterConfig(2, 1024),
    FilterConfig(4),
    FilterConfig(8, 1024),
    FilterConfig(16),
    FilterConfig(16, 1024),
]
SEARCHES = [SearchConfig(TRUNCATE=0), SearchConfig(TIERED=0), *(SearchConfig(ARITY=parts) for parts in (2, 3, 4))]


@pytest.fixture(autouse=True)
def only_hopper(monkeypatch):
    """Leaves the Hopper implementation nothing of the portable paths to run instead of its kernel."""
    from nologits import fused, hopper

    monkeypatch.setattr(hopper, "filtered", SimpleNamespace(row_blocks=filtered.row_blocks, Count=filtered.Count))
    monkeypatch.setattr(hopper, "fused", SimpleNamespace(KernelSource=fused.KernelSource))


@pytest.fixture
def force(monkeypatch):
    """``force(config)``: from then on every launch is made that way."""
    from nologits.kernels import filters_sm90

    return lambda config: monkeypatch.setattr(filters_sm90, "filter_config", lambda *shape: config)


def rows_of(family, batch, vocab, dtype, seed=0):
    """Rows that have the same bits everywhere, in ``dtype``; what would become +inf becomes its largest number."""
    logits = make_logits(family, batch, vocab, seed, DEVICE).to(dtype)
    return logits.nan_to_num(posinf=torch.finfo(dtype).max, neginf=-INF)


def mixed(count, vocab, dtype, seed=0):
    """Rows of all families in turn."""
    each = -(-count // len(MADE))
    return torch.stack([rows_of(name, each, vocab, dtype, seed) for name in MADE], dim=1).flatten(0, 1)[:count]


def request_of(names, draw, vocab, rows=0):
    """Random filters and a temperature, the same everywhere, for all rows, or tensors with ``rows`` of each."""
    makers = {
        "top_k": lambda: draw.choice([0, -1, 1, 2, 50, 400, draw.randrange(vocab) + 1, vocab - 1, vocab, vocab + 7]),
        "top_p": lambda: draw.choice([0.0, 1.0, 1e-8, 0.9999999, 0.9, draw.random(), 1 - draw.random() ** 4]),
        "min_p": lambda: draw.choice([0.0, 1.0, 0.05, draw.random(), draw.random() ** 4]),
        "temperature": lambda: draw.choice([1.0, draw.randrange(41, 410) / 4096, draw.randrange(1, 81) / 16]),
    }
    share, count = draw.choice([(torch.float64, torch.int64), (torch.float32, torch.int32)])
    dtypes = {"top_k": count, "top_p": share, "min_p": share, "temperature": torch.float32}
    if not rows:
        return {name: makers[name]() for name in (*names, "temperature")}
    values = {name: [makers[name]() for _ in range(rows)] for name in (*names, "temperature")}
    return {name: torch.tensor(column, dtype=dtypes[name], device=DEVICE) for name, column in values.items()}


def part_of(request, rows):
    return {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in request.items()}


def sorted_set(row, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0):
    """``kept_sets`` of one row ``[1, V]``, for every value that a filter may have."""
    top_k, min_p = int(top_k) if top_k > 0 else row.shape[1], float(min_p)
    if min_p == 1:  # only the peak's copies are as likely as the peak; the oracle would call that undecided
        top_k, min_p = min(top_k, int((row == row.amax()).sum())), 0.0
    return kept_sets(row, top_k=top_k, top_p=float(top_p), min_p=min_p or None, temperature=float(temperature))


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def check_sets(logits, request, about):
    """Kept sets against the oracle's and the specification's; returns how many rows are clear, and so were compared."""
    out = nl.filter_logits(logits, impl="hopper", **request)
    keep = out > -INF
    assert torch.equal(bits(out), bits(logits.masked_fill(~keep, -INF))), about
    order, counts = count_sorted(logits.float(), make_rows(nl.SamplingParams(**request), *logits.shape, DEVICE, noise=False))
    # Whatever the rounding at a boundary, what is kept is a prefix of the contract's order.
    prefix = torch.arange(logits.shape[1], device=DEVICE) < keep.sum(-1, keepdim=True)
    assert torch.equal(keep.gather(1, order), prefix), about
    assert prefix[:, 0].all(), about
    sets = [sorted_set(logits[row : row + 1], **part_of(request, row)) for row in range(len(logits))]
    want, clear = (torch.cat(part) for part in zip(*sets, strict=True))
    wrong = clear & ((keep != want).any(-1) | (keep.sum(-1) != counts))
    listed = [(row, part_of(request, row)) for row in wrong.nonzero().flatten().tolist()]
    assert not listed, f"{about}: other sets than the sort's for {listed}"
    return int(clear.sum())


def check_families(families, batch, vocab, dtype, turns):
    """Every mode, ``turns`` times with one request for all rows and with one a row; most rows are clear."""
    compared = 0
    for family in families:
        about = f"{family} {[batch, vocab]} {dtype}"
        logits, draw = rows_of(family, batch, vocab, dtype, seed=batch), random.Random(about)
        requests = [request_of(names, draw, vocab, rows) for names in MODES for rows in (0, batch) for _ in range(turns)]
        compared += sum(check_sets(logits, request, about) for request in requests)
    assert compared > 0.9 * len(families) * 2 * len(MODES) * turns * batch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(12, 33), (12, 1_000), (12, 5_000), (12, 20_000), (8, 151_936), (9, 151_936), (2, 1 << 20)])
def test_sets_equal_the_sort(shape, dtype):
    """Of 36,180 rows in all, so more than 32,000 are compared."""
    check_families(MADE, *shape, dtype, turns=2)


def test_sets_of_a_trained_model_equal_the_sort():
    try:
        check_families(["smollm2"], 32, 49_152, torch.bfloat16, turns=1)
    except UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("vocab", [1, 33, 1_000, 20_001])
@pytest.mark.parametrize("config", LAUNCHES + [FilterConfig(8, search=search) for search in SEARCHES], ids=str)
def test_sets_equal_the_sort_in_every_launch_and_search(config, vocab, force):
    """Also where most blocks of a cluster have no logits at all."""
    force(config)
    check_families(MADE, 4, vocab, torch.float32, turns=1)


def test_copies_that_are_all_kept_are_seen(force):
    """The control of the tests above: without the rule for copies of the boundary value the comparison fails."""
    force(FilterConfig(8, search=SearchConfig(DUPLICATES=0)))
    with pytest.raises(AssertionError, match=r"^ties .* other sets"):
        check_families(["ties"], 4, 20_001, torch.float32, turns=1)


@pytest.mark.parametrize("mode", [None, False, "processed"], ids=["set", "token", "logprobs"])
@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 20_000), (torch.bfloat16, 20_001)], ids=str)
def test_a_row_has_the_same_bits_in_every_batch_slot_launch_and_run(mode, dtype, vocab, force):
    """Rows of an odd V change their alignment with the slot."""
    logits, request = mixed(65, vocab, dtype), request_of(MODES[-1], random.Random(vocab), vocab, 65)
    keys = {"seed": torch.arange(65, device=DEVICE), "position": torch.arange(65, device=DEVICE) * 2**31}

    def run(rows):
        if mode is None:
            return [bits(nl.filter_logits(logits[rows], impl="hopper", **part_of(request, rows)))]
        drawn = nl.sample_logits(logits[rows], **part_of(request | keys, rows), logprobs=mode, impl="hopper")
        return [bits(part) for part in drawn if part is not None]

    want = [torch.cat(parts) for parts in zip(*(run(slice(row, row + 1)) for row in range(65)), strict=True)]
    for config in LAUNCHES:
        force(config)
        for batch in (1, 3, 8, 9, 64, 65):
            slots = torch.arange(batch, device=DEVICE)
            for rows in ((7 * slots + batch) % 65, 0 * slots + batch % 9):  # all different; one in all slots
                for got in (run(rows), run(rows)):
                    assert all(torch.equal(a, b[rows]) for a, b in zip(got, want, strict=True)), (config, batch)


@pytest.mark.parametrize("vocab", [4_999, 20_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_read_and_written_where_they_lie(vocab, dtype):
    """Any pitch and offset, the output a part of something larger or the input itself; nothing else changes."""
    rows = mixed(9, vocab, dtype)
    request = {"top_k": 700, "top_p": 0.9, "temperature": 2.0}
    keep = nl.filter_logits(rows, impl="torch", **request) > -INF
    aligned = -(-vocab // 64) * 64 + 64
    layouts = ((0, aligned), (8, aligned), (1, aligned), (0, vocab), (3, aligned + 1))

    def place(layout, values):
        offset, pitch = layout
        whole = torch.full((18, pitch), 100.0, dtype=dtype, device=DEVICE)
        whole[::2, offset : offset + vocab] = values
        return whole, whole[::2, offset : offset + vocab]

    for source in layouts:
        given, logits = place(source, rows)
        for target in layouts:
            for mask_value in (-INF, -1e4):
                whole, out = place(target, 5.0)
                assert nl.filter_logits(logits, out=out, mask_value=mask_value, impl="hopper", **request) is out
                assert torch.equal(whole, place(target, rows.masked_fill(~keep, mask_value))[0]), (source, target)
        assert torch.equal(given, place(source, rows)[0]), source
        nl.filter_logits(logits, out=logits, mask_value=-1e4, impl="hopper", **request)
        assert torch.equal(given, place(source, rows.masked_fill(~keep, -1e4))[0]), source


@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 5_000), (torch.bfloat16, 20_001)], ids=str)
def test_invalid_rows_leave_their_neighbours_alone(dtype, vocab):
    logits, seed = mixed(28, vocab, dtype), torch.arange(28, device=DEVICE)
    request = request_of(MODES[-1], random.Random(vocab), vocab, 28)
    impossible = {"temperature": (NAN, -1.0, INF), "top_k": (-2,), "top_p": (NAN, 1.5, -0.5), "min_p": (NAN, 1.5)}
    for i, (name, value) in enumerate((name, value) for name, values in impossible.items() for value in values):
        request[name][2 * i + 1] = value
    logits[19, 0] = logits[21, vocab // 2] = logits[23, -1] = NAN
    logits[25], logits[27] = -INF, NAN

    def run(rows):
        asked = part_of(request, rows)
        drawn = nl.sample_logits(logits[rows], **asked, seed=seed[rows], logprobs="processed", impl="hopper")
        plain = nl.sample_logits(logits[rows], **asked, seed=seed[rows], impl="hopper").tokens
        return [nl.filter_logits(logits[rows], mask_value=-1e4, impl="hopper", **asked), plain, *drawn[:2], drawn.log_mass]

    out, plain, tokens, *numbers = every = run(slice(None))
    assert torch.equal(out[1::2], torch.full_like(out[1::2], -1e4))
    assert plain[1::2].tolist() == tokens[1::2].tolist() == [-1] * 14
    assert all(part[1::2].isnan().all() for part in numbers)
    for row in range(0, 28, 2):
        alone = slice(row, row + 1)
        assert all(torch.equal(bits(got[alone]), bits(want)) for got, want in zip(every, run(alone), strict=True)), row


@pytest.mark.parametrize("vocab", [5_000, 20_001])
def test_infinite_logits_win(vocab):
    logits = mixed(9, vocab, torch.float32)
    logits[:, [vocab - 2, 77]] = INF
    one, both = [{"top_k": 1}, {"top_p": 0.4}], [{"top_k": 2}, {"min_p": 0.5}, {"top_k": 40, "top_p": 0.9}]
    for request in one + both:
        kept = (nl.filter_logits(logits, impl="hopper", **request) > -INF).nonzero()[:, 1]
        assert kept.tolist() == ([77] if request in one else [77, vocab - 2]) * 9
        for mode in (False, "processed"):
            drawn = nl.sample_logits(logits, seed=1, logprobs=mode, impl="hopper", **request)
            assert drawn.tokens.tolist() == [77] * 9
        assert (drawn.logprobs.tolist(), drawn.log_mass.tolist()) == ([0.0] * 9, [INF] * 9)


def check_draws(draw, logits, params, mode):
    """``draw()`` against the reference's draws from ``logits``: tokens, unless the best scores are too close, and numbers."""
    torch.manual_seed(5)
    got = draw()
    torch.manual_seed(5)
    want = nl.sample_logits(logits, params, logprobs=mode, impl="reference")
    differ = got.tokens != want.tokens
    if differ.any():  # the kernel's logarithms are approximate
        torch.manual_seed(5)
        rows = make_rows(params, *logits.shape, DEVICE)
        score = scores(transform(logits.float(), rows, 0, logits.shape[1]), rows, 0, 0)
        best, other = (score.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1) for tokens in (want.tokens, got.tokens))
        size = torch.maximum(best.abs(), torch.as_tensor(rows.temperature32, device=DEVICE))
        assert ((best - other).abs() <= 1e-5 * size)[differ].all(), (best[differ], other[differ])
    assert differ.sum() <= 2
    for a, b in zip(got[1:], want[1:], strict=True):
        if a is not None or b is not None:
            torch.testing.assert_close(a[~differ], b[~differ], rtol=1e-6, atol=2e-5)


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
def test_draws_are_the_references(vocab, dtype, mode):
    logits, draw = mixed(27, vocab, dtype), random.Random(vocab)
    requests = [request_with_keys(names, draw, vocab, 27, "given") for names in MODES]
    requests += [request_with_keys(MODES[-1], draw, vocab, 27, seeds) for seeds in ("some", "none", "unsigned")]
    requests += [nl.SamplingParams(**one, temperature=0.7, seed=7) for one in ({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1})]
    for params in (*requests, nl.SamplingParams(top_k=50, top_p=0.95, seed=torch.arange(27, device=DEVICE))):
        check_draws(lambda p=params: nl.sample_logits(logits, p, logprobs=mode, impl="hopper"), logits, params, mode)


@pytest.mark.parametrize("seeds", ["given", "some", "none"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_draws_under_a_bias_and_a_mask_are_the_references(seeds, dtype, monkeypatch):
    """They are made for a few rows at a time."""
    vocab = 20_001
    monkeypatch.setattr(filtered, "SCRATCH_BYTES", vocab * 8 * 5)
    logits, draw, generator = mixed(27, vocab, dtype), random.Random(3), torch.Generator().manual_seed(3)
    ids = torch.randint(-1, vocab, (27, 40), generator=generator).to(DEVICE)
    dense = torch.randn(27, vocab, generator=generator).to(DEVICE)
    allowed = torch.randint(-(2**31), 2**31, (27, 626), generator=generator).to(torch.int32).to(DEVICE)
    extras = [{"logit_bias": bias} for bias in (dense, dense[0].bfloat16(), (ids, ids.cos()))]
    for extra in (*extras, {"allowed_tokens": allowed}, {"logit_bias": dense, "allowed_tokens": allowed[0]}):
        params = nl.SamplingParams(**{**vars(request_with_keys(MODES[-1], draw, vocab, 27, seeds)), **extra})
        check_draws(lambda p=params: nl.sample_logits(logits, p, logprobs=True, impl="hopper"), logits, params, True)


@pytest.mark.parametrize("seeds", ["given", "some", "none"])
def test_filtered_draws_from_hidden_states_are_the_references(seeds):
    """Through an identity: row b's logits are column b % 16 of the weight, exactly."""
    weight = mixed(16, 20_001, torch.bfloat16).clamp(min=-3e4).T.contiguous()
    rows = torch.arange(40, device=DEVICE) % 16
    hidden, logits = torch.eye(16, dtype=torch.bfloat16, device=DEVICE)[rows], weight.T.float()[rows]
    for names in MODES:
        params = request_with_keys(names, random.Random(names[0]), 20_001, 40, seeds)
        check_draws(lambda p=params: nl.sample(hidden, weight, **vars(p), logprobs=True, impl="hopper"), logits, params, True)


def test_nothing_synchronises_and_a_replay_follows_its_inputs():
    logits, seed = mixed(9, 20_000, torch.bfloat16), torch.arange(9, device=DEVICE)
    request = request_of(MODES[-1], random.Random(0), 20_000, 9)

    def call():
        plain = nl.sample_logits(logits, seed=seed, impl="hopper", **request).tokens
        drawn = nl.sample_logits(logits, seed=seed, logprobs="processed", impl="hopper", **request)
        scalars = nl.sample_logits(logits, top_k=50, top_p=0.9, seed=3, impl="hopper").tokens
        return [nl.filter_logits(logits, impl="hopper", **request), plain, scalars, *drawn[:2], drawn.log_mass]

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out = call()
    for turn in range(1, 4):
        logits.copy_(mixed(9, 20_000, torch.bfloat16, seed=turn).flip(0))
        seed += 9
        for name, value in request_of(MODES[-1], random.Random(turn), 20_000, 9).items():
            request[name].copy_(value)
        graph.replay()
        assert all(torch.equal(bits(got), bits(want)) for got, want in zip(out, call(), strict=True))


def test_compiled_filters_and_draws_are_the_eager_ones():
    def step(x, keys, p):
        drawn = nl.sample_logits(x * 2, seed=keys, top_k=50, top_p=p, logprobs=True, impl="hopper")
        return nl.filter_logits(x * 2, top_k=900, top_p=p, impl="hopper"), drawn.tokens, drawn.logprobs, drawn.log_mass

    inputs = (mixed(9, 20_000, torch.bfloat16) / 2, torch.arange(9, device=DEVICE), torch.arange(1, 10, device=DEVICE) / 10)
    for got, want in zip(torch.compile(step, fullgraph=True)(*inputs), step(*inputs), strict=True):
        assert torch.equal(bits(got), bits(want))


FLAT = [(4_096, {"top_p": 0.5}, 2_048), (4_096, {"top_k": 5}, 5), (151_936, {"top_p": 0.5}, 75_968)]
FLAT += [(1 << 22, {"top_p": 0.5}, 1 << 21), (1 << 22, {"top_k": 3_000_001}, 3_000_001)]


@pytest.mark.parametrize(("vocab", "request_", "count"), FLAT, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_of_equal_logits_the_first_are_kept(vocab, request_, count, dtype):
    """Up to the largest V, whose masses sum to 2^62 units; a zero's sign counts for nothing, and stays."""
    zeros = torch.zeros(3, vocab, dtype=dtype, device=DEVICE)
    zeros[1, ::3], zeros[2] = -0.0, 1.5
    out = nl.filter_logits(zeros, impl="hopper", **request_)
    assert torch.equal(bits(out[:, :count]), bits(zeros[:, :count]))
    assert (out[:, count:] == -INF).all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("config", LAUNCHES, ids=str)
def test_copies_of_the_boundary_stay_by_id(config, dtype, force):
    """Copies spread over all blocks, fewer and more than a list holds; what is below them has no mass."""
    vocab, cases = 20_000, []  # copies, ids above them, k, p, min-p, how many are kept
    for copies in (2, 300, 512, 513, 600, 5_000):
        cases += [(copies, above, above + k, 1.0, 0.0, above + k) for above in (0, 10) for k in (1, copies // 2, copies)]
        for k, left in ((0, copies), (copies // 2, copies // 2), (vocab - 1, copies)):
            cases += [(copies, 0, k, 0.5, min_p, -(-left // 2)) for min_p in (0.0, 0.5, 1.0)] + [(copies, 0, k, 1.0, 0.5, left)]
    logits = torch.randn(len(cases), vocab, generator=torch.Generator().manual_seed(2)).round() - 60
    want = torch.zeros_like(logits, dtype=torch.bool)
    for row, (copies, above, *_, count) in enumerate(cases):
        ids, top = torch.arange(copies) * (vocab // copies) + row % 2, torch.arange(above) * 1_600 + 2
        logits[row, ids], logits[row, top] = 1.0, 2.0
        want[row, logits[row].sort(descending=True, stable=True).indices[:count]] = True
    k, p, min_p = (torch.tensor(column, device=DEVICE) for column in list(zip(*cases, strict=True))[2:5])
    force(config)
    out = nl.filter_logits(logits.to(DEVICE, dtype), top_k=k, top_p=p, min_p=min_p, impl="hopper")
    wrong = ((out > -INF) != want.to(DEVICE)).any(-1).nonzero().flatten().tolist()
    assert not wrong, [cases[row] for row in wrong]


@pytest.mark.parametrize("vocab", [151_936, 1 << 22])
def test_a_tail_of_less_than_a_millionth_is_cut_where_p_says(vocab):
    """A peak, and copies of a logit so far below that each has a few units of mass, or half of one, or none."""
    logits = torch.tensor([-20.0, -24.0, -27.5, -28.0, -28.35, -28.45, -29.0, -30.0], device=DEVICE)[:, None].repeat(1, vocab)
    logits[:, vocab // 3] = 0.0
    for tail in (1e-5, 2.2e-6, 1e-6, 1e-7, 7.8e-8, 1e-9, 1e-12):
        assert torch.equal(*(nl.filter_logits(logits, top_p=1 - tail, impl=impl) for impl in ("hopper", "torch"))), tail


def test_the_last_rows_of_a_tensor_past_2_31_elements():
    logits = torch.empty(15_000, 151_936, dtype=torch.bfloat16, device=DEVICE)
    logits.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    seed, rows = torch.arange(15_000, device=DEVICE), torch.tensor([0, 14_133, 14_134, 14_135, 14_998, 14_999], device=DEVICE)
    few, request = logits[rows], {"top_k": 5_000, "top_p": 0.5}
    want = nl.filter_logits(few, impl="torch", **request)
    tokens = nl.sample_logits(logits, seed=seed, impl="hopper", **request).tokens[rows]
    assert torch.equal(tokens, nl.sample_logits(few, seed=rows, impl="hopper", **request).tokens)
    assert torch.equal(nl.filter_logits(logits, out=logits, impl="hopper", **request)[rows], want)
