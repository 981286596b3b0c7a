"""The threshold engine: what a family of squashing functions is, the search for its threshold, its derivative, its operator."""

from khot.primitives.threshold import operator as operator
