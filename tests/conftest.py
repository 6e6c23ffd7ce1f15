"""Hypothesis profiles and the seeded generator that tests share."""

import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Machines that run tests are shared and slow builds (sanitizers) are slower: time is never a failure here.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, database=None)
settings.register_profile("again", parent=settings.get_profile("ci"), max_examples=25)  # ran in full on another build
settings.register_profile("long", parent=settings.get_profile("default"), max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


@pytest.fixture
def rng() -> np.random.Generator:
    """NumPy generator with a new seed every time; pytest shows the seed when the test fails."""
    seed = int(os.environ.get("PYSTALE_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"repeat with PYSTALE_TEST_SEED={seed}")
    return np.random.default_rng(seed)
