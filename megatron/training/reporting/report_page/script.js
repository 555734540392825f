const main = document.querySelector("main");
const NUM_LAUNCH_COLORS = 8;
const MAX_LAUNCHES_IN_LEGEND = 8;
const MAX_ROWS_OF_DATA = 400;
// Activities of the goodput bar: key in the data, label, color.
const SPENT = [
  ["training", "training", "training"],
  ["done again later", "repeated later", "repeated"],
  ["held up by saves", "blocked by saves", "saves"],
  ["loading", "loading", "loading"],
  ["starting", "starting", "starting"],
  ["evaluation and other", "evaluation and other", "other"],
  ["between starts", "between launches", "between"],
];
// Phases of a save: key in the data, color.
const STAGES = [
  ["copy to host memory", "copy"],
  ["write", "write"],
  ["commit", "commit"],
];

// ---- Elements ----

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter(child => child !== null));
  return node;
}

function svg(tag, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}

const section = (title, ...content) => el("section", {}, el("h2", {}, title), ...content);
const tile = (value, text) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, text));
const legendEntry = (text, style, shape = "") =>
  el("span", {}, el("i", { style, class: shape }), text);
const launchColor = index => `var(--launch-${index % NUM_LAUNCH_COLORS + 1})`;
const spentColor = name => `var(--spent-${name})`;

// ---- Numbers as text ----

function formatCount(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return trimZeros((value / 1e9).toFixed(2)) + "B";
  if (size >= 1e6) return trimZeros((value / 1e6).toFixed(2)) + "M";
  if (size >= 1e4) return trimZeros((value / 1e3).toFixed(1)) + "k";
  return String(Math.round(value));
}

const trimZeros = text => text.includes(".") ? text.replace(/\.?0+$/, "") : text;

/* Return a number with about four significant digits. */
function formatValue(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return trimZeros(value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(size)))));
}

function formatBytes(value) {
  if (value === 0) return "0";
  if (value >= 1e9) return trimZeros((value / 1e9).toFixed(2)) + " GB";
  if (value >= 1e6) return trimZeros((value / 1e6).toFixed(1)) + " MB";
  return trimZeros((value / 1e3).toFixed(1)) + " kB";
}

function formatSeconds(seconds) {
  if (seconds < 1) return (1000 * seconds).toFixed(0) + " ms";
  if (seconds < 90) return seconds.toFixed(1) + " s";
  if (seconds < 5400) return (seconds / 60).toFixed(1) + " min";
  if (seconds < 172800) return (seconds / 3600).toFixed(1) + " h";
  return (seconds / 86400).toFixed(1) + " days";
}

function formatDate(seconds) {
  if (seconds === null) return "";
  return new Date(1000 * seconds).toISOString().replace("T", " ").slice(0, 16) + " UTC";
}

function formatShare(part) {
  if (part > 0 && part < 0.0005) return "< 0.1 %";
  if (part >= 0.9995) return "100 %";
  return (100 * part).toFixed(part < 0.1 ? 1 : 0) + " %";
}

/* Return "TP2 PP4 DP16 SP ZeRO-1" for "TP 2 x PP 4 x DP 16, sequence parallel, distributed optimizer". */
function shortenLayout(layout) {
  return (layout ?? "")
    .replaceAll(" x ", " ")
    .replace(/\b([A-Z]+) (\d+)/g, "$1$2")
    .replace(", sequence parallel", " SP")
    .replace(", distributed optimizer", " ZeRO-1");
}

// ---- Charts ----

/* What the reader has selected. Charts over iterations share the range `zoom` that is selected by
   dragging; null: everything. A served page reloads itself, and its tab keeps the selection. */
const view = { zoom: null, isLog: false };
const VIEW_KEY = "view";
const isServed = location.protocol.startsWith("http");
if (isServed) Object.assign(view, JSON.parse(sessionStorage.getItem(VIEW_KEY)));
const charts = [];

function changeView(changes) {
  Object.assign(view, changes);
  if (isServed) sessionStorage.setItem(VIEW_KEY, JSON.stringify(view));
  redrawAll();
}

/* Add a chart that is drawn for the width of its figure, so that its text is readable on a phone.
   `draw` fills an SVG image; `describe` returns the table of its data: columns and rows. */
function addChart(parent, { title, legend, height, controls = null, note = "", draw, describe }) {
  const figure = el("figure", { style: `height:${height}px` });
  const tip = el("div", { class: "tip", role: "status" });
  figure.append(tip);
  const data = el("details", {}, el("summary", {}, "data"));
  data.ontoggle = () => {
    data.querySelector(".scroll")?.remove();
    if (data.open) data.append(makeTable(...describe()));
  };
  const heading = el("h2", {}, title);
  if (controls !== null) heading.append(controls);
  const whole = el("section", {}, heading, el("div", { class: "legend" }, ...legend), figure);
  if (note) whole.append(el("p", { class: "note" }, note));
  whole.append(data);
  parent.append(whole);

  const redraw = () => {
    const width = Math.max(260, figure.clientWidth);
    figure.querySelector("svg")?.remove();
    const [, rows] = describe();
    let label = title;
    if (rows.length) label += `, from ${rows[0].slice(0, 2).join(": ")} to ${rows.at(-1).slice(0, 2).join(": ")}`;
    const image = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
    figure.append(image);
    draw(image, width, height, tip);
  };
  charts.push([figure, redraw]);
}

/* Return about `wanted` round numbers from `low` to `high`. */
function makeTicks(low, high, wanted) {
  const raw = (high - low || 1) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(value => value >= raw);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) values.push(value);
  return values;
}

/* Return powers of ten from `low` to `high`, with 2 and 5 between them in a narrow range. */
function makeLogTicks(low, high, wanted) {
  const decades = Math.log10(high / low);
  const step = Math.max(1, Math.ceil(decades / wanted));
  const factors = decades > wanted / 2 ? [1] : [1, 2, 5];
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += step) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) values.push(value);
    }
  }
  return values.length > 1 ? values : makeTicks(low, high, wanted);
}

/* Draw grid and axes; return the maps from data to pixels. */
function drawAxes(image, width, height, x, y, { unit, format, log = false }) {
  const left = 64;
  const right = 14;
  const top = 20;
  const bottom = 38;
  const scale = log ? Math.log10 : value => value;
  const [low, high] = [scale(y[0]), scale(y[1])];
  const px = value => left + (value - x[0]) / (x[1] - x[0] || 1) * (width - left - right);
  const py = value => height - bottom - (scale(value) - low) / (high - low || 1) * (height - top - bottom);
  for (const value of log ? makeLogTicks(...y, height / 55) : makeTicks(...y, height / 55)) {
    image.append(svg("line", { x1: left, x2: width - right, y1: py(value), y2: py(value), stroke: "var(--line)" }));
    image.append(svg("text", { x: left - 8, y: py(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const value of makeTicks(...x, width / 110).filter(Number.isInteger)) {
    image.append(svg("text", { x: px(value), y: height - 20, "text-anchor": "middle" }, formatCount(value)));
  }
  image.append(svg("text", { x: left + (width - left - right) / 2, y: height - 4, "text-anchor": "middle" }, "iteration"));
  image.append(svg("text", { x: 2, y: 12 }, unit));
  return { px, py, left, right, top, bottom };
}

function makePath(points, axes) {
  const steps = points.map(([x, y], n) => `${n ? "L" : "M"}${axes.px(x).toFixed(1)} ${axes.py(y).toFixed(1)}`);
  return steps.join("");
}

/* Let the reader select a range of iterations by dragging; a double click shows everything. */
function addZoom(image, axes, range, width) {
  const toIteration = x => range[0] + (x - axes.left) / (width - axes.left - axes.right) * (range[1] - range[0]);
  const shade = svg("rect", { y: axes.top, height: 0, fill: "var(--soft)", "fill-opacity": 0.2 });
  image.append(shade);
  let from = null;
  const position = event => event.clientX - image.getBoundingClientRect().left;
  image.onpointerdown = event => {
    from = position(event);
  };
  image.addEventListener("pointermove", event => {
    if (from === null) return;
    const to = position(event);
    shade.setAttribute("x", Math.min(from, to));
    shade.setAttribute("width", Math.abs(to - from));
    shade.setAttribute("height", image.clientHeight - axes.top - axes.bottom);
  });
  image.onpointerup = event => {
    const ends = [from, position(event)].map(toIteration).sort((a, b) => a - b);
    from = null;
    if (ends[1] - ends[0] < (range[1] - range[0]) / 50) return;
    changeView({ zoom: ends });
  };
  image.ondblclick = () => {
    changeView({ zoom: null });
  };
}

function redrawAll() {
  for (const [, redraw] of charts) redraw();
}

/* Return the points in the range, and one more on each side, to which lines are drawn. */
function clip(points, [low, high]) {
  let first = points.findIndex(point => point[0] >= low);
  if (first < 0) return points.slice(-1);
  let last = points.findLastIndex(point => point[0] <= high);
  return points.slice(Math.max(0, first - 1), last + 2);
}

/* A series is one launch, or one run of a comparison: label, color, `first` iteration, the last
   iteration that was `kept`, and its `points`. Rings are evaluations. */
function addLineChart(parent, { title, unit, format = formatValue, series, rings = [], height = 230, fromZero = false, log = false, logOption = false, legend, note }) {
  series = series.filter(one => one.points.length || rings.length);
  const all = [...series.flatMap(one => one.points), ...rings.flatMap(one => one.points)];
  if (!all.length) return;
  const end = Math.max(facts.train_iters ?? 0, ...all.map(point => point[0]));
  const isAlwaysLog = log && all.every(point => point[1] > 0);
  let controls = null;
  if (logOption) {
    const box = el("input", { type: "checkbox" });
    box.checked = view.isLog;
    box.onchange = () => changeView({ isLog: box.checked });
    controls = el("label", { class: "controls" }, box, " log scale");
  }

  const draw = (image, width, height, tip) => {
    const range = view.zoom ?? [0, end];
    const shown = all.filter(point => point[0] >= range[0] && point[0] <= range[1]);
    const values = (shown.length ? shown : all).map(point => point[1]);
    let low = values.reduce((a, b) => Math.min(a, b));
    let high = values.reduce((a, b) => Math.max(a, b));
    const useLog = (isAlwaysLog || (logOption && view.isLog)) && low > 0;
    if (useLog) {
      [low, high] = [low / 1.1, high * 1.1];
    } else {
      const pad = (high - low || Math.abs(high) || 1) * 0.06;
      [low, high] = [fromZero ? 0 : low - pad, high + pad];
    }
    const axes = drawAxes(image, width, height, range, [low, high], { unit, format, log: useLog });
    drawSeries(image, axes, range, series, width, height);
    drawRings(image, axes, range, rings);
    drawTip(image, axes, series, rings, tip, width, format);
    addZoom(image, axes, range, width);
  };
  const describe = () => {
    const rows = [];
    for (const one of [...series, ...rings]) {
      for (const [x, y] of one.points) rows.push([x, formatValue(y), one.label]);
    }
    const step = Math.ceil(rows.length / MAX_ROWS_OF_DATA) || 1;
    const sample = rows.filter((_, n) => n % step === 0 || n === rows.length - 1);
    return [[["iteration", "num"], [title, "num"], ["", "short"]], sample];
  };
  addChart(parent, { title, legend, height, controls, note, draw, describe });
}

function drawSeries(image, axes, range, series, width, height) {
  let before = [];  // the points from which the next launch continues
  series.forEach((one, index) => {
    const kept = one.points.filter(point => point[0] <= one.kept);
    const repeated = one.points.filter(point => point[0] > one.kept);
    if (one.joins && index > 0 && one.first >= range[0] && one.first <= range[1]) {
      const x = axes.px(one.first);
      image.append(svg("line", { x1: x, x2: x, y1: axes.top, y2: height - axes.bottom, stroke: one.color, "stroke-dasharray": "2 4", "stroke-opacity": 0.6 }));
    }
    if (repeated.length) {
      const from = Math.max(axes.left, axes.px(one.kept));
      const to = Math.min(width - axes.right, axes.px(repeated.at(-1)[0]));
      if (to > from) {
        const band = { x: from, width: to - from, y: axes.top, height: height - axes.top - axes.bottom };
        image.append(svg("rect", { ...band, class: "repeated", fill: "var(--spent-repeated)", "fill-opacity": 0.12 }));
      }
      const path = makePath(clip([...kept.slice(-1), ...repeated], range), axes);
      image.append(svg("path", { d: path, fill: "none", stroke: one.color, "stroke-width": 2, "stroke-dasharray": "6 4" }));
    }
    if (!one.joins) before = [];
    before = before.filter(point => point[0] <= one.first);
    const path = makePath(clip([...before.slice(-1), ...kept], range), axes);
    image.append(svg("path", { d: path, fill: "none", stroke: one.color, "stroke-width": 2, "stroke-linejoin": "round" }));
    if (kept.length < 40) {
      for (const [x, y] of clip(kept, range)) image.append(svg("circle", { cx: axes.px(x), cy: axes.py(y), r: 2.4, fill: one.color }));
    }
    before = [...before, ...kept];
  });
}

function drawRings(image, axes, range, rings) {
  const count = rings.reduce((sum, one) => sum + one.points.length, 0);
  const isSmall = count > 60;  // so that many evaluations do not hide the curve
  for (const one of rings) {
    for (const [x, y] of one.points) {
      if (x < range[0] || x > range[1]) continue;
      const ring = { cx: axes.px(x), cy: axes.py(y), r: isSmall ? 2 : 4.5, "stroke-width": isSmall ? 1 : 2 };
      image.append(svg("circle", { ...ring, fill: "var(--paper)", stroke: one.color }));
    }
  }
}

function drawTip(image, axes, series, rings, tip, width, format) {
  const dot = svg("circle", { r: 4.5, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden" });
  image.append(dot);
  image.addEventListener("pointermove", event => {
    const box = image.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    let best = null;
    let distance = Infinity;
    for (const one of [...series, ...rings]) {
      for (const point of one.points) {
        const d = Math.abs(axes.px(point[0]) - x) + 0.15 * Math.abs(axes.py(point[1]) - y);
        if (d < distance) [best, distance] = [[point, one], d];
      }
    }
    const [point, one] = best;
    const left = axes.px(point[0]);
    const top = axes.py(point[1]);
    dot.setAttribute("cx", left);
    dot.setAttribute("cy", top);
    dot.setAttribute("visibility", "visible");
    const repeated = point[0] > one.kept ? ", repeated later" : "";
    tip.textContent = `iteration ${point[0]}: ${format(point[1])} (${one.label}${repeated})`;
    tip.style.left = Math.min(Math.max(left, 110), width - 110) + "px";
    tip.style.top = Math.max(30, top) + "px";
    tip.style.visibility = "visible";
  });
  image.onpointerleave = () => {
    tip.style.visibility = "hidden";
    dot.setAttribute("visibility", "hidden");
  };
}

function addSavesChart(parent, launches) {
  const rows = launches.flatMap(launch => launch.saves);
  if (!rows.length) return;
  const total = stages => STAGES.reduce((sum, [name]) => sum + stages[name], 0);
  const highest = Math.max(...rows.map(([, stages]) => Math.max(stages["training lost"], total(stages))));
  const end = Math.max(facts.train_iters, ...rows.map(row => row[0]));
  const draw = (image, width, height) => {
    const range = view.zoom ?? [0, end];
    const axes = drawAxes(image, width, height, range, [0, 1.08 * highest], { unit: "seconds", format: formatValue });
    const shown = rows.filter(([iteration]) => iteration >= range[0] && iteration <= range[1]);
    // Bars of successive saves do not overlap.
    const places = shown.map(([iteration]) => axes.px(iteration)).sort((a, b) => a - b);
    const gaps = places.slice(1).map((place, n) => place - places[n]).filter(gap => gap > 0);
    const thickness = Math.max(1, Math.min(22, 0.8 * Math.min(...gaps, 40)));
    for (const [iteration, stages] of shown) {
      const x = Math.min(axes.px(iteration) - thickness / 2, width - axes.right - thickness);
      let sum = 0;
      for (const [stage, color] of STAGES) {
        const y = axes.py(sum + stages[stage]);
        image.append(svg("rect", { x, y, width: thickness, height: axes.py(sum) - y, fill: spentColor(color) }));
        sum += stages[stage];
      }
      const y = axes.py(stages["training lost"]);
      image.append(svg("line", { x1: x - 3, x2: x + thickness + 3, y1: y, y2: y, stroke: spentColor("saves"), "stroke-width": 3 }));
    }
    addZoom(image, axes, range, width);
  };
  const describe = () => {
    const names = [...STAGES.map(([name]) => name), "training lost"];
    const columns = [["iteration", "num"], ...names.map(name => [`${name} (s)`, "num"]), ["size", "num"]];
    return [columns, rows.map(([i, stages]) => [i, ...names.map(name => formatValue(stages[name])), formatBytes(stages.bytes)])];
  };
  const legend = STAGES.map(([name, color]) => legendEntry(name, `background:${spentColor(color)}`, "box"));
  legend.push(legendEntry("training lost", `background:${spentColor("saves")}`));
  addChart(parent, { title: "Time of each save", legend, height: 230, draw, describe });
}

// ---- Tables ----

const MAX_TEXT = 80;

/* Return a long text as its beginning, which opens. */
function foldText(text, maxLength = MAX_TEXT) {
  if (text.length <= maxLength + 20) return text;
  return el("details", {}, el("summary", {}, text.slice(0, maxLength) + " ..."), text);
}

/* Columns are [name, class]; cells are texts, numbers, nodes, or {content, mood, title}. */
function makeTable(columns, rows, kind = "") {
  const head = el("tr", {}, ...columns.map(([name, style]) => el("th", { class: style, scope: "col" }, name)));
  const body = rows.map(cells => el("tr", {}, ...cells.map((cell, n) => {
    const { content, mood = "", title = "" } = cell?.content === undefined ? { content: cell } : cell;
    const shown = typeof content === "string" ? foldText(content) : content;
    const attributes = { class: `${columns[n][1]} ${mood}`.trim(), "data-name": columns[n][0], title };
    return el("td", attributes, shown ?? "");
  })));
  const table = el("table", { class: kind }, el("thead", {}, head), el("tbody", {}, ...body));
  return el("div", { class: "scroll", tabindex: 0 }, table);
}

/* The domain is the same for all hosts of a cluster; only long names break. */
function hostCell(host) {
  const name = (host ?? "").split(".")[0];
  return { content: name, title: host ?? "", mood: name.length <= 20 ? "short" : "" };
}

const numberCell = (value, format) => value === null || value === undefined ? "" : format(value);
const SPEED_COLUMNS = [["tokens/s", "num"], ["TFLOP/s", "num"]];
const speedCells = ({ tokens_per_second, tflops, mfu }) => [
  numberCell(tokens_per_second, formatCount),
  {
    content: numberCell(tflops, formatValue) + (mfu === null ? "" : ` (${formatShare(mfu)})`),
    title: "of a device; in brackets, its share of the data sheet's bf16 FLOP/s (MFU)",
  },
];

const layoutCell = layout => ({ content: shortenLayout(layout), title: layout ?? "" });

function makeCopyButton(text) {
  const button = el("button", { type: "button", title: text }, "copy");
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      window.prompt("The command:", text);  // the browser does not allow access to the clipboard
    }
  };
  return button;
}

function makeList(texts) {
  if (texts.length === 0) return "";
  if (texts.length === 1) return texts[0];
  return el("ul", {}, ...texts.map(text => el("li", {}, text)));
}

// ---- Page of a run ----

const MAX_VERDICT = 120;

function showVerdict(verdict) {
  const icons = { good: "✓", warn: "!", bad: "✗" };
  const items = verdict.map(({ mood, text }) =>
    el("li", { class: mood }, el("span", { class: "icon", "aria-hidden": "true" }, icons[mood]), el("span", {}, foldText(text, MAX_VERDICT))));
  main.append(el("ul", { class: "verdict", "aria-label": "Verdict" }, ...items));
}

function showTiles(run) {
  const newest = run.launches.at(-1);
  const losses = newest.curves.lm_loss.length ? newest.curves.lm_loss : run.launches.flatMap(launch => launch.curves.lm_loss);
  const checks = run.launches.flatMap(launch => launch.validation);
  const total = Object.values(run.goodput).reduce((a, b) => a + b, 0);
  const launches = run.launches.length;
  main.append(el("div", { class: "tiles" },
    tile(formatCount(newest.last), `of ${formatCount(run.train_iters)} iterations`),
    losses.length ? tile(formatValue(losses.at(-1)[1]), "training loss") : null,
    checks.length ? tile(formatValue(checks.at(-1)[1]), "validation loss") : null,
    newest.speed.tokens_per_second === null ? null : tile(formatCount(newest.speed.tokens_per_second), `tokens per second (launch ${launches})`),
    newest.speed.mfu === null ? null : tile(formatShare(newest.speed.mfu), `MFU (launch ${launches})`),
    tile(formatSeconds(total), launches === 1 ? "since the launch" : `since the first of ${launches} launches`)));
}

// The charts of every report: loss, throughput, gradient norm and learning rate. `seriesOf` makes
// one series per launch or run from its points.
function addCommonCharts(seriesOf, legend) {
  const checks = seriesOf(launch => launch.validation);
  const hasChecks = checks.some(one => one.points.length);
  const rings = hasChecks ? [legendEntry("validation", "", "ring")] : [];
  addLineChart(main, {
    title: "Loss", unit: "loss", height: 320, logOption: true,
    series: seriesOf(launch => launch.curves.lm_loss), rings: hasChecks ? checks : [],
    legend: [...legend, ...rings],
    note: "Drag to zoom all charts, double-click to show everything.",
  });
  const grid = el("div", { class: "charts" });
  main.append(grid);
  const add = (title, unit, name, options = {}) =>
    addLineChart(grid, { title, unit, series: seriesOf(launch => launch.curves[name]), legend: [], ...options });
  add("Throughput", "tokens per second", "tokens_per_second", { format: formatCount, fromZero: true });
  add("Gradient norm", "norm, log scale", "grad_norm", { log: true });
  add("Learning rate", "learning rate", "learning_rate", { fromZero: true });
  return { grid, add };
}

function showCharts(run) {
  // Launches at one layout have one color, so that colors are few in a run with many launches.
  const layouts = [...new Set(run.launches.map(launch => launch.layout))];
  const manyLaunches = run.launches.length > MAX_LAUNCHES_IN_LEGEND;
  const colorOf = (launch, index) => launchColor(manyLaunches ? layouts.indexOf(launch.layout) : index);
  const seriesOf = points => run.launches.map((launch, index) => ({
    label: `launch ${index + 1}`,
    color: colorOf(launch, index),
    first: launch.first,
    kept: launch.kept,
    joins: true,
    points: points(launch),
  }));
  let who = run.launches.map((launch, n) => legendEntry(`launch ${n + 1}: ${shortenLayout(launch.layout)}`, `background:${launchColor(n)}`));
  if (manyLaunches) {
    who = [el("span", {}, `launches 1 to ${run.launches.length}, colored by layout:`)];
    layouts.slice(0, MAX_LAUNCHES_IN_LEGEND).forEach((layout, n) => who.push(legendEntry(shortenLayout(layout), `background:${launchColor(n)}`)));
  }
  const hasRepeated = run.launches.some(launch => launch.last > launch.kept);
  if (hasRepeated) who.push(legendEntry("repeated by a later launch (dashed)", "background:var(--spent-repeated);opacity:0.3", "box"));
  const { grid, add } = addCommonCharts(seriesOf, who);
  if (hasChanges(run, "loss_scale")) add("Loss scale", "factor, log scale", "loss_scale", { log: true });
  add("Load of the fullest expert", "tokens / mean over experts", "max_load_over_mean");
  addEvaluationChart(grid, run.launches, "Validation loss by domain", "loss", "lm loss validation ");
  addEvaluationChart(grid, run.launches, "Tasks", "score", "eval ");
  addMemoryChart(grid, seriesOf, run.summary.memory);
  addSavesChart(grid, run.launches);
}

/* One line for each metric whose name begins with `prefix`, over all launches. */
function addEvaluationChart(parent, launches, title, unit, prefix) {
  const names = [...new Set(launches.flatMap(launch => Object.keys(launch.evaluations)))].filter(name => name.startsWith(prefix));
  if (!names.length) return;
  const series = names.map((name, index) => ({
    label: name.slice(prefix.length),
    color: launchColor(index),
    first: 0,
    kept: Infinity,
    joins: false,
    points: launches.flatMap(launch => (launch.evaluations[name] || []).filter(point => point[0] <= launch.kept)),
  }));
  addLineChart(parent, { title, unit, series, legend: series.map(one => legendEntry(one.label, `background:${one.color}`)) });
}

/* Peak memory of the fullest and of the emptiest rank; older records have rank 0 alone. */
function addMemoryChart(parent, seriesOf, planned) {
  const least = seriesOf(launch => launch.curves.min_memory_bytes).map(one => ({ ...one, joins: false, label: `${one.label}, emptiest rank` }));
  const most = seriesOf(launch => launch.curves.max_memory_bytes);
  const isOfAll = least.some(one => one.points.length);
  addLineChart(parent, {
    title: isOfAll ? "Peak memory of the fullest and the emptiest rank" : "Peak memory of rank 0",
    unit: "bytes", format: formatBytes, fromZero: true, series: [...most, ...least], legend: [],
    note: planned ? `Planned: ${planned}. On a CPU, the memory of the whole process.` : "",
  });
}

const hasChanges = (run, name) => new Set(run.launches.flatMap(launch => launch.curves[name].map(point => point[1]))).size > 1;

function showGoodput(run) {
  const total = Object.values(run.goodput).reduce((a, b) => a + b, 0);
  const spent = SPENT.filter(([name]) => run.goodput[name] > 0);
  const describe = (name, label) => `${label} ${formatSeconds(run.goodput[name])} (${formatShare(run.goodput[name] / total)})`;
  const bar = spent.map(([name, label, color]) =>
    el("div", { style: `flex:${run.goodput[name]} 0 0;background:${spentColor(color)}`, title: describe(name, label) }));
  const legend = spent.map(([name, label, color]) => legendEntry(describe(name, label), `background:${spentColor(color)}`, "box"));
  main.append(section(`Goodput: how ${formatSeconds(total)} were spent`,
    el("div", { class: "bar", role: "img", "aria-label": spent.map(([name, label]) => describe(name, label)).join(", ") }, ...bar),
    el("div", { class: "legend", style: "margin-top:8px" }, ...legend)));
}

function showLaunches(run) {
  const columns = [["launch", "num"], ["ended", "long"], ["iterations", "num"], ["from", ""], ["layout", ""], ...SPEED_COLUMNS, ["changes", "long"], ["host", ""], ["began", "short"], ["took", "num"]];
  const rows = run.launches.map((launch, n) => [launch.began, [
    n + 1,
    { content: launch.reason, mood: launch.failed ? "bad" : "" },
    `${launch.first + 1} to ${launch.last}`,
    launch.loaded ? launch.loaded.split("/").pop() : "random weights",
    layoutCell(launch.layout),
    ...speedCells(launch.speed),
    makeList(launch.changes),
    hostCell(launch.host),
    formatDate(launch.began),
    formatSeconds(launch.ended - launch.began),
  ]]);
  for (const failed of run.failed) {
    rows.push([failed.time, ["", { content: failed.reason, mood: "bad" }, "none", "", "", "", "", "", "", formatDate(failed.time), ""]]);
  }
  rows.sort((a, b) => a[0] - b[0]);
  main.append(section("Launches", makeTable(columns, rows.map(row => row[1]), "stack")));
}

function showCheckpoints(run) {
  if (!run.checkpoints.length) {
    main.append(section("Checkpoints", el("p", { class: "note" }, "There are no checkpoints.")));
    return;
  }
  const columns = [["usable", "long"], ["iteration", "num"], ["size", "num"], ["written", "short"], ["validation loss", "num"], ["layout", ""], ["launch", "num"], ["descends from", ""], ["resume", ""]];
  const rows = run.checkpoints.map(row => [
    { content: row.usable ? `✓ ${row.state}` : `✗ ${row.state}`, mood: row.usable ? "good" : "bad" },
    row.iteration,
    { content: formatBytes(row.bytes), title: `${row.files} files` },
    { content: row.time === null ? "" : `${formatSeconds(Math.max(0, facts.generated - row.time))} ago`, title: formatDate(row.time) },
    row.validation === null ? "" : formatValue(row.validation),
    layoutCell(row.layout),
    row.launch,
    { content: (row.parent ?? "") + (row.branch === "left" ? " (left branch)" : ""), title: "A left branch is not continued by later launches." },
    row.usable && row.resume ? makeCopyButton(row.resume) : "",
  ]);
  main.append(section("Checkpoints", makeTable(columns, rows, "stack"),
    el("p", { class: "note" }, "The button copies the command of the newest launch, with the flags that resume from this checkpoint.")));
}

function showRun(run) {
  main.append(el("h1", {}, run.name));
  const parameters = (run.summary.parameters ?? "").split(",")[0];
  const described = [run.summary.model, parameters ? `${parameters} parameters` : ""].filter(text => text).join("; ");
  main.append(el("p", { class: "sub" }, described));
  main.append(el("p", { class: "sub" }, `${run.path}; ${formatDate(run.launches[0].began)} to ${formatDate(run.launches.at(-1).ended)}; report of ${formatDate(facts.generated)}`));
  showVerdict(run.verdict);
  showTiles(run);
  showCharts(run);
  showGoodput(run);
  showLaunches(run);
  showCheckpoints(run);
  const summary = Object.entries(run.summary).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
  main.append(section("The newest launch", el("dl", {}, ...summary)));
  main.append(section("Its command", el("code", { class: "block" }, run.command.join(" "))));
}

// ---- Comparison of runs ----

function showComparison(runs) {
  main.append(el("h1", {}, runs.map(run => run.name).join(" and ")));
  main.append(el("p", { class: "sub" }, `comparison of ${runs.length} runs; report of ${formatDate(facts.generated)}`));
  const last = points => points.length ? formatValue(points.at(-1)[1]) : "";
  const columns = [["run", "long"], ["iterations", "num"], ["training loss", "num"], ["validation loss", "num"], ["layout", ""], ...SPEED_COLUMNS, ["productive", "num"], ["model", ""]];
  main.append(makeTable(columns, runs.map(run => [
    run.path,
    `${run.launches.at(-1).last} of ${run.train_iters}`,
    last(run.launches.flatMap(launch => launch.curves.lm_loss)),
    last(run.launches.flatMap(launch => launch.validation)),
    layoutCell(run.launches.at(-1).layout),
    ...speedCells(run.launches.at(-1).speed),
    formatShare(run.goodput.training / Object.values(run.goodput).reduce((a, b) => a + b, 0)),
    run.summary.model ?? "",
  ]), "stack"));

  const seriesOf = points => runs.map((run, index) => ({
    label: run.name,
    color: launchColor(index),
    first: 0,
    kept: Infinity,
    joins: false,
    // Without the iterations that a later launch repeated.
    points: run.launches.flatMap(launch => points(launch).filter(point => point[0] <= launch.kept)),
  }));
  const who = runs.map((run, n) => legendEntry(run.name, `background:${launchColor(n)}`));
  addCommonCharts(seriesOf, who);

  const rows = facts.differences.map(([name, ...values]) => [name, ...values]);
  const heads = [["flag", "short"], ...runs.map(run => [run.name, "long"])];
  const content = rows.length ? makeTable(heads, rows, "stack") : el("p", { class: "note" }, "The newest launches have the same flags and versions.");
  main.append(section("Differences of the newest launches", content));
}

if (facts.runs.length === 1) showRun(facts.runs[0]);
else showComparison(facts.runs);
document.title = `${facts.runs.map(run => run.name).join(" and ")}: run report`;
for (const [figure, redraw] of charts) {
  redraw();
  // Draw again whenever the width of the page changes.
  let width = figure.clientWidth;
  new ResizeObserver(() => {
    if (figure.clientWidth !== width) redraw();
    width = figure.clientWidth;
  }).observe(figure);
}
