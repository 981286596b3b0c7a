r"""Gradients through a random choice of k items, one file each.

Every estimator has the same form: it draws masks, evaluates the objective on them, and returns the mean loss of each row with a
gradient that estimates that of the expected loss in the scores:

    loss = khot.estimators.straight_through(objective, scores, k).mean()
    loss.backward()

``objective`` maps masks ``(num_samples, *scores.shape)`` to losses ``(num_samples, ...)``; what it is made of gets its ordinary
gradient. With ``k_subset`` in a description, the masks come from :class:`khot.distributions.KSubset` with logits ``scores / tau``.
"""

from khot.estimators._table import ESTIMATORS as ESTIMATORS
from khot.estimators._table import Estimator as Estimator
from khot.estimators._table import Objective as Objective
from khot.estimators.marginal import marginal as marginal
from khot.estimators.perturb_and_map import perturb_and_map as perturb_and_map
from khot.estimators.relaxed_gumbel import relaxed_gumbel as relaxed_gumbel
from khot.estimators.score_function import score_function as score_function
from khot.estimators.second_order import second_order as second_order
from khot.estimators.straight_through import straight_through as straight_through
