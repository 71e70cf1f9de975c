"""Compiles the Triton kernels of filtered draws for a GPU that need not be there; prints registers and bytes of stack, as JSON.

A process of its own: where ``TRITON_INTERPRET=1``, the kernels are no code that a compiler takes. The interpreter, in turn,
checks no types.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nologits.kernels import categorical, choose, threshold, whole
from nologits.kernels.config import TILES

HALF = ("hidden", "weight", "bias_ptr")
WIDE = (
    "bias_ids_ptr", "seed_ptr", "position_ptr", "entropy_ptr", "key_ptr", "entry_ptr", "unit_ptr", "token_ptr", "top_k_ptr",
    "ever_open_ptr",
)  # fmt: skip
NARROW = ("allowed_ptr", "gathered_ptr", "open_ptr", "num_open_ptr")
DOUBLE = ("rest_ptr", "top_p_ptr", "min_p_ptr")
FLOATS = ("scale", "softcap", "temperature_value")
TILE = {
    "FROM_LOGITS": False, "HAS_BIAS": True, "HAS_SCALE": True, "HAS_SOFTCAP": True, "HAS_LOGIT_BIAS": True,
    "HAS_SPARSE_BIAS": True, "HAS_ALLOWED": True, "USE_TMA": False, "UPCAST": False, "PRECISION": "ieee", "FAST_LOG": True,
    "stride_wd": 1, "stride_hd": 1,
}  # fmt: skip
PLAIN = TILE | {name: False for name in TILE if name.startswith("HAS_")}
NOISE = {"HAS_TEMPERATURE": True, "HAS_SEED": True, "HAS_POSITION": True, "HAS_ENTROPY": True, "GREEDY": False}
FILTERS = {"HAS_TOP_K": True, "HAS_TOP_P": True, "HAS_MIN_P": True}


def kind_of(name):
    for names, kind in ((HALF, "*bf16"), (WIDE, "*i64"), (NARROW, "*i32"), (DOUBLE, "*fp64"), (FLOATS, "fp32")):
        if name in names:
            return kind
    return "*fp32" if name.endswith("_ptr") else "i32"


def compiled(kernel, flags, capability, warps, stages=3):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in flags else kind_of(name) for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name in ("D", "stride_wv", "stride_hb")]
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in flags.items() if name in names},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    options = {"num_warps": warps, "num_stages": stages}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return [int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK")]


def main(capability):
    config = TILES["sm90" if capability == 90 else "any", "half"][16]
    shape = {"BLOCK_V": config.BLOCK_V, "BLOCK_B": config.BLOCK_B, "BLOCK_D": config.BLOCK_D}
    tile = (capability, config.num_warps, config.num_stages)
    results = {
        "pilot": compiled(threshold._pilot_kernel, TILE | shape, *tile),
        "whole": compiled(whole._whole_rows_kernel, TILE | shape | {"RAW": True}, *tile),
        "threshold": compiled(
            threshold._threshold_kernel, FILTERS | {"HAS_TEMPERATURE": True, "BLOCK": 1024}, capability, 1
        ),
    }  # fmt: skip
    for name, flags in {
        "gather": PLAIN | {"MASS": False, "RAW": False, "GREEDY": True},
        "gather, all": TILE | {"MASS": True, "RAW": True},
    }.items():
        every = NOISE | shape | {"GATHER": True, "REST": True} | flags
        results[name] = compiled(categorical._categorical_tile_kernel, every, *tile)
    for name, flags, warps in (
        ("choose", {"WHOLE": False, "REST": True, "BLOCK": choose.BLOCK_CANDIDATES}, choose.WARPS_CANDIDATES),
        ("choose, whole", {"WHOLE": True, "REST": False, "BLOCK": choose.BLOCK_WHOLE}, choose.WARPS_WHOLE),
    ):
        every = NOISE | FILTERS | {"MASS": True, "RAW": True, "FAST_LOG": True, "BLOCK_T": choose.BLOCK_T} | flags
        results[name] = compiled(choose._choose_kernel, every, capability, warps)
    print(json.dumps(results))


main(int(sys.argv[1]))
