"""Certified sparse attention for long-context decoding. The public names, and nothing else."""

from certjax.attention import choose_implementation as choose_implementation
from certjax.attention import decode_attention as decode_attention
from certjax.attention import dense_decode_attention as dense_decode_attention
from certjax.cache import append as append
from certjax.cache import init_cache as init_cache
from certjax.cache import prefill as prefill
from certjax.ledger import delta_per_call as delta_per_call
from certjax.ledger import delta_spent as delta_spent
from certjax.projection import project as project
from certjax.types import AttentionResult as AttentionResult
from certjax.types import Certificate as Certificate
from certjax.types import Config as Config
from certjax.types import Hint as Hint
from certjax.types import KVCache as KVCache
from certjax.types import init_hint as init_hint
