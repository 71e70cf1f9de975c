"""One run of the suite ``vllm`` on a tiny model: ``python vllm_bench_job.py OUT.json``, a process, as vLLM's hooks want it."""

import json
import sys

from nologits.bench import vllm_suite
from nologits.bench.decoder import Shape
from nologits.bench.suite import Plan

TINY = Shape("tiny", "a test", 997, 64, 2, 2, 1, 32, 96)


def main():
    record = {}
    plan = Plan(["tiny"], [1, 3], ["t06", "t06k20p95"], vllm_suite.PROVIDERS, 2)
    vllm_suite.run(plan, True, record, print, print, (TINY,), 96)
    with open(sys.argv[1], "w") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main()
