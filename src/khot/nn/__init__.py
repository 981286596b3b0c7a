"""Layers and module forms: the state and the names of the functions, none of their logic."""

from khot.nn.annealing import anneal as anneal
from khot.nn.csr import to_csr as to_csr
from khot.nn.dictionary import Dictionary as Dictionary
from khot.nn.differentiable_topk import DifferentiableTopK as DifferentiableTopK
from khot.nn.experts import StackedFeedForward as StackedFeedForward
from khot.nn.feature_selector import FeatureSelector as FeatureSelector
from khot.nn.learned_k import LearnedK as LearnedK
from khot.nn.libraries import FourierLibrary as FourierLibrary
from khot.nn.libraries import FunctionLibrary as FunctionLibrary
from khot.nn.libraries import Library as Library
from khot.nn.libraries import PolynomialLibrary as PolynomialLibrary
from khot.nn.moe import MoE as MoE
from khot.nn.routing import Routing as Routing
from khot.nn.sample_topk import SampleTopK as SampleTopK
from khot.nn.sindy import SINDy as SINDy
from khot.nn.soft_knn import SoftKNN as SoftKNN
from khot.nn.soft_topk import SoftTopK as SoftTopK
from khot.nn.sparse_autoencoder import SparseAutoencoder as SparseAutoencoder
from khot.nn.sparse_linear import SparseLinear as SparseLinear
from khot.nn.sparsify import Sparsifier as Sparsifier
from khot.nn.sparsify import sparsify as sparsify
from khot.nn.token_topk import TokenTopK as TokenTopK
from khot.nn.topk_loss import TopKLoss as TopKLoss
from khot.nn.topk_router import TopKRouter as TopKRouter
