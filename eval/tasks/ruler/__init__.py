"""RULER (arXiv 2404.06654): thirteen synthetic long-context tasks, generated here in our own words.

The tasks, their sizes, budgets and metrics are the published ones. What differs, unless the user gives files: the
wording (`templates.load`), the word lists (`words.load`), the essay and how it is split into sentences (`texts.load`),
and the documents of qa_1 and qa_2 (`documents.towns`). Context and question are encoded apart, so that they may be read
with different attention. Scores are comparable with published ones only where those files are the published ones, and
then with policy "compat" in distribution, not in bits.
"""

from certjax.eval.tasks.ruler.parts import Materials as Materials
from certjax.eval.tasks.ruler.parts import Policy as Policy
from certjax.eval.tasks.ruler.parts import load_materials as load_materials
from certjax.eval.tasks.ruler.runner import Answer as Answer
from certjax.eval.tasks.ruler.runner import Start as Start
from certjax.eval.tasks.ruler.runner import read as read
from certjax.eval.tasks.ruler.runner import run_sample as run_sample
from certjax.eval.tasks.ruler.scoring import clean as clean
from certjax.eval.tasks.ruler.scoring import effective_length as effective_length
from certjax.eval.tasks.ruler.scoring import score as score
from certjax.eval.tasks.ruler.scoring import task_score as task_score
from certjax.eval.tasks.ruler.scoring import weighted_averages as weighted_averages
from certjax.eval.tasks.ruler.statistics import Paired as Paired
from certjax.eval.tasks.ruler.statistics import interval as interval
from certjax.eval.tasks.ruler.statistics import mcnemar as mcnemar
from certjax.eval.tasks.ruler.statistics import paired as paired
from certjax.eval.tasks.ruler.tasks import GENERATOR_VERSION as GENERATOR_VERSION
from certjax.eval.tasks.ruler.tasks import TASKS as TASKS
from certjax.eval.tasks.ruler.tasks import Sample as Sample
from certjax.eval.tasks.ruler.tasks import encode as encode
from certjax.eval.tasks.ruler.tasks import generate as generate
