"""Experiments with the embedded demo: algorithms, rewards, judge, LoRA, other trainers.

Writes benchmarks/results/experiments.md.

    make bench NAME=experiments                                   (hours: about three minutes a run)
    python benchmarks/experiments.py --list
    python benchmarks/experiments.py --only default formula_alone --seeds 1
    python benchmarks/experiments.py --tables-only

Each run's result is a file under results/experiments; what is there with the same settings is not
run again. The runs themselves are under runs/experiments, with a log and a ledger each. The stages
before RL are shared by all runs.
"""

from rl_experiments.command import main

if __name__ == "__main__":
    main()
