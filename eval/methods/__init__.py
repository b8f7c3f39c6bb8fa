"""Rival methods behind one protocol (protocol.py), to be measured in the same harness as certjax: see registry.py."""

from certjax.eval.methods.paper import PaperResult as PaperResult
from certjax.eval.methods.paper import paper_attend as paper_attend
from certjax.eval.methods.protocol import Method as Method
from certjax.eval.methods.protocol import Outcome as Outcome
from certjax.eval.methods.protocol import Problem as Problem
from certjax.eval.methods.registry import METHODS as METHODS
