"""Are chains between machines those of one process, and what do they cost? Makes chains.md.

    python experiments/deployment/chains.py

Three hospitals of docs/hospitals.md with a node each, over sockets of this machine: a logistic formula with two random
effects. The log odds ratio ``arm[treated]``, mean ± sd over all draws: by importance weights, by chains between
machines (``deployment.chains``), and of a fit in one process. Exchanges are those of the chains; with secure sums each
step takes two, the masked sums and their seals. A row of chains with a k-hat instead of an R-hat is of chains that have
not mixed, which the caveat says: its draws are by weights. Seconds are of the whole command.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from institutions import COMMAND, runner, start

import bayesfed as bf
from bayesfed.deploy.secure import new_key, public_key
from bayesfed.output.posterior import Posterior

DOCS = Path(__file__).resolve().parents[2] / "docs/hospitals"
FORMULA = "died ~ arm + age + (1 + arm | hospital)"
PATIENTS = {"aarhus": 240, "bergen": 150, "cork": 90}
CASES = {
    "importance weights": "",
    "chains": "chains = true\n",
    "chains, secure sums": "chains = true\nsecure = true\n",
}


def tables() -> dict[str, pd.DataFrame]:
    """Return the first three tables of the tutorial."""
    rng, found = np.random.default_rng(1), {}
    for hospital, patients in PATIENTS.items():
        age = rng.normal(66, 11, patients).round()
        treated = rng.integers(0, 2, patients)
        effect = rng.normal(-0.7, 0.3)
        risk = rng.normal(-1.3, 0.4) + effect * treated + 0.05 * (age - 66)
        died = rng.random(patients) < 1 / (1 + np.exp(-risk))
        arm = np.where(treated, "treated", "control")
        found[hospital] = pd.DataFrame({"died": died.astype(int), "arm": arm, "age": age})
    return found


def write(folder: Path, options: str) -> None:
    """Write the files of all hospitals."""
    text = (DOCS / "experiment.toml").read_text(encoding="utf-8")
    for number, name in enumerate(PATIENTS, 1):
        text = text.replace(f"127.0.0.1:930{number}", f"./{name}.sock")
    experiment = text.replace("[deployment]\n", f"[deployment]\n{options}")
    (folder / "experiment.toml").write_text(experiment, encoding="utf-8")
    keys = {name: new_key() for name in PATIENTS}
    pins = "".join(f'{name} = "{public_key(key).hex()}"\n' for name, key in keys.items())
    node = (DOCS / "aarhus.toml").read_text(encoding="utf-8")
    for name, table in tables().items():
        table.to_csv(folder / f"{name}.csv", index=False)
        own = node.replace("127.0.0.1:9301", "./aarhus.sock").replace("aarhus", name)
        secure = f"\n[identities]\n{pins}" if "secure" in options else ""
        (folder / f"{name}.toml").write_text(own + secure, encoding="utf-8")
        (folder / name).mkdir()
        (folder / name / "identity.key").write_bytes(keys[name])


def summary(posterior: Posterior) -> str:
    """Return the log odds ratio."""
    assert posterior.correction is not None
    draws = posterior.derived(num_samples=posterior.correction.count)["arm[treated]"]
    return f"{draws.mean():.3f} ± {draws.std():.3f}"


def diagnostics(posterior: Posterior) -> list[str]:
    """Return k-hat, R-hat and the effective number of draws."""
    found = posterior.correction
    assert found is not None
    khat, rhat = ("–" if x is None else f"{x:.{n}f}" for x, n in ((found.khat, 2), (found.rhat, 3)))
    return [khat, rhat, f"{found.ess:,.0f}"]


def measure(case: str) -> list[str]:
    """Fit over sockets, or in one process."""
    found = tables()
    model = bf.formula(FORMULA, found, family="bernoulli", client="hospital")
    begin = time.monotonic()
    if case == "one process":
        here = bf.fit(model, model.federation, progress=False)
        seconds = time.monotonic() - begin
        return [summary(here), *diagnostics(here), "–", f"{seconds:.0f}"]
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        folder = Path(name)
        write(folder, CASES[case])
        nodes = [start(folder, f"{n} node", [*COMMAND, "node", f"{n}.toml"]) for n in PATIENTS]
        try:
            while not all((folder / f"{n}.sock").exists() for n in PATIENTS):
                time.sleep(0.2)
            begin = time.monotonic()
            command = [*COMMAND, "run", "experiment.toml", "--on", "sockets", "--output", "found"]
            text = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=True
            ).stdout
            seconds = time.monotonic() - begin
        finally:
            for node in nodes:
                node.kill()
                node.wait()
        exchanges = re.findall(r"chains: ([\d,]+) exchanges, R-hat", text)
        there = bf.Posterior.load(folder / "found/posterior.safetensors", model)
    used = exchanges[-1] if exchanges else "0"
    return [summary(there), *diagnostics(there), used, f"{seconds:.0f}"]


def main() -> None:
    columns = "draws of θ by | arm[treated] | k-hat | R-hat | effective draws | exchanges of chains | seconds"
    runner.table(columns, [*CASES, "one process"], measure, runner.arguments(__doc__))


if __name__ == "__main__":
    main()
