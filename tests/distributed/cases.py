"""All cases: importing their files fills the table."""

from __future__ import annotations

from tests.distributed import dtensor_cases as dtensor_cases
from tests.distributed import hard_cases as hard_cases
from tests.distributed import module_cases as module_cases
from tests.distributed import soft_cases as soft_cases
from tests.distributed import wire_cases as wire_cases
from tests.distributed.table import CASES as CASES
