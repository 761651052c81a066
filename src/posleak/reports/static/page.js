"use strict";
(() => {
  const { DATA, ROOT, $, $$, make, unpack, show, percent, missing, draw, follow } = COMMON;

  /* state: the selected run, head and component; the fragment of the address stores it */
  const state = { run: 0, head: null, component: "total", quantity: "power", queries: "all" };
  const article = () => $(`article[data-run="${state.run}"]`);
  const current = () => DATA.runs[state.run];
  const SHARED = new Set(["mask", "drift", "sink", "scaling", "residual", "state", "earlier", "here", "origin", "left"]);
  const shownParts = () => ["total", ...current().parts];

  /* names show the model's layer ids; data-layer and state.head are indices of attention calls */
  const headName = (run, layer, head) => `L${run.names[layer]}.H${head}`;

  const readAddress = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const run = Number(given.get("run") || 0);
    if (DATA.runs[run]) state.run = run;
    const head = /^L(\w+)\.H(\d+)$/.exec(given.get("head") || "");
    const layer = head ? current().names.indexOf(head[1]) : -1;
    if (layer >= 0 && Number(head[2]) < current().heads.heads[layer]) state.head = [layer, Number(head[2])];
    const known = (name, values) => { if (values.includes(given.get(name))) state[name] = given.get(name); };
    known("component", $$(".component option", article()).map((o) => o.value));
    known("quantity", ["power", "share"]);
    known("queries", ["all", "early"]);
  };
  const writeAddress = () => {
    const parts = [`head=${headName(current(), ...state.head)}`, `component=${state.component}`];
    if (state.quantity !== "power") parts.push(`quantity=${state.quantity}`);
    if (state.queries !== "all") parts.push(`queries=${state.queries}`);
    if (state.run) parts.push(`run=${state.run}`);
    history.replaceState(null, "", "#" + parts.join("&"));
  };

  /* numbers of heads: the rows of heads.parquet */
  const column = (run, queries, quantity, component) =>
    run.heads.columns.findIndex((c) => c[0] === queries && c[1] === quantity && c[2] === component);
  const cell = (run, at, layer, head) => {
    const [layers, heads] = run.heads.shape;
    const start = ((at * layers + layer) * heads + head) * 3;
    return unpack(run.heads.numbers, Float64Array).subarray(start, start + 3);
  };
  const chosenColumn = (run) => {
    if (state.component === "sink_attention") return column(run, "reference", "sink_attention", null);
    if (state.component === "stabilisation") return column(run, state.queries, "stabilisation", null);
    return column(run, state.queries, state.quantity, state.component);
  };
  const eachHead = (run, visit) =>
    run.heads.heads.forEach((count, layer) => { for (let head = 0; head < count; head++) visit(layer, head); });
  const outOfWindow = (run, layer) =>
    state.component === "sink_attention" && run.windows[layer] !== null && run.windows[layer] <= (run.length * 3) / 4;

  /* the map */
  const mix = (from, to, share) => `color-mix(in oklab, ${to} ${(100 * share).toFixed(1)}%, ${from})`;
  const scaleOf = (run, at) => {
    const values = [];
    eachHead(run, (l, h) => { const x = cell(run, at, l, h)[0]; if (!Number.isNaN(x)) values.push(x); });
    values.sort((a, b) => a - b);
    const top = values.length ? values[Math.min(values.length - 1, Math.floor(0.98 * values.length))] : 1;
    if (state.component === "sink_attention") return { kind: "linear", most: 1, colour: "--sink" };
    if (state.component === "stabilisation") return { kind: "log", most: Math.max(top, 2), colour: "--sink" };
    const colour = `--${state.component}`;
    return state.quantity === "share" ? { kind: "diverging", most: 1, colour } : { kind: "root", most: Math.max(top, 1e-12), colour };
  };
  const placed = (scale, x) => {
    if (scale.kind === "log") return Math.log(Math.max(x, 1)) / Math.log(scale.most);
    if (scale.kind === "root") return Math.sqrt(Math.max(x, 0) / scale.most);
    return x / scale.most;
  };
  const markOf = (run, scale, layer, [x, low, high]) => {
    if (outOfWindow(run, layer)) return ["⊘", "position 0 outside the window"];
    if (Number.isNaN(x)) return ["×", "not defined"];
    const place = placed(scale, x), none = scale.kind === "log" ? 1 : 0;
    if (place > 1.0001) return ["▲", "above the scale"];
    if (place < -1.0001) return ["▼", "below the scale"];
    if (scale.kind !== "linear" && low <= none && high >= none) return ["○", `interval contains ${none}`];
    return ["", ""];
  };
  const drawMap = () => {
    const run = current(), grid = $(".grid", article()), at = chosenColumn(run), scale = scaleOf(run, at);
    const [layers, heads] = run.heads.shape;
    if (!grid.childElementCount) buildMap(run, grid, layers, heads);
    for (const button of $$("button", grid)) {
      const layer = Number(button.dataset.layer), head = Number(button.dataset.head);
      const numbers = cell(run, at, layer, head), [x, low, high] = numbers;
      const [mark, why] = markOf(run, scale, layer, numbers);
      const place = Math.max(-1, Math.min(1, placed(scale, x)));
      const nan = Number.isNaN(x) || why.startsWith("position 0");
      button.className = nan ? "nan" : Math.abs(place) > 0.55 ? (ROOT.dataset.theme === "dark" || state.component === "drift" ? "light" : "dark") : "";
      button.style.background = nan ? "" : place < 0 ? mix("var(--paper)", "var(--negative)", -place) : mix("var(--wash)", `var(${scale.colour})`, place);
      button.textContent = mark;
      const text = `${headName(run, layer, head)}: ${show(x)} (${show(low)} … ${show(high)})${why ? ", " + why : ""}`;
      button.title = text;
      button.setAttribute("aria-label", text);
      const selected = layer === state.head[0] && head === state.head[1];
      button.setAttribute("aria-selected", String(selected));
      button.tabIndex = selected ? 0 : -1;
    }
    drawScale($(".scale", article()), scale);
  };
  const buildMap = (run, grid, layers, heads) => {
    grid.style.setProperty("--heads", heads);
    grid.setAttribute("aria-rowcount", layers);
    const header = grid.appendChild(make("div", { class: "row", "aria-hidden": "true" }));
    header.append(make("span", { class: "label" }, "L \\ H"));
    for (let h = 0; h < heads; h++) header.append(make("span", { class: "label", style: "text-align:center" }, heads <= 16 || h % 4 === 0 ? h : ""));
    for (let l = 0; l < layers; l++) {
      const row = grid.appendChild(make("div", { class: "row", role: "row" }));
      row.append(make("span", { class: "label", role: "rowheader" }, run.windows[l] ? `${run.names[l]}w` : run.names[l]));
      if (run.windows[l]) row.firstChild.title = `window of ${run.windows[l]} tokens`;
      for (let h = 0; h < run.heads.heads[l]; h++)
        row.append(make("button", { type: "button", role: "gridcell", "data-layer": l, "data-head": h }));
    }
    grid.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) choose(Number(button.dataset.layer), Number(button.dataset.head));
    });
    grid.addEventListener("keydown", moveByKey);
  };
  const moveByKey = (event) => {
    const run = current(), [layer, head] = state.head, last = run.heads.shape[0] - 1;
    const moves = {
      ArrowUp: [Math.max(layer - 1, 0), head], ArrowDown: [Math.min(layer + 1, last), head],
      ArrowLeft: [layer, Math.max(head - 1, 0)], ArrowRight: [layer, head + 1],
      Home: [layer, 0], End: [layer, Infinity], PageUp: [0, head], PageDown: [last, head],
    };
    const to = moves[event.key];
    if (!to) return;
    event.preventDefault();
    choose(to[0], Math.min(to[1], run.heads.heads[to[0]] - 1));
    $('.grid button[aria-selected="true"]', article()).focus();
  };
  const drawScale = (spot, scale) => {
    const from = scale.kind === "diverging" ? `var(--negative), var(--paper), var(${scale.colour})` : `var(--wash), var(${scale.colour})`;
    const low = scale.kind === "diverging" ? "−100%" : scale.kind === "log" ? "×1" : "0";
    const high = scale.kind === "diverging" ? "100%" : scale.kind === "log" ? `×${show(scale.most)}` : show(scale.most);
    const unit = { root: " nats² (square-root scale)", log: " (log scale)" }[scale.kind] || "";
    spot.replaceChildren(make("span", {}, low), make("i", { style: `background:linear-gradient(to right in oklab, ${from})` }), make("span", {}, high + unit));
  };

  /* the selected head */
  const choose = (layer, head) => {
    state.head = [layer, head];
    writeAddress();
    drawMap();
    drawHead();
    for (const row of $$(".sortable tbody tr", article()))
      row.setAttribute("aria-selected", String(row.dataset.head === `${layer}.${head}`));
  };
  const series = (packed, at, size) => {
    const all = unpack(packed, Float32Array), start = at * 3 * size;
    return [0, 1, 2].map((k) => Array.from(all.subarray(start + k * size, start + (k + 1) * size), missing));
  };
  const band = (x, [value, low, high], name, colour, extra = {}) => {
    const there = x.map((_, k) => k).filter((k) => low[k] !== null);
    const back = [...there].reverse();
    return [
      { x: [...there, ...back].map((k) => x[k]), y: [...there.map((k) => high[k]), ...back.map((k) => low[k])], fill: "toself",
        fillcolor: `var(${colour}-band)`, line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: name },
      { x, y: value, name, legendgroup: name, mode: "lines+markers", line: { color: `var(${colour})`, width: 2 }, marker: { size: 4 },
        customdata: x.map((_, k) => [low[k], high[k]]), connectgaps: false,
        hovertemplate: `${name} at %{x}: %{y:.3g} (%{customdata[0]:.3g} … %{customdata[1]:.3g})<extra></extra>`, ...extra },
    ];
  };
  const zero = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: "var(--muted)", width: 1 } };
  const beyond = (run, layer, from) => {
    if (run.windows[layer] === null) return {};
    const shape = { type: "rect", yref: "paper", x0: from, x1: run.length, y0: 0, y1: 1, fillcolor: "var(--wash)", line: { width: 0 }, layer: "below" };
    const note = { x: Math.log10(from), xref: "x", yref: "paper", y: 1, xanchor: "left", yanchor: "top", showarrow: false, text: "outside the window", font: { size: 10, color: "var(--muted)" } };
    return from < run.length ? { shapes: [zero, shape], annotations: [note] } : {};
  };
  const drawHead = () => {
    const run = current(), panel = $(".headpanel", article()), [layer, head] = state.head, c = run.curves;
    $(".headname", panel).textContent = `Layer ${run.names[layer]}, head ${head}` + (run.windows[layer] ? ` (window ${run.windows[layer]})` : "");
    headRow($(".headrow", panel), run, layer, head);
    const at = c.at[layer][head], plots = $$(".plot", panel);
    $(".head-absent", panel).hidden = at >= 0;
    plots.forEach((plot) => { plot.parentElement.hidden = at < 0 && plot.parentElement.tagName === "FIGURE"; });
    if (at < 0) { plots.forEach((plot) => Plotly.purge(plot)); return; }
    const kind = $('[data-switch="curve"] input:checked', panel).value, n = c.queries.length, d = c.offsets.length;
    const octaves = Array.from({ length: 20 }, (_, k) => 2 ** (k + 1)).filter((v) => v <= run.length);
    const logx = (title) => ({ type: "log", title: { text: title }, tickvals: octaves, ticktext: octaves, tickangle: 0 });
    draw($(".head-parts", panel), {
      data: shownParts().flatMap((name) => band(c.queries, series(c[kind][name], at, n), name, `--${name}`)),
      layout: { shapes: [zero], xaxis: logx("query i"), yaxis: { title: { text: kind === "mean" ? "nats, mean over offsets" : "weighted power, nats²" } } },
    });
    draw($(".head-attention", panel), {
      data: band(c.queries, series(c.attention, at, n), "attention", "--sink"),
      layout: { showlegend: false, xaxis: logx("query i"), yaxis: { range: [0, 1.02] }, margin: { l: 40, r: 8, t: 8, b: 38 }, ...beyond(run, layer, run.windows[layer]) },
    });
    const x = c.offsets.map((o) => o + 1), shown = c.offsets.filter((o) => o < 2 || Number.isInteger(Math.log2(o)));
    draw($(".head-logits", panel), {
      data: [...band(x, series(c.late, at, d), "late", "--total"), ...band(x, series(c.early, at, d), "early", "--drift")],
      layout: { xaxis: { ...logx("offset δ"), tickvals: shown.map((v) => v + 1), ticktext: shown },
        yaxis: { title: { text: "logit" } }, margin: { l: 44, r: 8, t: 24, b: 38 }, ...beyond(run, layer, run.windows[layer] + 1) },
    });
  };
  const headRow = (table, run, layer, head) => {
    const row = (name, cells) => {
      const tr = make("tr");
      tr.append(make("td", {}, name), ...cells);
      return tr;
    };
    const both = (quantity, name, share = false) =>
      ["all", "early"].map((queries) => number(run, column(run, queries, quantity, name), layer, head, share));
    const blank = () => make("td");
    const rows = [...shownParts(), "residual", ...run.sources].map((name) =>
      row(name, [...both("power", name), ...(SHARED.has(name) ? both("share", name, true) : [blank(), blank()])]));
    rows.push(row("stabilisation", [...both("stabilisation", null), blank(), blank()]));
    rows.push(row("attention to position 0", [number(run, column(run, "reference", "sink_attention", null), layer, head), blank(), blank(), blank()]));
    const header = make("tr");
    ["", "power, all", "power, early", "share, all", "share, early"].forEach((name) => header.append(make("th", {}, name)));
    table.replaceChildren(make("thead"), make("tbody"));
    table.tHead.append(header);
    table.tBodies[0].append(...rows);
  };
  const number = (run, at, layer, head, share = false) => {
    const [x, low, high] = cell(run, at, layer, head), form = share ? percent : show;
    const td = make("td", { "data-value": String(x) });
    td.append(make("b", {}, form(x)), " ", make("span", {}, Number.isNaN(low) ? "" : `${form(low)} … ${form(high)}`));
    return td;
  };

  /* the sortable table: built once per run; data-value has the unrounded values */
  const COLUMNS = [["total", "power"], ["mask", "power"], ["drift", "power"], ["sink", "power"], ["mask", "share"], ["drift", "share"], ["sink", "share"], [null, "stabilisation"], [null, "sink_attention"]];
  const buildTable = () => {
    const table = $(".sortable", article()), run = current();
    if (table.tHead) return;
    table.replaceChildren(make("thead"), make("tbody"));
    const header = table.tHead.appendChild(make("tr"));
    ["head", "total", "mask", "drift", "sink", "mask %", "drift %", "sink %", "stabilisation", "attention to position 0"].forEach((name, k) => {
      const button = make("button", { type: "button" }, name);
      button.addEventListener("click", () => sortBy(table, k, button.parentElement));
      header.appendChild(make("th", { "aria-sort": "none" })).append(button);
    });
    eachHead(run, (layer, head) => {
      const row = make("tr", { "data-head": `${layer}.${head}` });
      row.append(make("td", { "data-value": layer * 1e4 + head }, headName(run, layer, head)));
      for (const [name, quantity] of COLUMNS) {
        const at = column(run, quantity === "sink_attention" ? "reference" : "all", quantity, name);
        row.append(number(run, at, layer, head, quantity === "share"));
      }
      row.addEventListener("click", () => choose(layer, head));
      table.tBodies[0].append(row);
    });
    sortBy(table, 1, header.children[1]);
  };
  const sortBy = (table, k, header) => {
    const down = header.getAttribute("aria-sort") !== "descending" && k > 0 || header.getAttribute("aria-sort") === "ascending";
    $$("th", table).forEach((th) => th.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => { const x = Number(row.children[k].dataset.value); return Number.isNaN(x) ? -Infinity : x; };
    const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? value(b) - value(a) : value(a) - value(b)) || 0);
    table.tBodies[0].append(...rows);
  };

  /* position 0 */
  const drawPortrait = () => {
    const spot = $(".portrait", article()), origin = current().origin;
    if (!spot || !origin) return;
    const slider = $(".depth", article()), depth = Number(slider.value), all = unpack(origin.picture, Float32Array);
    const tokens = all.length / origin.depths / 2, start = depth * tokens * 2;
    const points = Array.from({ length: tokens }, (_, k) => [all[start + 2 * k], all[start + 2 * k + 1]]);
    const figure = structuredClone(current().figures.portrait);
    figure.data.forEach((trace, k) => {
      const part = k ? points.slice(0, 1) : points.slice(1);
      trace.x = part.map((p) => p[0]);
      trace.y = part.map((p) => p[1]);
    });
    if (!$(".zoom", article()).checked) {
      const most = 1.05 * all.reduce((m, v) => Math.max(m, Math.abs(v)), 0);
      figure.layout.xaxis.range = figure.layout.yaxis.range = [-most, most];
    }
    const [a, b] = origin.explained[depth];
    figure.layout.xaxis.title.text = `first component, ${(100 * a).toFixed(0)}% of the variance`;
    figure.layout.yaxis.title.text = `second component, ${(100 * b).toFixed(0)}%`;
    const text = `${depth} · mean cosine ${origin.among.value[depth].toFixed(3)}`;
    slider.nextElementSibling.textContent = text;
    slider.setAttribute("aria-valuetext", `depth ${text}`);
    draw(spot, figure);
  };
  const drawFingerprint = () => {
    const spot = $('[data-figure="fingerprint"]', article()), origin = current().origin;
    if (!spot || !origin) return;
    const size = origin.cosine_size, all = unpack(origin.cosine, Float32Array), start = Number($(".reader", article()).value) * size * size;
    const figure = structuredClone(current().figures.fingerprint);
    figure.data[0].texttemplate = spot.clientWidth > 440 ? "%{z:.2f}" : "";
    figure.data[0].z = Array.from({ length: size }, (_, k) => Array.from(all.subarray(start + k * size, start + (k + 1) * size)));
    draw(spot, figure);
  };

  /* everything about the selected run */
  const drawFigures = (within, figures) => {
    for (const spot of $$("[data-figure]", within)) {
      const name = spot.dataset.figure;
      if (!["portrait", "fingerprint", "circuit-curve"].includes(name) && figures[name]) draw(spot, figures[name]);
    }
  };
  const drawRun = () => {
    $$("article.run").forEach((a) => { a.hidden = a.dataset.run !== String(state.run); });
    if ($("#run")) $("#run").value = state.run;
    const quantity = $(".quantity", article());
    $(".component", article()).value = state.component;
    $(".queries", article()).value = state.queries;
    if (!SHARED.has(state.component)) state.quantity = "power";
    quantity.value = state.quantity;
    quantity.disabled = !SHARED.has(state.component);
    $(".queries", article()).disabled = state.component === "sink_attention";
    if (state.head === null) state.head = strongest();
    drawFigures(article(), current().figures);
    drawMap();
    drawHead();
    buildTable();
    drawPortrait();
    drawFingerprint();
    CIRCUIT.drawCurve(article(), current());
  };
  const strongest = () => {
    const run = current(), at = column(run, "all", "power", "total");
    let best = [0, 0], most = -Infinity;
    eachHead(run, (l, h) => { const x = cell(run, at, l, h)[0]; if (x > most) [most, best] = [x, [l, h]]; });
    return best;
  };
  const drawAll = () => {
    drawRun();
    const compared = $(".compared");
    if (compared) drawFigures(compared, DATA.compared);
  };
  /* events */
  for (const name of ["component", "quantity", "queries"])
    $$(`select.${name}`).forEach((select) => select.addEventListener("change", () => {
      state[name] = select.value;
      drawRun();
      writeAddress();
    }));
  $$('[data-switch="curve"] input').forEach((input) => input.addEventListener("change", drawHead));
  $$('[data-switch="depth"] input').forEach((input) => input.addEventListener("change", () => {
    $$("[data-base]", article()).forEach((spot) => { spot.dataset.figure = `${spot.dataset.base}-${input.value}`; });
    drawFigures(article(), current().figures);
  }));
  $$(".depth, .zoom").forEach((input) => input.addEventListener("input", drawPortrait));
  $$(".reader").forEach((select) => select.addEventListener("change", drawFingerprint));
  if ($("#run")) $("#run").addEventListener("change", (event) => {
    state.run = Number(event.target.value);
    state.head = strongest();
    drawRun();
    writeAddress();
  });
  addEventListener("hashchange", () => { readAddress(); drawRun(); });
  CIRCUIT.start();
  readAddress();
  follow(drawAll);
  ROOT.dataset.ready = "true";
})();
