"""A real SGLang 0.5.23 engine on the CPU, with a tiny random Llama: prints one JSON object of what came out.

Not part of the tests: SGLang's dependencies take gigabytes. It needs the wheel unpacked (``PYTHONPATH``), the small pure
dependencies it asks for, an entry point of nologits in the group ``sglang.srt.plugins``, and stand-ins of ``torchvision`` and
of ``vllm._custom_ops.rotary_embedding`` (one that does nothing will do: another model, the same engine). No CUDA graph.

    NOLOGITS_SGLANG=1 python tests/sglang_job.py [--no-overlap]
"""

import json
import sys
import tempfile
from pathlib import Path

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 997,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [[5, 9, 17, 4], [7, 8, 100, 33, 21], [11, 200, 150], [(37 * place) % 990 + 3 for place in range(40)]]
TOKENS = 8
PLAIN = [{"temperature": 0.9, "sampling_seed": 11 + row} for row in range(4)]
SOME = [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05, "top_k": 50}, {"logit_bias": {"4": 30.0}}]
MIXED = [PLAIN[0], {"temperature": 0.0, "presence_penalty": 2.0}, PLAIN[2], {"top_k": 20, "top_p": 0.9}]


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        engine = Engine(
            model_path=folder,
            device="cpu",
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            skip_server_warmup=True,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            disable_overlap_schedule="--no-overlap" in sys.argv,
            max_total_tokens=1024,
            max_running_requests=8,
            mem_fraction_static=0.5,
            chunked_prefill_size=16,  # the last prompt takes three passes
            disable_radix_cache=True,  # and does so each time
            random_seed=3,
            enable_return_hidden_states=True,
        )
        try:
            print(json.dumps(measure(engine)))
        finally:
            engine.shutdown()


def measure(engine) -> dict:
    def ids(params, prompts=PROMPTS, **more):
        params = [{**one, "max_new_tokens": TOKENS, "ignore_eos": True} for one in params]
        return [out["output_ids"] for out in engine.generate(input_ids=prompts, sampling_params=params, **more)]

    result = {
        "greedy": ids([{"temperature": 0.0}] * 4),
        "seeded": ids(PLAIN),
        "seeded alone": [ids([params], [prompt])[0] for params, prompt in zip(PLAIN, PROMPTS, strict=True)],
        "filtered": ids(SOME),
        "mixed": ids(MIXED),
        "greedy with logprobs": ids([{"temperature": 0.0}] * 4, return_logprob=True, top_logprobs_num=2),
    }
    params = [{**one, "max_new_tokens": TOKENS, "ignore_eos": True} for one in PLAIN[:1]]
    out = engine.generate(input_ids=PROMPTS[:1], sampling_params=params, return_hidden_states=True)[0]
    # The prompt's states come first, and the last of them draws the first token; then one state a token.
    first, *rest = out["meta_info"]["hidden_states"]
    weight = engine.get_weights_by_name("lm_head.weight", truncate_size=10**6)
    if isinstance(weight, list) and weight and isinstance(weight[0], list) and isinstance(weight[0][0], list):
        weight = weight[0]
    result["offline"] = {"tokens": out["output_ids"], "again": offline([first[-1], *rest], weight)}
    result["counters"] = [state.get("nologits") for state in engine.get_server_info()["internal_states"]]
    return result


def offline(hidden, weight) -> list[int]:
    """The tokens of the first seeded request, from hidden states, seed and position alone."""
    import torch

    import nologits as nl

    states = torch.tensor([row[0] if isinstance(row[0], list) else row for row in hidden])
    head = torch.tensor(weight)[: SHAPE["vocab_size"]]
    positions = torch.arange(len(states))
    return nl.sample(states, head, temperature=0.9, seed=11, position=positions).tokens.tolist()


if __name__ == "__main__":
    main()
