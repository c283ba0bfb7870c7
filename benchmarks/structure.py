"""The plainness of the code, its size and shape, and the time that commands take to start.

    make bench NAME=structure
    python benchmarks/structure.py --runs 0               (no times)
    python benchmarks/structure.py benchmarks tests/cli   (only how plainly these folders read)

Public code that reads plainly stands beside ours. Times are the shortest of several runs, and only
a quiet machine gives ones that can be compared.
"""

import argparse

from code_figures.plainness import plainness_by_package, plainness_table
from code_figures.shape import shape
from code_figures.start_times import start_times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="how plainly the code reads, its size and shape")
    parser.add_argument("folders", nargs="*", help="print only how plainly these folders read")
    parser.add_argument("--runs", type=int, default=3, help="of each timed command; 0: no times")
    options = parser.parse_args()
    print("\n".join(plainness_table(plainness_by_package(options.folders))))
    if options.folders:
        return
    print("\n| | |\n| --- | ---: |")
    for name, value in shape():
        print(f"| {name} | {value} |")
    if not options.runs:
        return
    for name, value in start_times(options.runs):
        print(f"| {name} | {value} |", flush=True)


if __name__ == "__main__":
    main()
