"""Draw LLM tokens straight from hidden states: exact, seeded, filtered, with log-probabilities and without logits."""

from ._version import __version__
from .api import filter_logits, sample, sample_logits, select
from .groups import merge
from .head import LMHead
from .online import OnlineSampler
from .params import SamplingParams
from .types import Candidates, KeptRows, Samples, TopTokens

__all__ = [
    "Candidates",
    "KeptRows",
    "LMHead",
    "OnlineSampler",
    "Samples",
    "SamplingParams",
    "TopTokens",
    "__version__",
    "filter_logits",
    "merge",
    "sample",
    "sample_logits",
    "select",
]
