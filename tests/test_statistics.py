"""The tests' own tests: right draws pass, wrong ones are rejected, and a wrong token is not excused as rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import nologits as nl
from nologits.testing import chi_squared, compare_tokens, count_tokens, tail_share

V = 300
ACCEPT = 1e-4


def _logits() -> Tensor:
    return 2 * torch.randn(V, generator=torch.Generator().manual_seed(0))


def _draw(**parameters: object) -> Tensor:
    draws = 60_000
    hidden = torch.ones(draws, 1)
    return nl.sample(hidden, _logits()[:, None], seed=11, position=torch.arange(draws), impl="torch", **parameters).tokens


class TestChiSquared:
    def test_accepts_draws_of_the_library(self) -> None:
        result = chi_squared(count_tokens(_draw(), V), _logits().double().softmax(-1))
        assert result.p_value > ACCEPT
        assert result.draws == 60_000
        assert 1 < result.cells <= V
        assert result.cells + result.pooled >= V

    @pytest.mark.parametrize(
        "wrong",
        [
            {"temperature": 1.05},
            {"top_k": 200},
            {"min_p": 0.001},
            {"allowed_tokens": torch.tensor([0, 0, 0, 0, *[-1] * 6], dtype=torch.int32)},  # a dropped tile of 128 ids
        ],
        ids=["temperature 1.05", "top-k", "min-p", "dropped tile"],
    )
    def test_rejects_wrong_draws(self, wrong: dict[str, object]) -> None:
        result = chi_squared(count_tokens(_draw(**wrong), V), _logits().double().softmax(-1))
        assert result.p_value < 1e-6

    def test_p_values_are_uniform_on_right_counts(self) -> None:
        share = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.005, 0.004, 0.001])
        torch.manual_seed(3)
        p_values = torch.tensor(
            [
                chi_squared(torch.bincount(torch.multinomial(share, 1000, replacement=True), minlength=7), share).p_value
                for _ in range(400)
            ]
        )
        # Each tenth holds 40 of the 400 in the mean; six standard deviations are 36.
        assert (torch.histc(p_values, 10, 0, 1) - 40).abs().max() < 36
        assert 0.42 < p_values.mean() < 0.58

    def test_tail_that_is_rare_as_a_whole_joins_the_rarest_cell(self) -> None:
        result = chi_squared([50, 45, 5], [0.5, 0.45, 0.05])
        assert result.cells == 2
        assert result.pooled == 1
        assert chi_squared([60, 20, 20], [0.5, 0.45, 0.05]).p_value < chi_squared([50, 45, 5], [0.5, 0.45, 0.05]).p_value

    def test_impossible_token_is_rejected_outright(self) -> None:
        assert chi_squared([5000, 4999, 1], [0.5, 0.5, 0.0]).p_value == 0.0

    def test_errors_name_the_argument(self) -> None:
        with pytest.raises(ValueError, match=r"^probabilities must have shape \[3\]"):
            chi_squared([1, 2, 3], [0.5, 0.5])
        with pytest.raises(ValueError, match=r"^counts must hold at least one draw, got 0"):
            chi_squared([0, 0], [0.5, 0.5])
        with pytest.raises(ValueError, match=r"^tokens must be in \[0, 3\), got -1"):
            count_tokens(torch.tensor([0, -1, 2]), 3)


class TestTailShare:
    def test_right_share_passes(self) -> None:
        result = tail_share(19_650 // 10 + 30, 1_000_000, 0.0019650)
        assert result.p_value > ACCEPT
        assert result.statistic == pytest.approx((1995 - 1965) / math.sqrt(1965), rel=0.01)

    def test_share_of_a_24_bit_uniform_is_rejected_from_20_000_draws(self) -> None:
        assert tail_share(round(20_000 * 0.00016), 20_000, 0.0019650).p_value < 1e-6
        assert tail_share(39, 20_000, 0.0019650).p_value > 0.9

    def test_is_two_sided(self) -> None:
        assert tail_share(120, 20_000, 0.0019650).p_value < 1e-6

    @pytest.mark.parametrize(
        ("hits", "draws", "share"), [(3, 2, 0.5), (-1, 2, 0.5), (0, 0, 0.5), (1, 2, 0.0), (1, 2, math.nan)]
    )
    def test_impossible_input_raises(self, hits: int, draws: int, share: float) -> None:
        with pytest.raises(ValueError, match="must be"):
            tail_share(hits, draws, share)


class TestCompareTokens:
    B, D = 64, 48

    def setup_method(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.hidden = torch.randn(self.B, self.D, generator=generator)
        self.head = nl.LMHead(torch.randn(V, self.D, generator=generator) / math.sqrt(self.D) * 3)

    @pytest.mark.parametrize(
        "filters",
        [{}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_accepts_the_streaming_path(self, filters: dict[str, float], dtype: torch.dtype) -> None:
        head = nl.LMHead(self.head.spec.weight.to(dtype), softcap=30.0)
        hidden = self.hidden.to(dtype)
        params = nl.SamplingParams(**{"temperature": 0.7, "seed": 9, **filters})
        result = compare_tokens(head.sample(hidden, params, num_samples=8, impl="torch").tokens, hidden, head, params)
        assert result.draws == self.B * 8
        assert result.mismatches <= 2
        assert 0 < result.budget < 1e-2

    def test_accepts_the_reference_itself_without_mismatch(self) -> None:
        params = nl.SamplingParams(seed=9, top_p=0.9)
        tokens = self.head.sample(self.hidden, params, impl="reference").tokens
        assert compare_tokens(tokens, self.hidden, self.head, params).mismatches == 0

    @pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
    def test_rejects_one_wrong_token(self, filters: dict[str, float]) -> None:
        params = nl.SamplingParams(seed=9, **filters)
        tokens = self.head.sample(self.hidden, params, num_samples=2, impl="reference").tokens
        tokens[17, 1] = (tokens[17, 1] + 1) % V
        with pytest.raises(AssertionError, match=r"^row 17, sample 1: token"):
            compare_tokens(tokens, self.hidden, self.head, params)

    def test_rejects_other_noise(self) -> None:
        tokens = self.head.sample(self.hidden, nl.SamplingParams(seed=9)).tokens
        with pytest.raises(AssertionError, match=r"^row"):
            compare_tokens(tokens, self.hidden, self.head, nl.SamplingParams(seed=10))

    def test_rejects_a_token_outside_the_filters_whatever_its_score(self) -> None:
        unfiltered = self.head.sample(self.hidden, nl.SamplingParams(seed=9)).tokens
        with pytest.raises(AssertionError, match="the filters drop it"):
            compare_tokens(unfiltered, self.hidden, self.head, nl.SamplingParams(seed=9, top_k=3))

    def test_accepts_a_swap_of_tokens_closer_than_the_rounding(self) -> None:
        # Ids 2 and 5 differ by 1e-7 of their logit: greedy may return either, but not id 0, which is 1e-3 lower.
        logits = torch.full((8,), 1.0)
        logits[2], logits[5] = 9.000001, 9.0
        logits[0] = 8.999
        head, hidden = nl.LMHead(logits[:, None]), torch.ones(1, 1)
        greedy = nl.SamplingParams(temperature=0.0)
        result = compare_tokens(torch.tensor([5]), hidden, head, greedy)
        assert result.mismatches == 1
        assert 0 < result.worst_gap <= result.budget
        with pytest.raises(AssertionError, match="token 0, the reference draws 2: its score is"):
            compare_tokens(torch.tensor([0]), hidden, head, greedy)

    def test_accepts_a_filter_boundary_moved_by_the_rounding(self) -> None:
        # Top-k 1 with two logits closer than the rounding: either may be the one that is kept, whatever the noise says.
        logits = torch.tensor([0.0, 9.000001, 9.0])
        head, hidden = nl.LMHead(logits[:, None]), torch.ones(1, 1)
        params = nl.SamplingParams(seed=1, top_k=1)
        assert compare_tokens(torch.tensor([2]), hidden, head, params).mismatches == 1
        with pytest.raises(AssertionError, match="the filters drop it"):
            compare_tokens(torch.tensor([0]), hidden, head, params)

    def test_invalid_rows_must_be_invalid(self) -> None:
        hidden = self.hidden.clone()
        hidden[3] = math.nan
        params = nl.SamplingParams(seed=9)
        tokens = self.head.sample(hidden, params).tokens
        assert tokens[3] == -1
        assert compare_tokens(tokens, hidden, self.head, params).mismatches == 0
        tokens[3] = 0
        with pytest.raises(AssertionError, match=r"^row 3"):
            compare_tokens(tokens, hidden, self.head, params)

    def test_unseeded_draws_cannot_be_compared(self) -> None:
        tokens = self.head.sample(self.hidden).tokens
        with pytest.raises(ValueError, match=r"^params must have a seed"):
            compare_tokens(tokens, self.hidden, self.head, nl.SamplingParams())
