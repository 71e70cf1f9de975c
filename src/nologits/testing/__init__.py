"""How this library is tested, for its own tests, for ``nologits verify`` and for the tests of other implementations.

The library itself never imports this package. ``statistics`` needs scipy, which is imported at the first test.
"""

from .budget import TokenComparison, compare_tokens
from .statistics import FitResult, chi_squared, count_tokens, tail_share

__all__ = ["FitResult", "TokenComparison", "chi_squared", "compare_tokens", "count_tokens", "tail_share"]
