"""What the plugins do on the host at each step: nothing a row, and nothing twice, while the same requests decode.

Engines are stand-ins here, and the draw is a stub: what is counted is the work around it.
"""

import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nologits as nl
from nologits import ops
from nologits.integrations.eligibility import Request
from nologits.integrations.plans import Planner
from nologits.integrations.rows import Batch, Keys, Positions, make_row
from nologits.integrations.vllm import heads, plugin, runner_v1, runner_v2
from nologits.integrations.vllm.session import Session
from nologits.params import make_rows
from nologits.types import Samples

V, D = 997, 8
CPU = torch.device("cpu")
PROMPT = 5


class Params(SimpleNamespace):
    """A vllm.SamplingParams."""

    def __init__(self, **given):
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "min_tokens": 0, "repetition_penalty": 1.0}
        for name in ("presence_penalty", "frequency_penalty"):
            neutral[name] = 0.0
        for name in (
            "logit_bias", "allowed_token_ids", "structured_outputs", "logprobs", "bad_words_token_ids", "logprob_token_ids",
            "thinking_token_budget",
        ):  # fmt: skip
            neutral[name] = None
        super().__init__(temperature=0.6, **{**neutral, **given})


class Layer:
    """The logits layer of a model under the plugin's hook."""

    def __init__(self):
        self.lm_head = SimpleNamespace(weight=torch.zeros(V, D))

    def compute_logits(self, hidden):
        heads._local.capture(heads.Call(self, self.lm_head, hidden, None))
        return heads.NoLogits()


def session():
    made = Session.__new__(Session)
    made.device, made.logprobs_mode, made.reason = CPU, "raw_logprobs", ""
    made._keys, made._planner = Keys(0), Planner(CPU)
    head = nl.LMHead(torch.zeros(V, D))
    made.site = SimpleNamespace(vocab_size=V, split=False, head=lambda call: head)
    return made


class EngineV2:
    """As much of a Model Runner V2 as the hook sees. ``rows`` are slots, in the order of the batch."""

    def __init__(self, modes, hidden=None):
        self.sampler = SimpleNamespace(_nologits_params={}, _nologits_added=0)
        self.model = Layer()
        count = len(modes)
        lengths = np.zeros(4 * count, dtype=np.int32)
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=lengths), prefill_len=SimpleNamespace(gpu=None))
        self.rows, self.length, self.due = list(range(count)), PROMPT, runner_v2._Due(self, session())
        self.hidden = torch.zeros(count, D) if hidden is None else hidden
        for slot, mode in enumerate(modes):
            self.add(slot, mode)

    def add(self, slot, mode):
        self.sampler._nologits_params[slot] = Params(**mode)
        self.sampler._nologits_added += 1
        self.req_states.prompt_len.np[slot] = PROMPT

    def step(self, reading=False):
        count = len(self.rows)
        batch = SimpleNamespace(
            num_reqs=count, num_tokens=count, idx_mapping_np=np.array(self.rows), idx_mapping=None, cu_num_logits=None,
            seq_lens=torch.zeros(count, dtype=torch.int32), logits_indices=torch.arange(count), req_ids=self.rows,
            seq_lens_cpu_upper_bound=torch.full((count + 3,), self.length, dtype=torch.int32),
            is_prefilling_np=np.full(count, reading),
        )  # fmt: skip
        self.length += 1
        return lambda: self.due.sample(self.hidden, batch, None, None)


class EngineV1:
    """As much of a Model Runner V1 as the hook sees."""

    def __init__(self, modes):
        self.requests = {f"r{place}": SimpleNamespace(sampling_params=Params(**mode)) for place, mode in enumerate(modes)}
        self.rows, self.length, self.due, self.model = list(self.requests), PROMPT, runner_v1._Due(session()), Layer()
        self.new = True

    def step(self):
        count = len(self.rows)
        self.input_batch = SimpleNamespace(
            req_ids=self.rows, num_reqs=count, num_tokens_no_spec=np.full(count + 2, self.length),
            num_prompt_tokens=np.full(count + 2, PROMPT),
        )  # fmt: skip
        self.length += 1
        scheduled, self.new = SimpleNamespace(scheduled_new_reqs=[None] if self.new else []), False
        hidden = torch.zeros(count, D)

        def run():
            self.due.begin(scheduled)
            self.due.open(self, heads.Call(None, self.model.lm_head, hidden, None))
            return self.due.sample(self, heads.NoLogits(), None, None)

        return run


ENGINES = {"V1": EngineV1, "V2": EngineV2}
MODES = {
    "alike": [{}],
    "filters": [{"top_k": 20, "top_p": 0.95}],
    "mixed": [{}, {"top_k": 20, "seed": 3}, {"min_p": 0.05}, {"logit_bias": {4: 1.0}}],
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Records what is drawn; and vLLM's modules, as far as results are made of them."""

    def module(name, **parts):
        made = ModuleType(name)
        vars(made).update(parts)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample"):
        module(name)
    module("vllm.v1.outputs", SamplerOutput=SimpleNamespace, LogprobsTensors=tuple)
    module("vllm.v1.worker.gpu.sample.output", SamplerOutput=SimpleNamespace)
    module("vllm.v1.worker.gpu.input_batch", get_num_sampled_and_rejected=lambda *given: ("vLLM's", "own"))
    drawn = []

    def run_hidden(hidden, head, rows, *rest):
        drawn.append((hidden, rows))
        return Samples(torch.empty(len(hidden), 1, dtype=torch.int64))

    monkeypatch.setattr(ops, "run_hidden", run_hidden)
    plugin.reset_counters()
    yield drawn
    assert plugin.counters()["errors"] == 0
    plugin.reset_counters()


class Ops(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def ops_of(run):
    with Ops() as counted:
        run()
    return counted.counts


def calls_of(run):
    """How many functions the host calls, Python's and C's."""
    count = Counter()
    sys.setprofile(lambda frame, event, argument: count.update([event]) if event in ("call", "c_call") else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count.total()


def steady(kind, mode, batch):
    """An engine of that many requests at its fifth step, and the entries that its plans were made of."""
    asked = MODES[mode]
    engine = ENGINES[kind]([asked[place % len(asked)] for place in range(batch)])
    planned, plan = [], engine.due.session.plan
    engine.due.session.plan = lambda entries: planned.append(entries) or plan(entries)
    for _ in range(4):
        engine.step()()
    return engine, planned


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("kind", list(ENGINES))
def test_a_steady_step_does_nothing_a_row(kind, mode, stand_ins):
    counted = {}
    for batch in (4, 64):
        engine, planned = steady(kind, mode, batch)
        assert len(planned) == 1
        first = stand_ins[-1][1]
        # Views cost no kernel; of the others one adds 1 to the positions, and one makes -1 an id. V1 wants int32.
        work = ops_of(engine.step())
        views = ("squeeze", "slice", "detach", "unsqueeze", "aten.empty", "alias")
        kernels = {name: count for name, count in work.items() if not any(view in name for view in views)}
        assert kernels == {"aten.add.Tensor": 1, "aten.clamp.default": 1} | (
            {"aten._to_copy.default": 1} if kind == "V1" else {}
        )
        counted[batch] = (work, calls_of(engine.step()))
        last = stand_ins[-1][1]
        assert last.position.tolist() == [5] * batch
        assert all(mine is other for name, mine, other in zip(last._fields, last, first, strict=True) if name != "position")
        assert len(planned) == 1
    assert counted[4] == counted[64]
    assert counted[4][1] < 250


@pytest.mark.parametrize("kind", list(ENGINES))
def test_a_batch_that_changes_is_planned_again(kind, stand_ins):
    """The control: order, requests that leave, and a new one in the place of another that looks the same."""
    engine, planned = steady(kind, "mixed", 8)
    keys = stand_ins[-1][1].seed
    calls = calls_of(engine.step())
    engine.rows = engine.rows[::-1]
    assert calls_of(engine.step()) > calls + 8
    assert torch.equal(stand_ins[-1][1].seed, keys.flip(0))
    engine.rows = engine.rows[1:]
    engine.step()()
    assert torch.equal(stand_ins[-1][1].seed, keys.flip(0)[1:])
    if kind == "V2":
        engine.add(engine.rows[0], {})
        engine.req_states.prompt_len.np[engine.rows[0]] = PROMPT + 2
    else:
        engine.requests[engine.rows[0]], engine.new = SimpleNamespace(sampling_params=Params()), True
    engine.step()()
    seeds, position = stand_ins[-1][1].seed, stand_ins[-1][1].position.tolist()
    assert seeds[0] not in keys
    assert torch.equal(seeds[1:], keys.flip(0)[2:])
    assert position == [5 if kind == "V2" else 7] + [7] * 6
    assert len(planned) == 4


def test_what_vllm_counts_by_itself(stand_ins):
    """The tokens that rows get while a prompt is read; else they are known."""
    engine, _ = steady("V2", "alike", 3)
    output, sampled, rejected = engine.step()()
    assert sampled.tolist() == [1, 1, 1]
    assert rejected.tolist() == [0, 0, 0]
    assert (output.num_sampled, output.num_rejected) == (sampled, rejected)
    assert engine.step(reading=True)()[1:] == ("vLLM's", "own")
    assert engine.step()()[1] is sampled


def test_hidden_states_are_read_in_place(stand_ins):
    """Where each row has one token; else they are gathered."""
    engine = EngineV2([{}] * 3, hidden=torch.arange(5.0 * D).view(5, D))
    engine.step()()
    assert stand_ins[-1][0].data_ptr() == engine.hidden.data_ptr()
    run = engine.step()
    batch = run.__closure__[0].cell_contents
    batch.num_tokens, batch.logits_indices = 5, torch.tensor([1, 2, 4])
    run()
    assert torch.equal(stand_ins[-1][0], engine.hidden[[1, 2, 4]])
    engine.pcp_manager = object()
    engine.step()()
    assert stand_ins[-1][0].data_ptr() != engine.hidden.data_ptr()


def test_positions():
    """As the host has them, whatever they do; the device adds one where that is all, and no old tensor is written to."""
    positions = Positions(CPU)
    told = [[0, 5], [1, 6], [2, 7], [2, 7], [3, 7], [4, 8], [0, 0], [2**40, 3]]
    work = []
    tensors = []
    for now in told:
        host = np.array(now)
        work.append(dict(ops_of(lambda host=host: tensors.append(positions.at(host)))))
        host += 100  # the host's array is its own
    assert [tensor.tolist() for tensor in tensors] == told
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    assert [work[step] for step in (1, 2, 3, 5)] == [{"aten.add.Tensor": 1}] * 2 + [{}] + [{"aten.add.Tensor": 1}]
    assert tensors[3] is tensors[2]


ASKED = [
    Request(temperature=0.0, logprobs=2, top_k=3),
    Request(temperature=0.7, top_k=20, seed=3),
    Request(temperature=1.2, top_p=0.8, seed=-4),
    Request(min_p=0.1, logit_bias={5: 2.0, 900: -1.5}),
    Request(allowed_tokens=[1, 31, 32, 63, 996]),
]


@pytest.mark.parametrize("some", [slice(0, 5), slice(0, 1), slice(1, 2), slice(1, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_are_kept_are_those_made_anew(some, masked):
    keys = Keys(0)
    rows = [make_row(request, V, keys) for request in ASKED[some]]
    kept, count = Batch(rows, V, CPU), len(rows)
    mask = {0: np.array([0b1011], dtype=np.int32)}
    for step in range(3):
        positions, grammar = np.arange(count) + step, mask if masked and step == 1 else None
        anew = make_rows(Batch(rows, V, CPU).params(positions, grammar), count, V, CPU)
        for name, mine, other in zip(anew._fields, kept.drawn(positions, grammar), anew, strict=True):
            assert torch.equal(mine, other) if isinstance(other, torch.Tensor) else mine == other, name
    assert kept.told(True).temperature is kept.told(True).temperature
