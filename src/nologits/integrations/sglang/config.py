"""What SGLang's configuration rules out, as far as it is known before the first forward pass."""

from __future__ import annotations


def obstacle() -> str:
    """Why nothing can be taken in this process; empty if something can."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_exec, get_flags, get_lora, get_parallel, get_spec

    parallel, features = get_parallel(), get_exec()
    reasons = (
        (parallel.tp_size > 1, "the head is split over tensor parallel ranks"),
        (parallel.pp_size > 1, "pipeline parallelism"),
        (get_spec().speculative_algorithm is not None, "speculative decoding"),
        (bool(get_lora().enable_lora), "LoRA"),
        (get_disagg().disaggregation_mode != "null", "prefill and decode are on separate servers"),
        (bool(get_disagg().enable_pdmux), "multiplexing of prefill and decode"),
        (bool(features.overlap.enable_two_batch_overlap), "two-batch overlap"),
        (bool(get_flags().capture.enable_torch_compile), "torch.compile of the model"),
        # Its promise is SGLang's own noise for a seed, and nologits has another.
        (bool(features.deterministic.enable_deterministic_inference), "deterministic inference"),
        (bool(features.features.enable_watermark), "watermarking"),
        (
            bool(envs.SGLANG_ENABLE_NAN_LOGITS_CHECK.get() or envs.SGLANG_ENABLE_ASYNC_ASSERT.get()),
            "a check for NaN looks at logits",
        ),
    )
    return next((reason for holds, reason in reasons if holds), "") or _unhooked()


def _unhooked() -> str:
    """The hooks that a draw needs and SGLang did not apply: it logs such a failure and goes on."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    for name, method in (("ForwardBatch.init_new", ForwardBatch.init_new), ("ModelRunner.sample", ModelRunner.sample)):
        if not hasattr(method, "__wrapped__"):
            return f"SGLang did not hook {name}"
    return ""
