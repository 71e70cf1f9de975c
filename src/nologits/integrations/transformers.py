"""transformers' ``generate`` without logits.

Usage: ``model.generate(..., custom_generate=nologits.integrations.transformers.generate)``.

The loop stays transformers' own (prefill, cache, stopping, streaming). Two things in it are swapped while it runs:

* the output head's ``forward``, on the instance, keeps the hidden state of the last position and returns one column of
  zeros, so that logits ``[B, V]`` are never made, nor ``[B, L, V]`` while the prompt is read;
* the logits processors draw the token from that hidden state, and what they return answers ``argmax`` with it.

What a model does to its logits after the head (soft cap, scale) is found by trying it: once a model, known values are
sent down the forward in place of logits, and a row is compared with the model's own. What cannot be reproduced exactly
runs the stock loop, with one reason on the logger ``nologits`` (level WARNING) and in :func:`last_report`.

Differences from the stock loop, all of them rounding or ties: logits are not rounded to the model's dtype before the
draw, and top-k keeps exactly k tokens where logits tie. ``stop_strings=`` needs the tokenizer, which transformers (5.24)
takes away from any custom loop: pass ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]`` instead.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

try:
    from transformers import generation
    from transformers.generation.configuration_utils import GenerationMode
    from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput, GenerationMixin
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module
except ImportError as error:
    raise ImportError("this integration needs transformers 5 or later: pip install 'nologits[transformers]'") from error

from ..dispatch import choose
from ..head import LMHead
from ..params import UNSEEDED, SamplingParams
from ..sources import HiddenSource
from ..types import LogprobsMode

if TYPE_CHECKING:
    from ..types import Impl

_logger = logging.getLogger("nologits")

_SOFTCAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_PROBE_RANGE = 64.0  # beyond every soft cap in use (30 and 50), so that a missed one shows in the first digit
_CHECK_COLUMNS = 1 << 14
_FRAMES = 16

_REPORTS: WeakKeyDictionary[Any, Report] = WeakKeyDictionary()
_VERDICTS: WeakKeyDictionary[Any, dict[object, _Transform | str]] = WeakKeyDictionary()


class Report(NamedTuple):
    """What the latest :func:`generate` on a model did.

    Attributes:
        used: the tokens were drawn from hidden states; otherwise the stock loop ran and made logits.
        reason: why the stock loop ran; empty if it did not.
        impl: the implementation that drew, as resolved; empty for the stock loop.
        batch: rows ``B``, after ``num_return_sequences``.
        steps: draws a row, the columns of new tokens; 0 for the stock loop.
        vocab_size: ``V`` of the head; 0 where no head could be told apart.
    """

    used: bool
    reason: str
    impl: str
    batch: int
    steps: int
    vocab_size: int


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What ``return_dict_in_generate=True`` gives, with the log-probabilities that were asked for.

    Attributes:
        logprobs: fp32 ``[B, L]`` for ``L`` new tokens: under the distribution that was sampled, after temperature, masks
            and filters (0 for greedy decoding). Padding after a row's end has 0 and adds nothing to a sum.
        raw_logprobs: fp32 ``[B, L]``: under softmax of the model's own logits. Padding has 0.
    """

    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool | None = None,
    streamer: Any = None,
    *,
    seed: int | Sequence[int] | Tensor | None = None,
    logprobs: LogprobsMode = False,
    impl: Impl = "auto",
    **model_kwargs: Any,
) -> Any:
    """The decoding loop for ``custom_generate=``; transformers fills in everything but ``seed``, ``logprobs`` and ``impl``.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs: as
            transformers' own loop gets them. A ``streamer`` given here receives new tokens only; one given to
            ``model.generate`` is found there.
        seed: fixes each row's draws, whatever else is in the batch: a row's token is a function of its seed, its index among
            the new tokens, and its logits. An int serves every prompt (equal prompts get equal texts); a list or an int64
            tensor has one a prompt, or one a returned sequence. In the first two forms the j-th of a prompt's
            ``num_return_sequences`` uses seed + j. ``None``, or -1 for one row: torch's generator.
        logprobs: ``"processed"``, ``"raw"`` or ``True`` (both) adds them to the output; needs ``return_dict_in_generate``.
        impl: as in :func:`nologits.sample`.

    Returns:
        Token ids ``[B, prompt + new]``, or with ``return_dict_in_generate`` a :class:`GenerateOutput`. Where the stock loop
        has to run, what it returns.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """
    if not isinstance(logprobs, (bool, str)) or logprobs not in (False, True, "processed", "raw"):
        raise ValueError(f'logprobs must be False, "processed", "raw" or True, got {logprobs!r}')
    if logprobs and not generation_config.return_dict_in_generate:
        raise ValueError("return_dict_in_generate must be True for logprobs to have a place, got False")
    resolved = choose(impl, model.device).impl
    given = _arguments_of_generate(model)
    streamer = given.get("streamer") if streamer is None else streamer
    if synced_gpus is None:
        synced_gpus = _synced(model) if given.get("synced_gpus") is None else given["synced_gpus"]
    loop: dict[str, Any] = {"stopping_criteria": stopping_criteria, "synced_gpus": synced_gpus, "streamer": streamer}

    capture: _Capture | None = None
    try:
        _check_request(model, generation_config, given.get("assistant_model"), model_kwargs)
        head = _head_of(model)
        plan = _plan(logits_processor, head.spec.vocab_size, head.spec.weight.device)
        capture = _Capture(model.get_output_embeddings())
        capture.acquire()
    except _UnsupportedError as refusal:
        reason = str(refusal)
    else:
        reason = ""
    if capture is None or reason:
        extra = (" The seed is not used." if seed is not None else "") + (
            " No log-probabilities come with it." if logprobs else ""
        )
        _logger.warning("generate runs transformers' own loop, which makes logits: %s.%s", reason, extra)
        embeddings = model.get_output_embeddings()
        vocab = embeddings.weight.shape[0] if isinstance(embeddings, nn.Linear) else 0
        _REPORTS[model] = Report(False, reason, "", input_ids.shape[0], 0, vocab)
        arguments = {**given, **loop, "logits_processor": logits_processor, "generation_config": generation_config}
        return _stock(model, input_ids, arguments, model_kwargs)

    try:
        if not generation_config.do_sample:
            plan = plan._replace(temperature=0.0)
        seeds = _row_seeds(seed, input_ids.shape[0], generation_config.num_return_sequences or 1)
        loop["stopping_criteria"] = watch = _Watch(stopping_criteria)
        draw = _Draw(head, capture, plan, watch, seeds, input_ids.shape[1], logprobs, impl)
        # The draw is done by then: the loop only has to look it up, which is what its greedy branch does.
        config = copy.copy(generation_config)
        config.do_sample = False
        output = model._sample(input_ids, logits_processor=draw, generation_config=config, **loop, **model_kwargs)
    finally:
        capture.release()
    _REPORTS[model] = Report(True, "", resolved, input_ids.shape[0], draw.steps, head.spec.vocab_size)
    if not generation_config.return_dict_in_generate:
        return output
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    return GenerateOutput(**values, logprobs=_columns(draw.logprobs), raw_logprobs=_columns(draw.raw_logprobs))


def last_report(model: Any) -> Report | None:
    """What the latest :func:`generate` on ``model`` did; ``None`` before the first."""
    return _REPORTS.get(model)


def find_head(model: Any) -> LMHead:
    """The model's output head with everything the model does to its logits, checked against the model's own.

    The check is one forward of four tokens, done once a model (again if its dtype, device or config changes). The head
    shares the model's weights.

    Raises:
        ValueError: the head cannot be reproduced; the message has the reason.
    """
    try:
        return _head_of(model)
    except _UnsupportedError as refusal:
        raise ValueError(f"model must be one whose logits can be reproduced, got {type(model).__name__}: {refusal}") from None


class _UnsupportedError(Exception):
    """The stock loop has to run; the message is the reason, to stand after a colon."""


# What generate() was asked for.


def _arguments_of_generate(model: Any) -> dict[str, Any]:
    """Arguments of the running ``model.generate`` call that it does not hand on to a custom loop (transformers 5.24).

    Without them a streamer would wait for ever, and a refused assisted or beam search could not be run as asked.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code is code and frame.f_locals.get("self") is model:
            names = ("streamer", "assistant_model", "inputs_tensor", "synced_gpus")
            return {name: frame.f_locals[name] for name in names if frame.f_locals.get(name) is not None}
        frame = frame.f_back
    return {}


def _synced(model: Any) -> bool:
    """Whether every process has to run as many forwards as the longest (sharded weights), as ``generate`` decides it."""
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return bool(sharded and distributed and torch.distributed.get_world_size() > 1)


def _check_request(model: Any, config: Any, assistant: Any, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        raise _UnsupportedError(f"{mode.value.replace('_', ' ')} reads whole rows of logits")
    if type(model)._sample is not GenerationMixin._sample:
        raise _UnsupportedError(f"{type(model).__name__} has a sampling loop of its own")
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        raise _UnsupportedError("output_scores or output_logits asks for whole rows of logits")
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    compiled = compiled or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable")
    # A compiled forward would bake the swapped head in, and meet it again in calls that are not ours.
    if compiled or model._valid_auto_compile_criteria(model_kwargs, config):
        raise _UnsupportedError("the model's forward is compiled (for a static cache, disable_compile=True avoids it)")


def _stock(model: Any, input_ids: Tensor, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> Any:
    """The loop that ``generate`` would have run without ``custom_generate``."""
    mode = arguments["generation_config"].get_generation_mode(arguments.get("assistant_model"))
    name = GENERATION_MODES_MAPPING[mode]
    method = getattr(model, name, None)
    if method is None:  # it lives in a repository of its own, which transformers downloads
        raise ValueError(f"custom_generate must be {name!r} for {mode.value.replace('_', ' ')}, got nologits' generate")
    known = inspect.signature(method).parameters
    return method(input_ids, **{key: value for key, value in arguments.items() if key in known}, **model_kwargs)


def _row_seeds(seed: int | Sequence[int] | Tensor | None, batch: int, copies: int) -> Tensor | None:
    """int64 ``[B]`` seeds of the returned sequences; ``B`` is a multiple of ``copies``, the sequences of one prompt."""
    if seed is None:
        return None
    prompts = batch // copies
    if isinstance(seed, Tensor):
        if seed.dtype not in (torch.int32, torch.int64) or seed.dim() > 1:
            raise ValueError(f"seed must be an int64 tensor of shape [{prompts}], got {seed.dtype} {list(seed.shape)}")
        seeds = seed.to(torch.int64).reshape(-1)
        given = prompts if seed.dim() == 0 else seeds.shape[0]
        seeds = seeds.expand(given)
    else:
        words = list(seed) if isinstance(seed, Sequence) else [seed] * prompts
        for word in words:
            SamplingParams(seed=word)  # the type and the range
        given = len(words)
        seeds = torch.tensor([word - 2**64 if word >= 2**63 else word for word in words], dtype=torch.int64)
    if given == batch and copies > 1:
        return seeds
    if given != prompts:
        either = f"{prompts}" if copies == 1 else f"{prompts} (one a prompt) or {batch} (one a sequence)"
        raise ValueError(f"seed must have {either} entries, got {given}")
    first = seeds.repeat_interleave(copies)
    shifted = first + torch.arange(copies, device=seeds.device).repeat(prompts)
    # -1 means no seed: it stays, and counting on from below it steps over it.
    shifted = torch.where((first < UNSEEDED) & (shifted >= UNSEEDED), shifted + 1, shifted)
    return torch.where(first == UNSEEDED, first, shifted)


# The logits processors, as sampling parameters.


class _Mask(NamedTuple):
    """Tokens that a processor forbids, or the only ones it allows, at sequences of some lengths."""

    ids: Tensor
    only: bool
    active: Callable[[int], bool]


class _Plan(NamedTuple):
    """What a list of processors does, in the order of the contract: masks, temperature, filters."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    masks: tuple[_Mask, ...]
    vocab: int
    device: torch.device
    packed: dict[tuple[bool, ...], Tensor | None]

    def allowed(self, length: int) -> Tensor | None:
        """The bitmask ``[1, ceil(V / 32)]`` for sequences of ``length`` tokens so far."""
        key = tuple(mask.active(length) for mask in self.masks)
        if key not in self.packed:
            active = [mask for mask, on in zip(self.masks, key, strict=True) if on]
            self.packed[key] = _pack(active, self.vocab, self.device) if active else None
        return self.packed[key]


def _pack(masks: Iterable[_Mask], vocab: int, device: torch.device) -> Tensor:
    ids = torch.arange(-(-vocab // 32) * 32, device=device)
    allowed = torch.ones_like(ids, dtype=torch.bool)
    for mask in masks:
        listed = torch.isin(ids, mask.ids.to(device))
        allowed = listed if mask.only else allowed & ~listed
    bits = allowed.view(1, -1, 32).long() << torch.arange(32, device=device)
    return bits.sum(-1).to(torch.int32)  # bit 31 wraps to the sign


def _plan(processors: Iterable[Any], vocab: int, device: torch.device) -> _Plan:
    """Reads the processors that transformers prepared. Only exact classes count: a subclass may do anything."""
    found: dict[str, Any] = {}
    masks: list[_Mask] = []
    for processor in processors:
        mask = _mask_of(processor)
        if mask is not None:
            if found:
                raise _UnsupportedError(f"{type(processor).__name__} comes after {next(reversed(found))}")
            masks.append(mask)
            continue
        step = _warper_of(processor)
        if step is None:
            continue
        name, value = step
        # min-p and top-k cut the same order of tokens, so either may come first. Top-p renormalises over what they left.
        if name in found or (name == "temperature" and found) or "top-p" in found:
            raise _UnsupportedError(
                f"{name} comes after {next(reversed(found))}, which differs from the order min-p, top-k, top-p"
            )
        found[name] = value
    return _Plan(
        found.get("temperature", 1.0),
        found.get("top-k"),
        found.get("top-p"),
        found.get("min-p"),
        tuple(masks),
        vocab,
        device,
        {},
    )


def _warper_of(processor: Any) -> tuple[str, float] | None:
    """A warper's name and value; ``None`` if it changes nothing."""
    kind = type(processor)
    if kind is generation.LogitNormalization:
        return None
    if kind is generation.TemperatureLogitsWarper:
        return "temperature", processor.temperature
    names = {generation.TopKLogitsWarper: "top_k", generation.TopPLogitsWarper: "top_p", generation.MinPLogitsWarper: "min_p"}
    if kind not in names:
        raise _UnsupportedError(f"{kind.__name__} reads or changes logits in its own way")
    attribute = names[kind]
    name, value = attribute.replace("_", "-"), getattr(processor, attribute)
    if processor.filter_value != -math.inf:
        raise _UnsupportedError(f"{name} lowers logits to {processor.filter_value} instead of dropping them")
    if kind is not generation.TopKLogitsWarper and processor.min_tokens_to_keep > 1:  # top-k has it in its k
        raise _UnsupportedError(f"{name} has to keep at least {processor.min_tokens_to_keep} tokens")
    neutral = {"top_p": 1.0, "min_p": 0.0}.get(attribute)
    return None if value == neutral else (name, value)


def _mask_of(processor: Any) -> _Mask | None:
    kind = type(processor)
    if kind is generation.SuppressTokensLogitsProcessor:
        return _Mask(processor.suppress_tokens, False, lambda length: True)
    if kind is generation.SuppressTokensAtBeginLogitsProcessor:
        return _Mask(processor.begin_suppress_tokens, False, lambda length: length == processor.begin_index)
    if kind is generation.MinLengthLogitsProcessor:
        return _Mask(processor.eos_token_id, False, lambda length: length < processor.min_length)
    if kind is generation.MinNewTokensLengthLogitsProcessor:
        return _Mask(
            processor.eos_token_id, False, lambda length: length - processor.prompt_length_to_skip < processor.min_new_tokens
        )
    # With several ids it would make them equally likely, which is more than a mask.
    if kind is generation.ForcedEOSTokenLogitsProcessor and processor.eos_token_id.numel() == 1:
        return _Mask(processor.eos_token_id, True, lambda length: length == processor.max_length - 1)
    return None


# The loop's two swapped parts.


class _Capture:
    """The head's ``forward`` while it is swapped: keeps the last position's input, makes no logits."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._thread = threading.get_ident()
        self._swapped = self._forward
        self._hidden: Tensor | None = None

    def acquire(self) -> None:
        # setdefault: of two threads that start at once, one gets it.
        if vars(self._head).setdefault("forward", self._swapped) is not self._swapped:
            raise _UnsupportedError(
                "the output head's forward is replaced (by a hook, or a generate call that is still running)"
            )

    def release(self) -> None:
        del self._head.forward

    def take(self) -> Tensor:
        """The hidden states ``[B, D]`` of the latest forward; each is taken once."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise RuntimeError("the model's forward did not call its output head")
        return hidden

    def _forward(self, hidden: Tensor) -> Tensor:
        if threading.get_ident() != self._thread:  # someone else's forward of the same model wants its logits
            return nn.Linear.forward(self._head, hidden)
        return self._keep(hidden)

    def _keep(self, hidden: Tensor) -> Tensor:
        # A copy: a view would keep the states of the whole prompt alive. Autocast may have left another dtype.
        self._hidden = hidden[:, -1].to(self._head.weight.dtype, copy=True)
        return hidden.new_zeros((*hidden.shape[:-1], 1))


class _Watch(generation.StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that remember which rows have ended, as the loop does."""

    done: Tensor | None = None

    @property
    def pads(self) -> bool:
        """Whether the loop pads rows that have ended; without an end token it writes on until all have."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = super().__call__(input_ids, scores, **kwargs)
        self.done = done if self.done is None else self.done | done
        return done


class _Drawn:
    """Takes the place of processed scores in the loop: their argmax is the token that was drawn."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0].tokens if function is torch.argmax else NotImplemented


class _Draw:
    """Stands in for the logits processors: draws each row's next token from the captured hidden states."""

    def __init__(
        self,
        head: LMHead,
        capture: _Capture,
        plan: _Plan,
        watch: _Watch,
        seeds: Tensor | None,
        prompt: int,
        logprobs: LogprobsMode,
        impl: Impl,
    ) -> None:
        self.steps = 0
        self.logprobs: list[Tensor] = []
        self.raw_logprobs: list[Tensor] = []
        self._head, self._capture, self._plan, self._watch = head, capture, plan, watch
        self._seeds = None if seeds is None else seeds.to(head.spec.weight.device)
        self._prompt, self._mode, self._impl = prompt, logprobs, impl

    def __call__(self, input_ids: Tensor, scores: Tensor) -> _Drawn:
        plan, length = self._plan, input_ids.shape[1]
        params = SamplingParams(
            plan.temperature,
            plan.top_k,
            plan.top_p,
            plan.min_p,
            seed=self._seeds,
            position=None if self._seeds is None else length - self._prompt,
            allowed_tokens=plan.allowed(length),
        )
        # check: an invalid row has token -1, which the embedding would meet as an index error. On a GPU looking would stall it.
        on_host = self._head.spec.weight.device.type == "cpu"
        drawn = self._head.sample(self._capture.take(), params, logprobs=self._mode, impl=self._impl, check=on_host)
        self.steps += 1
        for values, kept in ((drawn.logprobs, self.logprobs), (drawn.raw_logprobs, self.raw_logprobs)):
            if values is not None:
                done = self._watch.done
                kept.append(values if done is None or not self._watch.pads else values.masked_fill(done.to(values.device), 0.0))
        return _Drawn(drawn.tokens.to(input_ids.device))


def _columns(steps: list[Tensor]) -> Tensor | None:
    return torch.stack(steps, dim=1) if steps else None


# The head, and what the model does after it.


class _Transform(NamedTuple):
    """logits = softcap(scale * head(hidden))."""

    scale: float
    softcap: float | None


def _head_of(model: Any) -> LMHead:
    """The checked head; raises :class:`_UnsupportedError` with the reason."""
    if model.config.is_encoder_decoder:
        raise _UnsupportedError("the model is an encoder-decoder")
    head = model.get_output_embeddings()
    _check_module(head)
    candidates = _candidates(model)
    verdicts = _VERDICTS.setdefault(model, {})
    weight = head.weight
    # Nothing of the weights' values: what follows the head does not depend on them.
    key = (weight.dtype, weight.device, tuple(weight.shape), head.bias is None, tuple(candidates))
    if key not in verdicts:
        verdicts[key] = _try_out(model, head, candidates)
    verdict = verdicts[key]
    if isinstance(verdict, str):
        raise _UnsupportedError(verdict)
    return LMHead(weight, head.bias, *verdict)


def _check_module(head: Any) -> None:
    if type(head) is not nn.Linear:  # a subclass may be quantised, adapted or parametrised
        raise _UnsupportedError(f"the output head is a {type(head).__name__}, not a plain Linear")
    for tensor in (head.weight, head.bias):
        if tensor is not None and type(tensor) not in (nn.Parameter, Tensor):
            raise _UnsupportedError(f"the output head's weights are a {type(tensor).__name__}")
    if "forward" in vars(head) or head._compiled_call_impl is not None:
        raise _UnsupportedError("the output head's forward is replaced (by a hook, or a generate call that is still running)")
    if head._forward_hooks or head._forward_pre_hooks:
        raise _UnsupportedError("the output head has forward hooks, which would not see its logits")
    if head.weight.device.type not in ("cpu", "cuda"):
        raise _UnsupportedError(f"the output head is on {head.weight.device.type}, where the draw has not been tried")
    try:
        LMHead(head.weight, head.bias)
    except ValueError as error:  # a dtype or shape (sharded weights are empty) that cannot be sampled from
        raise _UnsupportedError(f"of the output head, {error}") from None


def _candidates(model: Any) -> list[_Transform]:
    """What may follow the head, by the names that models use for it; the probe decides which does."""
    configs = (model.config.get_text_config(), model.config)

    def values(names: tuple[str, ...]) -> list[float]:
        found = [getattr(config, name, None) for config in configs for name in names]
        return [float(v) for v in found if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0]

    scales = [s for value in values(_SCALE_NAMES) for s in (value, 1 / value)]
    pairs = itertools.product([*scales, 1.0], [*values(_SOFTCAP_NAMES), None])
    return list(dict.fromkeys(_Transform(*pair) for pair in pairs))


class _Probe(_Capture):
    """Row 0 gets the head's own logits, row 1 known values: the model's output shows what it does to each."""

    calls = 0

    def _keep(self, hidden: Tensor) -> Tensor:
        if hidden.dim() != 3 or hidden.shape[0] != 2:
            raise _UnsupportedError(f"the output head gets hidden states of shape {list(hidden.shape)}, not [B, L, D]")
        self.calls += 1
        self._hidden = hidden[:1, -1].to(self._head.weight.dtype, copy=True)
        logits = nn.Linear.forward(self._head, hidden[:1])
        return torch.cat([logits, _probe_values(logits).expand_as(logits)])


def _probe_values(like: Tensor) -> Tensor:
    values = torch.linspace(-_PROBE_RANGE, _PROBE_RANGE, like.shape[-1], device=like.device)
    return values.to(like.dtype)


def _try_out(model: Any, head: nn.Linear, candidates: list[_Transform]) -> _Transform | str:
    """One short forward: which candidate explains what the model makes of known values and of a row of its own."""
    probe = _Probe(head)
    probe.acquire()
    ids = torch.arange(1, 5, device=model.device) % head.weight.shape[0]
    cached = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        with torch.no_grad():
            logits = model(input_ids=ids.expand(2, -1), return_dict=True, **cached).logits
    except _UnsupportedError:
        raise
    except Exception as failure:  # whatever a model wants besides token ids
        raise _UnsupportedError(f"the model could not be tried on four tokens ({type(failure).__name__}: {failure})") from None
    finally:
        probe.release()
    vocab = head.weight.shape[0]
    if probe.calls != 1 or logits.dim() != 3 or logits.shape[-1] != vocab:
        return f"the model makes logits {list(logits.shape)} with {probe.calls} calls of its output head of {vocab} rows"

    eps = torch.finfo(head.weight.dtype).eps
    sent = _probe_values(logits.to(head.weight.dtype)).float()
    got = logits[1, -1].float()
    errors = {}
    for transform in candidates:
        expected = sent * transform.scale
        if transform.softcap is not None:
            expected = transform.softcap * torch.tanh(expected / transform.softcap)
        error = (got - expected).abs()
        if bool((error <= eps * (1 + 4 * expected.abs())).all()):
            errors[transform] = float(error.sum())
    if not errors:
        tried = "; ".join(f"scale {t.scale:g}, soft cap {t.softcap}" for t in candidates)
        return f"the model changes its logits after the head in a way that is not known here (tried: {tried})"
    best = min(errors, key=errors.__getitem__)
    return best if _same_row(probe.take(), head, best, logits[0, -1]) else "the head's logits differ from the model's own"


def _same_row(hidden: Tensor, head: nn.Linear, transform: _Transform, own: Tensor) -> bool:
    """Whether the logits drawn from are the model's, within the rounding of its dtype; by columns, as ``V`` may be large."""
    spec = LMHead(head.weight, head.bias, *transform).spec
    # On a GPU fp32 products may run in TF32, 10 bits.
    eps = torch.finfo(hidden.dtype).eps if not hidden.is_cuda else max(torch.finfo(hidden.dtype).eps, 2.0**-10)
    for start in range(0, spec.vocab_size, _CHECK_COLUMNS):
        stop = min(start + _CHECK_COLUMNS, spec.vocab_size)
        ours = HiddenSource(hidden, spec).chunk(start, stop)[0]
        size = torch.mv(spec.weight[start:stop].float().abs(), hidden[0].float().abs())
        if spec.bias is not None:
            size = size + spec.bias[start:stop].float().abs()
        if not bool(((ours - own[start:stop].float()).abs() <= 16 * eps * size * abs(spec.scale)).all()):
            return False
    return True
