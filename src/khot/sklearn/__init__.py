"""Estimators with scikit-learn's interface: ``pip install khot[sklearn]``."""

from khot.sklearn.topk_selector import TopKSelector as TopKSelector
