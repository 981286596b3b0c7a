"""Estimators with scikit-learn's interface: ``pip install khot[sklearn]``."""

from khot.sklearn.topk_dictionary import TopKDictionary as TopKDictionary
from khot.sklearn.topk_neighbors import TopKNeighborsClassifier as TopKNeighborsClassifier
from khot.sklearn.topk_neighbors import TopKNeighborsRegressor as TopKNeighborsRegressor
from khot.sklearn.topk_regressor import RegressionPath as RegressionPath
from khot.sklearn.topk_regressor import TopKRegressor as TopKRegressor
from khot.sklearn.topk_selector import TopKSelector as TopKSelector
