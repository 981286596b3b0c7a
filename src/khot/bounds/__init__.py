"""Sound bounds of networks that select: intervals and linear forms through the layers of a transformer and through its top-k."""

from khot.bounds.affine import Affine as Affine
from khot.bounds.box import Box as Box
from khot.bounds.certify import Certificate as Certificate
from khot.bounds.certify import certify as certify
from khot.bounds.certify import certify_cases as certify_cases
from khot.bounds.elementwise import exp as exp
from khot.bounds.elementwise import gelu as gelu
from khot.bounds.elementwise import reciprocal as reciprocal
from khot.bounds.elementwise import relu as relu
from khot.bounds.elementwise import rsqrt as rsqrt
from khot.bounds.layers import attend as attend
from khot.bounds.layers import cat as cat
from khot.bounds.layers import gather as gather
from khot.bounds.layers import layer_norm as layer_norm
from khot.bounds.layers import linear as linear
from khot.bounds.layers import matmul as matmul
from khot.bounds.layers import patches as patches
from khot.bounds.layers import softmax as softmax
from khot.bounds.selection import enumerate_cases as enumerate_cases
from khot.bounds.selection import kth_best as kth_best
from khot.bounds.selection import rank_bounds as rank_bounds
from khot.bounds.selection import topk as topk
