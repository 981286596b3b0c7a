"""Training on pytorch-ignite: ``khot train``, ``khot eval`` and ``khot results``; needs ``pip install 'khot[train]'``."""
