"""nologits.integrations.sglang without SGLang: the real hooks around small stand-ins of what they touch.

The stand-ins have the names, attributes and order of calls of SGLang 0.5.23, as read in its source. They prove the plugin's
logic and not its integration: no CUDA graph is captured here (``sglang_job.py`` runs an engine on the CPU, by hand). SGLang's
own hook registry applies the hooks where its source is at hand (``SGLANG_SOURCE``: a folder with ``sglang/`` in it), and a
stand-in of it everywhere.
"""

import dataclasses
import enum
import functools
import importlib.util
import os
import pkgutil
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nologits as nl
from nologits.integrations.sglang import heads, plugin
from nologits.integrations.sglang.heads import LateLogits

B, D, V, PADDED = 6, 16, 157, 160
TOP_K_ALL = 1 << 30
HOOKS = Path(os.environ.get("SGLANG_SOURCE", "/nowhere")) / "sglang/srt/plugins/hook_registry.py"


class ForwardMode(enum.IntEnum):
    EXTEND, DECODE, MIXED, TARGET_VERIFY = 1, 2, 3, 5


@dataclasses.dataclass
class LogitsProcessorOutput:
    next_token_logits: object
    hidden_states: object = None
    auxiliary_device_output: object = "of the step before"


def make_metadata(mode=ForwardMode.DECODE, **changes):
    fields = {"forward_mode": mode, "extend_return_logprob": False, "is_prefill_only": False, "next_token_logits_buffer": None}
    return SimpleNamespace(**{**fields, **changes})


class UnquantizedEmbeddingMethod:
    pass


def make_modules():
    """Fresh classes for each test: hooks change them."""

    class LogitsProcessor(torch.nn.Module):
        def __init__(self, vocab_size=V, logit_scale=None, softcap=None):
            super().__init__()
            self.vocab_size, self.logit_scale, self.final_logit_softcapping = vocab_size, logit_scale, softcap
            self.do_tensor_parallel_all_gather = self.use_attn_tp_group = self.use_tp_lm_head_all_to_all = False
            self.return_full_logits, self.rl_on_policy_target = False, None
            self.matmuls = 0

        def forward(self, input_ids, hidden_states, lm_head, logits_metadata):
            return LogitsProcessorOutput(self._get_logits(hidden_states, lm_head, logits_metadata))

        def _get_logits(self, hidden_states, lm_head, logits_metadata, embedding_bias=None, use_logits_buffer=True):
            self.matmuls += 1
            logits = hidden_states.to(lm_head.weight.dtype) @ lm_head.weight.T
            if self.logit_scale is not None:
                logits.mul_(self.logit_scale)
            logits = logits[:, : self.vocab_size].float()
            if self.final_logit_softcapping:
                logits = self.final_logit_softcapping * torch.tanh(logits / self.final_logit_softcapping)
            buffer = logits_metadata.next_token_logits_buffer if use_logits_buffer else None
            return buffer.copy_(logits) if buffer is not None and buffer.shape == logits.shape else logits

    class Sampler(torch.nn.Module):
        """Takes the likeliest token, so that a row drawn here is told from a drawn one."""

        def forward(self, logits_output, sampling_info):
            assert isinstance(logits_output.next_token_logits, torch.Tensor)
            return logits_output.next_token_logits.argmax(-1).to(torch.int32)

    class ForwardBatch:
        @classmethod
        def init_new(cls, batch, model_runner, *, return_hidden_states_before_norm):
            self = cls()
            self.sampling_info, self.seq_lens_cpu = batch.sampling_info, batch.seq_lens_cpu
            batch.sampling_info.grammars = [r.grammar for r in batch.reqs] if any(r.grammar for r in batch.reqs) else None
            return self

    class ModelRunner:
        is_draft_worker, watermark_state, sampling_observer = False, None, None
        ngram_embedding_manager = SimpleNamespace(enabled=False)

        def __init__(self):
            self.sampler = Sampler()

        def sample(self, logits_output, forward_batch):
            logits_output.auxiliary_device_output = None
            info = forward_batch.sampling_info
            info.update_regex_vocab_mask()
            info.apply_logits_bias(logits_output.next_token_logits)
            info.grammar_mask = None
            return self.sampler(logits_output, info)

    class Scheduler:
        def get_internal_state(self, recv_req):
            return SimpleNamespace(internal_state={"random_seed": 1})

    flag = SimpleNamespace(get=lambda: False)
    bags = {
        "get_parallel": SimpleNamespace(tp_size=1, pp_size=1, dp_rank=None),
        "get_exec": SimpleNamespace(
            overlap=SimpleNamespace(enable_two_batch_overlap=False),
            deterministic=SimpleNamespace(enable_deterministic_inference=False),
            features=SimpleNamespace(enable_watermark=False),
        ),
        "get_spec": SimpleNamespace(speculative_algorithm=None),
        "get_lora": SimpleNamespace(enable_lora=None),
        "get_disagg": SimpleNamespace(disaggregation_mode="null", enable_pdmux=False),
        "get_flags": SimpleNamespace(capture=SimpleNamespace(enable_torch_compile=False)),
        "get_device": SimpleNamespace(random_seed=7),
    }
    return {
        "sglang.version": {"__version__": plugin.READ},
        "sglang.srt.environ": {
            "envs": SimpleNamespace(SGLANG_ENABLE_NAN_LOGITS_CHECK=flag, SGLANG_ENABLE_ASYNC_ASSERT=flag)
        },
        "sglang.srt.runtime_context": {
            name: functools.partial(lambda bag: bag, bag) for name, bag in bags.items()
        },
        "sglang.srt.layers.logits_processor": {"LogitsProcessor": LogitsProcessor},
        "sglang.srt.layers.sampler": {"Sampler": Sampler},
        "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": ForwardBatch},
        "sglang.srt.model_executor.model_runner": {"ModelRunner": ModelRunner},
        "sglang.srt.managers.scheduler": {"Scheduler": Scheduler},
    }  # fmt: skip


class HookType(enum.Enum):
    AFTER, AROUND = "after", "around"


def make_registry():
    """A stand-in of ``HookRegistry``: hooks get what SGLang's wrappers give them."""

    class HookRegistry:
        hooks: list = []  # noqa: RUF012

        @classmethod
        def register(cls, target, hook, hook_type=HookType.AFTER):
            cls.hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls):
            for target, hook, kind in cls.hooks:
                place, name = target.rsplit(".", 1)
                owner = pkgutil.resolve_name(place)
                raw = vars(owner)[name]
                is_class_method = isinstance(raw, classmethod)
                wrapped = wrap(raw.__func__ if is_class_method else raw, hook, kind)
                setattr(owner, name, classmethod(wrapped) if is_class_method else wrapped)

    def wrap(original, hook, kind):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            if kind is HookType.AROUND:
                return hook(original, *args, **kwargs)
            result = original(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            return result if changed is None else changed

        return wrapper

    HookRegistry.hooks = []
    return {"HookRegistry": HookRegistry, "HookType": HookType}


def install_modules(monkeypatch, modules):
    made = {}
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in made:
                made[path] = types.ModuleType(path)
                made[path].__path__ = []
                monkeypatch.setitem(sys.modules, path, made[path])
                if end > 1:
                    setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[path])
        vars(made[name]).update(content)
    return made


@pytest.fixture(params=["stand-in", "SGLang's"])
def engine(request, monkeypatch):
    """SGLang's stand-ins with a registry that has no hooks yet."""
    modules = make_modules()
    if request.param == "stand-in":
        modules["sglang.srt.plugins.hook_registry"] = make_registry()
    elif not HOOKS.is_file():
        pytest.skip("SGLANG_SOURCE has no source of SGLang")
    made = install_modules(monkeypatch, modules)
    if request.param != "stand-in":
        install_modules(monkeypatch, {"sglang.srt.plugins": {}})
        spec = importlib.util.spec_from_file_location("sglang.srt.plugins.hook_registry", HOOKS)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        sys.modules["sglang.srt.plugins"].hook_registry = module
        made = {**made, spec.name: module}
        # The parents were replaced by those of the second call.
        for path, content in made.items():
            monkeypatch.setitem(sys.modules, path, content)
        made["sglang.srt"].plugins = sys.modules["sglang.srt.plugins"]
    monkeypatch.setenv(plugin.SWITCH, "1")
    monkeypatch.setattr(plugin, "_status", plugin.Status(False, ""))
    monkeypatch.setattr(heads, "_refusal", "")
    plugin.reset_counters()
    return SimpleNamespace(
        modules=made,
        registry=made["sglang.srt.plugins.hook_registry"].HookRegistry,
        context=made["sglang.srt.runtime_context"],
        layer=lambda **how: made["sglang.srt.layers.logits_processor"].LogitsProcessor(**how),
        batch=made["sglang.srt.model_executor.forward_batch_info"].ForwardBatch,
        runner=made["sglang.srt.model_executor.model_runner"].ModelRunner,
    )


@pytest.fixture
def hooked(engine):
    """The same with the plugin's hooks in place."""
    plugin.register()
    assert plugin.status() == plugin.Status(True, "")
    engine.registry.apply_hooks()
    return engine


def make_head(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(PADDED, D, generator=generator).to(dtype)
    return SimpleNamespace(weight=weight, quant_method=UnquantizedEmbeddingMethod(), tp_size=1)


def make_request(prompt=3, **changes):
    params = {
        "temperature": 1.0, "top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0, "sampling_seed": 11, "logit_bias": None,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0,
    }  # fmt: skip
    own = {
        "return_logprob": False, "return_sampling_mask": False, "custom_logit_processor": None, "beam_group": None,
        "grammar": None,
    }  # fmt: skip
    own.update({name: changes.pop(name) for name in list(changes) if name in own})
    assert set(changes) <= set(params)
    return SimpleNamespace(origin_input_ids=[1] * prompt, sampling_params=SimpleNamespace(**{**params, **changes}), **own)


class Grammar:
    """Allows some tokens by a bitmask, as xgrammar and llguidance, or by a bool mask of what is not allowed, as outlines."""

    finished = False

    def __init__(self, allowed, bits=True):
        self.allowed, self.bits = allowed, bits

    def mask(self, rows):
        if not self.bits:
            return torch.zeros(rows, V, dtype=torch.bool)
        return torch.full((rows, -(-V // 32)), -1, dtype=torch.int32)

    def fill(self, mask, row):
        if self.bits:
            mask[row] = bitmask(self.allowed)
        else:
            mask[row] = True
            mask[row, self.allowed] = False


def bitmask(allowed):
    words = [0] * -(-V // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)


class SamplingBatchInfo:
    """The steps of ``update_regex_vocab_mask`` and ``apply_logits_bias``; every penalty here takes token 0's chance away."""

    def __init__(self, requests):
        self.requests = requests
        self.grammars = self.grammar_mask = None

    def __len__(self):
        return len(self.requests)

    def update_regex_vocab_mask(self):
        self.grammar_mask = None
        if self.grammars:
            first = next(grammar for grammar in self.grammars if grammar)
            mask = first.mask(len(self))
            for row, grammar in enumerate(self.grammars):
                if grammar:
                    grammar.fill(mask, row)
            self.grammar_mask = SimpleNamespace(grammar=first, vocab_mask=mask)

    def apply_logits_bias(self, logits):
        if self.grammar_mask is not None:
            mask = self.grammar_mask.vocab_mask
            if mask.dtype == torch.int32:
                mask = (mask[:, torch.arange(V) // 32] >> (torch.arange(V) % 32)) & 1 == 0
            logits.masked_fill_(mask, float("-inf"))
        for row, request in enumerate(self.requests):
            if request.sampling_params.presence_penalty:
                logits[row, 0] = float("-inf")


class Model:
    """A head, a runner, and a decode graph captured once, whose replays serve batches of any requests."""

    def __init__(self, engine, layer=None, lm_head=None):
        self.engine, self.runner = engine, engine.runner()
        self.layer, self.lm_head = layer or engine.layer(), lm_head or make_head()
        self.static = torch.zeros(8, D, dtype=self.lm_head.weight.dtype)
        self.metadata = make_metadata(next_token_logits_buffer=torch.zeros(8, V))
        self.captured = self.layer(None, self.static, self.lm_head, self.metadata)

    def replay(self, hidden):
        """What a replay leaves: the captured output over new contents, cut to the real rows."""
        self.static[: len(hidden)] = hidden
        out = self.captured.next_token_logits
        if isinstance(out, torch.Tensor):
            out.copy_(self.plain(self.static))
        return dataclasses.replace(self.captured, next_token_logits=out[: len(hidden)])

    def plain(self, hidden):
        return type(self.layer)._get_logits.__wrapped__(self.layer, hidden, self.lm_head, make_metadata())

    def decode(self, requests, hidden, generated):
        output = self.replay(hidden)
        return self.sample(requests, output, generated), output

    def sample(self, requests, output, generated):
        lengths = torch.tensor([len(r.origin_input_ids) + n for r, n in zip(requests, generated, strict=True)])
        batch = SimpleNamespace(reqs=list(requests), sampling_info=SamplingBatchInfo(requests), seq_lens_cpu=lengths)
        forward_batch = self.engine.batch.init_new(batch, self.runner, return_hidden_states_before_norm=False)
        batch.reqs.clear()  # the scheduler goes on
        self.forward_batch = forward_batch
        return self.runner.sample(output, forward_batch)


def hidden_states(rows=B, dtype=torch.float32):
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(rows)).to(dtype)


def expected(hidden, position, seed=11, **parameters):
    """The token that nologits' public function draws for one row alone."""
    parameters = {"scale": 1.0, "softcap": None, **parameters}
    return nl.sample(
        hidden[None], make_head(hidden.dtype).weight, vocab_size=V, seed=seed, position=position, **parameters
    ).tokens.item()


TAKEN = [
    ({}, {}),
    ({"temperature": 0.6, "sampling_seed": 2**64 - 5}, {"temperature": 0.6, "seed": 2**64 - 5}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"top_p": 0.7, "sampling_seed": 3}, {"top_p": 0.7, "seed": 3}),
    ({"min_p": 0.2, "top_k": 9}, {"min_p": 0.2, "top_k": 9}),
    ({"logit_bias": {"4": 30.0, "04": 31.0}}, {"logit_bias": (torch.tensor([[4]]), torch.tensor([[31.0]]))}),
    ({"top_k": 1, "top_p": 0.5}, {"temperature": 0.0}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eligible_rows_are_drawn_as_by_sample(hooked, dtype):
    model, count = Model(hooked, lm_head=make_head(dtype)), len(TAKEN)
    hidden = hidden_states(count, dtype)
    for generated in (range(count), range(5, 5 + count)):
        made = model.layer.matmuls
        tokens, output = model.decode([make_request(**asked) for asked, _ in TAKEN], hidden, generated)
        assert model.layer.matmuls == made
        assert output.auxiliary_device_output is None
        want = [expected(row, n, **ours) for row, n, (_, ours) in zip(hidden, generated, TAKEN, strict=True)]
        assert tokens.tolist() == want
    assert plugin.counters() == {"steps": 2, "taken": 2 * count, "fallbacks": {}, "errors": 0}


def test_a_row_is_the_same_alone_and_in_any_batch(hooked):
    model, hidden = Model(hooked), hidden_states()
    requests = [make_request(prompt=row, sampling_seed=None, temperature=1.5) for row in range(B)]
    together, _ = model.decode(requests, hidden, [4] * B)
    for row in range(B):
        alone, _ = model.decode([requests[row]], hidden[row : row + 1], [4])
        assert alone.item() == together[row]
    keys = {request._nologits[1].key for request in requests}
    assert len(keys) == B


def test_a_batch_of_the_same_graph_gets_its_logits_later(hooked):
    model, hidden = Model(hooked), hidden_states(8)
    assert isinstance(model.captured.next_token_logits, LateLogits)
    tokens, output = model.decode([make_request(return_logprob=True)] * 8, hidden, [0] * 8)
    torch.testing.assert_close(output.next_token_logits, model.plain(hidden))
    # The rows of the graph, so its buffer is used, as SGLang does.
    assert output.next_token_logits.data_ptr() == model.metadata.next_token_logits_buffer.data_ptr()
    assert tokens.tolist() == model.plain(hidden).argmax(-1).tolist()
    assert not model.captured.next_token_logits.made
    tokens, _ = model.decode([make_request()], hidden[:1], [0])
    assert tokens.tolist() == [expected(hidden[0], 0)]
    assert plugin.counters()["fallbacks"] == {"log-probabilities": 8}


LEFT = {
    "penalties": {"presence_penalty": 0.5},
    "min_tokens": {"min_new_tokens": 2},
    "log-probabilities": {"return_logprob": True},
    "the sampling mask is asked for": {"return_sampling_mask": True},
    "custom logit processor": {"custom_logit_processor": "{}"},
    "beam search": {"beam_group": object()},
    "top-p with another filter": {"top_k": 20, "top_p": 0.95},
    "a seed of more than 64 bits": {"sampling_seed": 2**64},
    "a token id outside the vocabulary": {"logit_bias": {str(V): 1.0}},
}


@pytest.mark.parametrize("reason", LEFT)
def test_mixed_batches_are_split_by_row(hooked, reason):
    model, hidden = Model(hooked), hidden_states()
    hidden[1] = make_head().weight[0] * 4  # token 0 is its likeliest, which a penalty takes away
    requests = [make_request(temperature=3.0) for _ in range(B)]
    requests[1], requests[4] = make_request(**LEFT[reason]), make_request(**LEFT[reason])
    tokens, _ = model.decode(requests, hidden, range(2, 2 + B))
    plain = model.plain(hidden)
    assert plain[1].argmax() == 0
    if reason == "penalties":
        plain[[1, 4], 0] = float("-inf")
    want = [expected(row, 2 + place, temperature=3.0) for place, row in enumerate(hidden)]
    want[1], want[4] = plain[1].argmax().item(), plain[4].argmax().item()
    assert tokens.tolist() == want
    assert tokens.dtype == torch.int32
    assert plugin.counters() == {"steps": 1, "taken": B - 2, "fallbacks": {reason: 2}, "errors": 0}


@pytest.mark.parametrize("asked", [{"top_p": 0.9, "min_p": 0.1}, {"top_p": 0.9, "top_k": 2}])
def test_filters_that_engines_read_differently_are_left(hooked, asked):
    Model(hooked).decode([make_request(**asked)], hidden_states(1), [0])
    assert plugin.counters()["fallbacks"] == {"top-p with another filter": 1}


@pytest.mark.parametrize("mixed", [False, True])
def test_grammars(hooked, mixed):
    model, hidden = Model(hooked), hidden_states()
    allowed = [5, 31, 32, 100, 156]
    requests = [make_request(temperature=2.0, grammar=Grammar(allowed) if row % 2 else None) for row in range(B)]
    if mixed:
        requests[3] = make_request(presence_penalty=1.0, grammar=Grammar([0, 7]))
    tokens, _ = model.decode(requests, hidden, [1] * B)
    for row, request in enumerate(requests):
        mask = {"allowed_tokens": bitmask(allowed)[None]} if request.grammar else {}
        want = 7 if mixed and row == 3 else expected(hidden[row], 1, temperature=2.0, **mask)
        assert tokens[row] == want
    assert model.forward_batch.sampling_info.grammar_mask is None
    assert plugin.counters()["taken"] == B - mixed


def test_a_grammar_backend_without_bitmasks_is_left(hooked):
    model, hidden = Model(hooked), hidden_states()
    requests = [make_request() for _ in range(B - 1)] + [make_request(grammar=Grammar([9], bits=False))]
    tokens, _ = model.decode(requests, hidden, [0] * B)
    assert tokens.tolist() == [*model.plain(hidden)[:-1].argmax(-1).tolist(), 9]
    assert plugin.counters()["fallbacks"] == {"a grammar backend without bitmasks": B}


def test_prefill_counts_from_the_end_of_the_prompt(hooked):
    model, hidden = Model(hooked), hidden_states(3)
    requests = [make_request(prompt=n) for n in (4, 9, 6)]
    output = model.layer(None, hidden, model.lm_head, make_metadata(ForwardMode.EXTEND))
    # The second prompt goes on in the next chunk; the third request was retracted with 2 tokens.
    tokens = model.sample(requests, output, [0, -5, 2])
    assert tokens.tolist() == [expected(hidden[0], 0), expected(hidden[1], 0), expected(hidden[2], 2)]


@pytest.mark.parametrize(
    "metadata",
    [
        make_metadata(ForwardMode.TARGET_VERIFY),
        make_metadata(ForwardMode.EXTEND, extend_return_logprob=True),
        make_metadata(ForwardMode.EXTEND, is_prefill_only=True),
    ],
)
def test_logits_that_are_not_sampled_are_made_at_once(hooked, metadata):
    model, hidden = Model(hooked), hidden_states()
    output = model.layer(None, hidden, model.lm_head, metadata)
    assert isinstance(output.next_token_logits, torch.Tensor)
    model.sample([make_request()] * B, output, [0] * B)
    assert plugin.counters()["fallbacks"] == {"logits made in the forward pass": B}


@pytest.mark.parametrize(("scale", "softcap"), [(0.25, None), (None, 3.0), (0.5, 2.0)])
def test_scale_and_cap_are_the_layers(hooked, scale, softcap):
    model, hidden = Model(hooked, hooked.layer(logit_scale=scale, softcap=softcap)), hidden_states()
    tokens, _ = model.decode([make_request(temperature=0.8)] * B, hidden, [3] * B)
    want = [expected(row, 3, temperature=0.8, scale=scale or 1.0, softcap=softcap) for row in hidden]
    assert tokens.tolist() == want
    assert plugin.counters()["taken"] == B


def refuse_layer(name, value):
    return lambda engine, layer, lm_head: setattr(layer, name, value)


def refuse_head(name, value):
    return lambda engine, layer, lm_head: setattr(lm_head, name, value)


def refuse_config(getter, path, value):
    def change(engine, layer, lm_head):
        bag = getattr(engine.context, getter)()
        *parents, leaf = path.split(".")
        setattr(functools.reduce(getattr, parents, bag), leaf, value)

    return change


REFUSED = {
    "the head is split over tensor parallel ranks": refuse_layer("do_tensor_parallel_all_gather", True),
    "RL on-policy mode": refuse_layer("rl_on_policy_target", "fsdp"),
    "the logits are scaled by -1.0": refuse_layer("logit_scale", -1.0),
    "the head is quantised (object)": refuse_head("quant_method", object()),
    "LoRA": refuse_head("set_lora", None),
    "the head is packed for AMX": refuse_head("use_intel_amx_backend", True),
    "speculative decoding": refuse_config("get_spec", "speculative_algorithm", "EAGLE"),
    "pipeline parallelism": refuse_config("get_parallel", "pp_size", 2),
    "deterministic inference": refuse_config("get_exec", "deterministic.enable_deterministic_inference", True),
    "torch.compile of the model": refuse_config("get_flags", "capture.enable_torch_compile", True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_heads_that_are_refused_stay_sglangs(hooked, reason):
    layer, lm_head, hidden = hooked.layer(), make_head(), hidden_states()
    REFUSED[reason](hooked, layer, lm_head)
    model = Model(hooked, layer, lm_head)
    tokens, _ = model.decode([make_request()] * B, hidden, [0] * B)
    assert isinstance(model.captured.next_token_logits, torch.Tensor)
    assert tokens.tolist() == model.plain(hidden).argmax(-1).tolist()
    assert plugin.counters()["fallbacks"] == {reason: B}


def test_a_layer_that_does_more_than_its_head_says_is_refused(hooked):
    layer = hooked.layer()
    layer.logit_scale = torch.full((PADDED,), 2.0)
    layer.logit_scale[3] = 1.0
    layer.logit_scale = Drifting(layer.logit_scale)
    model = Model(hooked, layer)
    assert isinstance(model.captured.next_token_logits, torch.Tensor)
    assert heads.refusal() == "the logits layer does more than its head says"


class Drifting(float):
    """A scale that is a number to the plugin and a vector to ``mul_``."""

    def __new__(cls, vector):
        self = super().__new__(cls, 2.0)
        self.vector = vector
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*[one.vector if isinstance(one, Drifting) else one for one in args], **(kwargs or {}))


RUNNERS = {
    "a draft model": {"is_draft_worker": True},
    "a sampler of its own (Sequential)": {"sampler": torch.nn.Sequential()},
    "watermarking": {"watermark_state": object()},
    "n-gram embeddings": {"ngram_embedding_manager": SimpleNamespace(enabled=True)},
    "a sampling observer": {"sampling_observer": SimpleNamespace(is_active=lambda info: True)},
}


@pytest.mark.parametrize("reason", RUNNERS)
def test_runners_that_need_logits_get_them(hooked, reason):
    model, hidden = Model(hooked), hidden_states()
    vars(model.runner).update(RUNNERS[reason])
    if "sampler" in RUNNERS[reason]:
        model.runner.sampler.forward = lambda output, info: output.next_token_logits.argmax(-1)
    tokens, _ = model.decode([make_request()] * B, hidden, [0] * B)
    assert tokens.tolist() == model.plain(hidden).argmax(-1).tolist()
    assert plugin.counters()["fallbacks"] == {reason: B}


@pytest.mark.parametrize("where", ["draw", "entry", "mask"])
def test_an_exception_falls_back_and_is_counted(hooked, monkeypatch, where):
    model, hidden = Model(hooked), hidden_states()
    requests = [make_request() for _ in range(B - 1)] + [make_request(presence_penalty=1.0, grammar=Grammar([5]))]

    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    name = {
        "draw": "nologits.head.LMHead.sample",
        "entry": "nologits.integrations.sglang.requests.read",
        "mask": "nologits.integrations.sglang.runner._grammar_mask",
    }[where]
    monkeypatch.setattr(name, broken)
    tokens, _ = model.decode(requests, hidden, [0] * B)
    assert tokens.tolist() == [*model.plain(hidden)[:-1].argmax(-1).tolist(), 5]
    counted = plugin.counters()
    assert counted["errors"] == 1
    assert counted["taken"] == 0
    assert sum(counted["fallbacks"].values()) == B
    assert counted["fallbacks"]["error in nologits"] >= B - 1


def test_what_is_not_hooked_gets_logits(hooked):
    model, hidden = Model(hooked), hidden_states()
    plain = model.plain(hidden)

    def late():
        return model.replay(hidden).next_token_logits

    assert late().shape == plain.shape
    assert (len(late()), late().dtype, late().device) == (B, plain.dtype, plain.device)
    torch.testing.assert_close(late()[[1, 4]].clone(), plain[[1, 4]])
    torch.testing.assert_close(torch.log_softmax(late(), -1), torch.log_softmax(plain, -1))
    torch.testing.assert_close(torch.cat((late(), late()[2:])), torch.cat((plain, plain[2:])))
    assert late()[0, 3] == plain[0, 3]
    changed = late()
    changed.index_fill_(1, torch.tensor([2]), -1e30)
    changed[:, 5] = 7.0
    assert changed[1:].logits()[:, 2].eq(-1e30).all()
    assert changed[1:].logits()[:, 5].eq(7.0).all()


def test_a_model_that_changes_its_logits_keeps_its_changes(hooked):
    model, hidden = Model(hooked), hidden_states()
    output = model.replay(hidden)
    output.next_token_logits.index_fill_(1, torch.arange(1, V), -1e30)
    assert model.sample([make_request()] * B, output, [0] * B).tolist() == [0] * B
    assert plugin.counters()["fallbacks"] == {"the model looks at its logits": B}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda batch: vars(batch).pop("_nologits_requests"), "no requests known"),
        (lambda batch: vars(batch).update(seq_lens_cpu=None), "lengths are on the device alone"),
        (lambda batch: vars(batch).update(_nologits_requests=()), "more rows than requests"),
    ],
)
def test_batches_that_are_not_understood_are_left(hooked, change, reason):
    model, hidden = Model(hooked), hidden_states()
    model.decode([make_request()] * B, hidden, [0] * B)
    plugin.reset_counters()
    change(model.forward_batch)
    tokens = model.runner.sample(model.replay(hidden), model.forward_batch)
    assert tokens.tolist() == model.plain(hidden).argmax(-1).tolist()
    assert plugin.counters()["fallbacks"] == {reason: B}


def test_replaced_weights_are_read_again(hooked):
    model, hidden = Model(hooked), hidden_states()
    model.decode([make_request()] * B, hidden, [0] * B)
    model.lm_head.weight = model.lm_head.weight.flip(0).clone()
    tokens, _ = model.decode([make_request(top_k=1)] * B, hidden, [0] * B)
    assert tokens.tolist() == model.plain(hidden).argmax(-1).tolist()
    assert plugin.counters()["taken"] == 2 * B


def test_the_scheduler_tells_the_counters(hooked):
    Model(hooked).decode([make_request()] * B, hidden_states(), [0] * B)
    answer = hooked.modules["sglang.srt.managers.scheduler"].Scheduler().get_internal_state(None)
    assert answer.internal_state == {"random_seed": 1, "nologits": plugin.counters()}


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_it_is_off_unless_switched_on(engine, monkeypatch, caplog, value):
    if value is None:
        monkeypatch.delenv(plugin.SWITCH)
    else:
        monkeypatch.setenv(plugin.SWITCH, value)
    caplog.set_level("INFO")
    plugin.register()
    reason = "NOLOGITS_SGLANG=0" if value == "0" else "it is experimental: NOLOGITS_SGLANG=1 switches it on"
    assert plugin.status() == plugin.Status(False, reason)
    assert caplog.messages == [f"nologits: inactive because {reason}"]
    engine.registry.apply_hooks()
    assert not hasattr(engine.runner.sample, "__wrapped__")


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23.post1"])
def test_the_version_gate(engine, monkeypatch, version):
    engine.modules["sglang.version"].__version__ = version
    plugin.register()
    assert not plugin.status().active
    assert version in plugin.status().reason
    monkeypatch.setenv(plugin.SWITCH, "force")
    plugin.register()
    assert plugin.status().active


def test_registration_never_raises(engine, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    caplog.set_level("INFO")
    plugin.register()
    assert not plugin.status().active
    assert len(caplog.messages) == 1
    assert "nologits: inactive because of ModuleNotFoundError" in caplog.messages[0]


@pytest.mark.parametrize("missing", ["ForwardBatch.init_new", "ModelRunner.sample"])
def test_a_hook_that_sglang_could_not_apply_leaves_all_to_it(engine, missing):
    plugin.register()
    owner = engine.batch if missing.startswith("ForwardBatch") else engine.runner
    name = missing.split(".")[1]
    stock = vars(owner)[name]
    engine.registry.apply_hooks()
    setattr(owner, name, stock)
    model, hidden = Model(engine), hidden_states()
    assert isinstance(model.captured.next_token_logits, torch.Tensor)
    assert heads.refusal() == f"SGLang did not hook {missing}"
    assert model.decode([make_request()] * B, hidden, [0] * B)[0].tolist() == model.plain(hidden).argmax(-1).tolist()


def test_the_entry_point_is_in_the_group_that_sglang_reads():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"nologits": "nologits.integrations.sglang:register"}
    assert project["optional-dependencies"]["sglang"] == []
