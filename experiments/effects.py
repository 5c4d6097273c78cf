"""Do effects agree with emmeans and with standardisation in R, on three models of pooled data? Makes effects.md.

    apt-get install r-base-core r-cran-lme4 r-cran-emmeans
    python experiments/effects.py                       # a minute

R fits the same formula to the pooled rows by lme4 (maximum likelihood, no prior). ``emmeans`` gives marginal means,
pairwise contrasts and slopes at random effects of 0, which is the average client; ``predict`` of every row with a
variable set to a value, averaged, is standardisation over these clients (what marginaleffects' ``avg_comparisons``
computes; it has no package in apt). A shift is in standard errors of emmeans, which standardisation by ``predict`` has
not. "Same draws" is the largest difference when emmeans is given the posterior's own draws of the coefficients
(``qdrg(mcmc=)``) and averages them over its own grid: it has nothing to do with priors or Monte Carlo error. Draws are
those of chains (``with_chains``), so that the table is of the effects and not of the variational distribution.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import runner

import bayesfed as bf
from bayesfed import effects

COLUMNS = "model | effect | bayesfed | R | shift in se | same draws"
R = """
suppressMessages({library(lme4); library(emmeans)})
folder <- commandArgs(TRUE)[1]
d <- read.csv(file.path(folder, "frame.csv"), stringsAsFactors = TRUE)
b <- as.matrix(read.csv(file.path(folder, "draws.csv"), check.names = FALSE))
out <- NULL; draws <- NULL
put <- function(name, estimate, se = NA) out <<- rbind(out, data.frame(name, estimate, se))
both <- function(name, grid, own, f = identity) {
  s <- as.data.frame(summary(grid))
  e <- intersect(names(s), c("estimate", "ratio", "odds.ratio", "emmean", "x.trend", "rate", "prob"))[1]
  put(paste(name, seq_len(nrow(s))), s[[e]], s[["SE"]])
  found <- f(own@post.beta %*% t(own@linfct))
  colnames(found) <- paste(name, seq_len(nrow(s)))
  draws <<- cbind(draws, found)
}
all_at <- function(f) for (k in 1:3) f(k, transform(d, kind = factor(c("a", "b", "c")[k], c("a", "b", "c"))))
"""
END = """
write.csv(out, file.path(folder, "out.csv"), row.names = FALSE)
write.csv(draws, file.path(folder, "same.csv"), row.names = FALSE)
"""
GAUSSIAN = """
m <- lmer(y ~ x * kind + (1 | hospital), d)
q <- qdrg(~ x * kind, data = d, mcmc = b)
of <- function(g) emmeans(g, "kind", contr = "revpairwise")$contrasts
both("mean", emmeans(m, "kind", lmer.df = "asymptotic"), emmeans(q, "kind"))
both("pair", emmeans(m, "kind", contr = "revpairwise", lmer.df = "asymptotic")$contrasts, of(q))
trend <- as.data.frame(summary(emtrends(m, "kind", var = "x", lmer.df = "asymptotic")))
put(paste("slope", 1:3), trend$x.trend, trend$SE)
"""
LOGISTIC = """
m <- glmer(died ~ x + kind + (1 | hospital), d, binomial)
q <- qdrg(~ x + kind, data = d, mcmc = b)
both("risk", regrid(emmeans(m, "kind")), emmeans(q, "kind"), plogis)
of <- function(g, ...) emmeans(g, "kind", contr = "revpairwise", ...)$contrasts
both("odds ratio", of(m, type = "response"), of(q), exp)
all_at(function(k, d) put(paste("standardised risk", k), mean(predict(m, d, type = "response"))))
"""
POISSON = """
m <- glmer(falls ~ x + kind + offset(log(years)) + (1 | hospital), d, poisson)
q <- qdrg(~ x + kind, data = d, mcmc = b)
of <- function(g, ...) emmeans(g, "kind", contr = "revpairwise", ...)$contrasts
both("rate ratio", of(m, type = "response"), of(q), exp)
all_at(function(k, d) {
  rate <- predict(m, transform(d, years = 1), type = "response")
  put(paste("standardised rate", k), weighted.mean(rate, d$years))
})
"""
MODELS = {
    "Gaussian": ("y ~ x * kind + (1 | hospital)", "gaussian", GAUSSIAN),
    "logistic": ("died ~ x + kind + (1 | hospital)", "bernoulli", LOGISTIC),
    "Poisson": ("falls ~ x + kind + offset(np.log(years)) + (1 | hospital)", "poisson", POISSON),
}
S = 4000


def simulated() -> pd.DataFrame:
    """Return 3,000 patients of 15 hospitals."""
    rng = np.random.default_rng(0)
    n = 3000
    frame = pd.DataFrame(
        {
            "hospital": rng.integers(0, 15, n).astype(str),
            "kind": rng.choice(list("abc"), n),
            "x": rng.normal(1.0, 2.0, n),
            "years": rng.uniform(0.5, 5.0, n),
        }
    )
    own = dict(zip(frame.hospital.unique(), rng.normal(0.0, 0.5, 15), strict=True))
    kind = frame.kind.map({"a": 0.0, "b": 0.6, "c": -0.4})
    eta = 0.3 * frame.x + kind + frame.hospital.map(own)
    frame["y"] = 10 + eta + 0.4 * frame.x * (frame.kind == "b") + rng.normal(0.0, 2.0, n)
    frame["died"] = rng.binomial(1, 1 / (1 + np.exp(1.0 - eta)))
    frame["falls"] = rng.poisson(frame.years * np.exp(eta - 1.5))
    return frame


def of_bayesfed(name: str, posterior: bf.Posterior) -> dict[str, effects.Effects]:
    """Return the effects that R's code names."""
    if name == "Gaussian":
        means = effects.marginal_means(posterior, "kind", num_samples=S)
        slopes = effects.slopes(posterior, "x", level="average", by="kind", num_samples=S)
        return {"mean": means, "pair": means.pairs(), "slope": slopes}
    linear = effects.marginal_means(posterior, "kind", scale="link", num_samples=S)
    if name == "logistic":
        risks = effects.predictions(posterior, "kind", num_samples=S)
        at_average = effects.marginal_means(posterior, "kind", num_samples=S)
        return {"risk": at_average, "odds ratio": linear.pairs("ratio"), "standardised risk": risks}
    asked = {"at": {"years": 1.0}, "weights": "years", "num_samples": S}
    rates = effects.predictions(posterior, "kind", **asked)
    return {"rate ratio": linear.pairs("ratio"), "standardised rate": rates}


def measure(name: str, seed: int) -> list[list[str]]:
    """Fit a model here and in R; a row for each effect."""
    (text, family, code), frame = MODELS[name], simulated()
    model = bf.formula(text, frame, family=family)
    posterior = bf.fit(model, model.federation, progress=False).with_chains()
    derived = posterior.derived(num_samples=S)
    wanted = ["Intercept", "x", "kind[b]", "kind[c]", "x:kind[b]", "x:kind[c]"]
    draws = pd.DataFrame({n: derived[n].double().numpy() for n in wanted if n in derived})
    with tempfile.TemporaryDirectory() as folder:
        frame.to_csv(f"{folder}/frame.csv", index=False)
        draws.to_csv(f"{folder}/draws.csv", index=False)
        script = Path(folder) / "script.R"
        script.write_text(R + code + END, encoding="utf-8")
        done = subprocess.run(["Rscript", script, folder], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        out, same = pd.read_csv(f"{folder}/out.csv"), pd.read_csv(f"{folder}/same.csv")
    rows = []
    for what, found in of_bayesfed(name, posterior).items():
        for k, own in enumerate(found.draws.numpy().T):
            label = f"{what} {k + 1}"
            there = out[out.name == label].iloc[0]
            shift = "" if np.isnan(there.se) else f"{(own.mean() - there.estimate) / there.se:.2f}"
            error = "" if np.isnan(there.se) else f" ± {there.se:.4f}"
            gap = f"{np.abs(own - same[label]).max():.1e}" if label in same else ""
            text = " ".join(map(str, found.labels.iloc[k])).replace("kind", "").strip()
            own_text = f"{own.mean():.4f} ± {own.std():.4f}"
            rows.append([f"{what} {text}", own_text, f"{there.estimate:.4f}{error}", shift, gap])
    return rows


def main() -> None:
    given = runner.arguments(__doc__)
    runner.table(COLUMNS, {name: [(name, 0)] for name in MODELS}, measure, given)


if __name__ == "__main__":
    main()
