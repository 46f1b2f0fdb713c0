"""The names of `__init__.py`, for type checkers."""

from steps.artifacts import Checkpoint as Checkpoint
from steps.artifacts import Completions as Completions
from steps.artifacts import Documents as Documents
from steps.artifacts import Report as Report
from steps.artifacts import Scores as Scores
from steps.artifacts import Sequences as Sequences
from steps.artifacts import TokenCache as TokenCache
from steps.artifacts import Tokenizer as Tokenizer
from steps.block_shuffle import block_shuffle as block_shuffle
from steps.compare import compare as compare
from steps.continue_training import extend as extend
from steps.continue_training import warm_start as warm_start
from steps.downstream import lm_evaluation as lm_evaluation
from steps.downstream import multiple_choice as multiple_choice
from steps.evaluate import evaluate as evaluate
from steps.follow import follow as follow
from steps.generate import generate as generate
from steps.mix import Phase as Phase
from steps.mix import mix as mix
from steps.pack import pack as pack
from steps.report import report as report
from steps.sample import sample as sample
from steps.scoring.job import Also as Also
from steps.tokenize_documents import tokenize as tokenize
from steps.train import train as train
from steps.train_tokenizer import train_tokenizer as train_tokenizer
