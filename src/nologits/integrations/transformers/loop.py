"""The decoding loop for ``custom_generate=``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...dispatch import choose
from ...types import LogprobsMode, logprobs_wanted
from .capture import Capture, UnsupportedError
from .draw import Draw, Watch, columns
from .heads import head_of
from .processors import make_plan
from .request import arguments_of_generate, check_request, is_synced, row_seeds, run_stock

if TYPE_CHECKING:
    from ...types import Impl

_logger = logging.getLogger("nologits")
_REPORTS: WeakKeyDictionary[Any, Report] = WeakKeyDictionary()


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
    screen: Literal["int8"] | None = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop for ``custom_generate=``; transformers fills in everything but ``seed``, ``logprobs``, ``impl`` and
    ``screen``.

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
        screen: as in :class:`nologits.LMHead`: the copy is kept as long as the model is. After new weights that torch's
            version counter does not see, call ``find_head(model, "int8").refresh()``.

    Returns:
        Token ids ``[B, prompt + new]``, or with ``return_dict_in_generate`` a :class:`GenerateOutput`. Where the stock loop
        has to run, what it returns.

    Raises:
        ValueError: naming the argument, what it must be and what it was.
    """
    if any(logprobs_wanted(logprobs)) and not generation_config.return_dict_in_generate:
        raise ValueError("return_dict_in_generate must be True for logprobs to have a place, got False")
    resolved = choose(impl, model.device).impl
    given = arguments_of_generate(model)
    streamer = given.get("streamer") if streamer is None else streamer
    if synced_gpus is None:
        synced_gpus = is_synced(model) if given.get("synced_gpus") is None else given["synced_gpus"]
    loop: dict[str, Any] = {"stopping_criteria": stopping_criteria, "synced_gpus": synced_gpus, "streamer": streamer}

    capture: Capture | None = None
    try:
        check_request(model, generation_config, given.get("assistant_model"), model_kwargs)
        head = head_of(model, screen)
        plan = make_plan(logits_processor, head.spec.vocab_size, head.spec.weight.device)
        capture = Capture(model.get_output_embeddings())
        capture.acquire()
    except UnsupportedError as refusal:
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
        return run_stock(model, input_ids, arguments, model_kwargs)

    try:
        if not generation_config.do_sample:
            plan = plan._replace(temperature=0.0)
        seeds = row_seeds(seed, input_ids.shape[0], generation_config.num_return_sequences or 1)
        loop["stopping_criteria"] = watch = Watch(stopping_criteria)
        draw = Draw(head, capture, plan, watch, seeds, input_ids.shape[1], logprobs, impl)
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
    return GenerateOutput(**values, logprobs=columns(draw.logprobs), raw_logprobs=columns(draw.raw_logprobs))


def last_report(model: Any) -> Report | None:
    """What the latest :func:`generate` on ``model`` did; ``None`` before the first."""
    return _REPORTS.get(model)
