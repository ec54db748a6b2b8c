from __future__ import annotations

import math

import pytest

from grpo.evidence.statistics import mean_interval, paired_difference, student_975
from grpo.model.optimizer import lr_factor


def test_paired_difference_by_hand():
    # Differences 1, 2, 0: mean 1, sd 1, standard error 1/sqrt(3), t sqrt(3).
    result = paired_difference([1, 2, 3], [2, 4, 3])
    assert (result.before, result.after, result.difference, result.n) == (2, 3, 1, 3)
    assert result.standard_error == pytest.approx(1 / math.sqrt(3)) and result.t == pytest.approx(math.sqrt(3))


def test_equal_changes_have_no_t():
    assert math.isnan(paired_difference([1, 2], [2, 3]).t)


def test_unpaired_items_are_refused():
    with pytest.raises(ValueError, match="not 2 and 1"):
        paired_difference([1, 2], [1])


def test_an_interval_by_hand():
    half = 4.302653 / math.sqrt(3)
    assert mean_interval([1, 2, 3]) == (2, pytest.approx(2 - half), pytest.approx(2 + half))
    with pytest.raises(ValueError, match="two items or more"):
        mean_interval([1])


def test_quantiles_of_students_t_are_those_of_its_table():
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 10: 2.2281, 31: 2.0395, 99: 1.9842}
    for degrees, t in table.items():
        assert student_975(degrees) == pytest.approx(t, rel=1.5e-3), degrees


def test_warm_up_rises_and_schedules_fall_to_zero_after_the_last_step():
    assert [lr_factor(step, 10, 4, "constant") for step in (0, 3, 4, 9)] == [0.2, 0.8, 1, 1]
    assert [lr_factor(step, 10, 0, "linear") for step in (0, 5, 10)] == [1, 0.5, 0]
    assert lr_factor(5, 10, 0, "cosine") == pytest.approx(0.5) and lr_factor(10, 10, 0, "cosine") == pytest.approx(0)
