"""nologits.integrations.transformers against transformers' own loop, on tiny random models and on SmolLM2."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import nologits  # noqa: E402
from nologits.integrations import transformers as integration  # noqa: E402
from nologits.integrations.transformers.processors import make_plan  # noqa: E402
from nologits.integrations.transformers.request import row_seeds  # noqa: E402

V = 211  # odd: neither a multiple of 32 (bitmasks) nor of a noise block
PAD, EOS = 0, 3
PROMPT = torch.tensor([[5, 9, 17, 4, 60], [7, 8, 100, 33, 21], [11, 200, 150, 3, 77]])

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_PHI = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}

# The scales and the cap are ones that change a greedy token or a draw if they are left out.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": _LLAMA,
    "Qwen3": {**_LLAMA, "head_dim": 8},
    "Gemma2": {**_LLAMA, "head_dim": 8, "final_logit_softcapping": 1.5, "sliding_window": 16},
    "GPT2": _GPT2,
    "Granite": {**_LLAMA, "logits_scaling": 0.25},
    "Phi": _PHI,
    "Mamba": _MAMBA,
    "Cohere": {**_LLAMA, "logit_scale": 3.0},
}


@functools.cache
def tiny(name: str) -> Any:
    torch.manual_seed(1234)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V, pad_token_id=PAD, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False, **MODELS[name]
    )
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{suffix}")(config).eval()
    with torch.no_grad():
        # Logits as spread as those of a trained model; else every test would be one of near-uniform noise.
        head = model.get_output_embeddings()
        head.weight.mul_(2.0 / model(PROMPT).logits.std() if name != "Gemma2" else 30.0)
        if head.bias is not None:
            head.bias.normal_(std=2.0)
    return model


def stock(model: Any, ids: Tensor = PROMPT, **settings: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": 8, "pad_token_id": PAD, **settings})


def ours(model: Any, ids: Tensor = PROMPT, loop: Callable[..., Any] = integration.generate, **settings: Any) -> Any:
    return stock(model, ids, custom_generate=loop, **settings)


def new(tokens: Any, prompt: int = PROMPT.shape[1]) -> Tensor:
    return (tokens if isinstance(tokens, Tensor) else tokens.sequences)[:, prompt:]


def used(model: Any) -> bool:
    report = integration.last_report(model)
    assert report is not None
    return report.used


@contextmanager
def counted_head(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shapes that ``nn.Linear.forward`` of the head sees, that is, every time logits are made."""
    head, shapes, forward = model.get_output_embeddings(), [], nn.Linear.forward

    def counting(self: nn.Linear, hidden: Tensor) -> Tensor:
        if self is head:
            shapes.append(tuple(hidden.shape))
        return forward(self, hidden)

    nn.Linear.forward = counting
    try:
        yield shapes
    finally:
        nn.Linear.forward = forward


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_stock(name: str) -> None:
    model = tiny(name)
    expected = stock(model, do_sample=False)
    assert torch.equal(ours(model, do_sample=False), expected)
    assert used(model), integration.last_report(model)
    assert len(new(expected).unique()) > 3  # a model that repeats one token would test little


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("filters", [{"top_k": 0}, {"top_k": 7, "top_p": 0.8, "temperature": 0.7}], ids=["plain", "filtered"])
def test_logprobs_equal_stock_scores(name: str, filters: dict[str, Any]) -> None:
    """The distributions: a forgotten cap, scale or bias leaves greedy text as it is, but not these."""
    model = tiny(name)
    settings = {"do_sample": True, "return_dict_in_generate": True, "max_new_tokens": 5, **filters}
    out = ours(model, seed=3, logprobs=True, **settings)
    assert used(model), integration.last_report(model)
    assert isinstance(out, integration.GenerateOutput)
    # Stock scores along the same tokens: a forward over the whole text, then the processors that generate prepares.
    with torch.no_grad():
        logits = model(out.sequences).logits[:, PROMPT.shape[1] - 1 : -1].float()
    warpers = transformers.LogitsProcessorList()
    if "temperature" in filters:
        warpers.append(transformers.TemperatureLogitsWarper(filters["temperature"]))
        warpers.append(transformers.TopKLogitsWarper(filters["top_k"]))
        warpers.append(transformers.TopPLogitsWarper(filters["top_p"]))
    tokens = new(out)
    for step in range(tokens.shape[1]):
        at = tokens[:, step : step + 1]
        processed = warpers(out.sequences, logits[:, step]).log_softmax(-1).gather(1, at)[:, 0]
        raw = logits[:, step].log_softmax(-1).gather(1, at)[:, 0]
        torch.testing.assert_close(out.logprobs[:, step], processed, atol=1e-4, rtol=0)
        torch.testing.assert_close(out.raw_logprobs[:, step], raw, atol=1e-4, rtol=0)
    assert (out.logprobs - out.raw_logprobs).abs().max() > 0.1 or filters == {"top_k": 0}


def test_logprobs_against_output_scores() -> None:
    """The same through stock's own output_scores, where both draw the same (top-k 1)."""
    model = tiny("Gemma2")
    expected = stock(model, do_sample=False, return_dict_in_generate=True, output_scores=True)
    out = ours(model, do_sample=True, top_k=1, return_dict_in_generate=True, logprobs="raw")
    assert torch.equal(out.sequences, expected.sequences)
    scores = model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
    torch.testing.assert_close(out.raw_logprobs, scores, atol=1e-4, rtol=0)
    assert out.logprobs is None


def test_whole_prompts_may_reach_the_head() -> None:
    """As in models without logits_to_keep: the last position counts."""
    model = tiny("Llama")
    with counted_head(model) as shapes:
        expected = stock(model, logits_to_keep=0)
    assert shapes[0] == (3, 5, 32)
    assert torch.equal(ours(model, logits_to_keep=0), expected)
    assert used(model)


def test_noise_moves_with_the_position() -> None:
    """The same hidden state at every step: only the position can make the draws differ."""
    model = copy.deepcopy(tiny("Llama"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    drawn = new(ours(model, PROMPT[:1], **SEEDED, seed=6))[0]
    assert len(drawn.unique()) > 4
    head, hidden = integration.find_head(model), torch.zeros(1, 32)
    expected = [head.sample(hidden, nologits.SamplingParams(seed=6, position=i)).tokens[0] for i in range(8)]
    assert drawn.tolist() == [int(token) for token in expected]


def test_find_head_has_the_transform() -> None:
    assert integration.find_head(tiny("Gemma2")).spec.softcap == 1.5
    assert integration.find_head(tiny("Granite")).spec.scale == 4.0
    assert integration.find_head(tiny("Cohere")).spec.scale == 3.0
    assert integration.find_head(tiny("Phi")).spec.bias is not None
    assert integration.find_head(tiny("Llama")).spec.scale == 1.0
    half = copy.deepcopy(tiny("Gemma2")).bfloat16()
    assert integration.find_head(half).spec.softcap == 1.5


def test_unknown_transform_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits - 0.01 * out.logits.pow(2)  # nothing that a config names
            return out

    model = Shifted(copy.deepcopy(tiny("Llama").config)).eval()
    with pytest.raises(ValueError, match="not known here"):
        integration.find_head(model)
    with caplog.at_level(logging.WARNING, "nologits"):
        assert torch.equal(ours(model, do_sample=False), stock(model, do_sample=False))
    assert not used(model)
    assert len(caplog.records) == 1


def test_other_logits_are_refused() -> None:
    class Moved(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits[0] += 0.1  # the row with its own logits, not the one with known values
            return out

    with pytest.raises(ValueError, match="differ from the model's own"):
        integration.find_head(Moved(copy.deepcopy(tiny("Llama").config)).eval())


def test_encoder_decoders_run_the_stock_loop() -> None:
    size = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": PAD}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=V, **size)).eval()
    assert torch.equal(ours(model), stock(model))
    assert not used(model)


def test_changed_config_is_checked_again() -> None:
    model = copy.deepcopy(tiny("Gemma2"))
    assert integration.find_head(model).spec.softcap == 1.5
    model.config.final_logit_softcapping = 7.0
    assert integration.find_head(model).spec.softcap == 7.0


def test_the_check_runs_once() -> None:
    model = tiny("Llama")
    ours(model, do_sample=False)
    with counted_head(model) as shapes:
        ours(model, do_sample=False)
        assert shapes == []  # neither a check nor any logits


def test_a_screen_is_kept_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny("Gemma2")).bfloat16()
    head = integration.find_head(model, "int8")
    assert head.spec.screen is not None
    assert head.spec.softcap == 1.5
    drawn = []
    sample = nologits.LMHead.sample
    monkeypatch.setattr(nologits.LMHead, "sample", lambda self, *a, **k: drawn.append(self) or sample(self, *a, **k))
    tokens = ours(model, **SEEDED, seed=6, screen="int8")
    assert set(drawn) == {head}
    assert torch.equal(tokens, ours(model, **SEEDED, seed=6))
    assert integration.find_head(model).spec.screen is None
    model.config.final_logit_softcapping = 7.0
    assert integration.find_head(model, "int8") is not head
    model.half()
    assert integration.find_head(model, "int8").spec.weight.dtype == torch.float16
    with pytest.raises(ValueError, match="screen must be None unless the weight is float16 or bfloat16"):
        ours(tiny("Llama"), screen="int8")


def test_no_logits_in_the_loop() -> None:
    """The claim: the head's own forward never runs, neither for the prompt nor after it."""
    for name in ("Llama", "Mamba"):
        model = tiny(name)
        integration.find_head(model)
        with counted_head(model) as shapes:
            out = ours(model, do_sample=True, top_p=0.9, return_dict_in_generate=True)
            assert shapes == []
            stock(model, max_new_tokens=2)
            assert len(shapes) == 2  # the counter does count
        assert isinstance(out, integration.GenerateOutput)
        assert integration.last_report(model) == integration.Report(True, "", "torch", 3, 8, V)


SEEDED = {"do_sample": True, "top_k": 0}


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05, "top_k": 30}, {"temperature": 0.6}])
def test_implementations_agree(filters: dict[str, Any]) -> None:
    model = tiny("Llama")
    drawn = [ours(model, **{**SEEDED, **filters}, seed=11, impl=impl) for impl in ("reference", "torch")]
    assert torch.equal(*drawn)
    assert used(model)
    assert not torch.equal(drawn[0], ours(model, **{**SEEDED, **filters}, seed=12))


def test_seeded_row_does_not_depend_on_the_batch() -> None:
    model = tiny("Llama")
    alone = [new(ours(model, row[None], **SEEDED, seed=[40 + i])) for i, row in enumerate(PROMPT)]
    assert not torch.equal(alone[0], alone[1])
    assert torch.equal(new(ours(model, **SEEDED, seed=[40, 41, 42])), torch.cat(alone))
    swapped = new(ours(model, PROMPT.flip(0), **SEEDED, seed=torch.tensor([42, 41, 40])))
    assert torch.equal(swapped, torch.cat(alone).flip(0))


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_left_padding(name: str) -> None:
    model = tiny(name)
    short = PROMPT[:1, 2:]
    ids = torch.cat([torch.cat([torch.full((1, 2), PAD), short], 1), PROMPT[1:]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    for settings in ({"do_sample": False}, {**SEEDED, "seed": [9, 8, 7]}):
        rows = new(ours(model, ids, attention_mask=mask, **settings))
        alone = {**settings, "seed": [9]} if "seed" in settings else settings
        assert torch.equal(rows[:1], new(ours(model, short, **alone), short.shape[1]))
    assert torch.equal(ours(model, ids, attention_mask=mask), stock(model, ids, attention_mask=mask))


def test_num_return_sequences() -> None:
    model = tiny("Llama")
    both = new(ours(model, PROMPT[:2], **SEEDED, seed=5, num_return_sequences=3))
    assert both.shape[0] == 6
    assert len(both[:3].unique(dim=0)) == 3
    for prompt in range(2):
        for j in range(3):
            alone = new(ours(model, PROMPT[prompt : prompt + 1], **SEEDED, seed=5 + j))
            assert torch.equal(both[3 * prompt + j], alone[0])
    listed = new(ours(model, PROMPT[:2], **SEEDED, seed=[5, 6, 7, 5, 6, 7], num_return_sequences=3))
    assert torch.equal(both, listed)
    per_prompt = new(ours(model, PROMPT[:2], **SEEDED, seed=torch.tensor([5, 5]), num_return_sequences=3))
    assert torch.equal(both, per_prompt)


def test_seeds_at_the_edges() -> None:
    seeds = row_seeds(2**64 - 3, 4, 4)
    assert seeds is not None
    assert seeds.tolist() == [-3, -2, 0, 1]  # -1 would be no seed at all
    assert row_seeds(torch.tensor([-1, 4]), 4, 2).tolist() == [-1, -1, 4, 5]  # type: ignore[union-attr]


def test_unseeded_draws_follow_torch() -> None:
    model = tiny("Llama")
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(ours(model, **SEEDED))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.chunks.append(value.clone())

    def end(self) -> None:
        self.ended += 1


def test_streamer() -> None:
    model, prompt = tiny("Llama"), PROMPT[:1]
    for streamed in (stock, ours):
        streamer = Recorder()
        out = streamed(model, prompt, streamer=streamer, do_sample=False)
        assert torch.equal(streamer.chunks[0], prompt)
        assert torch.equal(torch.cat(streamer.chunks[1:]), new(out)[0])
        assert streamer.ended == 1
    # Handed to the loop instead of to generate: new tokens only.
    streamer = Recorder()
    out = ours(model, prompt, loop=functools.partial(integration.generate, streamer=streamer))
    assert torch.equal(torch.cat(streamer.chunks), new(out)[0])
    # And a stock run on our behalf streams too.
    streamer = Recorder()
    out = ours(model, prompt, streamer=streamer, repetition_penalty=1.3)
    assert not used(model)
    assert torch.equal(torch.cat(streamer.chunks[1:]), new(out)[0])


def test_end_tokens_and_padding() -> None:
    model = tiny("Llama")
    free = new(stock(model, max_new_tokens=12))
    ends = [int(free[0, 2]), int(free[1, 5])]
    settings = {"eos_token_id": ends, "max_new_tokens": 12, "return_dict_in_generate": True}
    expected = stock(model, **settings)
    out = ours(model, **settings, logprobs=True)
    assert used(model)
    assert torch.equal(out.sequences, expected.sequences)
    ended = (new(out)[0] == PAD).nonzero().flatten()
    assert len(ended) > 0
    assert (out.raw_logprobs[0, ended] == 0).all()
    assert (out.raw_logprobs[0, : ended[0]] < 0).all()
    assert out.raw_logprobs.shape == new(out).shape
    shorter = ours(model, max_new_tokens=None, max_length=9)
    assert torch.equal(shorter, stock(model, max_new_tokens=None, max_length=9))
    assert shorter.shape[1] == 9


def test_cache_settings() -> None:
    """The loop is stock's: no cache, a static one, a prompt in chunks, and a cache from before all work."""
    model = tiny("Llama")
    expected = stock(model)
    every: list[dict[str, Any]] = [{"use_cache": False}, {"cache_implementation": "static"}]
    if not transformers.__version__.startswith("5.0."):  # where the stock loop cannot do it either
        every.append({"prefill_chunk_size": 2})
    for settings in every:
        assert torch.equal(ours(model, **settings), expected)
        assert used(model)
    first = ours(model, max_new_tokens=4, return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    name = "cache" if hasattr(first, "cache") else "past_key_values"
    assert torch.equal(ours(model, first.sequences, max_new_tokens=4, **{name: cache}), expected)


def test_hidden_states_still_come() -> None:
    model = tiny("Llama")
    settings = {"return_dict_in_generate": True, "output_hidden_states": True}
    expected, out = stock(model, **settings), ours(model, **settings)
    assert used(model)
    torch.testing.assert_close(out.hidden_states[3][-1], expected.hidden_states[3][-1])


MASKS = [
    {"suppress_tokens": [1, 31, 32, 63, 210]},
    {"begin_suppress_tokens": [17]},
    {"min_new_tokens": 4, "eos_token_id": 17},
    {"min_length": 8, "eos_token_id": 17},
    {"forced_eos_token_id": 44},
]


@pytest.mark.parametrize("settings", MASKS, ids=lambda settings: next(iter(settings)))
def test_masks_are_taken(settings: dict[str, Any]) -> None:
    model = tiny("Llama")
    # Make the masked tokens the ones that greedy decoding would take.
    free = new(stock(model))[0].tolist()
    key = next(iter(settings))
    if key == "suppress_tokens":
        settings = {key: [*settings[key], *free]}
    elif key == "begin_suppress_tokens":
        settings = {key: [free[0]]}
    elif "eos_token_id" in settings:
        settings = {**settings, "eos_token_id": free[0]}
    expected = stock(model, **settings)
    assert not torch.equal(expected, stock(model, **{k: v for k, v in settings.items() if k == "eos_token_id"}))
    assert torch.equal(ours(model, **settings), expected)
    assert used(model), integration.last_report(model)


def test_masks_at_every_length() -> None:
    """Bit for bit what each processor does to a row, also where it starts and ends."""
    ends = torch.tensor([17, 32])
    processors = [
        transformers.SuppressTokensLogitsProcessor([1, 31, 32, 63, 210]),
        transformers.SuppressTokensAtBeginLogitsProcessor([4, 64], 6),
        transformers.MinLengthLogitsProcessor(8, ends),
        transformers.MinNewTokensLengthLogitsProcessor(5, 4, ends),
        transformers.ForcedEOSTokenLogitsProcessor(11, 17),
    ]
    for listed in ([processor] for processor in processors), (processors, processors[::-1]):
        for some in listed:
            plan = make_plan(transformers.LogitsProcessorList(some), V, torch.device("cpu"))
            for length in range(4, 13):
                ids = torch.zeros(1, length, dtype=torch.int64)
                scores = torch.zeros(1, V)
                for processor in some:
                    scores = processor(ids, scores)
                mask = plan.allowed(length)
                bits = torch.ones(1, V) if mask is None else (mask[:, torch.arange(V) // 32] >> (torch.arange(V) % 32)) & 1
                assert torch.equal(bits == 1, scores > -torch.inf), (some, length)


def test_suppressed_tokens_are_never_sampled() -> None:
    model = tiny("Llama")
    banned = list(range(0, V, 2))
    drawn = new(ours(model, PROMPT.repeat(8, 1), **SEEDED, suppress_tokens=banned, temperature=5.0))
    assert used(model)
    assert (drawn % 2 == 1).all()


class Custom(transformers.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1)


def _subclass(top_k: int) -> Any:
    class Other(transformers.TopKLogitsWarper):
        pass

    return Other(top_k)


FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "beams": ("beam search", {"num_beams": 3, "ours": {"seed": 5}}),
    "prompt lookup": ("assisted generation", {"prompt_lookup_num_tokens": 3, "ids": PROMPT[:1]}),
    "penalty": ("RepetitionPenaltyLogitsProcessor", {"repetition_penalty": 1.5}),
    "custom": ("Custom", {"logits_processor": [Custom()]}),
    "subclass": ("Other", {"logits_processor": [_subclass(4)]}),
    "guidance": ("UnbatchedClassifierFreeGuidanceLogitsProcessor", {"guidance_scale": 1.5, "ids": PROMPT[:1]}),
    "scores": ("output_scores", {"output_scores": True, "return_dict_in_generate": True}),
    "logits": ("output_logits", {"output_logits": True, "return_dict_in_generate": True}),
    "min-p after top-p": ("min-p comes after top-p", {"do_sample": True, "top_p": 0.9, "min_p": 0.1}),
    "top-k after top-p": (
        "top-k comes after top-p",
        {"do_sample": True, "logits_processor": [transformers.TopPLogitsWarper(0.9)], "top_k": 5},
    ),
    "temperature after top-k": (
        "temperature comes after top-k",
        {"do_sample": True, "logits_processor": [transformers.TopKLogitsWarper(5), transformers.TemperatureLogitsWarper(0.5)]},
    ),
    "kept tokens": (
        "at least 2 tokens",
        {"do_sample": True, "top_k": 0, "logits_processor": [transformers.TopPLogitsWarper(0.9, min_tokens_to_keep=2)]},
    ),
    "filter value": (
        "lowers logits to -5.0",
        {"do_sample": True, "top_k": 0, "logits_processor": [transformers.TopPLogitsWarper(0.9, filter_value=-5.0)]},
    ),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_fallback_is_stock_and_says_why(case: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, settings = FALLBACKS[case]
    model, settings = tiny("Llama"), dict(settings)
    ids = settings.pop("ids", PROMPT)
    own = settings.pop("ours", {})
    torch.manual_seed(7)
    expected = stock(model, ids, **settings)
    torch.manual_seed(7)
    with caplog.at_level(logging.WARNING, "nologits"):
        out = ours(model, ids, **settings, **own)
    assert torch.equal(new(out), new(expected))
    assert type(out) is type(expected)
    report = integration.last_report(model)
    assert report is not None
    assert not report.used
    assert reason in report.reason
    records = [record for record in caplog.records if record.name == "nologits"]
    assert len(records) == 1
    assert report.reason in records[0].getMessage()
    assert ("seed is not used" in records[0].getMessage()) == ("seed" in own)


def test_a_seed_that_a_fallback_ignores_is_named(caplog: pytest.LogCaptureFixture) -> None:
    ours(tiny("Llama"), PROMPT, do_sample=True, repetition_penalty=1.3, seed=5)
    assert "The seed is not used." in caplog.text


def test_assisted_generation_falls_back_with_its_assistant() -> None:
    model, prompt = tiny("Llama"), PROMPT[:1]
    calls = []
    assistant = copy.deepcopy(model)
    assistant.register_forward_hook(lambda *_: calls.append(1))
    out = ours(model, prompt, assistant_model=assistant)
    assert calls
    assert not used(model)
    assert torch.equal(out, stock(model, prompt, assistant_model=assistant))


def test_neutral_processors_are_nothing() -> None:
    model = tiny("Llama")
    settings = {"do_sample": True, "top_k": 9, "min_p": 0.0, "top_p": 0.9, "renormalize_logits": True}
    assert torch.equal(ours(model, **settings, seed=2), ours(model, do_sample=True, top_k=9, top_p=0.9, seed=2))
    assert used(model)


def test_heads_that_are_refused() -> None:
    def reason(change: Callable[[Any], object]) -> str:
        model = copy.deepcopy(tiny("Llama"))
        change(model)
        with pytest.raises(ValueError, match="model must be") as caught:
            integration.find_head(model)
        return str(caught.value)

    class Adapted(nn.Linear):
        pass

    assert "Adapted" in reason(lambda m: m.set_output_embeddings(Adapted(32, V, bias=False)))
    assert "hooks" in reason(lambda m: m.lm_head.register_forward_hook(lambda *_: None))
    assert "replaced" in reason(lambda m: setattr(m.lm_head, "forward", lambda h: h))
    assert "float64" in reason(lambda m: m.double())
    assert "encoder-decoder" in reason(lambda m: setattr(m.config, "is_encoder_decoder", True))
    assert "0 calls" in reason(lambda m: setattr(m, "get_output_embeddings", lambda: nn.Linear(32, V)))


def test_compiled_forward_is_left_alone() -> None:
    model = copy.deepcopy(tiny("Llama"))
    model.forward = torch.compile(model.forward, backend="eager")
    ours(model, max_new_tokens=2)
    assert "compiled" in integration.last_report(model).reason  # type: ignore[union-attr]


def test_head_is_restored_after_an_exception() -> None:
    model = tiny("Llama")

    class Stop(transformers.StoppingCriteria):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            assert "forward" in vars(model.lm_head)  # it is swapped by now
            raise RuntimeError("stop here")

    expected = stock(model)
    with pytest.raises(RuntimeError, match="stop here"):
        ours(model, stopping_criteria=[Stop()])
    assert "forward" not in vars(model.lm_head)
    assert torch.equal(stock(model), expected)
    ours(model)
    assert "forward" not in vars(model.lm_head)


def test_other_threads_get_logits() -> None:
    """While one thread generates, a forward of the same model elsewhere is a usual one, and a second loop is the stock one."""
    model = tiny("Llama")
    expected, logits = stock(model), model(PROMPT).logits
    seen: dict[str, Any] = {}

    class Meanwhile(transformers.StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if not seen:
                thread = threading.Thread(target=self.elsewhere)
                thread.start()
                thread.join()
            return torch.zeros(len(input_ids), dtype=torch.bool)

        def elsewhere(self) -> None:
            seen["logits"] = model(PROMPT).logits
            seen["tokens"] = ours(model)
            seen["report"] = integration.last_report(model)

    assert torch.equal(ours(model, stopping_criteria=[Meanwhile()]), expected)
    torch.testing.assert_close(seen["logits"], logits)
    assert torch.equal(seen["tokens"], expected)
    assert "still running" in seen["report"].reason


def test_bad_arguments() -> None:
    model = tiny("Llama")
    for settings, message in (
        ({"logprobs": "all", "return_dict_in_generate": True}, "logprobs must be"),
        ({"logprobs": True}, "return_dict_in_generate must be True"),
        ({"impl": "cuda"}, "impl must be one of"),
        ({"seed": [1, 2]}, "seed must have 3 entries, got 2"),
        ({"seed": 0.5}, "seed must be"),
        ({"seed": torch.zeros(3)}, "seed must be an int64 tensor"),
        ({"seed": [1, 2], "num_return_sequences": 2, "do_sample": True}, "3 \\(one a prompt\\) or 6"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(model, **settings)


def test_invalid_rows_raise_on_a_cpu() -> None:
    model = copy.deepcopy(tiny("Llama"))
    integration.find_head(model)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="3 invalid rows"):
        ours(model, **SEEDED)
    assert "forward" not in vars(model.lm_head)


def test_weights_may_change_in_place() -> None:
    model = copy.deepcopy(tiny("Llama"))
    before = ours(model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    after = ours(model)
    assert not torch.equal(before, after)
    assert torch.equal(after, stock(model))


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from nologits.demo import smollm2

    try:
        return smollm2.load()
    except ImportError as error:
        pytest.skip(str(error))


def test_smollm2_greedy_and_stop_strings(smollm2: Any) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    out = model.generate(**inputs, **settings, custom_generate=integration.generate)
    assert used(model)
    assert torch.equal(out, expected)
    assert "Paris" in tokenizer.decode(out[0])
    stop = transformers.StoppingCriteriaList([transformers.StopStringCriteria(tokenizer, ["Paris"])])
    stopped = model.generate(**inputs, **settings, stopping_criteria=stop, custom_generate=integration.generate)
    assert used(model)
    assert stopped.shape[1] < expected.shape[1]
    assert torch.equal(stopped, model.generate(**inputs, **settings, stop_strings=["Paris"], tokenizer=tokenizer))


def test_the_page_in_docs_is_true(smollm2: Any) -> None:
    """Its code runs as written: the draw, the report, and one of its tokens drawn again."""
    model, tokenizer = smollm2
    page = (Path(__file__).parents[1] / "docs" / "transformers.md").read_text()
    tokenizer.padding_side = "left"
    prompt = tokenizer(["The capital of France is", "Three primes are"], return_tensors="pt", padding=True)
    names: dict[str, Any] = {"model": model, "prompt": prompt}
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    report = next(line for line in blocks[1].splitlines() if "# Report" in line).split("# ")[1]
    assert str(integration.last_report(model)) == report
    assert names["out"].logprobs.shape == (2, 12)
    # A control: another position is another draw
    drawn = names["head"].sample(names["hidden"], names["params"]).tokens
    tokens = [names["head"].sample(names["hidden"], dataclasses.replace(names["params"], position=p)).tokens for p in range(20)]
    assert any(not torch.equal(other, drawn) for other in tokens)


def test_smollm2_text_streams(smollm2: Any) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer(["The capital of France is"], return_tensors="pt")
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    out: list[Tensor] = []

    def run() -> None:
        settings = {"max_new_tokens": 6, "do_sample": True, "top_k": 40, "top_p": 0.9}
        out.append(model.generate(**inputs, **settings, seed=1, streamer=streamer, custom_generate=integration.generate))

    thread = threading.Thread(target=run)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(new(out[0], inputs["input_ids"].shape[1])[0])
