"""What every test and every doctest finds in place."""

import importlib.util

import pytest
import torch
from hypothesis import settings

import khot

# The one file that imports an optional dependency when it is imported itself.
collect_ignore = [] if importlib.util.find_spec("triton") else ["src/khot/kernels/triton_rows.py"]

# Two workers on two cores: a thread pool in each would only get in the other's way.
torch.set_num_threads(1)

settings.register_profile("khot", deadline=None, derandomize=True)
settings.load_profile("khot")


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace["torch"] = torch
    doctest_namespace["khot"] = khot


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch.set_printoptions(profile="default")
