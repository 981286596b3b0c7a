"""Layers and module forms: the state and the names of the functions, none of their logic."""

from khot.nn.annealing import anneal as anneal
from khot.nn.differentiable_topk import DifferentiableTopK as DifferentiableTopK
from khot.nn.feature_selector import FeatureSelector as FeatureSelector
from khot.nn.learned_k import LearnedK as LearnedK
from khot.nn.sample_topk import SampleTopK as SampleTopK
from khot.nn.soft_topk import SoftTopK as SoftTopK
from khot.nn.topk_loss import TopKLoss as TopKLoss
