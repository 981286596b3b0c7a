"""What every test and every doctest finds in place."""

import importlib.util

import pytest
import torch
from hypothesis import settings

import khot

# A program that changes torch for the process it runs in, and files that import an optional dependency when they are imported themselves.
collect_ignore = ["tests/without_private_names.py"]
collect_ignore += [] if importlib.util.find_spec("triton") else ["src/khot/kernels/triton_rows.py", "src/khot/kernels/triton_hard.py"]

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
