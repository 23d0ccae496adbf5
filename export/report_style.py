"""The style sheet of the report: colours for light and dark screens, one column on a phone."""

from __future__ import annotations

from trapetum.export.report_figures import SERIES

__all__ = ["STYLE"]

_LIGHT = {
    **{"ink": "#1b1f24", "dim": "#5b6470", "paper": "#ffffff", "edge": "#d8dde3", "panel": "#f5f7f9"},
    **{"bad": "#b3261e", "c0": "#2f6db3", "c1": "#c2571a", "c2": "#2c8a4b", "c3": "#8a4fb0"},
    **{"c4": "#b0303f", "c5": "#7a6a12", "c6": "#0f7f86", "c7": "#c23f8b"},
}
_DARK = {
    **{"ink": "#e6e9ed", "dim": "#a0a9b4", "paper": "#14171b", "edge": "#333a42", "panel": "#1d2126"},
    **{"bad": "#ff8a80", "c0": "#6fa8e8", "c1": "#f09a5c", "c2": "#6cc98a", "c3": "#c493e6"},
    **{"c4": "#f0808b", "c5": "#d2c04f", "c6": "#56c7ce", "c7": "#f28cc2"},
}

_RULES = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 860px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; }
.dim, figcaption, th { color: var(--dim); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(112px, 1fr)); gap: 8px; margin: 1rem 0; }
.facts div { background: var(--panel); border: 1px solid var(--edge); border-radius: 6px; padding: 8px 12px; }
.facts b { display: block; font-size: 1.2rem; }
.facts span { color: var(--dim); font-size: .85rem; }
.scroll { overflow-x: auto; }
figure { margin: .5rem 0; }
figcaption { font-size: .85rem; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--edge); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.name { font-family: ui-monospace, monospace; font-size: .85em; min-width: 12em; overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--edge); border-radius: 6px; padding: 10px; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
svg { display: block; width: 100%; max-width: 640px; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg text.dim { fill: var(--dim); }
svg text.cell { font-size: 10px; }
svg text.strong { fill: var(--paper); }
svg .grid { stroke: var(--edge); }
svg .line { fill: none; stroke-width: 1.5; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 14px; padding: 0; margin: .25rem 0;
  font-size: .85rem; }
ul.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; }
.bad { color: var(--bad); font-weight: 600; }
summary { cursor: pointer; color: var(--dim); }
"""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def _series(i: int) -> str:
    return (
        f"svg rect.s{i}, svg circle.s{i} {{ fill: var(--c{i}); }}\n"
        f"svg .line.s{i} {{ stroke: var(--c{i}); }}\ni.s{i} {{ background: var(--c{i}); }}\n"
    )


STYLE = (
    f":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}"
    f"{_RULES}{''.join(map(_series, range(SERIES)))}"
)
"""The whole sheet."""
