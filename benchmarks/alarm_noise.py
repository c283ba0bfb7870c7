"""How often do the alarms that compare windows sound where there is nothing but noise?

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
LENGTHS, SIGNIFICANCES = (60, 200), (4.0, 5.0)
REWARD_NOISE, GOLD_NOISE = 0.035, 0.04
RISE = 0.3
PRIMARY = PrimaryMetric("gold_top1", "gold top-1")
GOLD = part_mean(PRIMARY.part)
Step = dict[str, float]


def flat_reward(rng: random.Random, steps: int) -> Iterator[Step]:
    """Nothing happens."""
    for _ in range(steps):
        yield {REWARD: rng.gauss(0, REWARD_NOISE)}


def rising_reward(rng: random.Random, steps: int) -> Iterator[Step]:
    """The reward rises, and gold top-1 stays."""
    for step in range(steps):
        yield {
            REWARD: rng.gauss(RISE * step / steps, REWARD_NOISE),
            GOLD: rng.gauss(0.8, GOLD_NOISE),
        }


SIMULATIONS = {"reward_down": flat_reward, "reward_up_gold_down": rising_reward}


def false_alarm(name: str, steps: int, significance: float, seed: int) -> bool:
    """Did this alarm sound in one run?"""
    watch = AlarmWatch(Alarms(significance=significance), PRIMARY)
    run = SIMULATIONS[name](random.Random(seed), steps)
    return any(
        alarm.name == name
        for step, known in enumerate(run, 1)
        for alarm in watch.update(step, known)
    )


def main() -> None:
    """Simulate and print."""
    columns = [(steps, significance) for steps in LENGTHS for significance in SIGNIFICANCES]
    print(f"\nRuns with a false alarm, of {RUNS:,} each\n")
    print(
        "| Alarm | "
        + " | ".join(f"{steps} steps, {errors:g} errors" for steps, errors in columns)
        + " |"
    )
    print("| --- |" + " ---: |" * len(columns))
    for name in SIMULATIONS:
        rates = [
            sum(false_alarm(name, *column, seed) for seed in range(RUNS)) / RUNS
            for column in columns
        ]
        print(f"| `{name}` | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |")


if __name__ == "__main__":
    main()
