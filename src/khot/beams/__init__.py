"""Beam search, hard and relaxed."""

from khot.beams.hard import Beams as Beams
from khot.beams.search import beam_search as beam_search
from khot.beams.soft import SoftBeams as SoftBeams
