"""spmdrl: reinforcement learning for language models as one SPMD program."""

import sys

from spmdrl.distributed.runs import RUNS

# "-m" is the name of a program until Python has found its module: python -m spmdrl.ppo imports this
# first. Ctrl-C would be a KeyboardInterrupt in an import, which is a traceback, or is lost there.
# Programs that are no runs end as Python does.
if sys.argv[:1] == ["-m"] and any(f"spmdrl.{run}" in sys.orig_argv for run in RUNS):
    from signal import SIG_BLOCK, SIGINT, pthread_sigmask

    pthread_sigmask(SIG_BLOCK, [SIGINT])  # it waits for `listen`, whose imports take 0.1 s
    from spmdrl.distributed.signals import STOPPING

    STOPPING.listen([SIGINT])
