"""Attention through black-box vector search: strategies that ask an oracle for keys, and the oracles. Nothing here is
certified; each class says what it promises instead.
"""

from certjax.retrieval.buckets import AdaptiveBuckets as AdaptiveBuckets
from certjax.retrieval.buckets import NonAdaptiveBuckets as NonAdaptiveBuckets
from certjax.retrieval.faiss_oracles import HNSW as HNSW
from certjax.retrieval.faiss_oracles import IVF as IVF
from certjax.retrieval.faiss_oracles import NSG as NSG
from certjax.retrieval.faiss_oracles import FaissFlat as FaissFlat
from certjax.retrieval.forest import MLANN as MLANN
from certjax.retrieval.index import Index as Index
from certjax.retrieval.index import RetrievalResult as RetrievalResult
from certjax.retrieval.index import release as release
from certjax.retrieval.oracles import Flat as Flat
from certjax.retrieval.oracles import Oracle as Oracle
from certjax.retrieval.oracles import Searcher as Searcher
from certjax.retrieval.partition_graph import PiPNN as PiPNN
from certjax.retrieval.strategies import SoftmaxLift as SoftmaxLift
from certjax.retrieval.strategies import TopK as TopK
from certjax.retrieval.strategies import TopKSampling as TopKSampling
from certjax.retrieval.strategy import Strategy as Strategy
