"""Least squares with exactly ``k`` columns: search by exchanges, and proof by branch and bound."""

from khot.subset.problem import make_problem as make_problem
from khot.subset.problem import reduce_rows as reduce_rows
from khot.subset.search import best_subsets as best_subsets
