"""Image models: the TopK networks, their controls, and a plain vision transformer."""

from khot.models.macs import count_macs as count_macs
from khot.models.presets import MODELS as MODELS
from khot.models.presets import PRESETS as PRESETS
from khot.models.presets import count_parameters as count_parameters
from khot.models.presets import create_model as create_model
from khot.models.reduction import reduce_tokens as reduce_tokens
from khot.models.reduction import restore_tokens as restore_tokens
from khot.models.select import off_diagonal_shares as off_diagonal_shares
from khot.models.select import set_tau_scale as set_tau_scale
from khot.models.topk import Mixer as Mixer
from khot.models.topk import TopKAttentionModel as TopKAttentionModel
from khot.models.topk import TopKDynamicModel as TopKDynamicModel
from khot.models.topk import TopKModel as TopKModel
from khot.models.vit import ViT as ViT
