"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const MOST_ROWS = 2000;

// ---------------------------------------------------------------- for people

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
function bytes(count) {
  let power = 0;
  while (power + 1 < UNITS.length && count >= 1024 ** (power + 1)) power += 1;
  return power === 0 ? `${count.toFixed(0)} B` : `${(count / 1024 ** power).toFixed(2)} ${UNITS[power]}`;
}
function seconds(value) {
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(2)} ms`;
  return value ? `${(value * 1e6).toFixed(2)} µs` : "0 s";
}
const number = (value) => value.toLocaleString("en-US");
const operator = (name) => name.split(".").slice(0, 2).join(".");
const short = (file) => file.split(/[\\/]/).pop();
const place = (record) => (record.file ? `${short(record.file)}:${record.line}` : "");
const colour = (collective) => `var(--${collective})`;

// ---------------------------------------------------------------- making elements

function make(tag, properties = {}, ...children) {
  const svg = ["svg", "rect", "text", "line", "g", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const $ = (id) => document.getElementById(id);
const chip = (text, kind, style = "") => make("span", { class: `chip ${kind}`, style }, text);
const collectiveChip = (move) =>
  chip(`${move.collective} ${move.axis}`, "collective", `background:${colour(move.collective)}`);

// ---------------------------------------------------------------- tables that sort

// columns: {title, value(row): what is sorted by, cell(row): what is shown, number: whether on the right}
function sortable(into, name, columns, rows, detail) {
  let by = -1;
  let descending = false;
  const open = new Set();
  const draw = () => {
    const sorted = by < 0 ? rows : [...rows].sort((a, b) => compare(columns[by].value(a), columns[by].value(b)));
    if (by >= 0 && descending) sorted.reverse();
    const head = make("tr", {}, ...columns.map((column, i) => make("th", {
      class: column.number ? "number" : "", scope: "col",
      "aria-sort": i !== by ? "none" : descending ? "descending" : "ascending",
      onclick: () => { descending = i === by ? !descending : Boolean(column.number); by = i; draw(); },
    }, column.title)));
    const body = make("tbody");
    for (const row of sorted.slice(0, MOST_ROWS)) {
      const cells = columns.map((column) => make("td", {
        class: column.number ? "number" : "", "data-value": column.value(row),
      }, column.cell ? column.cell(row) : String(column.value(row))));
      const line = make("tr", { class: detail ? "row" : "" }, ...cells);
      body.append(line);
      if (!detail) continue;
      const toggle = (show) => {
        if (show) line.after(make("tr", { class: "detail" }, make("td", { colspan: columns.length }, detail(row))));
        else line.nextSibling.remove();
      };
      line.addEventListener("click", () => {
        if (open.delete(row)) toggle(false); else { open.add(row); toggle(true); }
      });
      if (open.has(row)) toggle(true);
    }
    into.replaceChildren(make("table", { id: name }, make("thead", {}, head), body));
  };
  draw();
  return (row) => { open.add(row); draw(); };
}
function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

// ---------------------------------------------------------------- the page, from above

function tiles() {
  const total = report.total;
  const shown = [
    ["collectives", "collectives", total.collectives, number(total.collectives)],
    ["received", "received by a rank", total.received_bytes, bytes(total.received_bytes)],
    ["seconds", "of communication, modelled", total.seconds, seconds(total.seconds)],
    ["count", "operators recorded", report.operators, number(report.operators)],
  ];
  $("tiles").append(...shown.map(([id, label, value, text]) =>
    make("div", { class: "tile" }, make("strong", { id: `tile-${id}`, "data-value": value }, text), make("span", {}, label))));
}

function subtitle() {
  const meshes = report.meshes.map((mesh) =>
    `${mesh.axes.map((axis, i) => `${axis}=${mesh.shape[i]}`).join(" × ")} on ${mesh.device} (${mesh.fabric})`);
  $("subtitle").textContent = meshes.join("; ") || "no tensor was seen";
}

// The last two axes as a grid, the others as grids beside each other.
function drawMesh() {
  const mesh = report.meshes.reduce((best, mesh) => (!best || size(mesh) > size(best) ? mesh : best), null);
  if (!mesh) return;
  const most = 256;
  if (size(mesh) > most) { $("mesh").append(make("p", { class: "none" }, `${number(size(mesh))} ranks: too many to draw`)); return; }
  const shape = mesh.shape.length < 2 ? [1, ...mesh.shape] : mesh.shape;
  const axes = mesh.shape.length < 2 ? ["", ...mesh.axes] : mesh.axes;
  const [rows, columns] = shape.slice(-2);
  const outer = shape.slice(0, -2);
  const grids = outer.reduce((a, b) => a * b, 1);
  const cell = Math.max(22, Math.min(52, 420 / Math.max(columns, 4)));
  const gap = 5;
  const left = 46, top = outer.length ? 44 : 26;
  const width = left + columns * (cell + gap), height = top + rows * (cell + gap) + 6;
  const across = Math.max(1, Math.min(grids, Math.floor(520 / width)));
  const picture = make("svg", { viewBox: `0 0 ${width * across} ${height * Math.ceil(grids / across)}`, width: width * across, role: "img", "aria-label": "the mesh" });
  for (let grid = 0; grid < grids; grid += 1) {
    const group = make("g", { transform: `translate(${(grid % across) * width},${Math.floor(grid / across) * height})` });
    if (outer.length) {
      let rest = grid;
      const at = outer.map((n, i) => { const below = outer.slice(i + 1).reduce((a, b) => a * b, 1); const index = Math.floor(rest / below); rest %= below; return `${axes[i]} ${index}`; });
      group.append(make("text", { x: left, y: 14, class: "soft" }, at.join(", ")));
    }
    group.append(make("text", { x: left, y: top - 10, class: "soft" }, `${axes[axes.length - 1]} →${over(axes[axes.length - 1])}`));
    if (axes[axes.length - 2]) group.append(make("text", { x: 0, y: top + cell / 2 + 4, class: "soft" }, `${axes[axes.length - 2]} ↓`));
    for (let i = 0; i < rows * columns; i += 1) {
      const x = left + (i % columns) * (cell + gap), y = top + Math.floor(i / columns) * (cell + gap);
      const rank = mesh.ranks[grid * rows * columns + i];
      group.append(make("rect", { x, y, width: cell, height: cell, rx: 7, class: "device" }),
        make("text", { x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle" }, rank === undefined ? "" : String(rank)));
    }
    picture.append(group);
  }
  $("mesh").append(picture);
}
const over = (axis) => (report.totals.axis[axis] ? ` ${bytes(report.totals.axis[axis].received_bytes)}` : "");
const size = (mesh) => mesh.shape.reduce((a, b) => a * b, 1);

function bars() {
  const sums = Object.entries(report.totals.collective).sort((a, b) => b[1].received_bytes - a[1].received_bytes);
  const most = Math.max(1, ...sums.map(([, total]) => total.received_bytes));
  if (!sums.length) $("bars").append(make("p", { class: "none" }, "Nothing was moved."));
  $("bars").append(...sums.map(([name, total]) => make("div", { class: "bar" },
    make("span", {}, name),
    make("i", { style: `width:${(100 * total.received_bytes) / most}%;background:${colour(name)}` }),
    make("span", {}, `${bytes(total.received_bytes)} in ${number(total.collectives)} ${total.collectives === 1 ? "call" : "calls"}`))));
}

function timeline() {
  const pieces = [];
  let now = 0;
  for (const record of report.records) for (const move of record.moves) {
    pieces.push({ record, move, start: now });
    now += move.seconds;
  }
  const into = $("timeline");
  if (!pieces.length) { into.append(make("p", { class: "none" }, "Nothing was moved.")); return; }
  const axes = [...new Set(pieces.map((piece) => piece.move.axis))];
  const left = 76, width = 1090, row = 34, top = 26, height = top + axes.length * row + 26;
  const x = (time) => left + (time / now) * (width - left - 8);
  const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": "timeline" });
  let from = 0;
  pieces.forEach((piece, i) => {
    const next = pieces[i + 1];
    if (next && next.record.phase === piece.record.phase) return;
    const end = next ? next.start : now;
    picture.append(make("rect", { x: x(from), y: 0, width: Math.max(1, x(end) - x(from)), height: height - 22, rx: 6, style: `fill:var(--${piece.record.phase === "forward" ? "forward" : "backward"});opacity:.55` }));
    if (x(end) - x(from) > 70) picture.append(make("text", { x: x(from) + 8, y: 16, class: "soft" }, piece.record.phase));
    from = end;
  });
  axes.forEach((axis, i) => picture.append(make("text", { x: 0, y: top + i * row + 21, class: "soft" }, axis)));
  for (const { record, move, start } of pieces) {
    const y = top + axes.indexOf(move.axis) * row + 5;
    picture.append(make("rect", {
      class: "piece", x: x(start) + 0.5, y, width: Math.max(1.5, x(start + move.seconds) - x(start) - 1), height: row - 12, rx: 4,
      style: `fill:${colour(move.collective)}`,
      onmousemove: (event) => tip(event, `${record.called} at ${place(record)}${record.module ? `, ${record.module}` : ""}\n${move.words}\n${move.tensor} ${move.before} → ${move.after}\n${bytes(move.received_bytes)}, ${seconds(move.seconds)}`),
      onmouseleave: () => { $("tip").hidden = true; },
      onclick: () => showOperator(record),
    }));
  }
  for (let i = 0; i <= 4; i += 1)
    picture.append(make("text", { x: x((now * i) / 4), y: height - 4, class: "soft", "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, seconds((now * i) / 4)));
  into.append(picture);
  $("legend").append(...[...new Set(pieces.map((piece) => piece.move.collective))].map((name) =>
    make("span", {}, make("i", { style: `background:${colour(name)}` }), name)));
}
function tip(event, text) {
  const box = $("tip");
  box.textContent = text;
  box.hidden = false;
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 12)}px`;
  box.style.top = `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 12)}px`;
}

function advice() {
  const seen = new Map();
  for (const record of report.records) if (record.advice) {
    const key = [record.operator, record.file, record.line, record.phase, record.advice].join("|");
    const known = seen.get(key) ?? { record, received: 0, count: 0 };
    known.received += record.received_bytes + record.received_inside_bytes; known.count += 1;
    seen.set(key, known);
  }
  const found = [...seen.values()].sort((a, b) => b.received - a.received).slice(0, 8);
  if (!found.length) { $("advice-card").remove(); return; }
  $("advice").append(...found.map(({ record, received, count }) => make("div", { class: "hint" },
    make("b", {}, `${operator(record.operator)} at ${place(record)}`), ` ${bytes(received)}${count > 1 ? ` in ${count} calls` : ""} `,
    chip(record.phase, record.phase), make("p", {}, record.advice))));
}

// ---------------------------------------------------------------- tables

function totals() {
  const titles = { line: "line", module: "module", collective: "collective", axis: "axis", phase: "phase" };
  const show = (by) => {
    for (const tab of $("tabs").children) tab.setAttribute("aria-selected", String(tab.dataset.by === by));
    const rows = Object.entries(report.totals[by]).map(([name, total]) => ({ name, ...total }));
    rows.sort((a, b) => b.received_bytes - a.received_bytes);
    sortable($("totals"), "totals-table", [
      { title: titles[by], value: (row) => row.name || `(no ${by})`, cell: (row) => make("code", { title: row.name }, by === "line" ? short(row.name) : row.name || `(no ${by})`) },
      { title: "collectives", number: true, value: (row) => row.collectives, cell: (row) => number(row.collectives) },
      { title: "received by a rank", number: true, value: (row) => row.received_bytes, cell: (row) => bytes(row.received_bytes) },
      { title: "time, modelled", number: true, value: (row) => row.seconds, cell: (row) => seconds(row.seconds) },
    ], rows);
  };
  $("tabs").append(...Object.keys(titles).map((by) =>
    make("button", { type: "button", role: "tab", "data-by": by, onclick: () => show(by) }, `by ${titles[by]}`)));
  show("line");
}

const layouts = (specs) => {
  const counts = new Map();
  for (const spec of specs) { const text = `${spec.tensor} ${spec.layout}`; counts.set(text, (counts.get(text) ?? 0) + 1); }
  return [...counts].map(([text, count]) => (count > 1 ? `${count} × ${text}` : text)).join(", ");
};

function detail(record) {
  const list = make("dl");
  const add = (name, ...what) => list.append(make("dt", {}, name), make("dd", {}, ...what));
  const code = (text) => make("div", { class: "code" }, text);
  add("where", `${record.file}:${record.line} in ${record.function}`, record.backward_called_at ? `; backward called at ${record.backward_called_at}` : "");
  const makers = (input) => (input.made_by === null ? "" : `, from ${operator(report.records[input.made_by].operator)} at ${place(report.records[input.made_by])}`);
  add("operands", ...record.inputs.slice(0, 40).map((input, i) => code(
    `${input.name}: ${input.tensor} ${input.layout}${record.wanted[i] && record.wanted[i] !== input.layout ? ` → ${record.wanted[i]}` : ""}${input.parameter ? ` (${input.parameter})` : ""}${makers(input)}`)));
  add("results", ...record.outputs.slice(0, 40).map((spec) => code(`${spec.tensor} ${spec.layout}`)));
  add("how", record.way, record.rule ? make("span", { class: "code" }, `  ${record.rule}`) : "", (record.error ? `, raised ${record.error}` : ""));
  for (const route of record.routes) {
    const steps = route.steps.map((step) => code(`${step.words} → ${step.layout}${step.received_bytes ? `, ${bytes(step.received_bytes)}, ${seconds(step.seconds)}` : ", nothing is moved"}`));
    add("route", code(`${route.before} → ${route.after}`), ...steps);
  }
  if (record.advice) add("advice", record.advice);
  const parts = report.records.filter((other) => other.parent === record.index);
  if (parts.length) add("computed from", parts.map((part) => operator(part.operator)).join(", "));
  const box = make("div", {}, list);
  if (record.candidates?.length) {
    const rows = record.candidates.map((candidate) => make("tr", { class: candidate.chosen ? "chosen" : "" },
      make("td", {}, candidate.axis), make("td", {}, candidate.inputs.join(", ")), make("td", {}, candidate.outputs.join(", ")),
      make("td", { class: "number" }, candidate.seconds === null ? "never" : seconds(candidate.seconds)), make("td", {}, candidate.chosen ? "chosen" : "")));
    box.append(make("table", { class: "candidates" }, make("thead", {}, make("tr", {}, ...["axis", "operands", "results", "takes", ""].map((t) => make("th", { class: t === "takes" ? "number" : "" }, t)))), make("tbody", {}, ...rows)));
  }
  return box;
}

let openOperator = () => {};
function operators() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (r) => `${r.operator} ${place(r)} ${r.module} ${r.phase} ${layouts(r.inputs)} ${layouts(r.outputs)} ${r.way} ${r.moves.map((m) => m.collective + " " + m.axis).join(" ")}`.toLowerCase();
  const rows = report.records.filter((r) => (!$("moving").checked || r.moves.length) && words.every((word) => text(r).includes(word)));
  $("shown").textContent = `${number(Math.min(rows.length, MOST_ROWS))} of ${number(report.records.length)}`;
  openOperator = sortable($("operators"), "operators-table", [
    { title: "#", number: true, value: (r) => r.index },
    { title: "operator", value: (r) => r.operator, cell: (r) => make("code", { class: r.parent === null ? "" : "part" }, r.called) },
    { title: "phase", value: (r) => r.phase, cell: (r) => chip(r.phase, r.phase) },
    { title: "line", value: place, cell: (r) => make("code", { class: "place" }, place(r)) },
    { title: "module", value: (r) => r.module },
    { title: "layouts", value: (r) => layouts(r.inputs), cell: (r) => make("div", { class: "code layouts" }, `${layouts(r.inputs) || "plain"} → ${layouts(r.outputs) || "plain"}`) },
    { title: "moved", value: (r) => r.moves.map((m) => m.collective).join(), cell: (r) => make("span", {}, ...r.moves.map(collectiveChip)) },
    { title: "received", number: true, value: (r) => r.received_bytes, cell: (r) => (r.moves.length ? bytes(r.received_bytes) : "") },
    { title: "time", number: true, value: (r) => r.seconds, cell: (r) => (r.moves.length ? seconds(r.seconds) : "") },
  ], rows, detail);
}
function showOperator(record) {
  openOperator(record);
  $("operators").scrollIntoView({ behavior: "smooth", block: "start" });
}

// ---------------------------------------------------------------- dark and light

function theme() {
  const root = document.documentElement;
  const wanted = new URLSearchParams(location.search).get("theme");
  root.dataset.theme = wanted ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("theme").addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });
}

theme();
subtitle();
tiles();
drawMesh();
bars();
timeline();
advice();
totals();
operators();
$("filter").addEventListener("input", operators);
$("moving").addEventListener("change", operators);
