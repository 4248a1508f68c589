"""What the process imports from which an engine's processes fork. It ends with the replica."""

import gc

import setproctitle
import vllm.v1.engine.core  # noqa: F401

import sluice.replica.grammar.check
import sluice.replica.vllm.scheduler
import sluice.replica.vllm.setup  # noqa: F401
from sluice.replica.processes import end_with_parent

end_with_parent()
# It finds its place beside the environment, which forks replace.
setproctitle.getproctitle()
# A collection in a fork would write to each object, and so copy the memory that they share.
gc.collect()
gc.freeze()
