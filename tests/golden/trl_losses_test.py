"""Our losses are TRL's where it has the same; only where its environment is made (`make trl-env`)."""

import against_trl_losses
import pytest


@pytest.mark.skipif(not against_trl_losses.TRL_PYTHON.exists(), reason="no environment for TRL")
def test_the_losses_that_trl_has_too_are_the_same():
    found = against_trl_losses.compare(cases=9)
    assert found.keys() == against_trl_losses.TRL.keys()
    for name, largest in found.items():
        assert all(value < 5e-6 for value in largest.values()), f"{name}: {largest}"
