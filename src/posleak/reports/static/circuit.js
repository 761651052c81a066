"use strict";
/* The drawing of the circuit, and the coefficient along its direction at a chosen depth. */
const CIRCUIT = (() => {
  const { DATA, $, $$, make, unpack, missing, draw } = COMMON;
  const KINDS = ["writer", "depth", "reader"];
  const at = (node) => ({ x: Number(node.dataset.x), y: Number(node.dataset.y) });
  const upwards = (a, b) => at(b).y - at(a).y || at(a).x - at(b).x;

  const show = (svg, node) => {
    const panel = $(".circuitpanel", svg.closest(".circuitlayout")), { kind, index, name, text } = node.dataset;
    const links = $$(".link", svg).filter((link) => link.dataset[kind] === index);
    $$(".on", svg).forEach((each) => each.classList.remove("on"));
    svg.classList.toggle("chosen", kind !== "depth");
    [node, ...links].forEach((each) => each.classList.add("on"));
    $(".node-name", panel).textContent = name;
    $(".node-text", panel).textContent = `${text}.`;
    const list = $(".node-links", panel);
    list.className = "node-links edges";
    list.replaceChildren(...links.map((link) => {
      const item = make("li");
      item.append(make("b", {}, link.dataset.name), ` ${link.dataset.text}`);
      return item;
    }));
    if (!links.length && kind !== "depth") list.append(make("li", {}, "No edge of this head was measured."));
    const more = $(".more", panel);
    if (more) more.remove();
  };
  const choose = (nodes, node) => {
    nodes.forEach((each) => { each.tabIndex = each === node ? 0 : -1; });
    node.focus();
  };
  const nearest = (nodes, node) => nodes.reduce((best, each) =>
    (Math.abs(at(each).y - at(node).y) < Math.abs(at(best).y - at(node).y) ? each : best));
  const target = (nodes, node, key) => {
    const column = (kind) => nodes.filter((each) => each.dataset.kind === kind).sort(upwards);
    const own = column(node.dataset.kind), place = own.indexOf(node);
    const within = { ArrowUp: place + 1, ArrowDown: place - 1, Home: 0, End: own.length - 1 }[key];
    if (within !== undefined) return own[within];
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    for (let k = KINDS.indexOf(node.dataset.kind) + step; step && KINDS[k]; k += step)
      if (column(KINDS[k]).length) return nearest(column(KINDS[k]), node);
    return undefined;
  };
  const connect = (svg) => {
    const nodes = $$(".node", svg);
    nodes.forEach((node) => {
      node.tabIndex = node === nodes.find((each) => each.dataset.kind === "writer") ? 0 : -1;
      node.addEventListener("focus", () => show(svg, node));
      node.addEventListener("mouseenter", () => show(svg, node));
      node.addEventListener("click", () => choose(nodes, node));
      node.addEventListener("keydown", (event) => {
        const to = target(nodes, node, event.key);
        if (event.key.startsWith("Arrow") || to) event.preventDefault();
        if (to) choose(nodes, to);
      });
    });
  };

  /* the mean coefficient with its interval: float32 [depth, (value, low, high), position] */
  const drawCurve = (article, run) => {
    const spot = $('[data-figure="circuit-curve"]', article), slider = $(".curve-depth", article);
    if (!spot || !run.circuit) return;
    const depth = Number(slider.value), count = run.circuit.positions, all = unpack(run.circuit.curve, Float32Array);
    const [value, low, high] = [0, 1, 2].map((k) => Array.from(all.subarray((3 * depth + k) * count, (3 * depth + k + 1) * count), missing));
    const figure = structuredClone(run.figures["circuit-curve"]), [band, line] = figure.data;
    const there = value.map((_, k) => k).filter((k) => low[k] !== null), back = [...there].reverse();
    band.x = [...there, ...back].map((k) => line.x[k]);
    band.y = [...there.map((k) => high[k]), ...back.map((k) => low[k])];
    line.y = value;
    line.customdata = value.map((_, k) => [low[k], high[k]]);
    slider.nextElementSibling.textContent = depth;
    slider.setAttribute("aria-valuetext", `depth ${depth}`);
    draw(spot, figure);
  };
  const start = () => {
    $$("svg.drawing").forEach(connect);
    $$(".curve-depth").forEach((slider) => slider.addEventListener("input", () => {
      const article = slider.closest("article");
      drawCurve(article, DATA.runs[Number(article.dataset.run)]);
    }));
  };
  return { start, drawCurve };
})();
