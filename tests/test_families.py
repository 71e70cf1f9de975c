"""The families of logits have the shapes they are named for, and the oracle of kept sets is right where sets are known."""

import ast
import inspect
import math

import pytest
import torch

import nologits as nl
from nologits.testing import FAMILIES, UnavailableError, families, kept_sets, make_logits

MADE = [name for name in FAMILIES if name != "smollm2"]
FILTERS = [
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.013},
]


def sets(logits, **filters):
    """The kept ids of each row."""
    return [row.nonzero().flatten().tolist() for row in kept_sets(torch.as_tensor(logits), **filters).keep]


def log(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


class TestFamilies:
    def test_names(self):
        assert list(FAMILIES) == ["gauss", "peaked", "flat", "zipf", "ties", "bf16", "masked", "outlier", "coldT", "smollm2"]
        assert all(family.name == name for name, family in FAMILIES.items())

    @pytest.mark.parametrize("name", MADE)
    def test_a_pure_function_whose_rows_do_not_depend_on_the_batch(self, name):
        five = make_logits(name, 5, 300, seed=3)
        assert (tuple(five.shape), five.dtype) == ((5, 300), FAMILIES[name].dtype)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        assert torch.equal(make_logits(name, 2, 300, seed=3), five[:2])
        assert torch.equal(before, torch.get_rng_state())
        assert not torch.equal(make_logits(name, 5, 300, seed=4), five)
        assert not torch.equal(five[0], five[1])

    @pytest.mark.parametrize("name", MADE)
    @pytest.mark.parametrize("vocab", [1, 2, 33])
    def test_small_vocabularies(self, name, vocab):
        logits = make_logits(name, 3, vocab)
        assert logits.shape == (3, vocab)
        assert bool((logits > -math.inf).any(-1).all())
        assert bool((logits < math.inf).all())  # NaN fails too

    def test_default_vocabulary(self):
        assert make_logits("ties", 1).shape == (1, 151_936)

    def test_gauss(self):
        logits = make_logits("gauss", 1)
        assert float(logits.std()) == pytest.approx(2.5, rel=0.02)
        assert float(logits.mean()) == pytest.approx(0, abs=0.03)
        assert len(sets(logits, top_p=0.9)[0]) == pytest.approx(151_936 / 9, rel=0.1)

    def test_peaked(self):
        logits = make_logits("peaked", 4)
        assert int((logits > 4.6).sum()) == pytest.approx(4 * 200 * 0.913, rel=0.1)  # the bulk ends 4.8 deviations up
        assert float(logits.median()) == pytest.approx(-4, abs=0.05)
        counts = [len(ids) for ids in sets(logits, top_p=0.9)]
        assert sum(counts) / len(counts) == pytest.approx(32, abs=16)

    def test_flat(self):
        logits = make_logits("flat", 1)
        assert float(logits.std()) == pytest.approx(0.05, rel=0.02)
        assert len(sets(logits, top_p=0.9)[0]) == pytest.approx(0.89 * 151_936, rel=0.01)

    def test_zipf(self):
        logits = make_logits("zipf", 2, 5_000).double()
        probabilities = logits.exp().sort(-1, descending=True)[0]
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(2).double(), rtol=1e-5, atol=0)
        torch.testing.assert_close(probabilities[0, 0] / probabilities[0], torch.arange(1, 5_001).double(), rtol=1e-5, atol=0)
        assert logits.argmax(-1).tolist() != [0, 0]  # in random order

    def test_ties(self):
        assert make_logits("ties", 1, 5_000).unique().tolist() == [value / 2 for value in range(-4, 5)]

    def test_bf16(self):
        logits = make_logits("bf16", 1)
        assert logits.dtype == torch.bfloat16
        assert len(logits.unique()) < 5_000
        assert torch.equal(logits[0], make_logits("gauss", 1)[0].bfloat16())

    def test_masked(self):
        logits, peaked = make_logits("masked", 3, 20_000), make_logits("peaked", 3, 20_000)
        kept = logits > -math.inf
        assert kept.sum(-1).tolist() == [200] * 3
        assert torch.equal(logits[kept], peaked[kept])

    def test_outlier(self):
        logits = make_logits("outlier", 4, 1_000)
        assert (logits == 1e9).sum(-1).tolist() == [1] * 4
        assert (logits == torch.finfo(torch.float32).min).sum(-1).tolist() == [0, 1, 0, 1]

    def test_cold(self):
        assert torch.equal(make_logits("coldT", 2, 1_000), make_logits("peaked", 2, 1_000) / 0.05)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("nonesuch", 1), "family must be one of gauss, .* got 'nonesuch'"),
            (("gauss", 0), "batch must be at least 1, got 0"),
            (("smollm2", 1, 151_936), "vocab must be 49152 for smollm2, got 151936"),
        ],
    )
    def test_wrong_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            make_logits(*arguments)


class TestSmollm2:
    def test_logits_of_a_model_on_text(self):
        try:
            logits = make_logits("smollm2", 64)
        except UnavailableError as reason:
            pytest.skip(str(reason))
        assert (tuple(logits.shape), logits.dtype) == ((64, 49_152), torch.float32)
        entropy = torch.distributions.Categorical(logits=logits.double()).entropy()
        assert float(entropy.min()) < 0.5  # a model that has been read right is sure of some tokens of its text
        assert float(entropy.mean()) < 5
        assert float(entropy.max()) > 4

    @pytest.fixture
    def positions(self, monkeypatch, tmp_path):
        """Logits carried from another machine."""
        monkeypatch.setenv("NOLOGITS_CACHE", str(tmp_path))
        logits = torch.arange(7.0)[:, None].expand(7, 49_152).clone()
        torch.save(logits, families.smollm2_file())
        return logits

    def test_a_carried_file_is_read_and_comes_again_beyond_its_end(self, positions):
        drawn = make_logits("smollm2", 9, seed=2)[:, 0].tolist()
        assert sorted(drawn[:7]) == list(range(7))
        assert drawn[7:] == drawn[:2]
        assert make_logits("smollm2", 9, seed=3)[:, 0].tolist() != drawn

    def test_without_the_weights_it_says_why(self, monkeypatch, tmp_path):
        monkeypatch.setenv("NOLOGITS_CACHE", str(tmp_path))

        def load():
            raise ImportError("the demo model needs gguf")

        monkeypatch.setattr("nologits.demo.smollm2.load", load)
        with pytest.raises(UnavailableError, match=f"the demo model needs gguf; or copy smollm2-.*.pt to {tmp_path}"):
            make_logits("smollm2", 1)


class TestKeptSets:
    @pytest.mark.parametrize(
        ("probabilities", "filters", "ids"),
        [
            ((0.3, 0.1, 0.1, 0.5), {"top_p": 0.79}, [0, 3]),
            ((0.5, 0.25, 0.125, 0.125), {"top_p": 0.7499}, [0, 1]),
            ((0.5, 0.25, 0.125, 0.125), {"top_p": 0.7501}, [0, 1, 2]),  # the lower id of the tie
            ((0.5, 0.3, 0.15, 0.05), {"top_p": 0.6}, [0, 1]),
            ((0.25, 0.25, 0.25, 0.25), {"top_p": 0.5}, [0, 1]),  # reached, not passed
            ((0.1, 0.2, 0.3, 0.4), {"top_p": 0.0}, [3]),
            ((0.1, 0.2, 0.3, 0.4), {"top_p": 1.0}, [0, 1, 2, 3]),
            ((0.2, 0.3, 0.2, 0.3), {"top_k": 3}, [0, 1, 3]),
            ((0.2, 0.3, 0.2, 0.3), {"top_k": 9}, [0, 1, 2, 3]),
            ((0.0, 0.5, 0.0, 0.5), {"top_k": 3}, [1, 3]),  # what has no mass is never kept
            ((0.1, 0.2, 0.3, 0.4), {"min_p": 0.49}, [1, 2, 3]),
            ((0.1, 0.2, 0.3, 0.4), {"min_p": 0.51}, [2, 3]),
            ((0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.5}, [0]),  # of the two's mass, not of the row's
            ((0.4, 0.3, 0.2, 0.1), {"min_p": 0.6, "top_p": 0.5}, [0]),
            ((0.4, 0.3, 0.2, 0.1), {"min_p": 0.6, "top_k": 3}, [0, 1]),
            ((0.4, 0.3, 0.2, 0.1), {"top_p": 0.5, "temperature": 0.1}, [0]),
            ((0.4, 0.3, 0.2, 0.1), {"top_p": 0.53, "temperature": 10.0}, [0, 1, 2]),
        ],
    )
    def test_known_sets(self, probabilities, filters, ids):
        assert sets(log(*probabilities), **filters) == [ids]

    @pytest.mark.parametrize(
        ("probabilities", "filters", "clear"),
        [
            ((0.5, 0.25, 0.125, 0.125), {"top_p": 0.75}, False),
            ((0.5, 0.25, 0.125, 0.125), {"top_p": 0.75 + 1e-8}, True),
            ((0.5, 0.25, 0.25), {"min_p": 0.5}, False),
            ((0.5, 0.25, 0.25), {"min_p": 0.5 - 1e-8}, True),
            ((0.5, 0.25, 0.25), {"top_k": 2}, True),  # ties are decided by id, not by rounding
        ],
    )
    def test_boundaries_that_rounding_decides_are_told_apart(self, probabilities, filters, clear):
        assert kept_sets(log(*probabilities), **filters).clear.tolist() == [clear]

    def test_against_exact_sums(self):
        """The same rules over Python's numbers, one row at a time, with correctly rounded sums."""
        logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(5)).mul(2).half().float()
        logits[::3, ::7] = 1.5
        logits[::4, 5:20] = -math.inf
        for row in logits:
            ranked = sorted(range(60), key=lambda i: (-float(row[i]), i))
            mass = {i: math.exp(float(row[i]) - float(row.max())) for i in ranked}
            kept = [i for i in ranked if mass[i] >= 0.02][:17]
            total = math.fsum(mass[i] for i in kept)
            prefix = [i for n, i in enumerate(kept) if math.fsum(mass[j] for j in kept[:n]) < 0.8 * total]
            assert sets(row[None], min_p=0.02, top_k=17, top_p=0.8) == [sorted(prefix)]

    def test_it_shares_no_code_with_the_library(self):
        tree = ast.parse(inspect.getsource(inspect.getmodule(kept_sets)))
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in imported if getattr(node, "level", 0)]
        assert "torch" in {name.name for node in imported for name in node.names}

    @pytest.mark.parametrize("filters", FILTERS, ids=str)
    @pytest.mark.parametrize("name", MADE)
    def test_the_library_keeps_these_sets(self, name, filters):
        logits = make_logits(name, 5, 3_000)
        right = kept_sets(logits, **filters)
        assert int(right.clear.sum()) >= 4
        kept = nl.filter_logits(logits, **filters) > -math.inf
        assert torch.equal(kept[right.clear], right.keep[right.clear])
