"""How this library is tested, for its own tests, for ``nologits verify`` and for the tests of other implementations.

The library itself never imports this package. ``statistics`` needs scipy, which is imported at the first test.
"""

from .budget import TokenComparison, compare_tokens
from .families import FAMILIES, Family, UnavailableError, make_logits
from .kept_sets import KeptSets, kept_sets
from .screened import ScreenedDraw, screened_draw
from .states import smollm2_states
from .statistics import FitResult, chi_squared, count_tokens, tail_share

__all__ = [
    "FAMILIES",
    "Family",
    "FitResult",
    "KeptSets",
    "ScreenedDraw",
    "TokenComparison",
    "UnavailableError",
    "chi_squared",
    "compare_tokens",
    "count_tokens",
    "kept_sets",
    "make_logits",
    "screened_draw",
    "smollm2_states",
    "tail_share",
]
