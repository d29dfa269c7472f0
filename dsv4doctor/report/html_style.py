"""The look of the HTML report: light and dark, nothing but CSS."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1c2128; --soft: #59636e; --line: #d8dde3;
  --code: #eef1f4; --link: #0b5cad;
  --runs: #1a7f4b; --fallback: #9a6a00; --fails: #c62f2f; --unknown: #6a6f78;
  --error: #c62f2f; --warning: #9a6a00; --info: #0b5cad; --on: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --card: #181d24; --ink: #e4e8ed; --soft: #9aa5b1; --line: #2d353f;
    --code: #222933; --link: #6cb2ff;
    --runs: #3fb97a; --fallback: #e0ab3a; --fails: #f47070; --unknown: #8f99a5;
    --error: #f47070; --warning: #e0ab3a; --info: #6cb2ff; --on: #0f1318;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 70rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .75rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: 0 0 .5rem; }
a { color: var(--link); }
nav ul { list-style: none; margin: 0; padding: 0; }
nav li { padding: .15rem 0; }
section + section { margin-top: 3rem; padding-top: 2rem; border-top: 3px solid var(--line); }
code, pre, .mono { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre {
  margin: .5rem 0 0; padding: .6rem .75rem; background: var(--code); border-radius: 6px;
  white-space: pre-wrap;
}
.soft { color: var(--soft); }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 1rem 1.25rem; margin: 0 0 1rem;
}
.verdict {
  display: inline-block; padding: .1rem .6rem; border-radius: 1rem; font-weight: 600;
  background: var(--tone); color: var(--on);
}
.runs { --tone: var(--runs); } .fallback { --tone: var(--fallback); }
.fails { --tone: var(--fails); } .unknown { --tone: var(--unknown); }
.error { --tone: var(--error); } .warning { --tone: var(--warning); }
.info { --tone: var(--info); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
.strip { display: flex; flex-wrap: wrap; gap: 3px; margin: .25rem 0 .75rem; }
.strip span {
  min-width: 2.1rem; padding: .3rem .2rem; border-radius: 4px; text-align: center;
  font-size: 12px; line-height: 1.15; background: var(--tone); color: var(--on);
}
.strip b { display: block; font-weight: 600; }
.legend span { margin-right: 1rem; color: var(--tone); white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td {
  text-align: left; vertical-align: top; padding: .4rem .6rem;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word;
}
tr:has(+ tr > td[colspan]) td, tr:first-child th { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; }
td.verdict-cell { color: var(--tone); font-weight: 600; white-space: nowrap; }
.finding { border-left: 5px solid var(--tone); }
.finding .severity { color: var(--tone); font-weight: 700; }
.finding h4 { margin: .9rem 0 .25rem; font-size: 13px; color: var(--soft); font-weight: 600; }
.finding ul { margin: 0; padding-left: 1.1rem; }
.source { display: grid; grid-template-columns: auto 1fr; margin: .4rem 0 0; }
.source div { padding: .3rem .6rem; background: var(--code); }
.source .at { color: var(--soft); border-radius: 6px 6px 0 0; grid-column: 1 / 3; }
.source .number { text-align: right; color: var(--soft); border-radius: 0 0 0 6px; }
.source .text { border-radius: 0 0 6px 0; white-space: pre-wrap; }
details { margin: 0 0 .75rem; }
summary { cursor: pointer; font-weight: 600; }
details > :not(summary) { margin-top: .6rem; }
.path { list-style: none; margin: .75rem 0 0; padding: 0; }
.path > li { position: relative; padding: 0 0 1.4rem; }
.path > li:last-child { padding-bottom: 0; }
.path > li:not(:last-child)::before {
  content: ""; position: absolute; left: 1.5rem; bottom: 0; height: 1.4rem;
  border-left: 2px solid var(--soft);
}
.path > li:not(:last-child)::after {
  content: ""; position: absolute; left: calc(1.5rem - 4px); bottom: 0;
  border: 5px solid transparent; border-top-color: var(--soft); border-bottom: 0;
}
.step { border: 1px solid var(--line); border-radius: 8px; background: var(--page); }
.step header { padding: .45rem .75rem; }
.step .branches { list-style: none; margin: 0; padding: 0; }
.step .branches li {
  display: grid; grid-template-columns: 3.6rem 1fr; gap: .6rem; padding: .4rem .75rem;
  border-top: 1px dashed var(--line);
}
.way {
  align-self: start; text-align: center; border: 1.5px solid var(--soft); border-radius: 5px;
  font-size: 12px; font-weight: 600; color: var(--soft);
}
.way.yes { border-color: var(--link); color: var(--link); }
.step .decides { background: var(--code); box-shadow: inset 4px 0 0 var(--link); }
.step footer { padding: .4rem .75rem; border-top: 1px solid var(--line); }
.end { border: 2px solid var(--tone); border-radius: 8px; padding: .5rem .75rem; }
@media (max-width: 40rem) {
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
  .layers tr:first-child, .layers td:empty { display: none; }
  .layers, .layers tbody, .layers tr, .layers td[colspan] { display: block; }
  .layers td { display: inline-block; max-width: 100%; padding: .1rem .6rem .1rem 0; border: 0; }
  .layers td[colspan] { padding-bottom: .7rem; }
}
@media print { body { max-width: none; background: none; } .card { break-inside: avoid; } }
"""
