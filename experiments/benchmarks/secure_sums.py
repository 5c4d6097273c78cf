"""What a secure sum costs a site and the server, beside the sum of what is sent as it is. Makes secure_sums.md.

    pip install 'bayesfed[deploy]'
    python experiments/benchmarks/secure_sums.py            # a minute, on a machine that does nothing else

One process, no network: a site masks an upload of so many numbers in single precision for a roster of so many sites,
the server adds up the masked uploads of all, takes off their seals and decodes. Every site of the sum that the server
is timed on sends the same words, so that 100 uploads of a million numbers need the memory of one. The plain sum adds
up the same uploads in single precision.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from timing import command, interleaved, write

from bayesfed.deploy import secure


def sites_of(count: int) -> tuple[secure.Site, secure.Sum]:
    """One of so many sites, and a sum of all."""
    keys = {f"site {i:03}": (secure.new_key(), secure.new_key()) for i in range(count)}
    pinned = {name: secure.public_key(identity) for name, (identity, _) in keys.items()}
    roster = {name: secure.public_key(run_key) for name, (_, run_key) in keys.items()}
    name = f"site {count // 2:03}"
    return secure.Site(name, *keys[name], pinned), secure.Sum("run", 0, 0, b"", roster)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--numbers", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 10, 100])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [
        "| numbers | sites | a site masks, ms | the server sums, ms | plain sum, ms | a site sends, kB | plain, kB |",
        "| --- |" + " --- |" * 6,
    ]
    for numbers in args.numbers:
        for count in args.sites:
            site, of = sites_of(count)
            upload = {"x": torch.randn(numbers)}
            seal = secure.seal(site, of)
            words = secure.encoded("x", upload["x"])
            words = words + secure._stream(seal, words.size).reshape(words.shape)
            masked = {name: {"x": words} for name in of.roster}
            seals = dict.fromkeys(of.roster, seal)

            def plain(value=upload["x"], count=count) -> torch.Tensor:
                total = torch.zeros_like(value)
                for _ in range(count):
                    total += value
                return total

            times = interleaved(
                {
                    "mask": lambda upload=upload, site=site, of=of: secure.mask(upload, site, of),
                    "sum": lambda m=masked, s=seals, of=of: secure.summed(m, s, of),
                    "plain": plain,
                },
                args.repeats,
            )
            found = [f"{1000 * statistics.median(t):.3g}" for t in times.values()]
            sizes = [f"{n / 1000:,.0f}" for n in (words.nbytes + len(seal), upload["x"].nbytes)]
            lines.append(f"| {numbers:,} | {count} | " + " | ".join([*found, *sizes]) + " |")
            print(lines[-1], flush=True)
    write(Path(__file__), lines)


if __name__ == "__main__":
    main()
