"""The shipped embedded profile with several seeds of the RL stage: the table in the README.

    make bench NAME=seeds

The experiment `default` of experiments.py; the stages before RL don't depend on its seed and are
reused.
"""

import sys

from rl_experiments.command import main

if __name__ == "__main__":
    main(["--only", "default", *sys.argv[1:]])
