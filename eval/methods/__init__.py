"""Rival methods, to be measured in the same harness as certjax.

Each is a plain numpy function over one query head.
"""

from certjax.eval.methods.paper import PaperResult as PaperResult
from certjax.eval.methods.paper import paper_attend as paper_attend
