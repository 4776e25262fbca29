import math
from statistics import fmean

import pytest

from kvmesh.sizing.lengths import MOST_P95_OF_MEAN, Lengths


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.78, 3.8])
def test_it_has_the_mean_and_the_95th_percentile_it_was_made_of(ratio: float) -> None:
    lengths = Lengths.of(200, 200 * ratio)
    assert lengths.p95 == pytest.approx(200 * ratio)
    assert fmean(lengths.points) == pytest.approx(200)
    assert sum(n <= lengths.p95 for n in lengths.points) in (95, 96) if ratio > 1 else True


def test_without_a_percentile_it_is_spread_as_an_exponential() -> None:
    assert Lengths(100).variation == pytest.approx(1)
    assert Lengths(100).p95 == pytest.approx(278, abs=1)


def test_prompts_that_are_all_alike_have_no_spread() -> None:
    alike = Lengths.of(100, 100)
    assert (alike.sigma, alike.variation, set(alike.points)) == (0, 0, {100.0})


@pytest.mark.parametrize("p95", [99, 388])
def test_a_percentile_that_no_lognormal_has_is_refused_with_what_is_possible(p95: float) -> None:
    with pytest.raises(ValueError, match=r"outside \[100, 386\.8"):
        Lengths.of(100, p95)
    assert math.isclose(MOST_P95_OF_MEAN, 3.868, abs_tol=1e-3)
