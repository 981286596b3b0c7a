"""The verbs on scores that are sharded over processes along their last dimension.

Every process of the group calls the same verb with its own shard; the shards stand one behind the other in the order of the ranks.
Only sums cross the wire: a few numbers per row and round, however long the rows are. What is the same on every rank (``k``, ``tau``, a
loss, gathered items) counts once: its gradient is whole on every rank and is not to be summed over them again.
"""

from khot.distributed import dtensor as dtensor
from khot.distributed.hard import gather_topk as gather_topk
from khot.distributed.hard import topk_mask as topk_mask
from khot.distributed.loss import topk_loss as topk_loss
from khot.distributed.sampling import sample as sample
from khot.distributed.sampling import sample_topk as sample_topk
from khot.distributed.soft import soft_topk as soft_topk
from khot.distributed.traffic import Traffic as Traffic
from khot.distributed.traffic import traffic as traffic
