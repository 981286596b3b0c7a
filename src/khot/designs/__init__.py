"""Sampling designs: random k-hot masks with prescribed inclusion probabilities, one file each."""

from khot.designs.brewer import brewer as brewer
from khot.designs.conditional_poisson import conditional_poisson as conditional_poisson
from khot.designs.gumbel import gumbel as gumbel
from khot.designs.pareto import pareto as pareto
from khot.designs.pivotal import pivotal as pivotal
from khot.designs.poisson import poisson as poisson
from khot.designs.sampford import sampford as sampford
from khot.designs.systematic import systematic as systematic
