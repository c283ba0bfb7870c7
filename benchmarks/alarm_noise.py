"""Share of runs in which the alarms that compare windows sound where there is nothing but noise.

    make bench NAME=alarm_noise          (half a minute)

Simulated runs with the noise of the embedded profile's steps and no change to be seen, through the
real `AlarmWatch` with its defaults but for `significance`: a flat reward, and a flat gold top-1
under a reward that rises all the time. Prints the share of runs with a false alarm.
"""

import random
from collections.abc import Iterator

from qinglan.config import Alarms
from qinglan.recipes import PrimaryMetric
from qinglan.training.alarms import REWARD, AlarmWatch, part_mean

RUNS = 1000
LENGTHS = (60, 200)
SIGNIFICANCES = (4.0, 5.0)
# Standard deviations over the steps of the embedded profile.
REWARD_NOISE = 0.035
GOLD_NOISE = 0.04
RISE = 0.3
PRIMARY = PrimaryMetric("gold_top1", "gold top-1")
GOLD = part_mean(PRIMARY.part)
StepMetrics = dict[str, float]


def flat_reward(rng: random.Random, steps: int) -> Iterator[StepMetrics]:
    """Metrics of a run in which nothing happens."""
    for _ in range(steps):
        yield {REWARD: rng.gauss(0, REWARD_NOISE)}


def rising_reward(rng: random.Random, steps: int) -> Iterator[StepMetrics]:
    """Metrics of a run in which the reward rises, and gold top-1 stays."""
    for step in range(steps):
        yield {
            REWARD: rng.gauss(RISE * step / steps, REWARD_NOISE),
            GOLD: rng.gauss(0.8, GOLD_NOISE),
        }


SIMULATIONS = {"reward_down": flat_reward, "reward_up_gold_down": rising_reward}


def has_false_alarm(name: str, steps: int, significance: float, seed: int) -> bool:
    """Did this alarm sound in one run?"""
    watch = AlarmWatch(Alarms(significance=significance), PRIMARY)
    run = SIMULATIONS[name](random.Random(seed), steps)
    for step, metrics in enumerate(run, 1):
        if any(alarm.name == name for alarm in watch.update(step, metrics)):
            return True
    return False


def false_alarm_rate(name: str, steps: int, significance: float) -> float:
    """Share of runs with this alarm."""
    # The same seeds for every column: they differ by length and significance alone.
    alarms = sum(has_false_alarm(name, steps, significance, seed) for seed in range(RUNS))
    return alarms / RUNS


def main() -> None:
    """Simulate and print."""
    columns = [(steps, significance) for steps in LENGTHS for significance in SIGNIFICANCES]
    headings = [f"{steps} steps, {significance:g} errors" for steps, significance in columns]
    print(f"\nRuns with a false alarm, of {RUNS:,} each\n")
    print(f"| Alarm | {' | '.join(headings)} |")
    print("| --- |" + " ---: |" * len(columns))
    for name in SIMULATIONS:
        rates = [false_alarm_rate(name, steps, significance) for steps, significance in columns]
        print(f"| `{name}` | {' | '.join(f'{rate:.1%}' for rate in rates)} |")


if __name__ == "__main__":
    main()
