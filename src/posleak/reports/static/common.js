"use strict";
/* Shared by all pages: data, numbers as text, plots in the colours of the theme, theme and print. */
const COMMON = (() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const ROOT = document.documentElement;
  const $ = (selector, within = document) => within.querySelector(selector);
  const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] };

  const make = (tag, attributes = {}, text = "") => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };

  /* base64 -> typed arrays; each text is decoded once */
  const decoded = new Map();
  const unpack = (text, Kind) => {
    if (!decoded.has(text)) {
      const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
      decoded.set(text, new Kind(bytes.buffer));
    }
    return decoded.get(text);
  };
  const show = (x) => {
    if (x === null || Number.isNaN(x)) return "–";
    const small = x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5);
    return (small ? x.toExponential(1).replace("+", "") : String(Number(x.toPrecision(3)))).replaceAll("-", "−");
  };
  const percent = (x) => (Number.isNaN(x) ? "–" : `${Math.round(100 * x) || 0}%`.replace("-", "−"));
  const missing = (x) => (Number.isNaN(x) ? null : x);

  /* theme: figures refer to CSS variables, which are resolved when a figure is drawn */
  const css = (name) => getComputedStyle(ROOT).getPropertyValue(name).trim();
  const themed = (value) => {
    if (typeof value === "string") return value.startsWith("var(--") ? css(value.slice(4, -1)) : value;
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object" && !ArrayBuffer.isView(value))
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v)]));
    return value;
  };
  const axis = (given = {}) => ({
    gridcolor: css("--edge"), linecolor: css("--faint"), zeroline: false, automargin: true, ticks: "", ...given,
    title: { font: { size: 12 }, standoff: 6, ...(given.title || {}) },
  });
  /* narrow screens: the labels of a forest plot are above its rows, and only the main ticks are kept */
  const stacked = (layout) => {
    const { tickvals, ticktext } = layout.yaxis;
    const labels = tickvals.map((y, k) => ({ x: 0, xref: "paper", y: y - 0.46, text: ticktext[k], showarrow: false, xanchor: "left", yanchor: "middle" }));
    const main = ["−90%", "no change", "×5", "×25"];
    const kept = (layout.xaxis.ticktext || []).map((text, k) => [text, k]).filter(([text]) => main.includes(text));
    const x = layout.xaxis.ticktext ? { tickvals: kept.map(([, k]) => layout.xaxis.tickvals[k]), ticktext: kept.map(([text]) => text), tickangle: 0 } : {};
    return { ...layout, annotations: labels, margin: { l: 8, r: 8, t: 34, b: 40 }, xaxis: { ...layout.xaxis, ...x }, yaxis: { ...layout.yaxis, showticklabels: false, automargin: false } };
  };
  const draw = (spot, figure) => {
    const narrow = spot.clientWidth < 480;
    const { data, layout: given } = themed(figure);
    for (const trace of data) // narrow cells have room for single marks, not for numbers
      if (narrow && trace.type === "heatmap" && Array.isArray(trace.text) && trace.text.flat().some((t) => t.length > 1)) trace.texttemplate = "";
    const layout = narrow && spot.classList.contains("forest") ? stacked(given) : given;
    Plotly.react(spot, data, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { family: "system-ui, sans-serif", size: narrow ? 11 : 12, color: css("--ink") },
      hoverlabel: { bgcolor: css("--wash"), bordercolor: css("--faint"), font: { color: css("--ink") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, bgcolor: "rgba(0,0,0,0)" },
      margin: { l: 48, r: 10, t: 34, b: 40 }, ...layout,
      title: layout.title ? { ...layout.title, font: { size: 14 }, x: 0, xanchor: "left" } : undefined,
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), ...(layout.yaxis2 ? { yaxis2: axis(layout.yaxis2) } : {}),
    }, CONFIG);
    if (ROOT.classList.contains("paper")) Plotly.relayout(spot, { width: spot.clientWidth, height: spot.clientHeight });
  };

  const setTheme = (theme) => { ROOT.dataset.theme = theme; };
  const remembered = () => { try { return localStorage.getItem("posleak-theme"); } catch { return null; } };

  /* redraw everything when the theme changes or the page is printed; handle the links at the top */
  const follow = (drawAll) => {
    $$("[data-go]").forEach((link) => link.addEventListener("click", (event) => {
      event.preventDefault();
      const target = $$(`[data-section="${link.dataset.go}"]`).find((s) => !s.closest("[hidden]"));
      if (target) { target.scrollIntoView(); target.tabIndex = -1; target.focus({ preventScroll: true }); }
    }));
    $("#theme").addEventListener("click", () => {
      setTheme(ROOT.dataset.theme === "dark" ? "light" : "dark");
      try { localStorage.setItem("posleak-theme", ROOT.dataset.theme); } catch { /* pages opened from a file may have no storage */ }
      drawAll();
    });
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", () => { if (!remembered()) { setTheme(scheme.matches ? "dark" : "light"); drawAll(); } });
    let before = null;
    // Figures have a fixed size: redraw them for the width of a sheet in the light theme, and restore them afterwards.
    const paper = (on) => {
      if (on) before = ROOT.dataset.theme;
      setTheme(on ? "light" : before);
      ROOT.classList.toggle("paper", on);
      $$("details.definition").forEach((each) => { // they cannot be opened on paper
        if (on) { each.dataset.was = String(each.open); each.open = true; } else each.open = each.dataset.was === "true";
      });
      drawAll();
    };
    addEventListener("beforeprint", () => paper(true));
    addEventListener("afterprint", () => paper(false));
    setTheme(remembered() || (scheme.matches ? "dark" : "light"));
    drawAll();
  };
  return { DATA, ROOT, $, $$, make, unpack, show, percent, missing, draw, follow };
})();
