"""A head's screen as its users meet it: what is checked, when it is stale, which draws use it.

The kernels are not here; what stands for them notes how it was called (``tests/test_screen_emulated.py`` has the kernels'
tokens, ``tests/test_screen_hopper.py`` those of a GPU).
"""

import copy
import gc
import importlib
import sys
import types
from unittest import mock

import pytest
import torch

import nologits as nl
from nologits import live_screen, reference, screened
from nologits.kernels.config import SCREENED_ROWS
from nologits.params import make_rows
from nologits.screen import make_screen, screen_rows
from nologits.sources import HiddenSource
from nologits.testing import screened_draw
from nologits.types import Samples

V, D = 300, 32


def operands(batch=5, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(batch, D, generator=generator), torch.randn(V, D, generator=generator)
    return hidden.to(dtype), weight.to(dtype)


def same(screen, weight):
    return all(torch.equal(one, other) for one, other in zip(screen, make_screen(weight), strict=True))


@pytest.mark.parametrize("value", ["fp8", "int4", True, 8, b"int8"])
def test_another_value_is_an_error(value):
    with pytest.raises(ValueError, match='screen must be None or "int8", got'):
        nl.LMHead(operands()[1], screen=value)


def test_weights_that_cannot_have_one():
    with pytest.raises(ValueError, match=r"unless the weight is float16 or bfloat16, got .int8. for torch\.float32"):
        nl.LMHead(operands(dtype=torch.float32)[1], screen="int8")
    with torch.inference_mode():
        weight = operands()[1]
    with pytest.raises(ValueError, match=r"for a weight made under torch\.inference_mode"):
        nl.LMHead(weight, screen="int8")
    with pytest.raises(ValueError, match="screen must be None with a group: shards have none yet"):
        nl.LMHead(operands()[1], vocab_size=V, group=object(), vocab_start=0, screen="int8")


def test_nothing_is_made_where_nothing_reads_it():
    """On a CPU a head with a screen is a head without."""
    hidden, weight = operands()
    plain, head = nl.LMHead(weight), nl.LMHead(weight, screen="int8")
    assert head.spec.screen.stale
    params = nl.SamplingParams(seed=torch.arange(5))
    for impl in ("auto", "reference", "torch"):
        assert torch.equal(head.sample(hidden, params, impl=impl).tokens, plain.sample(hidden, params, impl=impl).tokens)
    head.refresh()
    plain.refresh()
    assert head.spec.screen.stale
    assert repr(head) == f"{repr(plain)[:-1]}, int8 screen)"


def test_the_copy_leaves_padding_out():
    weight = operands()[1]
    head = nl.LMHead(weight, vocab_size=V - 9, screen="int8")
    assert same(head.spec.screen.fresh(), weight[: V - 9])


WRITES = {
    "in place": lambda weight: weight.mul_(2),
    "one row": lambda weight: weight[7].fill_(1),
    "the base of a view": lambda weight: weight._base.zero_(),
    "copied into": lambda weight: weight.copy_(torch.ones_like(weight)),
    "many tensors": lambda weight: torch._foreach_add_([weight], 1.0),
    "inference mode": lambda weight: weight.add_(1),
}


@pytest.mark.parametrize("how", WRITES)
def test_writes_are_noticed_and_refreshed_in_place(how):
    weight = torch.cat([operands()[1]] * 2)[:V]
    head = nl.LMHead(weight, screen="int8")
    live = head.spec.screen
    first = live.fresh()
    pointers = [part.data_ptr() for part in first]
    assert not live.stale
    assert live.fresh() is first
    with torch.inference_mode(how == "inference mode"):
        WRITES[how](weight)
        assert live.stale
        assert same(live.fresh(), weight)
    assert not live.stale
    assert [part.data_ptr() for part in live.fresh()] == pointers


def test_a_step_of_an_optimizer_is_noticed():
    weight = torch.nn.Parameter(operands()[1])
    head = nl.LMHead(weight, screen="int8")
    head.spec.screen.fresh()
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()
    assert head.spec.screen.stale
    assert same(head.spec.screen.fresh(), weight.detach())


def test_a_screen_made_in_inference_mode_can_be_refreshed_outside():
    weight = operands()[1]
    with torch.inference_mode():
        live = nl.LMHead(weight, screen="int8").spec.screen
        live.fresh()
    weight.mul_(3)
    assert same(live.fresh(), weight)


def test_what_is_not_counted_needs_refresh():
    """The control: torch does not count writes through ``.data``. If it did one day, the docs could say less."""
    weight = operands()[1]
    head = nl.LMHead(weight, screen="int8")
    live = head.spec.screen
    live.fresh()
    weight.data.mul_(-3)
    assert not live.stale
    assert not same(live.fresh(), weight)
    head.refresh()
    assert same(live.fresh(), weight)
    weight.data.mul_(-3)
    live_screen.refresh_all()
    assert same(live.fresh(), weight)


def test_a_capture_never_refreshes(monkeypatch):
    weight = operands()[1]
    live = nl.LMHead(weight, screen="int8").spec.screen
    made = live.fresh()
    monkeypatch.setattr(live_screen, "_capturing", lambda device: True)
    assert live.obstacle == ""
    assert live.fresh() is made
    weight.mul_(2)
    assert "stale" in live.obstacle
    with pytest.raises(RuntimeError, match="refresh must be called outside of a graph's capture"):
        live.refresh()


def test_keys_name_screens_of_one_weight_while_they_live():
    weight = operands()[1]
    head = nl.LMHead(weight, vocab_size=V - 1, screen="int8")
    key = head.spec.screen.key
    assert live_screen.find(key, weight) is head.spec.screen
    assert live_screen.find(key, weight.clone()) is None
    assert live_screen.find(0, weight) is None
    other = copy.deepcopy(head)
    assert other.spec.screen.key != key
    assert live_screen.find(other.spec.screen.key, other.spec.weight) is other.spec.screen
    weight.fill_(5)
    assert same(other.spec.screen.fresh(), other.spec.weight[: V - 1])
    del head
    gc.collect()
    assert live_screen.find(key, weight) is None


@pytest.fixture
def kernels(monkeypatch):
    """Stands for the screened kernels: ``calls`` has their arguments. Tokens are the row numbers of the batch, 10 a row."""
    seen = types.SimpleNamespace(calls=[], left=torch.zeros(0))

    def launch_screened(source, screen, states, rows, config):
        seen.calls.append((source, screen, states, rows, config))
        left = torch.zeros(1 + source.batch, dtype=torch.int32)
        left[0] = left[1] = 1
        return Samples(10 * torch.arange(source.batch)[:, None]), left

    module = types.ModuleType("nologits.kernels.screen_sm90")
    module.launch_rows, module.launch_screened = (lambda hidden: ("rows of", hidden)), launch_screened
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


REASONS = {
    "": {},
    "filters": {"params": {"top_k": 5}},
    "mass": {"processed": True},
    "mass ": {"raw": True},
    "mass  ": {"num_top": 3},
    "one draw": {"num_samples": 2},
    "up to 64": {"batch": 65},
    "scale": {"head": {"scale": -0.5}},
    "no screen": {"head": {"screen": None}},
}


@pytest.mark.parametrize("reason", REASONS)
def test_obstacles_have_names(reason):
    asked = {"batch": 64, "params": {}, "head": {}, "num_samples": 1, "processed": False, "raw": False, "num_top": 0} | REASONS[
        reason
    ]
    hidden, weight = operands(asked["batch"])
    head = nl.LMHead(weight, **{"screen": "int8"} | asked["head"])
    rows = make_rows(nl.SamplingParams(seed=1, **asked["params"]), len(hidden), V, hidden.device)
    flags = [asked[name] for name in ("num_samples", "processed", "raw", "num_top")]
    said = screened.obstacle(HiddenSource(hidden, head.spec), head.spec.screen, rows, *flags)
    assert bool(said) == bool(reason)
    assert reason.strip() in said


def test_greedy_rows_need_no_filters():
    hidden, weight = operands()
    head = nl.LMHead(weight, screen="int8")
    rows = make_rows(nl.SamplingParams(temperature=0.0, top_k=5), 5, V, hidden.device)
    assert not screened.obstacle(HiddenSource(hidden, head.spec), head.spec.screen, rows, 1, False, False, 0)


def test_a_draw_hands_the_fresh_copy_to_the_kernels(kernels):
    hidden, weight = operands()
    head = nl.LMHead(weight, screen="int8")
    rows = make_rows(nl.SamplingParams(seed=1), 5, V, hidden.device)
    source = HiddenSource(torch.randn(D, 5).bfloat16().T, head.spec)
    with screened.counting_left(hidden.device) as left:
        for _ in range(3):
            assert screened.sample(source, head.spec.screen, rows, "config").tokens.tolist() == [[0], [10], [20], [30], [40]]
            weight.mul_(1.5)
    assert left.tolist() == [3]
    screened.sample(source, head.spec.screen, rows, "config")
    assert left.tolist() == [3]
    got, screen, states, asked, config = kernels.calls[-1]
    assert same(screen, weight)
    assert got.hidden.is_contiguous()
    assert torch.equal(got.hidden, source.hidden)
    assert states == ("rows of", got.hidden)
    assert asked is rows
    assert config == "config"


@pytest.mark.parametrize("impl", ["hopper", "torch"])
def test_compiled_graphs_name_the_screen(monkeypatch, impl):
    """A graph draws with the screen of its head, where the implementation has a use for one."""
    hidden, weight = operands()
    head = nl.LMHead(weight, screen="int8")
    used = []

    def sample(source, rows, *rest):
        used.append(source.head.screen)
        return Samples(torch.zeros(source.batch, 1, dtype=torch.int64))

    monkeypatch.setattr(nl.ops, "implementation", lambda impl: sample)
    monkeypatch.setattr(nl.api, "resolve", lambda impl, device: impl)
    want = head.spec.screen if impl == "hopper" else None
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        params = nl.SamplingParams(seed=1)
        step = torch.compile(lambda x, p=params: head.sample(x * 2, p, impl=impl).tokens, fullgraph=True, backend=backend)
        step(hidden)
        assert used.pop() is want
        weight.mul_(2)
        step(hidden)
        assert used.pop() is want


def test_a_graph_that_writes_to_the_weight_draws_from_what_it_wrote(hopper):
    """To a compiler the written weight is another tensor, which has no screen; the next graph refreshes the head's."""
    hidden, weight = operands()
    head, params = nl.LMHead(weight, screen="int8"), nl.SamplingParams(temperature=0.0)
    head.sample(hidden, params)
    torch._dynamo.reset()

    def step(x):
        weight.mul_(-1)
        return head.sample(x, params, impl="hopper").tokens

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        got = compiled(hidden)
        assert torch.equal(got, nl.LMHead(weight).sample(hidden, params, impl="reference").tokens)


def test_screened_draws_pass_opcheck():
    hidden, weight = operands()
    head = nl.LMHead(weight, screen="int8")
    rows = make_rows(nl.SamplingParams(seed=1), 5, V, hidden.device)
    flat = (*nl.ops._flatten_head(head.spec), *nl.ops._flatten(rows), 1, False, False, "torch")
    torch.library.opcheck(torch.ops.nologits.sample_screened.default, (head.spec.screen.key, hidden, *flat))


@pytest.fixture
def hopper(monkeypatch):
    """Draws under ``hopper`` on the CPU: its kernels are stood in for by the specifications. Says which path each draw took."""
    pytest.importorskip("triton")
    importlib.import_module("nologits.fused")  # loaded before, and stays
    how = types.SimpleNamespace(paths=[])

    def launch_screened(source, screen, states, rows, config):
        how.paths.append("screened")
        params = nl.SamplingParams(rows.temperature, seed=rows.seed, position=rows.position)
        drawn = screened_draw(source.hidden, source.head, params, screen, states)
        return Samples(drawn.tokens[:, None]), torch.zeros(1 + source.batch, dtype=torch.int32)

    def launch_draw(source, rows, processed, raw, config, num_top=0):
        how.paths.append("full")
        return reference.sample(source, rows, 1, processed, raw)

    stubs = {f"nologits.kernels.{name}": mock.MagicMock() for name in ("categorical_sm90", "filters_sm90", "screen_sm90")}
    stubs["nologits.kernels.screen_sm90"].launch_rows = screen_rows
    stubs["nologits.kernels.screen_sm90"].launch_screened = launch_screened
    stubs["nologits.kernels.categorical_sm90"].launch_draw = launch_draw
    monkeypatch.setattr(nl, "hopper", None, raising=False)
    monkeypatch.setattr(live_screen, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(live_screen, "LEAST_DEPTH", (0, 0))
    # No more than these names: what torch imports meanwhile must not be forgotten, and imported twice.
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setitem(sys.modules, "nologits.hopper", types.ModuleType("nologits.hopper"))
    del sys.modules["nologits.hopper"]
    importlib.import_module("nologits.hopper")
    monkeypatch.setattr(nl.api, "resolve", lambda impl, device: "hopper" if impl in ("auto", "hopper") else impl)
    return how


REQUESTS = {
    "plain": ({}, {}, "screened"),
    "greedy": ({"temperature": 0.0, "top_p": 0.5}, {}, "screened"),
    "filters": ({"top_k": 9}, {}, "full"),
    "log-probabilities": ({}, {"logprobs": True}, "full"),
    "a list": ({}, {"logprobs": "processed", "top_logprobs": 3}, "full"),
}


@pytest.mark.parametrize("impl", ["auto", "hopper"])
@pytest.mark.parametrize("name", REQUESTS)
def test_draws_take_the_screen_where_it_serves(hopper, name, impl):
    params, asked, path = REQUESTS[name]
    hidden, weight = operands()
    head = nl.LMHead(weight, screen="int8")
    params = nl.SamplingParams(seed=torch.arange(5), **params)
    got = head.sample(hidden, params, impl=impl, **asked)
    assert hopper.paths == [path]
    assert torch.equal(got.tokens, head.sample(hidden, params, impl="reference").tokens)
    assert nl.LMHead(weight).sample(hidden, params, impl=impl, **asked).tokens.equal(got.tokens)
    assert hopper.paths == [path, "full"]
    assert head.spec.screen.stale == (path == "full")


def test_more_rows_take_the_full_path(hopper):
    hidden, weight = operands(SCREENED_ROWS + 1)
    head = nl.LMHead(weight, screen="int8")
    params = nl.SamplingParams(seed=1)
    for rows in (hidden[:-1], hidden):
        assert torch.equal(head.sample(rows, params).tokens, nl.LMHead(weight).sample(rows, params, impl="reference").tokens)
    assert hopper.paths == ["screened", "full"]


def test_auto_reads_a_screen_only_where_that_is_faster(hopper, monkeypatch):
    monkeypatch.setattr(live_screen, "LEAST_DEPTH", (D, D + 1))
    hidden, weight = operands(33)
    head = nl.LMHead(weight, screen="int8")
    params = nl.SamplingParams(seed=1)
    for rows in (hidden[:32], hidden):
        head.sample(rows, params)
    monkeypatch.setattr(live_screen, "LEAST_WEIGHTS", V * D + 1)
    head.sample(hidden[:1], params)
    assert hopper.paths == ["screened", "full", "full"]
    head.sample(hidden, params, impl="hopper")
    assert hopper.paths[3:] == ["screened"]


def test_an_update_takes_effect_at_the_next_draw(hopper, monkeypatch):
    hidden, weight = operands()
    head = nl.LMHead(weight, screen="int8")
    params = nl.SamplingParams(temperature=0.0)

    def draws_right():
        return torch.equal(head.sample(hidden, params).tokens, head.sample(hidden, params, impl="reference").tokens)

    assert draws_right()
    weight.copy_(weight.roll(100, 0))
    assert draws_right()
    weight.data.copy_(weight.roll(100, 0))
    assert not draws_right()  # the control: nobody noticed
    head.refresh()
    assert draws_right()
    monkeypatch.setattr(live_screen, "_capturing", lambda device: True)
    assert draws_right()
    weight.copy_(weight.roll(100, 0))
    assert draws_right()
    assert hopper.paths == ["screened"] * 5 + ["full"]


def test_impossible_parameters_spoil_their_row(hopper):
    hidden, weight = operands()
    head = nl.LMHead(weight, screen="int8")
    params = nl.SamplingParams(temperature=0.0, top_k=torch.tensor([3, -7, 0, 1, 2]))
    assert (head.sample(hidden, params).tokens < 0).tolist() == [False, True, False, False, False]
    assert hopper.paths == ["screened"]


def test_compiled_draws_take_the_screen(hopper):
    hidden, weight = operands()
    head = nl.LMHead(weight, screen="int8")
    torch._dynamo.reset()
    step = torch.compile(lambda x: head.sample(x, nl.SamplingParams(seed=3)).tokens, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(step(hidden), head.sample(hidden, nl.SamplingParams(seed=3), impl="reference").tokens)
        weight.copy_(weight.roll(100, 0))
    assert hopper.paths == ["screened"] * 2


def test_vllms_heads_have_one_where_the_environment_asks(monkeypatch, caplog):
    from nologits.integrations.vllm import heads

    layer = types.SimpleNamespace(scale=0.5, soft_cap=None, org_vocab_size=V - 3)
    weight = operands()[1]

    def make(weight):
        return heads._make(heads.Call(layer, types.SimpleNamespace(weight=weight), operands()[0], None)).spec

    monkeypatch.delenv(heads.SCREEN, raising=False)
    assert make(weight).screen is None
    monkeypatch.setenv(heads.SCREEN, "int8")
    with torch.inference_mode():  # where engines run
        made = weight.clone()
        spec = make(weight)
    assert same(spec.screen.fresh(), weight[: V - 3])
    for other, why in ((weight.float(), "float32"), (made, "made in inference mode")):
        caplog.clear()
        assert make(other).screen is None
        assert f"NOLOGITS_SCREEN=int8 is not used: the head's weight is {why}" in caplog.text
    monkeypatch.setenv(heads.SCREEN, "fp8")
    with pytest.raises(ValueError, match="NOLOGITS_SCREEN must be int8 or not set, got 'fp8'"):
        make(weight)
