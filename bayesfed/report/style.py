"""The style sheet of a report: one column up to a width that is easy to read, light or dark as the reader prefers."""

STYLE = """
:root {
  --paper: #fff; --ink: #1d2530; --soft: #5b6673; --line: #dfe4ea; --wash: #f4f6f9;
  --blue: #2f6db0; --band: #2f6db02e; --half: #2f6db066; --orange: #b4540a;
  --good: #1b7f4d; --good-wash: #e5f4ec; --bad: #9a4a00; --bad-wash: #fdf0e1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --ink: #e3e8ee; --soft: #9aa6b2; --line: #2c343d; --wash: #1b2127;
    --blue: #77b1ee; --band: #77b1ee2e; --half: #77b1ee66; --orange: #f2a057;
    --good: #6fd3a0; --good-wash: #15301f; --bad: #f5b56b; --bad-wash: #352611;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 0.3rem; overflow-wrap: anywhere; }
* + h1 { margin-top: 4.5rem; padding-top: 1.5rem; border-top: 4px solid var(--line); }
h2 { font-size: 1.25rem; margin: 2.8rem 0 0.6rem; padding-top: 1.1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 0.4rem; overflow-wrap: anywhere; }
p { margin: 0.5rem 0; max-width: 46rem; }
a { color: var(--blue); }
.soft { color: var(--soft); font-size: 0.9rem; }
.lead { font-size: 1.05rem; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 0.3rem 1.1rem; margin: 1.1rem 0 0; font-size: 0.95rem; }
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 0.7rem; margin: 1.1rem 0; }
.card { background: var(--wash); border-radius: 0.5rem; padding: 0.6rem 0.8rem; }
.card b { display: block; font-size: 1.3rem; font-weight: 600; overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: 0.85rem; }
.note { border-left: 4px solid var(--good); background: var(--good-wash); padding: 0.6rem 0.9rem;
  border-radius: 0 0.4rem 0.4rem 0; margin: 0.9rem 0; max-width: 46rem; overflow-wrap: anywhere; }
.note.bad { border-color: var(--bad); background: var(--bad-wash); }
.note b { color: var(--good); }
.note.bad b { color: var(--bad); }
.scroll { overflow-x: auto; margin: 0.7rem 0; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.32rem 0.9rem 0.32rem 0; text-align: left; vertical-align: middle; unicode-bidi: isolate;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 500; font-size: 0.85rem; vertical-align: bottom; }
tbody th { font-weight: 500; overflow-wrap: anywhere; min-width: 8rem; }
.words { min-width: 12rem; }
.number { text-align: right; white-space: nowrap; }
pre { background: var(--wash); padding: 0.9rem; border-radius: 0.5rem; overflow-x: auto; line-height: 1.45; }
code, .hash { font: 0.85em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--blue); margin: 0.5rem 0; }
.forest { width: 100%; table-layout: fixed; font-size: 0.88rem; }
.forest td, .forest th { border: 0; padding: 0.16rem 0.5rem 0.16rem 0; }
.forest th { width: 26%; min-width: 0; }
.forest td.number span { white-space: nowrap; }
.forest td.number { width: 27%; color: var(--soft); padding-right: 0; }
.plot { position: relative; height: 1.15rem; }
.plot span { position: absolute; }
.plot .wide { top: 50%; height: 2px; margin-top: -1px; background: var(--blue); }
.plot .narrow { top: 50%; height: 6px; margin-top: -3px; background: var(--blue); border-radius: 3px; }
.plot .dot { top: 50%; width: 9px; height: 9px; margin: -4.5px 0 0 -4.5px; border-radius: 50%;
  background: var(--paper); border: 2px solid var(--blue); }
.plot .seen { top: 50%; width: 9px; height: 9px; margin: -4.5px 0 0 -4.5px; background: var(--orange);
  transform: rotate(45deg); }
.plot .line { top: -0.2rem; bottom: -0.2rem; width: 1px; background: var(--soft); opacity: 0.55; }
.forest .ticks .plot { height: 1.3rem; border-top: 1px solid var(--line); }
.ticks .plot span { transform: translateX(-50%); color: var(--soft); font-size: 0.8rem; top: 0.1rem; }
.frame { position: relative; height: 13rem; margin: 0.8rem 0 4.6rem 4.2rem; max-width: 50rem;
  border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.frame svg { position: absolute; width: 100%; height: 100%; overflow: hidden; }
.frame span { position: absolute; color: var(--soft); font-size: 0.8rem; white-space: nowrap; }
.frame .y { right: 100%; padding-right: 0.4rem; transform: translateY(-50%); }
.frame .x { top: 100%; padding-top: 0.2rem; transform: translateX(-50%); }
.frame .title { top: 100%; right: 0; padding-top: 1.3rem; }
.band { fill: var(--band); }
.half { fill: var(--half); }
.curve { fill: none; stroke: var(--blue); stroke-width: 1.8; vector-effect: non-scaling-stroke; }
.prior { fill: none; stroke: var(--orange); stroke-width: 1.4; stroke-dasharray: 4 3;
  vector-effect: non-scaling-stroke; }
.spark { display: block; width: 8.5rem; height: 2.1rem; }
.swatch { display: inline-block; width: 1.4rem; border-top: 2px solid var(--blue); vertical-align: middle;
  margin: 0 0.25rem; }
.swatch.dashed { border-top: 2px dashed var(--orange); }
.done { color: var(--good); white-space: nowrap; }
.not-done { color: var(--bad); white-space: nowrap; }
@media (max-width: 34rem) {
  body { font-size: 15px; }
  h1 { font-size: 1.5rem; }
  .forest th { width: 28%; }
  .forest td.number { width: 32%; font-size: 0.78rem; line-height: 1.3; white-space: normal; }
  .frame { margin-left: 3.6rem; height: 11rem; }
  .spark { width: 5rem; }
  tbody th { min-width: 7rem; }
  .forest th { min-width: 0; }
}
@media print {
  main { max-width: none; padding: 0; }
  nav { display: none; }
  h2 { break-after: avoid; }
  tr, .card, .note { break-inside: avoid; }
}
"""
