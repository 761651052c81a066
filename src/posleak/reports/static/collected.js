"use strict";
(() => {
  const { DATA, ROOT, $, $$, make, show, draw, follow } = COMMON;
  const knobs = Object.keys(DATA.knobs);
  const MOST_LINES = 24;
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const named = (value) => (value === null ? "–" : String(value));
  const quantityOf = (key) => DATA.quantities.find((q) => q.key === key);
  const numberOf = (state, point) => ((state.norm === "even" && point.even[state.key]) || point.numbers[state.key]);
  const text = ([x, low, high, n]) =>
    `${show(x)}${low === null || high === null ? "" : ` (${show(low)} … ${show(high)})`}, n = ${n}`;

  /* controls: the values of the selects are the state of a figure */
  const select = (spot, id, label, options, chosen, changed) => {
    const box = make("label", {}, `${label} `), menu = make("select", { id });
    for (const [value, title] of options) {
      const option = make("option", { value }, title);
      option.selected = value === chosen;
      menu.append(option);
    }
    menu.addEventListener("change", () => changed(menu.value));
    box.append(menu);
    spot.append(box);
  };
  const ALL = "all values";
  const filters = (spot, state, free, redraw) => {
    for (const knob of knobs.filter((name) => !free.includes(name))) {
      const values = DATA.knobs[knob].values;
      const options = [...(state.all ? [[ALL, ALL]] : []), ...values.map((v, k) => [String(k), named(v)])];
      const known = options.some(([value]) => value === state.only[knob]);
      if (!known) state.only[knob] = options[0][0];
      select(spot, `${state.name}-only-${knob}`, DATA.knobs[knob].title, options, state.only[knob], (value) => {
        state.only[knob] = value;
        redraw();
      });
    }
  };
  const kept = (state, free) => DATA.points.filter((point) => knobs.every((knob) =>
    free.includes(knob) || [undefined, ALL].includes(state.only[knob]) || point.knobs[knob] === DATA.knobs[knob].values[Number(state.only[knob])]));
  const quantities = () => DATA.quantities.map((q) => [q.key, q.axis]);
  const NORMS = [["attention", "by attention"], ["even", "evenly"]];
  const chooseQuantity = (spot, state, redraw) => {
    select(spot, `${state.name}-quantity`, "quantity", quantities(), state.key, (value) => { state.key = value; redraw(); });
    select(spot, `${state.name}-norm`, "weighted", NORMS, state.norm, (value) => { state.norm = value; redraw(); });
  };

  /* a setting as an axis: numbers on a log scale if they span a wide range, texts in order */
  const scaleOf = (knob) => {
    const values = DATA.knobs[knob].values, numbers = values.filter((v) => typeof v === "number");
    if (numbers.length !== values.length && knob !== "step") {
      return { place: (v) => values.indexOf(v), axis: { tickvals: values.map((_, k) => k), ticktext: values.map((v) => escape(named(v))) } };
    }
    const most = Math.max(...numbers), least = Math.min(...numbers.filter((v) => v > 0));
    const log = most / least >= 16;
    const place = (v) => (v === null ? null : log ? Math.log10(1 + v) : v);
    let ticks = numbers;
    if (numbers.length > 12) ticks = numbers.filter((_, k) => k % Math.ceil(numbers.length / 12) === 0);
    return { place, axis: { tickvals: ticks.map(place), ticktext: ticks.map(String) } };
  };

  /* curves */
  const curve = { name: "curve", all: true, norm: "attention", x: knobs.includes("step") ? "step" : knobs[0], key: DATA.quantities[0] && DATA.quantities[0].key, only: {} };
  const drawCurves = () => {
    const spot = $("#curve-controls");
    spot.replaceChildren();
    chooseQuantity(spot, curve, drawCurves);
    select(spot, "curve-x", "over", knobs.map((k) => [k, DATA.knobs[k].title]), curve.x, (value) => { curve.x = value; drawCurves(); });
    filters(spot, curve, [curve.x], drawCurves);
    const scale = scaleOf(curve.x), lines = new Map();
    const drawn = kept(curve, [curve.x]).filter((point) => numberOf(curve, point) && numberOf(curve, point)[0] !== null && scale.place(point.knobs[curve.x]) !== null);
    const others = knobs.filter((k) => k !== curve.x && new Set(drawn.map((point) => point.knobs[k])).size > 1);
    for (const point of drawn) {
      const number = numberOf(curve, point);
      const name = others.map((k) => (k === "model" ? named(point.knobs[k]) : `${DATA.knobs[k].title} ${named(point.knobs[k])}`)).join(" · ") || "all cells";
      if (!lines.has(name)) lines.set(name, []);
      lines.get(name).push([scale.place(point.knobs[curve.x]), number, point]);
    }
    const shown = [...lines].slice(0, MOST_LINES);
    const data = shown.map(([name, points], k) => {
      points.sort((a, b) => a[0] - b[0]);
      const colour = `var(--run-${k % 6})`;
      const end = (side, at) => points.map(([, n]) => (n[side] === null ? 0 : Math.abs(n[side] - n[at])));
      return {
        type: "scatter", mode: "lines+markers", name: escape(name), x: points.map((p) => p[0]), y: points.map(([, n]) => n[0]),
        line: { color: colour, dash: DASHES[Math.floor(k / 6) % DASHES.length], width: 1.8 }, marker: { color: colour, size: 6 },
        error_y: { type: "data", symmetric: false, array: end(2, 0), arrayminus: end(1, 0), thickness: 1.1, width: 3, color: colour },
        text: points.map(([, n, p]) => `${escape(DATA.knobs[curve.x].title)} ${escape(named(p.knobs[curve.x]))}: ${text(n)}`),
        hovertemplate: `%{text}<extra>${escape(name)}</extra>`,
      };
    });
    const quantity = quantityOf(curve.key);
    draw($("#curves"), {
      data, layout: {
        xaxis: { ...scale.axis, title: { text: DATA.knobs[curve.x].title } }, yaxis: { title: { text: quantity.axis }, rangemode: "tozero" },
        showlegend: data.length > 1, margin: { l: 60, r: 10, t: 40 + 18 * Math.ceil(Math.min(data.length, 24) / 3), b: 48 },
      },
    });
    const left = lines.size - shown.length;
    $("#curve-caption").textContent = `${quantity.title}, by ${DATA.knobs[curve.x].title}.` +
      (left > 0 ? ` ${left} more lines are not drawn; select values above.` : "") + (data.length ? "" : " None of these cells has this quantity.");
  };

  /* maps */
  const fullest = (x, y) => { // the values of the other settings that fill the largest part of the map
    const rest = knobs.filter((k) => k !== x && k !== y), groups = new Map();
    for (const point of DATA.points) {
      const at = JSON.stringify(rest.map((k) => DATA.knobs[k].values.indexOf(point.knobs[k])));
      if (!groups.has(at)) groups.set(at, [new Set(), new Set()]);
      groups.get(at)[0].add(point.knobs[x]);
      groups.get(at)[1].add(point.knobs[y]);
    }
    const [at, [xs, ys]] = [...groups].reduce((a, b) => (a[1][0].size * a[1][1].size >= b[1][0].size * b[1][1].size ? a : b));
    const only = Object.fromEntries(rest.map((k, i) => [k, String(JSON.parse(at)[i])]));
    return { only, filled: Math.min(xs.size, ys.size) > 1 ? xs.size * ys.size : 0 };
  };
  const pairs = knobs.flatMap((y) => knobs.filter((x) => x !== y && y !== "step").map((x) => [x, y]));
  const preferred = ([, y]) => (y === "edits" ? 2 : y === "model" ? 1 : 0);
  const best = pairs.map((pair) => [fullest(...pair).filled, preferred(pair), pair])
    .sort((a, b) => (b[0] > 0) - (a[0] > 0) || b[1] - a[1] || b[0] - a[0])[0];
  const map = { name: "map", all: false, norm: "attention", key: curve.key, only: {} };
  const lay = (x, y) => Object.assign(map, { x, y, only: fullest(x, y).only });
  if (best) lay(...best[2]);
  const drawMap = () => {
    const spot = $("#map-controls");
    if (!spot) return;
    spot.replaceChildren();
    const turn = (axis, other) => (value) => {
      const wanted = { x: map.x, y: map.y, [axis]: value };
      if (map[other] === value) wanted[other] = map[axis];
      lay(wanted.x, wanted.y);
      drawMap();
    };
    const options = knobs.map((k) => [k, DATA.knobs[k].title]);
    chooseQuantity(spot, map, drawMap);
    select(spot, "map-y", "rows", options, map.y, turn("y", "x"));
    select(spot, "map-x", "columns", options, map.x, turn("x", "y"));
    filters(spot, map, [map.x, map.y], drawMap);
    const there = kept(map, [map.x, map.y]), quantity = quantityOf(map.key);
    const measured = (knob) => DATA.knobs[knob].values.filter((v) => there.some((point) => point.knobs[knob] === v));
    const xs = measured(map.x), ys = measured(map.y);
    const empty = () => ys.map(() => xs.map(() => null));
    const z = empty(), marks = empty().map((row) => row.map(() => "")), hover = empty().map((row) => row.map(() => ""));
    const neutral = quantity.key.includes("/ratio/") ? 1 : 0;
    for (const point of there) {
      const number = numberOf(map, point), r = ys.indexOf(point.knobs[map.y]), c = xs.indexOf(point.knobs[map.x]);
      if (!number) continue;
      const [x, low, high] = number;
      z[r][c] = x;
      const unsure = low !== null && high !== null && low <= neutral && neutral <= high;
      marks[r][c] = x === null ? "×" : unsure ? `(${show(x)})` : show(x);
      hover[r][c] = `${escape(named(ys[r]))}, ${escape(named(xs[c]))}: ${text(number)}`;
    }
    const found = z.flat().filter((x) => x !== null), most = Math.max(...found.map((x) => Math.abs(x - neutral)), 1e-12);
    const diverging = neutral === 1 || found.some((x) => x < 0);
    draw($("#map"), {
      data: [{
        type: "heatmap", z, text: marks, texttemplate: "%{text}", customdata: hover, hovertemplate: "%{customdata}<extra></extra>", xgap: 2, ygap: 2,
        hoverongaps: false, x: xs.map((_, k) => k), y: ys.map((_, k) => k),
        zmin: diverging ? neutral - most : 0, zmax: neutral + most,
        colorscale: diverging ? [[0, "var(--negative)"], [0.5, "var(--wash)"], [1, "var(--mask)"]] : [[0, "var(--wash)"], [1, "var(--mask)"]],
        colorbar: { thickness: 12, outlinewidth: 0 },
      }],
      layout: {
        xaxis: { title: { text: DATA.knobs[map.x].title }, tickvals: xs.map((_, k) => k), ticktext: xs.map((v) => escape(named(v))), showgrid: false },
        yaxis: { title: { text: DATA.knobs[map.y].title }, tickvals: ys.map((_, k) => k), ticktext: ys.map((v) => escape(named(v))), autorange: "reversed", showgrid: false },
      },
    });
    $("#map-caption").textContent = `${quantity.axis}.` + (found.length ? "" : " None of these cells has this quantity.");
  };

  const drawAll = () => {
    if (!knobs.length || !DATA.quantities.length) return;
    drawCurves();
    drawMap();
  };
  follow(drawAll);
  ROOT.dataset.ready = "true";
})();
