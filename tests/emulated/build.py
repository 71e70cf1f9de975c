"""Kernels compiled for the CPU, from a copy of their source in which little is replaced, and the launchers for them."""

import ctypes
import functools
import hashlib
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
COPIED = (
    "filters.cu",
    "contract.cuh",
    "order.cuh",
    "request.cuh",
    "cluster.cuh",
    "chunk.cuh",
    "share.cuh",
    "row.cuh",
    "search.cuh",
    "list.cuh",
    "guess.cuh",
    "read.cuh",
    "results.cuh",
    "params.cuh",
    "winners.cuh",
    "held.cuh",
    "leave.cuh",
    "choose.cu",
    "tile.cuh",
    "draw.cuh",
    "mass.cuh",
    "patience.cuh",
    "truncate.cuh",
    "categorical.cu",
    "sweep.cuh",
    "settle.cuh",
    "finish.cu",
    "exchange.cuh",
    "exchange.cu",
    "screen.cu",
    "rescore.cu",
    "screen_rows.cu",
    "merge.cu",
)
FLAGS = (
    "-std=c++17 -O1 -march=native -ffp-contract=fast -fno-strict-aliasing -fvisibility=hidden -fno-gnu-unique -w -fPIC -shared"
)


def adapted(path):
    """The text of a source file without what g++ cannot compile. The file must have, once, all that is known to be replaced."""
    text, replaced = path.read_text(), (HERE / "replaced.txt").read_text()
    pairs = re.findall(r"^- (.*)\n\+ (.*)$", replaced.partition(f"== {path.name}\n")[2].partition("\n==")[0], re.M)
    for old, new in pairs:
        text, count = re.subn(r"\s+".join(map(re.escape, old.split())), lambda _, new=new: new, text)
        assert count == 1, f"{path.name} has {count} times: {old}"
    assert not re.search(r"\basm\b|__shared__", text), path.name
    return text


def copy_sources(sources, folder):
    """Makes ``folder`` what :func:`build` compiles."""
    for name in COPIED:
        (folder / name).write_text(adapted(sources / name))
    for name in ("ptx", "pipeline"):
        (folder / f"{name}.cuh").write_text(f'#include "{name}.h"\n')
    for path in (*HERE.glob("*.h"), *HERE.glob("*.cpp")):
        shutil.copy(path, folder)


def build(gxx, folder, defines, name="filters"):
    """The loaded library of a kernel under the macros ``defines``."""
    macros = [f"-D{key}={value}" for key, value in defines]
    target = folder / f"{name}-{hashlib.sha256(repr(macros).encode()).hexdigest()[:16]}.so"
    command = [gxx, *FLAGS.split(), *macros, str(folder / f"{name}.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    library.launch.restype = ctypes.c_char_p
    library.launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_int]
    return library


@functools.cache
def launcher(name="filters_sm90"):
    """A module of launchers, also where CUDA's bindings are not installed: here it launches nothing by them."""
    known = (
        {"nologits.kernels.categorical_sm90": launcher("categorical_sm90")} if name != "categorical_sm90" else {}
    )  # one module, not a second copy
    name = f"nologits.kernels.{name}"
    importlib.import_module("nologits.kernels.arguments")  # what it imports besides is loaded before, and stays
    try:
        return importlib.import_module(name)
    except ImportError:
        bindings = ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.bindings.nvrtc")
        with mock.patch.dict(sys.modules, {part: mock.MagicMock() for part in bindings} | known):
            return importlib.import_module(name)


def launch_tiles(library, ranks, logits, grid, shared, seed, poison):
    """Starts a kernel of ``tiles.cpp``; ``ranks`` are each rank's arguments, ``logits [rows, V]`` its matmul's."""

    class Rank(ctypes.Structure):
        _fields_ = [("params", ctypes.c_void_p), ("links", ctypes.c_void_p)]

    structures = [[part for part in arguments if isinstance(part, ctypes.Structure)] for arguments in ranks]
    given = (Rank * len(ranks))(*[Rank(*map(ctypes.addressof, parts)) for parts in structures])
    rows = (ctypes.c_void_p * len(ranks))(*[part.data_ptr() for part in logits])
    library.launch.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_ulonglong, ctypes.c_int
    ]  # fmt: skip
    return library.launch(given, len(ranks), rows, *grid, shared, seed, poison)


def kept_sets():
    """``nologits.hopper.kept_sets``, also where CUDA's bindings are not installed."""
    known = {f"nologits.kernels.{name}": launcher(name) for name in ("categorical_sm90", "filters_sm90")}
    with mock.patch.dict(sys.modules, known):
        return importlib.import_module("nologits.hopper").kept_sets
