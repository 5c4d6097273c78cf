"""What does a secure sum cost an institution and the server, beside a plain sum? Makes secure_sums.md.

    pip install 'bayesfed[deploy]'
    python experiments/benchmarks/secure_sums.py            # a minute, on a machine that does nothing else

One process, no network: an institution masks an upload of some numbers in single precision for a roster of
institutions; the server adds up the masked uploads of all, takes off their seals and decodes. All institutions of the
sum that the server is timed on send the same words, so that 100 uploads of a million numbers need the memory of one.
The plain sum adds up the same uploads in single precision.
"""

from __future__ import annotations

import statistics

import torch
from timing import interleaved, runner

from bayesfed.deploy import secure
from bayesfed.deploy.fixed_point import encode


def institutions(count: int) -> tuple[secure.Keys, secure.SumId]:
    """Return one of that many institutions, and a sum of all."""
    keys = {f"site {i:03}": (secure.new_key(), secure.new_key()) for i in range(count)}
    pinned = {name: secure.public_key(identity) for name, (identity, _) in keys.items()}
    roster = {name: secure.public_key(run_key) for name, (_, run_key) in keys.items()}
    name = f"site {count // 2:03}"
    return secure.Keys(name, *keys[name], pinned), secure.SumId("run", 0, 0, b"", roster)


def measure(numbers: int, count: int, repeats: int) -> list[str]:
    """Time the masks, the secure sum and the plain one."""
    site, of = institutions(count)
    upload = {"x": torch.randn(numbers)}
    seal = secure.seal(site, of)
    words = encode("x", upload["x"])
    words = words + secure._stream(seal, words.size).reshape(words.shape)
    masked = {name: {"x": words} for name in of.roster}
    seals = dict.fromkeys(of.roster, seal)

    def plain() -> torch.Tensor:
        total = torch.zeros_like(upload["x"])
        for _ in range(count):
            total += upload["x"]
        return total

    contenders = {
        "mask": lambda: secure.mask(upload, site, of),
        "sum": lambda: secure.unmask(masked, seals, of),
        "plain": plain,
    }
    times = interleaved(contenders, repeats).values()
    sizes = [f"{n / 1000:,.0f}" for n in (words.nbytes + len(seal), upload["x"].nbytes)]
    return [*(f"{1000 * statistics.median(t):.3g}" for t in times), *sizes]


def main() -> None:
    sizes = {"numbers": [10**3, 10**4, 10**5, 10**6], "sites": [3, 10, 100]}
    given = runner.arguments(__doc__, **sizes, repeats=5)
    rows = {
        (f"{numbers:,}", count): [(numbers, count, given.repeats)]
        for numbers in given.numbers
        for count in given.sites
    }
    columns = (
        "numbers | institutions | an institution masks, ms | the server sums, ms | plain sum, ms "
        "| an institution sends, kB | plain, kB"
    )
    runner.table(columns, rows, measure, given)


if __name__ == "__main__":
    main()
