"""What it costs to take the stalest groups of several shards: a simulation. Run: python benchmarks/shards.py

Groups arrive with a model step a few steps back, as responses of uneven length do, and go to a shard by a hash of their
id. Every step a batch is taken stalest first, by one of three ways to agree on it:

- exact: every shard names the keys of its first `batch` groups; the smallest are taken. Equal to one buffer.
- estimate: every shard names twice its share; a shard all of whose keys were among the smallest is asked again.
- share: every shard gives its share, and nothing is agreed on.
"""

import argparse
import heapq
import random
from collections.abc import Iterator


class Shards:
    """Heaps of (model step, arrival)."""

    def __init__(self, n: int) -> None:
        self.heaps: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        self.keys_sent = 0
        self.rounds = 0

    def put(self, key: tuple[int, int]) -> None:
        heapq.heappush(self.heaps[hash((key[1], "group")) % len(self.heaps)], key)

    def first(self, shard: int, n: int) -> list[tuple[int, int]]:
        found = heapq.nsmallest(n, self.heaps[shard])
        self.keys_sent += len(found)
        return found

    def take(self, keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
        chosen = set(keys)
        for shard, heap in enumerate(self.heaps):
            self.heaps[shard] = [key for key in heap if key not in chosen]
            heapq.heapify(self.heaps[shard])
        return sorted(keys)

    def exact(self, batch: int) -> list[tuple[int, int]]:
        self.rounds += 1
        named = [self.first(shard, batch) for shard in range(len(self.heaps))]
        return self.take(heapq.nsmallest(batch, heapq.merge(*named)))

    def estimate(self, batch: int) -> list[tuple[int, int]]:
        share = -(-2 * batch // len(self.heaps))
        asked = [share] * len(self.heaps)
        named = [self.first(shard, share) for shard in range(len(self.heaps))]
        self.rounds += 1
        while True:
            best = heapq.nsmallest(batch, heapq.merge(*named))
            limit = best[-1]
            short = [i for i, keys in enumerate(named) if len(keys) == asked[i] and keys[-1] <= limit]
            if not short:
                return self.take(best)
            self.rounds += 1
            for shard in short:
                asked[shard] = batch
                named[shard] = self.first(shard, batch)

    def share(self, batch: int) -> list[tuple[int, int]]:
        self.rounds += 1
        n = len(self.heaps)
        taken = [key for i in range(n) for key in self.first(i, batch * (i + 1) // n - batch * i // n)]
        self.keys_sent = 0
        return self.take(taken)


def arrivals(seed: int, steps: int, batch: int) -> Iterator[list[tuple[int, int]]]:
    """Keys of the groups that arrive in each step: a batch on average."""
    rng, number = random.Random(seed), 0
    for step in range(steps):
        keys = []
        for _ in range(round(batch * rng.uniform(0.7, 1.3))):
            number += 1
            keys.append((max(0, step - min(int(rng.expovariate(0.7)), 8)), number))
        yield keys


def simulate(
    way: str, shards: int, *, batch: int, steps: int, stored: int, seed: int
) -> tuple[float, float, float, float]:
    """Mean staleness of what is taken, of its stalest tenth, keys sent and rounds per batch."""
    store = Shards(shards)
    rng = random.Random(seed)
    for i in range(stored):
        store.put((-rng.randrange(4), -i - 1))
    ages: list[int] = []
    for step, keys in enumerate(arrivals(seed, steps, batch)):
        for key in keys:
            store.put(key)
        ages += [step - model_step for model_step, _ in getattr(store, way)(batch)]
    ages.sort()
    tail = ages[-len(ages) // 10 :]
    return sum(ages) / len(ages), sum(tail) / len(tail), store.keys_sent / steps, store.rounds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stored", type=int, default=512)
    given = parser.parse_args()
    print(f"{'way':10}{'shards':>7}{'staleness':>11}{'stalest tenth':>15}{'keys sent':>11}{'rounds':>8}")
    for shards in (1, 2, 4, 8, 16):
        for way in ("exact",) if shards == 1 else ("exact", "estimate", "share"):
            mean, tail, keys, rounds = simulate(
                way, shards, batch=given.batch, steps=given.steps, stored=given.stored, seed=1
            )
            print(f"{way:10}{shards:7}{mean:11.3f}{tail:15.3f}{keys:11.0f}{rounds:8.2f}")


if __name__ == "__main__":
    main()
