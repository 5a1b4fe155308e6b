"""What described clusters would do: the real coordinator on simulated machines (docs/simulator.md).

python benchmarks/simulate.py                                       # the descriptions in benchmarks/simulated
python benchmarks/simulate.py my_friends.toml --seed 1 --seed 2
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec
from _measure import machine

from core.errors import CoreError
from core.testing.simulator import Description, simulate

EXAMPLES = Path(__file__).with_name("simulated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, action="append", help="in place of the description's; as often as you like")
    asked = parser.parse_args()
    print(machine())
    for path in asked.files or sorted(EXAMPLES.glob("*.toml")):
        try:
            description = Description.read(path)
            for seed in asked.seed or [description.seed]:
                _simulate(msgspec.structs.replace(description, seed=seed))
        except CoreError as error:
            sys.exit(str(error))


def _simulate(description: Description) -> None:
    wall, processor = time.perf_counter(), time.process_time()
    report = simulate(description)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(report)
    print(
        f"  simulated       {report.ready_after + report.seconds:.0f} s in {wall:.1f} s, {processor:.1f} s of CPU time"
    )


if __name__ == "__main__":
    main()
